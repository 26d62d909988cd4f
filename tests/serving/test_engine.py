"""The engine: every request gets the tokens that `speculative_generate` gives it alone, whatever runs beside it."""

import collections
import concurrent.futures
import dataclasses
import logging
import queue
import threading

import jax
import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams, compat, speculative_generate
from mtpjax.decoding import gpu_graph
from mtpjax.decoding import session as programs
from mtpjax.serving.calls import InFlightCall
from mtpjax.serving.engine import Engine
from mtpjax.serving.engine_session import EngineSession
from mtpjax.serving.executor import Executor
from mtpjax.serving.programs import Programs
from mtpjax.serving.request import Finish, QueueFull, Request
from mtpjax.serving.sizes import EngineSettings
from tests.helpers.engine_client import Client, check_idle
from tests.helpers.failing_graphs import FailingCall

CONFIG = DecodeConfig(num_steps=2, prefill_chunk=8)
SETTINGS = EngineSettings(
    num_slots=4,
    max_length=96,
    page_size=8,
    num_pages=19,  # less than two of the longest texts need
    batch_sizes=(1, 4),
    prefill_tokens=16,
)
ONE_SIZE = dataclasses.replace(SETTINGS, batch_sizes=(4,))  # fewer programs to compile
OPTIONS = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.7, "top_k": 9, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"temperature": 1.1, "top_p": 0.8, "min_p": 0.02},
    {"logit_bias": {7: 2.0, 9: -3.0}},
]


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


def alone(params, model, request, config=CONFIG, max_length=96, draft_params=None):
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
    result = speculative_generate(
        params, [request.prompt], model=model, config=config, sampling=request.sampling, draft_params=draft_params
    )
    return result.rows()[0], result.logprobs[0], result.finish_reasons[0]


def check_all(engine, model, params, requests, config=CONFIG, draft_params=None):
    """Runs all requests at once, and compares each with itself alone."""
    for request, (tokens, logprobs, finish) in zip(requests, Client(engine).run(requests), strict=True):
        expected, expected_logprobs, reason = alone(params, model, request, config, draft_params=draft_params)
        assert (tokens, finish.reason) == (expected, reason), request
        assert finish.num_new_tokens == len(tokens)
        if request.logprobs:
            np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-4)
    check_idle(engine)


@pytest.fixture(scope="module")
def engines(small):
    """`engines(attention, settings, **config)` -> a running engine, its model and parameters."""
    made = {}

    def make(attention="grouped", settings=SETTINGS, **changes):
        key = (attention, settings, tuple(changes.items()))
        if key not in made:
            model, params = small(attention)
            engine = Engine(params, model=model, config=dataclasses.replace(CONFIG, **changes), settings=settings)
            engine.warm_up()
            engine.start()
            made[key] = engine, model, params
        return made[key]

    yield make
    for engine, _, _ in made.values():
        assert engine.close(timeout=30)


def test_each_request_gets_the_text_that_it_gets_alone(engines):
    engine, model, params = engines()
    check_all(engine, model, params, list(random_requests(0, 16)))
    assert engine.status().accept_length > 1


def test_the_first_token_in_a_used_slot_was_not_drafted(engines):
    engine, _, _ = engines()
    client = Client(engine)
    # Six in each slot, one after the other: prompts end at places where texts before had drafted tokens.
    submitted = [client.submit(request) for request in random_requests(8, 24, prompt_length=(5, 30))]
    firsts = [events.get(timeout=60) for _, events in submitted]
    assert [delta.origins[0] for delta in firsts] == [0] * len(submitted)
    assert sum(sum(client.finish(each)[2].accepted) for each in submitted) > 0
    check_idle(engine)


@pytest.mark.parametrize("num_steps", [2, 0])
def test_passes_of_one_row_are_padded_on_a_gpu(num_steps, small, monkeypatch):
    model, params = small("grouped")
    config = dataclasses.replace(CONFIG, num_steps=num_steps)
    # The second fills the context: its last pass writes a padded row after it.
    requests = [
        Request(prompt=(5, 6, 7), max_new_tokens=20, speculative=False),
        Request(prompt=tuple(range(56)), max_new_tokens=40),
    ]
    expected = [alone(params, model, request, config)[0] for request in requests]
    for module in ("mtpjax.decoding.decoder", "mtpjax.serving.sizes", "mtpjax.serving.engine_session"):
        monkeypatch.setattr(f"{module}.platform_of", lambda mesh: "gpu")
    engine = Engine(params, model=model, config=config, settings=SETTINGS)
    assert engine._executor.session.sizes.min_rows == (2, 1)
    assert engine._executor.session.decoder.slots_per_round >= 2
    engine.start()
    for request, tokens in zip(requests, expected, strict=True):
        assert Client(engine).run([request])[0][0] == tokens
    assert engine.close(timeout=30)


PREFIXES = [np.random.default_rng(100 + row).integers(0, 61, 27).tolist() for row in range(2)]


@pytest.mark.parametrize(
    ("attention", "changes"),
    [
        ("grouped", {}),
        pytest.param("latent", {}, marks=pytest.mark.slow),
        pytest.param("latent", {"topk": 2, "num_draft_tokens": 5}, marks=pytest.mark.slow),
        pytest.param("sparse", {}, marks=pytest.mark.slow),
        pytest.param("hybrid", {}, marks=pytest.mark.slow),
        pytest.param("grouped", {"acceptance": "token"}, marks=pytest.mark.slow),
        pytest.param("grouped", {"drafter": "lookup"}, marks=pytest.mark.slow),
        pytest.param("grouped", {"num_steps": 0}, marks=pytest.mark.slow),
    ],
)
def test_preemption_and_shared_beginnings_change_no_text(engines, attention, changes):
    engine, model, params = engines(attention, **changes)
    before = engine.status()
    requests = list(random_requests(1, 32, prompt_length=(1, 20), new_tokens=(1, 60), prefixes=PREFIXES))
    requests = [request for request in requests if len(request.prompt) + 1 < engine.max_length]
    check_all(engine, model, params, requests, dataclasses.replace(CONFIG, **changes))
    status = engine.status()
    assert status.num_preempted > before.num_preempted
    assert status.num_cached_tokens > before.num_cached_tokens


@pytest.mark.slow
def test_a_depth_that_follows_the_load_changes_no_text(engines):
    settings = dataclasses.replace(ONE_SIZE, disable_drafts_at=3)
    engine, model, params = engines("grouped", settings, acceptance="sample")
    requests = list(random_requests(2, 16, new_tokens=(5, 60)))
    check_all(engine, model, params, requests, dataclasses.replace(CONFIG, acceptance="sample"))
    # Some rounds had drafts, and others had none.
    assert 0 < engine.status().proposed[0] < engine.status().num_steps


def test_depth_by_load_needs_a_rule_whose_text_does_not_depend_on_it(small):
    model, params = small("grouped")
    settings = dataclasses.replace(ONE_SIZE, disable_drafts_at=3)
    with pytest.raises(ValueError, match="acceptance 'block' the text for a seed depends"):
        Engine(params, model=model, config=CONFIG, settings=settings)


def test_an_engine_of_the_greedy_rule_refuses_a_temperature(small):
    model, params = small("grouped")
    engine = Engine(params, model=model, config=dataclasses.replace(CONFIG, acceptance="greedy"), settings=ONE_SIZE)
    with pytest.raises(ValueError, match=r"acceptance 'greedy' supports only temperature 0, got 0\.5"):
        engine.submit(Request(prompt=(1,), max_new_tokens=1, sampling=SamplingParams(temperature=0.5, seed=1)), print)


def test_an_aborted_request_gives_back_its_slot_and_pages(engines):
    engine, model, params = engines()
    client = Client(engine)
    long = Request(prompt=(1, 2, 3), max_new_tokens=90)
    running = [client.submit(long) for _ in range(6)]  # two of them wait
    running[0][1].get(timeout=60)
    for request_id, _ in running:
        engine.abort(request_id)
        engine.abort(request_id)  # again, and unknown ones: nothing happens
    engine.abort(10**9)
    for submitted in running:
        assert client.finish(submitted)[2].reason in ("abort", "length")
    check_idle(engine)
    check_all(engine, model, params, list(random_requests(3, 4)))


@pytest.mark.slow
def test_a_row_that_becomes_nan_fails_alone(small):
    model, params = small("grouped")
    broken = {**params, "embedding": params["embedding"].at[60].set(np.nan)}
    # Token 60 is in one prompt only: no row drafts it.
    config = dataclasses.replace(CONFIG, draft_vocabulary=tuple(range(60)))
    engine = Engine(broken, model=model, config=config, settings=ONE_SIZE)
    engine.warm_up()
    engine.start()
    client = Client(engine)
    requests = [Request(prompt=(index + 1, 2, 3, index), max_new_tokens=30) for index in range(7)]
    requests[3] = Request(prompt=tuple(range(40, 61)), max_new_tokens=30)
    submitted = [client.submit(request) for request in requests]
    results = [client.finish(each) for each in submitted]
    assert results[3][2].reason == "error" and "NaN" in results[3][2].message and not results[3][0]
    status = engine.status()
    assert status.num_failed == status.num_nan_logits == 1 and status.num_used_pages == 0
    for index in (0, 1, 2, 4, 5, 6):
        assert results[index][2].reason == "length"
        assert results[index][0] == alone(broken, model, requests[index], config)[0]
    # The pages that it wrote do no harm to the rows that get them.
    for request, result in zip(requests[4:], client.run(requests[4:]), strict=True):
        assert result[0] == alone(broken, model, request, config)[0]
    assert engine.close(timeout=30)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(prompt=(), max_new_tokens=1), "prompt 0 is empty"),
        (Request(prompt=(10**6,), max_new_tokens=1), "token id 1000000, outside"),
        (Request(prompt=(1,) * 96, max_new_tokens=1), "has 96 tokens; max_length 96 leaves room for 95"),
        (Request(prompt=(1,), max_new_tokens=0), "max_new_tokens must be at least 1"),
        (Request(prompt=(1,), max_new_tokens=1, sampling=SamplingParams(temperature=0.5)), "needs SamplingParams.seed"),
        (
            Request(prompt=(1,), max_new_tokens=1, stop_sequences=((1,) * 9,)),
            "stop sequences of up to 9 tokens do not fit",
        ),
    ],
)
def test_a_wrong_request_is_refused_and_changes_nothing(engines, request_, message):
    engine, *_ = engines()
    with pytest.raises(ValueError, match=message):
        engine.submit(request_, print)
    check_idle(engine)


def test_a_full_queue_refuses_and_a_closed_engine_too(small):
    model, params = small("grouped")
    settings = dataclasses.replace(SETTINGS, num_slots=1, batch_sizes=None, max_waiting=2)
    engine = Engine(params, model=model, config=CONFIG, settings=settings)
    events = queue.Queue()
    # Its thread has not started, so nothing runs yet: one will get the slot, and two wait.
    for _ in range(3):
        engine.submit(Request(prompt=(1,), max_new_tokens=3), events.put)
    with pytest.raises(QueueFull, match=r"the queue is full \(2 requests\)"):
        engine.submit(Request(prompt=(1,), max_new_tokens=3), events.put)
    engine.start()
    closer = threading.Thread(target=engine.close)
    closer.start()
    closer.join(timeout=60)
    # The others ended before the engine did.
    assert [event.reason for event in events.queue if isinstance(event, Finish)] == ["length"] * 3
    with pytest.raises(QueueFull, match="shutting down"):
        engine.submit(Request(prompt=(1,), max_new_tokens=3), events.put)


@pytest.mark.slow
def test_requests_that_take_too_long_end_with_a_timeout(engines):
    settings = dataclasses.replace(SETTINGS, num_slots=1, batch_sizes=None, max_queue_seconds=0.0, max_run_seconds=0.3)
    engine, *_ = engines("grouped", settings)
    client = Client(engine)
    results = client.run([Request(prompt=(1,), max_new_tokens=95)] * 30)
    reasons = {result[2].reason for result in results}
    assert "timeout" in reasons and reasons <= {"timeout", "length"}
    check_idle(engine)


def test_a_receiver_that_fails_disturbs_nobody(engines):
    engine, model, params = engines()

    def fail(event):
        raise RuntimeError("the receiver fails")

    engine.submit(Request(prompt=(1, 2), max_new_tokens=5), fail)
    check_all(engine, model, params, list(random_requests(4, 6)))


def test_scores_are_those_of_a_forward_pass(engines):
    engine, model, params = engines()
    rng = np.random.default_rng(5)
    # One token, parts of chunks, whole ones, and the longest text. Others run meanwhile, and preempt.
    lengths = (1, 2, 8, 9, 10, 21, 95, 96)
    texts = [rng.integers(0, 61, length).tolist() for length in lengths]
    client = Client(engine)
    others = [client.submit(request) for request in random_requests(8, 6, new_tokens=(20, 40))]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda text: engine.score(text, 3), texts))
    for text, scores in zip(texts, results, strict=True):
        check_scores(scores, text, model, params)
    for other in others:
        client.finish(other)
    check_idle(engine)
    for text in ([], texts[-1] + [1], [61]):
        with pytest.raises(ValueError, match="text"):
            engine.score(text, 1)
    with pytest.raises(ValueError, match="num_top"):
        engine.score([1], 21)


def check_scores(scores, text, model, params):
    """The plain twin: one forward pass over the whole text."""
    import jax

    from mtpjax import forward

    padded = np.array([text + [0] * (96 - len(text))])  # one program for all lengths
    logprobs = jax.nn.log_softmax(forward(params, padded, model=model).logits[0])
    expected = [float(logprobs[index, token]) for index, token in enumerate(text[1:])]
    assert len(scores.logprobs) == len(scores.top_ids) == len(scores.top_logprobs) == len(text)
    assert scores.logprobs[0] is None and scores.top_ids[0] == []
    np.testing.assert_allclose(scores.logprobs[1:], expected, atol=1e-4)
    for row, ids, values in zip(np.asarray(logprobs), scores.top_ids[1:], scores.top_logprobs[1:], strict=False):
        assert ids == np.argsort(-row)[:3].tolist()
        np.testing.assert_allclose(values, np.sort(row)[::-1][:3], atol=1e-4)


@pytest.mark.parametrize("how", ["dispatch", "read"])
def test_a_call_that_fails_ends_its_requests_and_the_engine_goes_on(how, engines, monkeypatch):
    engine, model, params = engines()
    client, advance, read, calls = Client(engine), engine._executor.advance, InFlightCall.read, []

    # As a CUDA graph that fails after the start: when it is dispatched, or when its report is read.
    def fail_once(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise jax.errors.JaxRuntimeError("INTERNAL: the device fails")
        return (advance if how == "dispatch" else read)(*arguments)

    monkeypatch.setattr(*((engine._executor, "advance") if how == "dispatch" else (InFlightCall, "read")), fail_once)
    requests = list(random_requests(6, 8, new_tokens=(20, 40)))
    results = client.run(requests)
    reasons = [result[2].reason for result in results]
    assert "error" in reasons and set(reasons) <= {"error", "stop", "length"}
    assert all(result[2].is_retryable for result in results if result[2].reason == "error")
    # What was delivered before is right.
    for request, (tokens, *_) in zip(requests, results, strict=True):
        assert tokens == alone(params, model, request)[0][: len(tokens)]
    monkeypatch.undo()
    check_all(engine, model, params, list(random_requests(7, 8)))


@pytest.mark.parametrize("how", ["dispatch", "read"])
def test_a_graph_that_fails_in_the_warm_up_gives_one_warning_and_the_same_texts(how, engines, monkeypatch, caplog):
    _, model, params = engines()  # has compiled the programs without options
    monkeypatch.setattr(compat, "is_cuda", lambda: True)
    monkeypatch.setattr(gpu_graph, "GRAPHS", gpu_graph.Graphs())
    clear = programs.clear_pages
    recorded = FailingCall(how, number=2, result=clear.plain, donated=2)  # XLA records a graph in the second call
    monkeypatch.setattr(clear, "_on_one_gpu", recorded)

    def warm_up(self, progress, keys, *, num_calls):
        for _ in range(num_calls):
            state = self.session.run(self.clearing(0, [0]))
            jax.block_until_ready((self.session.state, state))

    monkeypatch.setattr(Programs, "_warm_up", warm_up)
    engine = Engine(params, model=model, config=CONFIG, settings=SETTINGS)
    with caplog.at_level(logging.WARNING):
        engine.warm_up()
    engine.start()
    requests = list(random_requests(9, 6))
    for request, (tokens, *_) in zip(requests, Client(engine).run(requests), strict=True):
        assert tokens == alone(params, model, request)[0]
    assert engine.close(timeout=30)
    [message] = [record.message for record in caplog.records if record.name == gpu_graph.__name__]
    assert "cuGraphInstantiate" in message and recorded.calls == 2


def test_a_warm_up_with_graphs_calls_each_program_twice(small, monkeypatch):
    model, params = small("grouped")
    own, calls = (
        Executor(EngineSession(params, model=model, config=CONFIG, settings=ONE_SIZE)).programs,
        collections.Counter(),
    )
    monkeypatch.setattr(own, "compile", lambda key, run: run(lambda: calls.update([key])))
    keys = own.all()
    own._warm_up(lambda done, total: None, keys, num_calls=2)
    assert calls == dict.fromkeys(keys, 2)
