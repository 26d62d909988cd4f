"""Faults inside a real server: only the requests that they hit fail, and the server goes on.

Numbers in the docstrings are those of the list of server tests. Faults are put into the running engine, so nothing is
compiled for them.
"""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from mtpjax.data.tokenizer import ByteTokenizer
from mtpjax.serving.calls import InFlightCall
from tests.helpers.live_server import SETTINGS, live_server, read_events

GREEDY = {"temperature": 0, "ignore_eos": True}
BODIES = [{"prompt": f"fault {number}", **GREEDY, "max_tokens": 20 + 5 * number} for number in range(8)]


@pytest.fixture(scope="module")
def running(small):
    model, params = small("grouped", "mixed", vocab_size=256, max_position_embeddings=512)
    settings = dataclasses.replace(SETTINGS, batch_sizes=(8,))  # fewer programs to compile
    with live_server(model, params, settings=settings) as server:
        server.engine.reference = [server.text(**body) for body in BODIES]
        yield server


@pytest.fixture
def server(running):
    yield running
    running.check()


def texts(responses):
    return [response.json()["choices"][0]["text"] for response in responses]


def is_nan(tree):
    return any(np.isnan(leaf).any() for leaf in jax.tree.leaves(tree) if leaf.dtype == np.float32)


def test_nan_in_one_row_of_eight_fails_that_row_alone(server, monkeypatch):
    """43: the embedding of a token that one prompt has is NaN."""
    session, params = server.engine._executor.session, server.engine._executor.session.params
    monkeypatch.setattr(session, "params", {**params, "embedding": params["embedding"].at[1].set(np.nan)})
    bodies = [*BODIES[:3], {**BODIES[3], "prompt": "\x01 bad"}, *BODIES[4:]]
    num_failed = server.engine.status().num_failed
    responses = server.together(bodies)
    bad = responses.pop(3)
    error = bad.json()["error"]
    assert bad.status_code == 500 and error["code"] == "internal_error" and len(error["message"].split()[-1]) == 32
    expected = server.engine.reference
    assert texts(responses) == expected[:3] + expected[4:]
    assert server.engine.status().num_failed == num_failed + 1
    assert not is_nan(server.engine._executor.session.state.trunk), "the pages of the failed row are cleared"


def accept_rate(server, bodies):
    """Returns the texts, and the share of the drafts that were accepted."""
    before = server.engine.status()
    responses = server.together(bodies)
    after = server.engine.status()
    assert [response.status_code for response in responses] == [200] * len(bodies)
    proposed, accepted = (sum(getattr(after, name)) - sum(getattr(before, name)) for name in ("proposed", "accepted"))
    return texts(responses), accepted / proposed


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}])
def test_nan_in_the_draft_head_changes_no_text(server, monkeypatch, options):
    """44: the acceptance falls while it lasts, and recovers."""
    session = server.engine._executor.session
    bodies = [{**body, **options} for body in BODIES]
    expected, healthy = accept_rate(server, bodies)
    with monkeypatch.context() as patch:
        broken = jax.tree.map(lambda leaf: leaf * np.nan, session.draft_params.modules)
        patch.setattr(session, "draft_params", dataclasses.replace(session.draft_params, modules=broken))
        server.engine.flush_cache()
        given, rate = accept_rate(server, bodies)
    assert rate < 0.2 * healthy
    # Under a ratio rule a draft takes part in the draw, so only the distribution of a sampled text stays.
    if not options:
        assert given == expected
    server.engine.flush_cache()
    assert accept_rate(server, bodies) == (expected, healthy)


@contextlib.contextmanager
def failing_once(owner, name, *, at=3, after=False, error=RuntimeError):
    """Lets a call of a method fail, before or after it does its work."""
    original, num_calls = getattr(owner, name), [0]

    def fail(*arguments, **options):
        num_calls[0] += 1
        if num_calls[0] != at:
            return original(*arguments, **options)
        if after:
            original(*arguments, **options)
        raise error("RESOURCE_EXHAUSTED: injected")

    setattr(owner, name, fail)
    try:
        yield num_calls
    finally:
        setattr(owner, name, original)
    assert num_calls[0] >= at


PLACES = {
    "before prefill": ("executor", "prefill", 1, False),
    "after prefill": ("executor", "prefill", 1, True),
    "before drafting": ("executor", "advance", 3, False),
    "after commit": ("executor", "advance", 3, True),
    "in the report": (InFlightCall, "read", 4, False),
    "in the admission": ("executor", "admit", 1, True),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_in_a_call_fails_its_batch_with_503_and_the_next_is_right(server, place):
    """45 and 46: also when memory runs out. Draft, verification and commit are one compiled call."""
    owner, name, at, after = PLACES[place]
    executor = server.engine._executor
    with failing_once(executor if owner == "executor" else owner, name, at=at, after=after):
        responses = server.together([*BODIES, *BODIES[:4]])
    assert {response.status_code for response in responses} <= {200, 503}
    assert 503 in {response.status_code for response in responses}
    for response, text in zip(responses, [*server.engine.reference, *server.engine.reference[:4]], strict=True):
        if response.status_code == 503:
            error = response.json()["error"]
            assert error["code"] == "engine_restarted" and "injected" not in error["message"]
            assert response.headers["retry-after"]
        else:
            assert response.json()["choices"][0]["text"] == text
    assert texts(server.together(BODIES)) == server.engine.reference


def test_a_fault_in_mid_stream_is_the_last_event_of_each_stream(server):
    """42 and 46."""
    with failing_once(server.engine._executor, "advance", at=8), server.stream(**GREEDY, max_tokens=400) as response:
        *_, last = read_events(response)
    assert last["error"]["code"] == "engine_restarted"


def test_the_old_state_is_freed_before_the_new_one_is_made(server, monkeypatch):
    """45: memory may not have room for two."""
    executor = server.engine._executor
    session, freed = executor.session, []
    new_state = session._new_state

    def record():
        freed.append(all(leaf.is_deleted() for leaf in jax.tree.leaves(session.state)))
        return new_state()

    monkeypatch.setattr(session, "_new_state", record)
    with failing_once(executor, "advance", at=1):
        assert server.post(**BODIES[0]).status_code == 503
    assert texts(server.together(BODIES)) == server.engine.reference
    assert freed == [True]


def test_an_engine_that_cannot_start_anew_tries_again(server, monkeypatch):
    """45: the memory is still full at the first attempt."""
    monkeypatch.setattr("mtpjax.serving.tick.RETRY_SECONDS", 0.05)
    executor = server.engine._executor
    with failing_once(executor.session, "_new_state", at=1), failing_once(executor, "advance", at=1):
        assert server.post(**BODIES[0]).status_code == 503
        assert server.text(**BODIES[1]) == server.engine.reference[1]


def test_a_fault_of_the_tokenizer_fails_one_request(server, monkeypatch):
    """46: in detokenize."""
    decoder = ByteTokenizer.incremental_decoder
    made = []

    def failing(self, prompt=()):
        step = decoder(self, prompt)
        made.append(step)
        if len(made) != 3:
            return step

        def fail(token):
            raise RuntimeError("injected")

        return fail

    monkeypatch.setattr(ByteTokenizer, "incremental_decoder", failing)
    responses = server.together(BODIES)
    statuses = [response.status_code for response in responses]
    assert sorted(statuses) == [200] * 7 + [500]
    for response, text in zip(responses, server.engine.reference, strict=True):
        assert response.status_code == 500 or response.json()["choices"][0]["text"] == text


def test_a_fault_of_the_metrics_fails_no_request(server, monkeypatch):
    """46: in the observer of requests."""
    with failing_once(server.metrics, "observe", at=2):
        assert texts(server.together(BODIES)) == server.engine.reference
