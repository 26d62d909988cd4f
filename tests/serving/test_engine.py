"""The engine: every request gets the tokens that `speculative_generate` gives it alone, whatever runs beside it."""

import dataclasses
import queue
import threading

import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams, speculative_generate
from mtpjax.serving.engine import Engine
from mtpjax.serving.executor import EngineSettings
from mtpjax.serving.request import Delta, Finish, QueueFull, Request

CONFIG = DecodeConfig(num_steps=2, prefill_chunk=8)
SETTINGS = EngineSettings(num_slots=4, max_length=96, page_size=8, batch_sizes=(1, 4), prefill_rows=2)
OPTIONS = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.7, "top_k": 9, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"temperature": 1.1, "top_p": 0.8, "min_p": 0.02},
    {"logit_bias": {7: 2.0, 9: -3.0}},
]


class Client:
    """Submits requests to an engine and collects what comes back."""

    def __init__(self, engine):
        self.engine = engine

    def submit(self, request):
        events = queue.Queue()
        return self.engine.submit(request, events.put), events

    def finish(self, submitted):
        """Waits for the end; returns tokens, log-probabilities and the `Finish`."""
        tokens, logprobs = [], []
        while True:
            event = submitted[1].get(timeout=120)
            if isinstance(event, Finish):
                return tokens, logprobs, event
            assert isinstance(event, Delta) and event.tokens
            tokens += event.tokens
            logprobs += event.logprobs or []

    def run(self, requests):
        return [self.finish(submitted) for submitted in [self.submit(request) for request in requests]]


def random_requests(seed, count, *, prompt_length=(1, 30), new_tokens=(1, 40), prefixes=()):
    """Requests of all kinds, some with a common beginning."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        options = OPTIONS[number % len(OPTIONS)]
        prompt = rng.integers(0, 61, rng.integers(*prompt_length)).tolist()
        if prefixes and number % 2:
            prompt = [*prefixes[number % len(prefixes)], *prompt]
        yield Request(
            prompt=tuple(prompt),
            max_new_tokens=int(rng.integers(*new_tokens)),
            sampling=SamplingParams(seed=number, **options),
            stop_sequences=((7, 7), (33,)) if number % 3 == 0 else (),
            logprobs=number % 4 == 0,
            speculative=number % 5 != 4,
        )


def alone(params, model, request, config=CONFIG, max_length=96):
    """The tokens, log-probabilities and end of a request that decodes alone, in contiguous caches."""
    config = dataclasses.replace(
        config,
        max_new_tokens=request.max_new_tokens,
        stop_sequences=request.stop_sequences,
        stop_token_ids=request.stop_token_ids,
        logprobs=True,
        max_length=max_length,
        **({} if request.speculative else {"num_steps": 0, "acceptance": "auto"}),
    )
    result = speculative_generate(params, [request.prompt], model=model, config=config, sampling=request.sampling)
    return result.rows()[0], result.logprobs[0], result.finish_reasons[0]


def check_all(engine, model, params, requests, config=CONFIG):
    """Runs all requests at once, and compares each with itself alone."""
    for request, (tokens, logprobs, finish) in zip(requests, Client(engine).run(requests), strict=True):
        expected, expected_logprobs, reason = alone(params, model, request, config)
        assert (tokens, finish.reason) == (expected, reason), request
        assert finish.num_new_tokens == len(tokens)
        if request.logprobs:
            np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-4)
    check_idle(engine)


def check_idle(engine):
    status = engine.status()
    assert (status.num_running, status.num_waiting, status.num_used_pages, status.num_compilations) == (0, 0, 0, 0)


@pytest.fixture(scope="module")
def engines(small):
    """`engines(attention, settings, **config)` -> a running engine, its model and parameters."""
    made = {}

    def make(attention="grouped", settings=SETTINGS, **changes):
        key = (attention, settings, tuple(changes.items()))
        if key not in made:
            model, params = small(attention)
            engine = Engine(params, model=model, config=dataclasses.replace(CONFIG, **changes), settings=settings)
            engine.start()
            made[key] = engine, model, params
        return made[key]

    yield make
    for engine, _, _ in made.values():
        assert engine.close(timeout=30)


def test_each_request_gets_the_text_that_it_gets_alone(engines):
    engine, model, params = engines()
    check_all(engine, model, params, list(random_requests(0, 24)))
    assert engine.status().accept_length > 1
