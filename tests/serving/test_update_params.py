"""New parameters in a running engine: what is running keeps the old ones, and nothing is compiled."""

import concurrent.futures
import dataclasses
import queue
import threading

import jax
import jax.numpy as jnp
import pytest

from mtpjax import DecodeConfig
from mtpjax.serving.engine import Engine
from mtpjax.serving.request import EngineClosed, Finish, Request
from mtpjax.serving.sizes import EngineSettings
from tests.helpers.small_models import constructed_drafter
from tests.serving.test_engine import alone

CONFIG = DecodeConfig(num_steps=2, prefill_chunk=8)
# One slot has room for a second text only after the first one has ended.
SETTINGS = EngineSettings(num_slots=2, max_length=96, page_size=8, batch_sizes=(2,), prefill_tokens=16)
PROMPT = tuple(range(1, 25))


@pytest.fixture(scope="module")
def weights(small):
    """Two sets of parameters of one model, which give different texts."""
    model, old = small("grouped")
    _, new = small("grouped", "mixed")
    return model, old, new


@pytest.fixture(scope="module")
def engine(weights):
    model, old, _ = weights
    engine = Engine(old, model=model, config=CONFIG, settings=SETTINGS)
    engine.warm_up()
    engine.start()
    yield engine
    assert engine.close(timeout=30)


def tokens_of(engine, request):
    return engine.generate([request])[0].tokens


def test_texts_change_and_nothing_compiles(weights, engine):
    model, old, new = weights
    request = Request(prompt=PROMPT, max_new_tokens=20)
    expected = {name: alone(params, model, request)[0] for name, params in (("old", old), ("new", new))}
    assert expected["old"] != expected["new"]
    # A prompt in the prefix cache would bring entries of the old parameters.
    for params, name in ((new, "new"), (old, "old"), (jax.device_get(new), "new"), (old, "old")):
        engine.update_params(params)
        assert tokens_of(engine, request) == expected[name]
        assert tokens_of(engine, request) == expected[name]
    # Arrays that are committed to their device are a different case for JAX's cache of programs.
    engine.update_params(jax.device_put(new, jax.devices()[0]))
    assert tokens_of(engine, request) == expected["new"]
    engine.update_params(old)
    assert tokens_of(engine, request) == expected["old"]
    assert engine.status().num_compilations == 0


def test_a_request_keeps_the_parameters_with_which_it_started(weights, engine):
    model, old, new = weights
    engine.update_params(old)
    # Both slots decode; a third request waits.
    long = [Request(prompt=(number, 2, 3), max_new_tokens=90) for number in (1, 2)]
    events = [queue.Queue() for _ in range(3)]
    for request, received in zip(long, events, strict=False):
        engine.submit(request, received.put)
    first = [received.get(timeout=30) for received in events[:2]]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        update = threads.submit(engine.update_params, new)
        waiting = Request(prompt=(5, 6, 7), max_new_tokens=10)
        while not engine._scheduler.holds_new and not update.done():
            pass
        engine.submit(waiting, events[2].put)
        update.result(timeout=60)
    assert [collect(received, delta) for received, delta in zip(events, first, strict=False)] == [
        alone(old, model, request)[0] for request in long
    ]
    assert collect(events[2]) == alone(new, model, waiting)[0]


def collect(received, first=None):
    tokens = list(first.tokens) if first else []
    while not isinstance(event := received.get(timeout=30), Finish):
        tokens += event.tokens
    return tokens


def test_preempted_requests_end_with_their_parameters(weights):
    model, old, new = weights
    # The pool has room for the beginnings of four texts, but not for their ends.
    settings = dataclasses.replace(SETTINGS, num_slots=4, batch_sizes=(4,), num_pages=20)
    requests = [Request(prompt=(number, 9), max_new_tokens=80) for number in range(8)]
    with Engine(old, model=model, config=CONFIG, settings=settings) as engine:
        events = [queue.Queue() for _ in requests]
        for request, received in zip(requests, events, strict=True):
            engine.submit(request, received.put)
        first = [received.get(timeout=60) for received in events[:4]]
        engine.update_params(new)
        started = {id(received) for received in events[:4]}
        texts = [
            collect(received, first[number] if id(received) in started else None)
            for number, received in enumerate(events)
        ]
        assert engine.status().num_preempted > 0
    expected = {
        name: [alone(params, model, each)[0] for each in requests] for name, params in (("old", old), ("new", new))
    }
    assert texts[:4] == expected["old"][:4]
    # Later requests started before the update or after it: their texts are never a mixture.
    assert all(text in (a, b) for text, a, b in zip(texts, expected["old"], expected["new"], strict=True))
    assert texts[-1] == expected["new"][-1]


def test_updates_without_requests_and_before_the_start(weights):
    model, old, new = weights
    engine = Engine(old, model=model, config=CONFIG, settings=SETTINGS)
    engine.update_params(new)
    request = Request(prompt=PROMPT, max_new_tokens=8)
    with engine:
        assert tokens_of(engine, request) == alone(new, model, request)[0]
        threads = [threading.Thread(target=engine.update_params, args=(each,)) for each in (old, old, old)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert tokens_of(engine, request) == alone(old, model, request)[0]
    with pytest.raises(EngineClosed):
        engine.update_params(new)


def test_own_parameters_of_a_drafter_stay_or_change(weights):
    model, old, new = weights
    drafter, first = constructed_drafter("medusa", model, new)
    second = jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.int32 else 0.5 * leaf, first)
    config = DecodeConfig(num_steps=2, prefill_chunk=8, drafter=drafter)
    with Engine(old, model=model, config=config, settings=SETTINGS, draft_params=first) as engine:
        engine.update_params(new, second)
        engine.update_params(old)  # keeps the second drafter
        held = engine._executor.session.draft_params
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), held, second))


def test_weak_types_compile_nothing(weights, engine):
    _, old, new = weights
    weak = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1.0) if leaf.ndim == 1 else leaf, new)
    assert any(leaf.weak_type for leaf in jax.tree.leaves(weak) if isinstance(leaf, jax.Array))
    engine.update_params(weak)
    tokens_of(engine, Request(prompt=PROMPT, max_new_tokens=8))
    engine.update_params(old)
    assert engine.status().num_compilations == 0


def test_an_interrupted_update_changes_nothing(weights, engine, monkeypatch):
    model, old, new = weights
    engine.update_params(old)
    monkeypatch.setattr(engine._inbox, "wait", lambda done: (_ for _ in ()).throw(KeyboardInterrupt))
    events = queue.Queue()
    engine.submit(Request(prompt=(1, 2), max_new_tokens=60), events.put)  # keeps the update waiting
    with pytest.raises(KeyboardInterrupt):
        engine.update_params(new)
    monkeypatch.undo()
    collect(events)
    request = Request(prompt=PROMPT, max_new_tokens=8)
    assert tokens_of(engine, request) in (alone(old, model, request)[0], alone(new, model, request)[0])
    assert not engine._scheduler.holds_new
    engine.update_params(old)


def test_an_engine_that_was_not_started_says_so(weights):
    model, old, _ = weights
    engine, request = Engine(old, model=model, config=CONFIG, settings=SETTINGS), Request(prompt=(1,), max_new_tokens=1)
    for call in (lambda: engine.generate([request]), lambda: engine.stream(request), engine.flush_cache):
        with pytest.raises(RuntimeError, match="has not been started"):
            call()
    events = queue.Queue()
    engine.submit(request, events.put)
    assert not engine.close(timeout=0.1) and events.get(timeout=1).reason == "error"


def test_a_failing_call_while_the_engine_closes_ends_all_requests(weights, monkeypatch):
    model, old, _ = weights
    engine = Engine(old, model=model, config=CONFIG, settings=SETTINGS)
    engine.start()

    def fail(*_, **__):
        engine._inbox.is_closing = True
        raise RuntimeError("injected")

    monkeypatch.setattr(engine._executor, "prefill", fail)
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    outputs = engine.generate([Request(prompt=(number, 1), max_new_tokens=4) for number in range(3)])
    assert {output.finish.reason for output in outputs} == {"error"}
    engine.close()


def test_an_engine_that_exchanges_pages_keeps_its_parameters(weights, engine, monkeypatch):
    monkeypatch.setattr(engine.pages, "is_in_use", True)
    with pytest.raises(ValueError, match="exchanges pages"):
        engine.update_params(weights[1])


def test_other_shapes_names_and_dtypes_are_refused(weights, engine):
    _, old, _ = weights
    embedding = old["embedding"]
    with pytest.raises(ValueError, match="embedding"):
        engine.update_params({**old, "embedding": embedding[:-1]})
    with pytest.raises(ValueError, match=r"params: embedding is bfloat16\[.*\]; in the engine it is float32"):
        engine.update_params({**old, "embedding": embedding.astype(jnp.bfloat16)})
    with pytest.raises(ValueError, match="more"):
        engine.update_params({**old, "more": embedding})
    with pytest.raises(ValueError, match="no parameters of its own"):
        engine.update_params(old, draft_params=old)
