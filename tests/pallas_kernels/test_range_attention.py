"""Attention over ranges of keys against its reference: values and gradients of every mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_blocks import Tiles
from pallas_kernels.range_attention import (
    KeyRanges,
    OwnKeys,
    blocks,
    kernels,
    range_attention,
    range_attention_reference,
)

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
    "blocks after anchors": {"anchors": 5},
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
        mask = jnp.broadcast_to(jnp.arange(levels) != 1, (B, T, levels))
        own = OwnKeys(normal(B, K, T, levels, H), normal(B, K, T, levels, V), mask)
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
by_kernels = functools.partial(by_blocks, implementation="interpreted")
FORMS = {"blocks": by_blocks, "kernels": by_kernels}


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, arrays, weights):
    """Returns the output and the gradients. Cases of the same shapes share the compiled function."""
    q, key, value, ranges, own, sinks = arrays

    def compute(q, key, value, pair, sinks):
        keys = None if own is None else OwnKeys(*pair, own.mask)
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
COMPARED += [pytest.param("kernels", name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]


@pytest.mark.parametrize(("form", "name"), COMPARED)
def test_values_and_gradients_are_those_of_the_reference(form, name):
    arrays = operands(CASES[name])
    q, value = arrays[0], arrays[2]
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(*q.shape[:4], value.shape[-1])), jnp.float32)
    (found, output), (wanted, expected) = (
        with_gradients(function, arrays, weights) for function in (FORMS[form], reference)
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


@pytest.mark.parametrize("mutant", ["window", "shift", "documents", "anchor", "block"])
def test_mutants_of_the_mask_are_caught(mutant):
    name = "blocks after anchors" if mutant in ("anchor", "block") else "everything"
    q, key, value, ranges, own, sinks = operands(CASES[name])
    first, last = ranges
    changed = {
        "window": ranges._replace(first=first - 1),
        "shift": ranges._replace(first=first + 1),
        "documents": ranges._replace(first=jnp.zeros_like(first)),
        "anchor": ranges._replace(last=last.at[..., 0].add(1)),  # the anchor's own entry
        "block": ranges._replace(last=last.at[..., 1].set(key.shape[2] - 1)),  # later blocks
    }[mutant]
    arrays = (q, key, value, ranges, own, sinks)
    assert abs(by_blocks(q, key, value, changed, own, sinks) - reference(*arrays)).max() > 1e-2


def test_without_a_level_the_result_differs():
    q, key, value, ranges, own, _ = operands(CASES["levels"])
    assert own is not None
    found = by_blocks(q, key, value, ranges, own, None)
    assert abs(by_blocks(q, key, value, ranges, None, None) - found).max() > 1e-3
    # The level whose mask is False adds nothing.
    moved = own._replace(key=own.key.at[:, :, :, 1].add(1))
    np.testing.assert_array_equal(by_blocks(q, key, value, ranges, moved, None), found)


def test_bfloat16_is_as_close_as_the_reference():
    arrays = operands(CASES["everything"], dtype=jnp.bfloat16)
    widen = lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf
    exact = reference(*jax.tree.map(widen, arrays))
    errors = [abs(f(*arrays).astype(jnp.float32) - exact).max() for f in (by_blocks, reference)]
    print(f"largest errors: by blocks {errors[0]:.2g}, reference {errors[1]:.2g}")
    assert errors[0] < 1.5 * errors[1] + 1e-3


def test_wrong_shapes_raise():
    q, key, value, ranges, _, _ = operands(CASES["causal"])
    with pytest.raises(ValueError, match=r"does not fit key \(2, 2, 44, 8\)"):
        range_attention(q, key[:, :, 1:], value, ranges, scale=1.0)
    with pytest.raises(ValueError, match=r"ranges \(2, 44, 1\)"):
        range_attention(q, key, value, KeyRanges(ranges.first[:, 1:], ranges.last[:, 1:]), scale=1.0)
