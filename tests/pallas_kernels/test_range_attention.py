"""Attention over ranges of keys against its reference: values and gradients of every mask."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec, use_abstract_mesh

from mtpjax.evaluation.compiled_call import h100_mesh
from pallas_kernels.attention_blocks import Tiles
from pallas_kernels.range_attention import (
    KeyRanges,
    OwnKeys,
    blocks,
    kernels,
    range_attention,
    range_attention_reference,
    with_gradients,
)
from tests.helpers.lowering import lower_for, triton_kernels

CASES = {
    "causal": {},
    "documents": {"documents": True},
    "window": {"window": 5, "documents": True},
    "window of a recycled depth": {"window": 5, "shift": 2, "documents": True, "levels": 3},
    "wide window": {"window": 100},
    "sinks": {"sinks": True, "documents": True},
    "levels": {"levels": 2, "documents": True},
    "narrow values, one head": {"shape": (1, 1, 37, 1, 8, 5), "documents": True},
    "one token": {"shape": (2, 1, 1, 2, 4, 4)},
    "one block": {"shape": (1, 2, 8, 1, 4, 4)},
    "everything": {"window": 7, "shift": 1, "documents": True, "levels": 2, "sinks": True},
    "nothing": {"ranges": (5, 4)},
    "only sinks": {"ranges": (5, 4), "sinks": True},
    "later keys": {"ranges": (20, 30)},
    "beyond both ends": {"ranges": (-3, 60)},
    "beyond the last key": {"ranges": (60, 70)},
    "two ranges": {"anchors": 5},
    "blocks after anchors": {"window": 9, "levels": 5, "blocks": 9},
    "one block of own keys": {"levels": 3, "blocks": 1, "sinks": True},
}


def packed_ranges(ids, window=0, shift=0):
    """Makes the ranges of packed documents, causal and inside a window, as in `mtpjax.models.masks.full_view`."""
    first = np.array([[list(row).index(each) for each in row] for row in ids])
    last = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    first = np.maximum(first, last + shift - window + 1) if window else first
    return KeyRanges(*(jnp.asarray(each[..., None], jnp.int32) for each in (first, last)))


def anchor_ranges(num_keys, num_tokens, block):
    """Makes the ranges of blocks of drafts: the text before an anchor, and the block, whose keys follow the text's."""
    first_key = num_keys - num_tokens
    which = np.arange(num_tokens) // block
    anchor = 3 + 4 * which
    first = np.stack([np.maximum(anchor - 6, 0), first_key + which * block], axis=-1)
    last = np.stack([anchor - 1, np.minimum(first[:, 1] + block, num_keys) - 1], axis=-1)
    return KeyRanges(*(jnp.asarray(np.stack([each, each]), jnp.int32) for each in (first, last)))


def operands(case, seed=0, dtype=jnp.float32):
    """Makes queries, keys, values, ranges, own keys and sinks."""
    B, K, T, G, H, V = case.get("shape", (2, 2, 45, 3, 8, 6))
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    ids = np.sort(rng.integers(0, 4, (B, T)), axis=1) if case.get("documents") else np.zeros((B, T))
    ranges, S = packed_ranges(ids, case.get("window", 0), case.get("shift", 0)), T
    if "ranges" in case:
        ranges = KeyRanges(*(jnp.full((B, T, 1), each, jnp.int32) for each in case["ranges"]))
    if "anchors" in case:
        S = 2 * T
        ranges = anchor_ranges(S, T, case["anchors"])
    own = None
    if levels := case.get("levels", 0):
        mask, A = jnp.broadcast_to(jnp.arange(levels) != 1, (B, T, levels)), case.get("blocks", T)
        mask = mask if A == T else mask | (jnp.arange(T) % 2 == 0)[None, :, None]
        own = OwnKeys(normal(B, K, A, levels, H), normal(B, K, A, levels, V), mask)
    sinks = normal(K, G) if case.get("sinks") else None
    return normal(B, K, T, G, H), normal(B, K, S, H), normal(B, K, S, V), ranges, own, sinks


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Small blocks, so that rows and keys fill several, with different numbers of rows and keys for the kernels."""
    monkeypatch.setattr(blocks, "BLOCK", 8)
    monkeypatch.setattr(kernels, "_choose_tiles", lambda *_: Tiles(32, 16, 4, 2))


def call(function, q, key, value, ranges, own, sinks, **settings):
    return function(q, key, value, ranges, scale=0.3, own=own, sinks=sinks, **settings)


by_blocks, reference = (functools.partial(call, each) for each in (range_attention, range_attention_reference))
interpreted, compiled = (functools.partial(by_blocks, implementation=name) for name in ("interpreted", "triton"))
FORMS = {"blocks": by_blocks, "interpreted": interpreted, "compiled": compiled}
attend = jax.jit(lambda form, *arrays: FORMS[form](*arrays), static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def of_all_arrays(function, arrays, weights):
    """Returns the output and the gradients. Cases of the same shapes share the compiled function."""
    q, key, value, ranges, own, sinks = arrays

    def compute(q, key, value, pair, sinks):
        keys = None if own is None else OwnKeys(pair[0], pair[1], own.mask)
        output = function(q, key, value, ranges, keys, sinks)
        return (output * weights).sum(), output

    differentiated = q, key, value, None if own is None else own[:2], sinks
    return jax.grad(compute, argnums=(0, 1, 2, 3, 4), has_aux=True)(*differentiated)


# Interpreted kernels compile for some seconds per shape, so the default cases are those that share one.
SLOW = (
    "window of a recycled depth",
    "sinks",
    "levels",
    "narrow values, one head",
    "one token",
    "one block",
    "only sinks",
)
COMPARED = [("blocks", name) for name in CASES]
COMPARED += [pytest.param("interpreted", name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
COMPARED += [pytest.param("compiled", name, marks=pytest.mark.gpu) for name in CASES]


@pytest.mark.parametrize(("form", "name"), COMPARED)
def test_values_and_gradients_are_those_of_the_reference(form, name):
    arrays = operands(CASES[name])
    q, value = arrays[0], arrays[2]
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(*q.shape[:4], value.shape[-1])), jnp.float32)
    (found, output), (wanted, expected) = (
        of_all_arrays(function, arrays, weights) for function in (FORMS[form], reference)
    )
    np.testing.assert_allclose(output, expected, atol=2e-6)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), found, wanted)


def test_the_reference_sees_what_the_ranges_describe():
    q, key, value, ranges, _, _ = operands(CASES["window"])
    seen = np.asarray(ranges.dense(45))
    for b, t in np.ndindex(2, 45):
        first, last = int(ranges.first[b, t, 0]), int(ranges.last[b, t, 0])
        assert list(np.flatnonzero(seen[b, t])) == list(range(first, last + 1))
    alone = range_attention_reference(
        q[:, :, 9:10],
        key[:, :, :10],
        value[:, :, :10],
        packed_ranges(np.zeros((2, 10)))._replace(first=jnp.full((2, 1, 1), 7), last=jnp.full((2, 1, 1), 9)),
        scale=1.0,
    )
    scores = np.einsum("BKGH,BKSH->BKGS", q[:, :, 9], key[:, :, 7:10])
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(alone[:, :, 0], np.einsum("BKGS,BKSV->BKGV", weights, value[:, :, 7:10]), atol=1e-5)


@pytest.mark.parametrize("form", ["blocks", "interpreted"])
@pytest.mark.parametrize("mutant", ["window", "shift", "documents", "anchor", "block", "own block", "own mask"])
def test_mutants_of_the_mask_are_caught(mutant, form):
    own_keys = "blocks after anchors"
    names = {"anchor": "two ranges", "block": "two ranges", "own block": own_keys, "own mask": own_keys}
    q, key, value, ranges, own, sinks = operands(CASES[names.get(mutant, "everything")])
    changed, others = ranges, own
    if mutant == "own block":
        others = own._replace(key=jnp.roll(own.key, 1, axis=2))  # the keys of the block before
    elif mutant == "own mask":
        others = own._replace(mask=jnp.ones_like(own.mask))
    else:
        changed = mutated_ranges(mutant, ranges, key.shape[2])
    arrays = (q, key, value, ranges, own, sinks)
    assert abs(attend(form, q, key, value, changed, others, sinks) - reference(*arrays)).max() > 1e-2


def mutated_ranges(mutant, ranges, num_keys):
    first, last = ranges[:2]
    return {
        "window": ranges._replace(first=first - 1),
        "shift": ranges._replace(first=first + 1),
        "documents": ranges._replace(first=jnp.zeros_like(first)),
        "anchor": ranges._replace(last=last.at[..., 0].add(1)),  # the anchor's own entry
        "block": ranges._replace(last=last.at[..., 1].set(num_keys - 1)),  # later blocks
    }[mutant]


def test_without_a_level_the_result_differs():
    q, key, value, ranges, own, _ = operands(CASES["levels"])
    assert own is not None
    found = by_blocks(q, key, value, ranges, own, None)
    assert abs(by_blocks(q, key, value, ranges, None, None) - found).max() > 1e-3
    # The level whose mask is False adds nothing.
    moved = own._replace(key=own.key.at[:, :, :, 1].add(1))
    np.testing.assert_array_equal(by_blocks(q, key, value, ranges, moved, None), found)


@pytest.mark.parametrize("form", ["blocks", "interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def test_bfloat16_is_as_close_as_the_reference(form):
    arrays = operands(CASES["everything"], dtype=jnp.bfloat16)
    widen = lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf
    exact = reference(*jax.tree.map(widen, arrays))
    found = attend(form, *arrays), reference(*arrays)
    errors = [abs(each.astype(jnp.float32) - exact).max() for each in found]
    print(f"largest errors: {form} {errors[0]:.2g}, reference {errors[1]:.2g}")
    assert errors[0] < 1.5 * errors[1] + 1e-3


def lowered_shapes(dtype, H=128, V=128):
    q, key, value = (
        jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, 2, 300, 4, H), (2, 2, 300, H), (2, 2, 300, V))
    )
    ranges = jax.eval_shape(lambda: KeyRanges(*[jnp.zeros((2, 300, 1), jnp.int32)] * 2))
    return q, key, value, ranges, jax.ShapeDtypeStruct((2, 2, 300, 4, V), dtype)


gradients = functools.partial(with_gradients, scale=0.1, implementation="triton")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_kernels_lower_for_both_platforms_without_a_gpu(dtype):
    for platform, lowered in lower_for(gradients, *lowered_shapes(dtype)).items():
        names = [kernel.name for kernel in triton_kernels(lowered)]
        assert names == [f"range_attention_{kernel}_{platform}" for kernel in ("forward", "queries", "keys")]


def in_shards(mesh):
    """Rows of the batch and key heads on different devices."""
    heads, rows = PartitionSpec("data", "tensor"), PartitionSpec("data")
    in_specs, out_specs = (*[heads] * 3, rows, heads), (heads, (heads,) * 3)
    return jax.shard_map(gradients, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def test_kernels_lower_inside_shard_map():
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    mesh = AbstractMesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, abstract_device=device)
    with use_abstract_mesh(mesh):
        traced = jax.jit(in_shards(mesh)).trace(*lowered_shapes(jnp.bfloat16))
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert len(triton_kernels(lowered)) == 3
    assert "bf16[1,1,1200,128]" in str(traced.jaxpr)  # of each device


@pytest.mark.h100
def test_kernels_compile_inside_shard_map_for_h100s():
    mesh = h100_mesh({"data": 2, "tensor": 2})
    with use_abstract_mesh(mesh.abstract_mesh):
        text = str(jax.jit(in_shards(mesh)).lower(*lowered_shapes(jnp.bfloat16)).compile().as_text())
    assert text.count("__gpu$xla.gpu.triton") == 3
    assert not re.search("all-(gather|reduce|to-all)|collective-permute", text)


def test_columns_that_do_not_fit_raise():
    arrays = lowered_shapes(jnp.bfloat16, H=512)
    with pytest.raises(ValueError, match="keys and values of 512 and 128 columns do not fit"):
        jax.eval_shape(gradients, *arrays)
    by_auto = functools.partial(with_gradients, scale=0.1)
    assert jax.eval_shape(by_auto, *arrays)[0].shape == (2, 2, 300, 4, 128)


@pytest.mark.parametrize("sizes", [(0, 5, 5), (1, 0, 5), (1, 5, 0)])
def test_empty_calls_have_results_of_the_right_shape(sizes):
    B, T, S = sizes
    ranges = KeyRanges(*[jnp.zeros((B, T, 1), jnp.int32)] * 2)
    output = range_attention(jnp.ones((B, 2, T, 3, 4)), *[jnp.ones((B, 2, S, 4))] * 2, ranges, scale=1.0)
    assert output.shape == (B, 2, T, 3, 4) and (S or not output.any())


def test_wrong_shapes_raise():
    q, key, value, ranges, _, _ = operands(CASES["causal"])
    with pytest.raises(ValueError, match=r"does not fit key \(2, 2, 44, 8\)"):
        range_attention(q, key[:, :, 1:], value, ranges, scale=1.0)
    with pytest.raises(ValueError, match=r"ranges \(2, 44, 1\)"):
        range_attention(q, key, value, KeyRanges(ranges.first[:, 1:], ranges.last[:, 1:]), scale=1.0)
