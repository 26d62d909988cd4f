"""Passes over long rows, which attend by ranges of keys, against passes with dense masks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.models import masks
from mtpjax.models.forward import forward


def set_limit(monkeypatch, tokens):
    """Sets the length of rows above which masks are ranges of keys. `forward` is jitted."""
    jax.clear_caches()
    monkeypatch.setattr(masks, "MAX_DENSE", tokens)


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
    monkeypatch.setattr("pallas_kernels.range_attention.blocks.BLOCK", 8)

    def loss(params, tokens):
        return forward(params, tokens, model=model, num_depths=2).mtp_logits[-1].sum()

    def has_pairs(limit):
        set_limit(monkeypatch, limit)
        text = jax.jit(jax.grad(lambda *call: loss(*call))).lower(params, jnp.zeros((1, T), jnp.int32)).compile()
        return re.search(rf"\b{T},(1,|2,|4,)*{T}\b", str(text.as_text())) is not None

    assert has_pairs(2048) and not has_pairs(8)
