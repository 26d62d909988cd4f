"""The process's HTTP server, which opens the port, prints the ready line, and drains at SIGTERM or Ctrl-C."""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TextIO

import uvicorn
from starlette.types import ASGIApp

from mtpjax.serving.header_limits import limited_protocol


def listen(host: str, port: int) -> socket.socket:
    """Opens a port (0 for a free one) before anything is loaded. Raises OSError with a one-line message on failure."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def run_app(
    app: ASGIApp,
    listener: socket.socket,
    line: str,
    drain: Callable[[], Awaitable[None]],
    abort: Callable[[], object],
    *,
    header_seconds: float = 30.0,
    has_lifespan: bool = False,
    should_stop: threading.Event | None = None,
) -> None:
    """Serves an application until SIGTERM or Ctrl-C.

    Args:
        app: the application.
        listener: from `listen`.
        line: printed when the port accepts connections.
        drain: awaited before connections are closed.
        abort: called at a second Ctrl-C to end running requests.
        header_seconds: time within which a client must send the header of each request.
        has_lifespan: whether the application handles startup and shutdown events.
        should_stop: when set, stops the server as SIGTERM does.
    """

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                tell(line, sys.stdout)

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or (should_stop is not None and should_stop.is_set())

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # Streams continue while the server drains, and new requests get 503. A second Ctrl-C ends the streams.
            draining = asyncio.ensure_future(drain())
            while not draining.done() and not self.force_exit:
                await asyncio.sleep(0.02)
            if draining.cancel():
                abort()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        http=limited_protocol(header_seconds),
        log_level="warning",
        access_log=False,
        server_header=False,
        # Without lifespan events, uvicorn logs nothing at a second Ctrl-C.
        lifespan="on" if has_lifespan else "off",
        timeout_graceful_shutdown=5,  # time after the drain for clients that do not read the rest
        # A client that sends a request just as the server closes an idle connection gets an error. httpx keeps idle
        # connections for 5 s, which is also uvicorn's default, so this server keeps them longer.
        timeout_keep_alive=header_seconds,  # type: ignore[arg-type]
    )
    with _expected_sigterm():
        Server(config).run(sockets=[listener])


@contextlib.contextmanager
def serve_in_thread(
    app: ASGIApp, *, port: int = 0, header_seconds: float = 30.0, log_level: str = "error"
) -> Iterator[str]:
    """Serves an application on localhost in a thread, for tests and notebooks. Yields the address."""
    with listen("127.0.0.1", port) as listener:
        address = address_of(listener)
        with run_in_thread(app, listener, header_seconds=header_seconds, log_level=log_level):
            yield address


@contextlib.contextmanager
def run_in_thread(
    app: ASGIApp,
    listener: socket.socket,
    *,
    header_seconds: float = 30.0,
    last_seconds: float = 0.0,
    log_level: str = "error",
) -> Iterator[None]:
    """Serves an application on an open port in a thread while the context is open; then closes the port.

    Args:
        app: the application.
        listener: from `listen`.
        header_seconds: see `run_app`.
        last_seconds: time for which open connections may continue at shutdown.
        log_level: log level of the HTTP server.
    """

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            for each in [*self.servers, *(sockets or ())]:
                each.close()
            end = time.monotonic() + last_seconds
            while self.server_state.connections and time.monotonic() < end:
                await asyncio.sleep(0.01)
            await super().shutdown(sockets)

    http = limited_protocol(header_seconds)
    # Without a `log_config`, uvicorn leaves the log handlers of this process alone.
    settings: dict[str, Any] = {"ws": "none", "log_config": None, "log_level": log_level}
    settings |= {"timeout_keep_alive": header_seconds, "timeout_graceful_shutdown": 1}
    server = Server(uvicorn.Config(app, http=http, **settings))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def _expected_sigterm() -> Iterator[None]:
    """Keeps the process alive after uvicorn has shut down, because uvicorn then raises the signal again."""
    if threading.current_thread() is not threading.main_thread():  # uvicorn handles signals only there
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def tell(line: str, stream: TextIO) -> None:
    """Prints a line. A full disk or a closed reader must not stop the server."""
    with contextlib.suppress(OSError):
        print(line, file=stream, flush=True)
