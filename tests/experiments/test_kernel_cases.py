"""Every kernel, at every shape that it is for, lowers for both GPU platforms on a machine without a GPU."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from experiments.kernels.bench_kernels import fastest_table
from experiments.kernels.kernel_cases import cases
from experiments.kernels.kernel_cases_attention import attention_case
from mtpjax import compat
from pallas_kernels import dispatch
from tests.helpers.lowering import lower_for, triton_kernels

CASES = cases()
ONE_OF_EACH = list({case.op: case for case in reversed(CASES)}.values())  # `machine_code.py` has all


def some_by_default(cases):
    """All cases, with all but the first three of each op marked as slow."""
    numbers, marked = collections.Counter(), []
    for case in cases:
        numbers[case.op] += 1
        marked.append(pytest.param(case, marks=[pytest.mark.slow] * (numbers[case.op] > 3)))
    return marked


@pytest.mark.parametrize("case", some_by_default(CASES), ids=str)
def test_kernel_lowers_without_a_gpu_where_it_was_measured_to_be_fastest(case, monkeypatch):
    """As "auto", so that what a case says of its shape is what the op asks for."""
    cells = fastest_table([{"op": case.op, "shape": case.shape(), "seconds": {"xla": [2.0], "triton": [1.0]}}])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "_agrees", lambda *args: True)  # no GPU to compare numbers on
    monkeypatch.setattr(dispatch._process, "measured", cells)
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    lowered = lower_for(functools.partial(case.run, implementation="auto"), *shapes)
    for platform in ("cuda", "rocm"):
        assert "custom_call @__gpu$xla.gpu.triton" in lowered[platform].as_text()


@pytest.mark.h100
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_kernel_compiles_for_an_h100(case):
    mesh = compat.make_mesh({"data": 1}, compat.h100_devices())
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    with use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(functools.partial(case.run, implementation="triton")).lower(*shapes).compile()
    assert "custom-call" in compiled.as_text()


@pytest.mark.parametrize("tokens", [1, 4])
def test_what_verify_attention_is_timed_against_computes_the_same(tokens, key):
    case = attention_case(2, 2, tokens, 3, 64, slots=40, is_ragged=True)
    arrays = case.make(key)
    found, expected = case.peers["jax.nn, xla"](*arrays), case.run(*arrays, implementation="xla")
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), atol=1e-2)


def test_each_platform_gets_its_own_kernel_alone():
    case = next(case for case in CASES if case.op == "verify_attention")
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    for platform, lowered in lower_for(functools.partial(case.run, implementation="triton"), *shapes).items():
        assert [kernel.name for kernel in triton_kernels(lowered)] == [
            f"verify_attention_{platform}",
            "combine_shares",
        ]


@pytest.mark.parametrize("case", [case for case in CASES if case.op == "grouped_matmul"], ids=str)
def test_offsets_into_stacks_do_not_overflow(case):
    """Each array of 2^31 numbers or more is addressed with 64 bits, and one of them is there in DeepSeek-V3's cases.

    The arrays of a kernel are the operands of its call, and offsets are what the Triton IR adds to their pointers.
    """
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    lowered = lower_for(functools.partial(case.run, implementation="triton"), *shapes, platforms=("cuda",))
    calls = re.findall(r"custom_call @__gpu\$xla.gpu.triton\(.*: \((.*)\) -> (.*)", lowered["cuda"].as_text())
    kernels = triton_kernels(lowered["cuda"])
    assert len(calls) == len(kernels) >= 2
    wide = 0
    for call, made in zip(calls, kernels, strict=True):
        arrays = re.findall(r"tensor<((?:\d+x)+)", "".join(call))
        sizes = [np.prod([int(size) for size in dims.split("x")[:-1]], dtype=np.int64) for dims in arrays]
        signature = next(line for line in made.ir.splitlines() if "tt.func" in line)
        assert "f8E4M3FN" not in signature  # they go in as numbers of two bytes
        pointers = re.findall(r"(%\w+): !tt.ptr", signature)
        assert len(sizes) == len(pointers)
        for pointer, size in zip(pointers, sizes, strict=True):
            offsets = offsets_added(made.ir, pointer)
            assert offsets
            if size >= 2**31:
                wide += 1
                assert offsets == {"i64"}
    assert wide or "DeepSeek" not in case.name


@pytest.mark.parametrize(
    "case",
    some_by_default(case for case in CASES if case.name.endswith("float8_e4m3fn cache") or "fp8" in case.name),
    ids=str,
)
def test_fp8_takes_the_fast_conversion_of_each_platform(case):
    """On CUDA to float32, since a conversion to bfloat16 runs at 1/16 of the rate; on ROCm none, but bit arithmetic."""
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    lowered = lower_for(functools.partial(case.run, implementation="triton"), *shapes)
    for platform, one in lowered.items():
        ir = "".join(kernel.ir for kernel in triton_kernels(one))
        found = re.findall(r"tt.fp_to_fp .*: tensor<\w+xf8E4M3FN> -> tensor<(?:\d+x)+(\w+)>", ir)
        assert set(found) <= ({"f32"} if platform == "cuda" else set())


def test_bytes_would_be_addressed_with_too_few_bits():
    """The hazard that the test above looks for, in a kernel of its own."""

    def kernel(stack_ref, out_ref):
        out_ref[...] = stack_ref[pl.program_id(0), 0, pl.ds(0, 128)].astype(jnp.float32)

    params = plt.CompilerParams(num_warps=4)
    out = jax.ShapeDtypeStruct((128,), jnp.float32)
    call = pl.pallas_call(kernel, out_shape=out, grid=(256,), compiler_params=params)
    stack = jax.ShapeDtypeStruct((256, 2048, 7168), jnp.float8_e4m3fn)
    assert stack.size >= 2**31
    (made,) = triton_kernels(lower_for(call, stack, platforms=("cuda",))["cuda"])
    assert offsets_added(made.ir, "%arg0") == {"i32"}


def offsets_added(ir, pointer):
    """The integer types of what is added to a pointer or to what is made of it."""
    made, types = {pointer}, set()
    for line in ir.splitlines():
        if match := re.match(r"\s*(%\w+) = (\S+) (%\w+)?", line):
            result, operation, operand = match.groups()
            made.discard(result)  # another block's, of the same name
            if operation in ("tt.splat", "tt.broadcast", "tt.addptr") and operand in made:
                made.add(result)
                if operation == "tt.addptr":
                    types.add(re.findall(r"(i\d+)>?$", line)[0])
    return types
