"""Kernels as machine code for sm_90 and gfx942, and that what must not pass does not."""

import functools
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from experiments.kernels import machine_code
from experiments.kernels.kernel_cases import cases
from experiments.kernels.machine_code import Report, compile_calls, find_python, run_jobs

# Answers a job with its number, and dies of the third, after half a line.
MORTAL = """
import json, os, sys
for line in sys.stdin:
    number = json.loads(line)["number"]
    print(f'{{"shared": {number}' if number == 2 else json.dumps({"shared": number}) + chr(10), end="", flush=True)
    if number == 2:
        os._exit(7)
"""


def product(x, w, *, tile, accumulate=jnp.float32):
    """x [256, 1024] times w [1024, 256], a square tile of the result to a program."""

    def kernel(x_ref, w_ref, out_ref):
        def step(k, sums):
            x, w = plt.load(x_ref.at[:, pl.ds(64 * k, 64)]), plt.load(w_ref.at[pl.ds(64 * k, 64), :])
            return sums + jnp.dot(x, w, preferred_element_type=accumulate)

        sums = jax.lax.fori_loop(jnp.int32(0), jnp.int32(16), step, jnp.zeros(out_ref.shape, accumulate))
        out_ref[...] = sums.astype(out_ref.dtype)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((256, 256), x.dtype),
        grid=(256 // tile, 256 // tile),
        in_specs=[pl.BlockSpec((tile, 1024), lambda i, j: (i, 0)), pl.BlockSpec((1024, tile), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((tile, tile), lambda i, j: (i, j)),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=4),
        name="product",
    )(x, w)


@pytest.mark.triton
@pytest.mark.parametrize("op", sorted({case.op for case in cases()}))
def test_kernels_neither_spill_nor_want_more_shared_memory_than_there_is(op):
    calls = [
        (case.name, functools.partial(case.run, implementation="triton"), jax.eval_shape(case.make, jax.random.key(0)))
        for case in cases()
        if case.op == op
    ]
    reports = compile_calls(calls, find_python())
    assert {report.platform for report in reports} == {"cuda", "rocm"}
    assert all(report.registers for report in reports)
    assert [(report.case, report.platform, report.faults) for report in reports if report.faults] == []


@pytest.mark.triton
def test_a_kernel_that_spills_or_does_not_compile_is_named_and_the_others_go_on():
    floats, whole = (
        [jax.ShapeDtypeStruct(shape, kind) for shape in ((256, 1024), (1024, 256))] for kind in (jnp.bfloat16, jnp.int8)
    )
    calls = [
        ("no such product", functools.partial(product, tile=64), whole),
        ("large", functools.partial(product, tile=256), floats),
        ("small", functools.partial(product, tile=64), floats),
    ]
    reports = {(report.case, report.platform): report for report in compile_calls(calls, find_python())}
    assert "RuntimeError" in reports["no such product", "cuda"].error
    assert ["spills" in fault for fault in reports["large", "cuda"].faults] == [True, False]
    assert ["spills" in fault for fault in reports["large", "rocm"].faults] == [True, False]
    small = reports["small", "cuda"]
    assert not small.faults and small.shared == 4 * 2 * 2 * 64 * 64  # stages, operands, bytes of an element
    assert any(kind.startswith("wgmma m64n64k16.f32.bf16") for kind in small.mma)
    assert small.loads.keys() == {"cp.async 16"}
    assert any(kind.startswith("v_mfma_f32_") for kind in reports["small", "rocm"].mma)


def test_a_job_that_ends_the_compiler_is_an_error_and_the_others_have_their_answers():
    answers = run_jobs([{"number": number} for number in range(5)], [sys.executable, "-c", MORTAL])
    assert [answer.get("shared") for answer in answers] == [0, 1, None, 3, 4]
    assert answers[2] == {"error": "the compiler ended with status 7"}


def test_what_a_report_finds_fault_with():
    def report(**figures):
        return Report(**{"case": "", "kernel": "", "platform": "rocm", "num_warps": 4, "num_stages": 1, **figures})

    assert report(shared=64 * 1024, scalar_spills=3).faults == []
    assert report(shared=64 * 1024 + 1).faults == ["65537 bytes of shared memory, 65536 at most"]
    assert report(shared=65537, platform="cuda", spills=8).faults == ["spills 8 bytes"]
    assert report(spills=1).faults == ["spills 1 vector registers"]
    assert report(error="it died").faults == ["it died"]


def test_the_command_says_what_ops_there_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["machine_code", "--python", "nowhere", "--op", "attention"])
    with pytest.raises(SystemExit):
        machine_code.main()
    assert "rms_norm" in capsys.readouterr().err
