"""A client of the HTTP API in the same process, over a fake engine."""

import contextlib
import json

from mtpjax.serving.api.settings import ApiSettings
from starlette.testclient import TestClient

from mtpjax.data.tokenizer import ByteTokenizer
from mtpjax.serving.app import make_app
from tests.helpers.fake_engine import FakeEngine


@contextlib.contextmanager
def api_client(engine=None, tokenizer=None, metrics=None, **settings):
    """Yields a client and its engine."""
    engine = engine or FakeEngine()
    app = make_app(
        engine,
        tokenizer or ByteTokenizer(),
        api_settings(**settings),
        metrics,
    )
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client, engine
    engine.close()


def api_settings(**settings):
    """Returns settings; bodies are read in threads, since processes need time to start."""
    return ApiSettings(**{"model_name": "tiny", "num_readers": 0, **settings})


def events(response):
    """Returns the events of a stream; the last one may be the text [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def completion(client, **body):
    return client.post("/v1/completions", json={"prompt": "Hi", "temperature": 0, "max_tokens": 100, **body})


def chat(client, content="Hi", **body):
    return client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **body})
