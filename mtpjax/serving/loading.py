"""Reports a server's progress while it loads and compiles, on the terminal or in the log, and to early clients."""

import asyncio
import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import rich.console
from rich.progress import Progress
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mtpjax.serving.api.errors import ApiError
from mtpjax.serving.api.http import error_response
from mtpjax.serving.http_server import address_of, run_in_thread, tell

LINE_SECONDS = 5.0  # time between two log lines
LAST_SECONDS = 0.5  # time for clients that connect just before the server is ready
BODY_SECONDS = 5.0  # time limit for reading and discarding a body
ALIVE_PATHS = ("/health", "/ping")


class Loading:
    """The progress of a server's start.

    Args:
        name: prefix of each line.
        address: address of the open port; "" if there is none.

    Attributes:
        text: the current stage, such as "compiling 7/48".
    """

    def __init__(self, name: str, address: str = ""):
        self._name, self._address = name, address
        self.text, self._begin = "starting", time.monotonic()
        console = rich.console.Console(stderr=True)
        self._has_bar = console.is_terminal
        self._bar = Progress(console=console, transient=True, disable=not self._has_bar)
        self._task: Any = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._write_lines, name="mtpjax-progress", daemon=True)

    def report(self, stage: str, done: int | None = None, total: int | None = None) -> None:
        """Sets the current stage and its progress."""
        self.text = stage if total is None else f"{stage} {done}/{total}"
        if self._task is not None:
            self._bar.update(self._task, description=stage, completed=done or 0, total=total)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Shows a bar on a terminal, and a line every few seconds elsewhere."""
        with self._bar:
            self._task = self._bar.add_task(self.text, total=None)
            self._thread.start()
            try:
                yield
            finally:
                self._stopped.set()
                self._thread.join()

    def _write_lines(self) -> None:
        # A quick start prints only the ready line.
        while not self._has_bar and not self._stopped.wait(LINE_SECONDS):
            where = f"{self._address} is open, " if self._address else ""
            tell(f"{self._name}: {where}{self.text} ({time.monotonic() - self._begin:.0f} s)", sys.stderr)


def loading_app(loading: Loading) -> ASGIApp:
    """Makes the application of a loading server. Health checks get 200, all other requests 503 with `Retry-After`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server's startup and shutdown events
            return
        # The connection closes after the response, because a different server accepts the next one.
        headers = {"Connection": "close"}
        if scope["path"] in ALIVE_PATHS:
            response = Response(headers=headers)
        else:
            message = f"the server is loading: {loading.text}"
            response = error_response(ApiError(message, status=503, code="loading", headers=headers, retry_after=5))
        # If the body were not read, the connection would be reset, and the client would not see the response.
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(BODY_SECONDS):
                async for _ in Request(scope, receive).stream():
                    pass
        await response(scope, receive, send)

    return app


@contextlib.contextmanager
def open_port(listener: socket.socket | None, name: str, *, header_seconds: float = 30.0) -> Iterator[Loading]:
    """Shows the startup progress, also to clients if there is a port. Yields the `Loading`."""
    loading = Loading(name, "" if listener is None else address_of(listener))
    with contextlib.ExitStack() as stack:
        stack.enter_context(loading.shown())
        if listener is not None:
            # The loading server closes its copy of the socket. Later connections wait for the next server on this port.
            app, copy = loading_app(loading), listener.dup()
            stack.enter_context(run_in_thread(app, copy, header_seconds=header_seconds, last_seconds=LAST_SECONDS))
        yield loading
