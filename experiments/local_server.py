"""An HTTP server in a thread of this process, on a free port."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from mtpjax.serving.header_timeout import protocol_with_timeout


@contextlib.contextmanager
def serve_in_thread(app: FastAPI, *, header_seconds: float = 30.0) -> Iterator[str]:
    """Serves an application while the context is open.

    Args:
        app: the application.
        header_seconds: time in which a client must send the header of a request.

    Yields:
        The address.
    """
    http = protocol_with_timeout(header_seconds)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, http=http, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
