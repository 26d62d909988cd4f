"""Attention over packed rows by blocks, against the dense version: values and gradients of every mask."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.models import masks
from mtpjax.models.forward import forward
from mtpjax.models.layers.attend import attend
from mtpjax.models.layers.packed_attention import packed_attention
from mtpjax.models.view import PackedMask

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
}


def operands(case, seed=0, dtype=jnp.float32):
    """Makes queries, sources, masks and sinks."""
    B, K, T, G, H, V = case.get("shape", (2, 2, 45, 3, 8, 6))
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    levels = case.get("levels", 0)
    sources = [(normal(B, K, T, H), normal(B, K, T, V)) for _ in range(1 + levels)]
    ids = np.sort(rng.integers(0, 4, (B, T)), axis=1) if case.get("documents") else np.zeros((B, T))
    mask = PackedMask(jnp.asarray(ids, jnp.int32), case.get("window", 0), case.get("shift", 0))
    own = [jnp.full((B, T, 1), level != 1) for level in range(levels)]
    sinks = normal(K, G) if case.get("sinks") else None
    return normal(B, K, T, G, H), sources, (mask, *own), sinks


def set_limit(monkeypatch, tokens):
    """Sets the length of rows above which attention is computed by blocks. `forward` is jitted."""
    jax.clear_caches()
    monkeypatch.setattr(masks, "MAX_DENSE", tokens)


def by_blocks(q, sources, masks, sinks):
    return packed_attention(q, sources, masks, scale=0.3, sinks=sinks, block=8)


def dense(q, sources, masks, sinks):
    return attend(q, sources, (masks[0].dense(), *masks[1:]), scale=0.3, sinks=sinks)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_dense_version(name):
    q, sources, masks, sinks = operands(CASES[name])
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(*q.shape[:4], sources[0][1].shape[-1])), jnp.float32)

    def loss(function):
        return lambda q, sources, sinks: (function(q, sources, masks, sinks) * weights).sum()

    np.testing.assert_allclose(by_blocks(q, sources, masks, sinks), dense(q, sources, masks, sinks), atol=2e-6)
    found, wanted = (
        jax.jit(jax.grad(loss(function), (0, 1) if sinks is None else (0, 1, 2)))(q, sources, sinks)
        for function in (by_blocks, dense)
    )
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), found, wanted)


@pytest.mark.parametrize(
    "mutant",
    [
        {"window": 8},  # one more
        {"shift": 2},
        {"segment_ids": jnp.zeros((2, 45), jnp.int32)},  # documents see each other
    ],
    ids=["window", "shift", "documents"],
)
def test_mutants_of_the_mask_are_caught(mutant):
    q, sources, masks, sinks = operands(CASES["everything"])
    changed = (dataclasses.replace(masks[0], **mutant), *masks[1:])
    difference = by_blocks(q, sources, changed, sinks) - dense(q, sources, masks, sinks)
    assert abs(difference).max() > 1e-2


def test_without_a_level_the_result_differs():
    q, sources, masks, sinks = operands(CASES["levels"])
    assert abs(by_blocks(q, sources[:1], masks[:1], sinks) - dense(q, sources, masks, sinks)).max() > 1e-3
    # The level whose mask is False adds nothing.
    swapped = [sources[0], sources[1], (sources[2][0] + 1, sources[2][1] + 1)]
    np.testing.assert_array_equal(by_blocks(q, swapped, masks, sinks), by_blocks(q, sources, masks, sinks))


def test_bfloat16_is_as_close_as_the_dense_version():
    q, sources, masks, sinks = operands(CASES["everything"], dtype=jnp.bfloat16)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (q, sources, sinks))
    exact = dense(wide[0], wide[1], masks, wide[2])
    errors = [abs(f(q, sources, masks, sinks).astype(jnp.float32) - exact).max() for f in (by_blocks, dense)]
    print(f"largest errors: by blocks {errors[0]:.2g}, dense {errors[1]:.2g}")
    assert errors[0] < 1.5 * errors[1] + 1e-3


@pytest.mark.parametrize(
    "attention",
    ["latent", "sliding", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grouped", "hybrid", "clamped"))],
)
def test_models_give_the_same_logits_and_gradients(attention, small, monkeypatch):
    model, params = small(attention)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 61, (2, 37)).astype(np.int32)
    segment_ids = np.sort(rng.integers(0, 3, (2, 37)), axis=1).astype(np.int32)

    def run(params):
        output = forward(params, tokens, model=model, segment_ids=segment_ids, num_depths=3)
        return sum((each.astype(jnp.float32) ** 2).mean() for each in (output.logits, *output.mtp_logits)), output

    found = []
    for limit in (2048, 8):
        set_limit(monkeypatch, limit)
        found.append(jax.value_and_grad(run, has_aux=True)(params))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-4), *found)


def test_no_array_of_all_pairs_is_compiled(small, monkeypatch):
    model, params = small("sliding")
    T = 88  # no other size here
    monkeypatch.setattr("mtpjax.models.layers.packed_attention.BLOCK", 8)

    def loss(params, tokens):
        return forward(params, tokens, model=model, num_depths=2).mtp_logits[-1].sum()

    def has_pairs(limit):
        set_limit(monkeypatch, limit)
        text = jax.jit(jax.grad(lambda *call: loss(*call))).lower(params, jnp.zeros((1, T), jnp.int32)).compile()
        return re.search(rf"\b{T},(1,|2,|4,)*{T}\b", text.as_text()) is not None

    assert has_pairs(2048) and not has_pairs(8)
