"""The engine's benchmark counts rounds as the schedule says; the times are only run, not judged."""

import json

import numpy as np
import pytest

from experiments.serving import bench_engine


@pytest.fixture(scope="module")
def tiny():
    """A running engine on the tiny model, with one batch size."""
    model, params = bench_engine.make_model("tiny")
    engine = bench_engine.make_engine(params, model, bench_engine.NUM_SLOTS, (bench_engine.NUM_SLOTS,))
    # Programs are compiled where they are needed.
    engine._executor.programs.warm_up = lambda progress=None: None
    engine.start()
    yield engine
    assert engine.close(timeout=60)


def test_rounds_of_an_engine_and_of_static_batches(tiny):
    rng = np.random.default_rng(0)
    loads = [bench_engine.make_requests(rng, [3] * 7 + [40] + [3] * 7 + [40], tiny.vocab_size)]
    found = bench_engine.measure_rounds(tiny, loads)
    assert found["requests"] == 16 and found["new_tokens"] == 14 * 3 + 80
    # Both long requests run at the same time for a while, which static batches cannot do.
    assert found["row_rounds"] / bench_engine.NUM_SLOTS < found["engine_rounds"] < found["static_rounds"]
    assert found["waited_used"] <= found["row_rounds"]
    assert found == bench_engine.measure_rounds(tiny, loads)


def test_a_trace_has_every_call_and_leaves_no_trace(tiny):
    rng = np.random.default_rng(0)
    with bench_engine.Trace(tiny) as trace:
        bench_engine.run_load(tiny, bench_engine.make_requests(rng, [12] * 4, tiny.vocab_size))
    assert not {"prefill", "advance"} & set(vars(tiny._executor))
    prompts = [row for traced in trace.calls if traced.call.is_prefill for row in traced.call.rows if row is not None]
    assert len(prompts) == 4  # each has one chunk
    for before, after in zip(trace.calls, trace.calls[1:], strict=False):
        assert before.began <= before.dispatched <= after.began and before.completed <= after.completed


def test_turns_alternate_and_the_first_is_left_out():
    names = []
    measures = {name: lambda name=name: float(names.append(name) or len(names)) for name in "ab"}
    values = bench_engine.in_turns(measures, 2)
    assert names == list("baabba")
    assert values["a"].tolist() == [3, 6] and values["b"].tolist() == [4, 5]
    assert bench_engine.median_ratio(np.array([2.0, 4.0]), np.array([1.0, 2.0])).value == 2


@pytest.mark.slow
def test_the_quick_run_writes_its_figures(tmp_path):
    output = tmp_path / "bench.json"
    assert bench_engine.main(["--quick", "--requests", "12", "--output", str(output)]) == 0
    (found,) = json.loads(output.read_text())["models"]
    assert set(found) == {"model", "rounds", "host", "single", "throughput"} and found["single"]["identical"]
