"""The HTTP API over real connections: uvicorn in a thread, over a fake engine."""

import contextlib
import socket
import threading
import time

import uvicorn

from mtpjax.data.tokenizer import ByteTokenizer
from mtpjax.serving.api.server import ApiSettings
from mtpjax.serving.app import make_app
from mtpjax.serving.header_timeout import protocol_with_timeout


@contextlib.contextmanager
def serve(engine, tokenizer=None, header_seconds=30.0, **settings):
    """Yields the address of a server in a thread."""
    app = make_app(engine, tokenizer or ByteTokenizer(), ApiSettings(model_name="tiny", **settings))
    http = protocol_with_timeout(header_seconds)
    config = uvicorn.Config(
        app, http=http, ws="none", log_level="error", timeout_keep_alive=1, timeout_graceful_shutdown=1
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            engine.close()
