import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bench_kernels
from experiments.kernel_cases import Case
from pallas_kernels import dispatch, rms_norm


@pytest.fixture
def case():
    def make(key):
        del key
        return jnp.ones((3, 64)), jnp.ones(64)

    def run(x, scale, *, implementation):
        return rms_norm(x, scale, implementation={"triton": "interpreted"}.get(implementation, implementation))

    peers = {"another": lambda x, scale: x, "one that fails": lambda x, scale: x @ x}
    sizes = {"rows": 3, "width": 64}
    return Case(op="rms_norm", name="small", sizes=sizes, run=run, make=make, bytes=1, operations=1, peers=peers)


def test_forms_are_compared_and_timed_in_turn(case, monkeypatch):
    monkeypatch.setattr(bench_kernels, "seconds", lambda call: call() and 1.0)
    row = bench_kernels.measure(case, rounds=2)
    assert row["error"] < 1e-6 and row["copies"] == bench_kernels.MOST_COPIES
    assert {name: len(times) for name, times in row["seconds"].items()} == {"triton": 2, "xla": 2, "another": 2}
    assert list(row["failed"]) == ["one that fails"]


def test_a_wrong_result_has_a_large_error():
    right = (jnp.ones(4), jnp.arange(4))
    assert bench_kernels.relative_error(right, right) == 0
    assert bench_kernels.relative_error((jnp.ones(4).at[0].set(2), jnp.arange(4)), right) == pytest.approx(0.5)
    assert bench_kernels.relative_error((jnp.ones(4).at[0].set(jnp.nan), jnp.arange(4)), right) == np.inf


def test_what_was_fastest_is_what_auto_takes():
    sizes = {"rows": 4, "width": 64}
    rows = [{"op": "rms_norm", "sizes": sizes, "seconds": {"xla": [2.0, 9.0, 2.0], "triton": [1.0, 1.0, 9.0]}}]
    table = json.loads(json.dumps(bench_kernels.fastest_table(rows)))
    assert dispatch._fastest(table["rms_norm"], sizes) == "triton"


def test_without_a_gpu_it_says_so(capsys):
    assert bench_kernels.main(["--op", "rms_norm"]) == 3
    assert "jax has none here" in capsys.readouterr().err
