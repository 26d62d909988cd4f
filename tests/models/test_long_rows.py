"""Passes over long rows, which attend by ranges of keys, against passes with dense masks."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.models import masks
from mtpjax.models.forward import forward
from mtpjax.models.layers import latent_attention
from mtpjax.models.layers.latent_attention import LatentAttention
from mtpjax.models.masks import full_view
from mtpjax.models.trunk import stack_layers
from mtpjax.models.view import Recycled
from pallas_kernels.range_attention import blocks

SLOW = ("grouped", "hybrid", "clamped", "sparse")


def set_limit(monkeypatch, tokens):
    """Sets the length of rows above which masks are ranges of keys. `forward` is jitted."""
    jax.clear_caches()
    monkeypatch.setattr(masks, "MAX_DENSE", tokens)


@pytest.mark.parametrize(
    "attention",
    ["latent", "sliding", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
def test_models_give_the_same_logits_and_gradients(attention, small, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 16)
    monkeypatch.setattr(latent_attention, "MAX_SCORES", 2 * 3 * 40 * 10)  # ten queries of a sparse indexer at a time
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


def has_pairs(compiled, T):
    """Whether a compiled program has an array with two axes of T tokens."""
    return re.search(rf"\b{T},(\d+,)*{T}\b", str(compiled.as_text())) is not None


@pytest.mark.parametrize("attention", ["sliding", pytest.param("sparse", marks=pytest.mark.slow)])
def test_no_array_of_all_pairs_is_compiled(attention, small, monkeypatch):
    model, params = small(attention)
    T = 88  # no other size here
    monkeypatch.setattr(blocks, "BLOCK", 8)
    monkeypatch.setattr(latent_attention, "MAX_SCORES", 3 * T * 10)

    def loss(params, tokens):
        return forward(params, tokens, model=model, num_depths=2).mtp_logits[-1].sum()

    def compiled(limit):
        set_limit(monkeypatch, limit)
        return jax.jit(jax.grad(lambda *call: loss(*call))).lower(params, jnp.zeros((1, T), jnp.int32)).compile()

    assert has_pairs(compiled(2048), T) and not has_pairs(compiled(8), T)


class SparseLayers:
    """A layer with an indexer and one that shares its selection, at the second recycled depth, over packed rows."""

    def __init__(self, small, monkeypatch, T=37, topk=7):
        # Ten queries of the indexer at a time, and key blocks that are not full.
        monkeypatch.setattr(latent_attention, "MAX_SCORES", 2 * 3 * (T + 3) * 10)
        monkeypatch.setattr(blocks, "BLOCK", 16)
        model, params = small("sparse")
        self.config, rng = dataclasses.replace(model.config, index_topk=topk), np.random.default_rng(0)
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
        entries = lambda: {"latent": normal(2, T, 16), "index": normal(2, T, 6)}
        self.segment_ids = jnp.asarray(np.sort(rng.integers(0, 3, (2, T)), axis=1), jnp.int32)
        layers = [params["trunk"][name]["attention"] for name in ("layer_0", "layer_1")]
        self.arrays = layers, normal(2, T, 32), Recycled(entries(), (entries(),))

    def attend(self, layers, x, recycled):
        view, selection, outputs = full_view(self.config, self.segment_ids, shift=2), None, []
        for kind, layer in zip(("full", "shared"), layers, strict=True):
            attention = LatentAttention(self.config, kind)
            output, _, selection = attention.apply({"params": layer}, x, view, recycled, selection)
            outputs.append(output.total())
        return outputs

    def run(self, monkeypatch, limit):
        monkeypatch.setattr(masks, "MAX_DENSE", limit)
        return jax.jit(lambda *arrays: self.attend(*arrays))(*self.arrays)

    def compiled_gradients(self, monkeypatch, limit):
        monkeypatch.setattr(masks, "MAX_DENSE", limit)
        loss = lambda *arrays: sum(jnp.sin(each).sum() for each in self.attend(*arrays))
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*self.arrays).compile()


@pytest.mark.parametrize("T, topk", [(37, 7), (1, 2), (37, 38)])  # the last selects all but one key
def test_sparse_layers_give_the_outputs_and_gradients_of_dense_masks(T, topk, small, monkeypatch):
    layers = SparseLayers(small, monkeypatch, T, topk)
    outputs = [layers.run(monkeypatch, limit) for limit in (2048, 0)]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), *outputs)
    if topk != 7:
        return
    compiled = [layers.compiled_gradients(monkeypatch, limit) for limit in (2048, 0)]
    assert [has_pairs(each, T) for each in compiled] == [True, False]
    gradients = [each(*layers.arrays) for each in compiled]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), *gradients)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients[1][0][0]["indexer"]))


@pytest.mark.slow
def test_scanned_sparse_layers_pass_the_selection_on(small, monkeypatch):
    model, params = small("sparse", indexer_types=("full", "full", "shared"), index_topk=7)
    scanned = dataclasses.replace(model, scan_layers=True, remat="layers")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 37)), jnp.int32)
    set_limit(monkeypatch, 8)
    found = forward(stack_layers(params, model.config), tokens, model=scanned, num_depths=0).logits
    np.testing.assert_allclose(found, forward(params, tokens, model=model, num_depths=0).logits, atol=2e-5)
    set_limit(monkeypatch, 2048)
    np.testing.assert_allclose(found, forward(params, tokens, model=model, num_depths=0).logits, atol=2e-5)


@pytest.mark.parametrize("mutant", ["none", "ties", "next key", "all keys", "levels"])
def test_mutants_of_the_selection_are_caught(mutant, small, monkeypatch):
    layers = SparseLayers(small, monkeypatch)
    wanted = layers.run(monkeypatch, 2048)
    select, top_k = latent_attention.Indexer.select, jax.lax.top_k

    def select_otherwise(*arguments):
        first, *own = select(*arguments)
        chosen = {"next key": first.chosen + 1, "all keys": None}.get(mutant, first.chosen)
        return first._replace(chosen=chosen), *(mask | (mutant == "levels") for mask in own)

    def prefer_later_keys(scores, count):
        found, index = top_k(scores[..., ::-1], count)
        return found, scores.shape[-1] - 1 - index

    monkeypatch.setattr(latent_attention.Indexer, "select", select_otherwise)
    if mutant == "ties":
        monkeypatch.setattr(jax.lax, "top_k", prefer_later_keys)
    found = layers.run(monkeypatch, 8)
    differences = [float(abs(one - other).max()) for one, other in zip(found, wanted, strict=True)]
    assert max(differences) < 1e-5 if mutant == "none" else min(differences) > 1e-3, differences
