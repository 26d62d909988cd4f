"""The HTTP API over real connections: uvicorn in a thread, over a fake engine."""

import contextlib

from mtpjax.data.tokenizer import ByteTokenizer
from mtpjax.serving.app import make_app
from mtpjax.serving.http_server import serve_in_thread
from tests.helpers.api_client import api_settings


@contextlib.contextmanager
def serve(engine, tokenizer=None, header_seconds=30.0, **settings):
    """Yields the address of a server in a thread."""
    app = make_app(engine, tokenizer or ByteTokenizer(), api_settings(**settings))
    try:
        with serve_in_thread(app, header_seconds=header_seconds) as address:
            yield address
    finally:
        engine.close()
