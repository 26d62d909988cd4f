import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernels import bench_kernels
from experiments.kernels.kernel_cases import Case
from experiments.kernels.kernel_cases_attention import attention_case, range_case
from pallas_kernels import dispatch
from pallas_kernels.rms_norm import rms_norm


@pytest.fixture
def case():
    def make(key):
        del key
        return jnp.ones((3, 64)), jnp.ones(64)

    def run(x, scale, *, implementation):
        return rms_norm(x, scale, implementation={"triton": "interpreted"}.get(implementation, implementation))

    peers = {"another": lambda x, scale: x, "one that fails": lambda x, scale: x @ x}
    return Case(op="rms_norm", name="small", run=run, make=make, bytes=1, operations=1, peers=peers)


def test_forms_are_compared_and_timed_in_turn(case, monkeypatch):
    monkeypatch.setattr(bench_kernels, "seconds", lambda call: call() and 1.0)
    row = bench_kernels.measure(case, rounds=2)
    assert row["error"] < 1e-6 and row["copies"] == bench_kernels.MOST_COPIES
    assert {name: len(times) for name, times in row["seconds"].items()} == {"triton": 2, "xla": 2, "another": 2}
    assert list(row["failed"]) == ["one that fails"]
    assert case.shape() == {"rows": 3, "width": 64}


def test_a_form_without_the_memory_leaves_the_others(case, monkeypatch):
    monkeypatch.setattr(bench_kernels, "seconds", lambda call: call() and 1.0)

    def plain(x, scale):
        raise MemoryError("RESOURCE_EXHAUSTED\nof what")

    row = bench_kernels.measure(dataclasses.replace(case, plain=plain), rounds=1)
    assert row["failed"]["xla"] == "MemoryError: RESOURCE_EXHAUSTED" and row["error"] is None
    assert sorted(row["seconds"]) == ["another", "triton"]


def test_what_is_carried_is_given_away_and_comes_back(key):
    def count(x, total, by):
        return x + by, total + by

    inputs = [(jnp.zeros(3), jnp.full(3, number), jnp.ones(3)) for number in range(2)]
    call = bench_kernels.repeated(count, inputs, carried=1)
    first, second = call(), call()
    assert [len(result) for result in first] == [1, 1]
    assert not inputs[1][1].is_deleted() and not second[0][0].is_deleted()


@pytest.mark.slow
def test_what_stands_in_a_kernels_place_computes_the_same(key):
    for case in (
        attention_case(2, 2, 3, 2, 32, slots=64),
        attention_case(2, 1, 2, 4, 576, slots=48, num_draft_slots=8),
        attention_case(2, 2, 3, 2, 32, slots=640, window=(512, 4)),
    ):
        arguments = jax.tree.map(
            lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, case.make(key)
        )
        assert case.plain is not None
        expected = case.run(*arguments, implementation="xla")
        np.testing.assert_allclose(case.plain(*arguments), expected, atol=2e-6)


def test_a_wrong_result_has_a_large_error():
    right = (jnp.ones(4), jnp.arange(4))
    assert bench_kernels.relative_error(right, right) == 0
    assert bench_kernels.relative_error((jnp.ones(4).at[0].set(2), jnp.arange(4)), right) == pytest.approx(0.5)
    assert bench_kernels.relative_error((jnp.ones(4).at[0].set(jnp.nan), jnp.arange(4)), right) == np.inf


def test_what_was_fastest_is_what_auto_takes():
    shape = {"rows": 4, "width": 64, "dtype": "float32"}
    rows = [{"op": "rms_norm", "shape": shape, "seconds": {"xla": [2.0, 9.0, 2.0], "triton": [1.0, 1.0, 9.0]}}]
    table = json.loads(json.dumps(bench_kernels.fastest_table(rows)))
    assert dispatch._fastest(table["rms_norm"], shape) == "triton"
    rows += [{"op": "rms_norm", "shape": shape, "seconds": {"xla": [1.0], "triton": [3.0]}}]  # the sum of both
    [cell] = bench_kernels.fastest_table(rows)["rms_norm"]
    assert cell["milliseconds"] == {"xla": 3000.0, "triton": 4000.0}


def test_without_a_gpu_it_says_so(capsys):
    assert bench_kernels.main(["--op", "rms_norm"]) == 3
    assert "jax has none here" in capsys.readouterr().err


def test_limits_are_predicted_without_a_gpu(capsys):
    assert bench_kernels.main(["--op", "range_attention", "--predict", "h100"]) == 0
    table = " ".join(capsys.readouterr().out.split())
    # 2 * 32 heads * 4096 * 4097 / 2 pairs * 128 columns, at 989 TFLOP/s, and at half of that.
    assert "0.0687 0.0695 0.139" in table


def test_attention_in_training_is_timed_against_the_same_function(key):
    case = range_case(2, 20, 2, 16, 8)
    arrays = case.make(key)
    found, expected = case.peers["all scores"](*arrays), case.run(*arrays, implementation="xla")
    assert bench_kernels.relative_error(found, expected) < bench_kernels.TOLERANCE
