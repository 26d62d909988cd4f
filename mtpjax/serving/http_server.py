"""The process's HTTP server: opens the port, prints the ready line, and drains at SIGTERM or Ctrl-C."""

import signal
import socket
from collections.abc import Awaitable, Callable

import uvicorn
from starlette.types import ASGIApp


def listen(host: str, port: int) -> socket.socket:
    """Opens a port, so that an address in use is an error in one line, and port 0 is known.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.

    Returns:
        The socket.

    Raises:
        OSError: the port cannot be opened.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def address_of(listener: socket.socket) -> str:
    """Returns the URL of an open port."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def run_app(
    app: ASGIApp, listener: socket.socket, line: str, drain: Callable[[], Awaitable[None]], *, log_level: str
) -> None:
    """Serves an application until SIGTERM or Ctrl-C.

    Args:
        app: the application.
        listener: from `listen`.
        line: printed when the port accepts connections.
        drain: awaited before connections are closed.
        log_level: of the HTTP server's own log.
    """

    class Server(uvicorn.Server):
        """Prints the ready line when the port accepts connections."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                print(line, flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await drain()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        log_level=log_level,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,  # after the drain: clients that do not read the rest
        timeout_keep_alive=30,
    )
    # uvicorn raises the signal that ended it again, behind the drain. Then it has done its work.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    Server(config).run(sockets=[listener])
