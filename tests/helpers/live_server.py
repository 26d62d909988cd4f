"""A real engine behind the real HTTP server, on a port of its own."""

import asyncio
import contextlib
import dataclasses
import json
import time

import httpx
from mtpjax.serving.api.settings import ApiSettings

from mtpjax import DecodeConfig
from mtpjax.data.tokenizer import ByteTokenizer
from mtpjax.serving.api.server import ApiServer
from mtpjax.serving.app import make_app
from mtpjax.serving.engine import Engine
from mtpjax.serving.http_server import serve_in_thread
from mtpjax.serving.metrics import Metrics
from mtpjax.serving.sizes import EngineSettings

CONFIG = DecodeConfig(num_steps=2, prefill_chunk=16)
SETTINGS = EngineSettings(num_slots=8, max_length=512, page_size=32, batch_sizes=(1, 8), prefill_tokens=16)
HEADER_SECONDS = 5.0
CONTROL = {"prompt": "The control text", "temperature": 0, "max_tokens": 40, "ignore_eos": True}


@dataclasses.dataclass
class LiveServer:
    """A running server.

    Attributes:
        address: its URL.
        engine: its engine.
        metrics: what `/metrics` answers.
        api: the state of its API.
        control: what the control request gave at the start.
        finishes: the end of each request since then, as the engine tells its observer.
    """

    address: str
    engine: Engine
    metrics: Metrics
    api: ApiServer
    finishes: list
    control: str = ""

    def post(self, path="/v1/completions", timeout=60, **body):
        """Sends a request; one without a prompt continues "Hi"."""
        prompt = {} if "messages" in body or "input_ids" in body or "text" in body else {"prompt": "Hi"}
        return httpx.post(self.address + path, json={**prompt, **body}, timeout=timeout)

    def text(self, **body):
        """Returns the text of a completion."""
        response = self.post(**body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    def stream(self, **body):
        """Returns the context of a stream; `next(response.iter_lines())` waits for its first event."""
        body = {"prompt": "Hi", "stream": True, **body}
        return httpx.stream("POST", f"{self.address}/v1/completions", json=body, timeout=60)

    async def gather(self, bodies):
        """Sends completions at the same time; returns their responses."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.address, limits=limits, timeout=120) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    def together(self, bodies):
        """Sends completions at the same time; returns their responses."""
        return asyncio.run(self.gather(bodies))

    @property
    def is_idle(self):
        """True if nothing runs, waits or holds pages."""
        status = self.engine.status()
        return not (status.num_running or status.num_waiting or status.num_used_pages or self.api.running)

    def check(self):
        """Checks that the server is as it was at the start."""
        wait_until(lambda: self.is_idle)
        assert self.text(**CONTROL) == self.control
        wait_until(lambda: self.is_idle)
        assert self.engine.status().num_compilations == 0


@contextlib.contextmanager
def live_server(model, params, *, config=CONFIG, settings=SETTINGS, **api_settings):
    """Yields a `LiveServer`."""
    finishes = []

    def observe(finish, times):
        finishes.append(finish)
        metrics.observe(finish, times)

    engine = Engine(params, model=model, config=config, settings=settings, observe=observe)
    metrics = Metrics(engine.status, model_name="tiny")
    engine.warm_up()
    engine.start()
    app = make_app(engine, ByteTokenizer(), ApiSettings(model_name="tiny", **api_settings), metrics)
    try:
        with serve_in_thread(app, header_seconds=HEADER_SECONDS) as address:
            live = LiveServer(address, engine, metrics, app.state.server, finishes)
            live.control = live.text(**CONTROL)
            yield live
    finally:
        assert engine.close(timeout=30)


def wait_until(condition, seconds=20.0):
    """Waits for a condition, and fails if it does not come true."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def read_events(response):
    """Returns the events that are left of a stream; the last one may be the text [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
