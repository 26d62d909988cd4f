"""The full pass against its twins: cached, absorbed, packed, scanned, and step by step as in decoding."""

import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from mtpjax.models.view import Recycled

from mtpjax import MTPModel, forward
from mtpjax.models.cache import commit, empty_cache
from mtpjax.models.forward import shift_left
from mtpjax.models.layers.latent_attention import LatentAttention
from mtpjax.models.masks import cached_view, full_view
from mtpjax.models.model import bind
from mtpjax.models.trunk import stack_layers, unstack_layers

TOKENS = np.random.default_rng(3).integers(0, 61, (3, 16))


def assert_close(found, expected):
    """Within 1e-5 of the largest number: float32 sums in another order."""
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("attention", ["grouped", "latent", "sparse", "hybrid", "sliding", "clamped"])
@pytest.mark.parametrize("widths", [pytest.param((4, 4, 4, 4), marks=pytest.mark.slow), (11, 1, 1, 1, 1, 1)])
def test_the_cached_trunk_equals_the_full_pass(attention, widths, small):
    model, params = small(attention)

    @jax.jit
    def step(tokens, cache):
        view = cached_view(model.config, cache.length, tokens.shape[1], 20)
        output = bind(model, params)(tokens, view, cache, method="run_trunk")
        return output.hidden, commit(output.cache, cache.length + tokens.shape[1])

    cache, begin, hidden = empty_cache(model.config, model.config.trunk_kinds, 3, 20), 0, []
    for width in widths:
        made, cache = step(TOKENS[:, begin : begin + width], cache)
        hidden.append(made)
        begin += width
    full = jax.jit(lambda tokens: forward(params, tokens, model=model, num_depths=0).hidden)(TOKENS)
    assert_close(np.concatenate(hidden, axis=1), full)


@pytest.mark.parametrize("q_lora_rank", [0, 20])
@pytest.mark.parametrize("memory", ["full", "cached", "recycled"])
def test_absorbed_latent_attention_equals_expanded(memory, q_lora_rank, small):
    model, params = small("latent", q_lora_rank=q_lora_rank)
    config, params = model.config, params["trunk"]["layer_0"]["attention"]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 16, 32)), jnp.float32)
    entries = [{"latent": jnp.asarray(rng.standard_normal((3, 16, 16)), jnp.float32)} for _ in range(2)]
    view = full_view(config, jnp.ones((3, 16), jnp.int32))
    if memory == "cached":
        x, view = x[:, :3], cached_view(config, jnp.array([0, 5, 13]), 3, 16)
    given = {"full": None, "cached": entries[0], "recycled": Recycled(entries[0], (entries[1],))}[memory]

    @functools.partial(jax.jit, static_argnames="expanded")
    def apply(expanded):
        return LatentAttention(config, expanded).apply({"params": params}, x, view, given)[0].total()

    assert_close(apply(expanded=False), apply(expanded=True))


@pytest.mark.parametrize(
    ("attention", "layout", "num_mtp_modules"),
    [
        ("grouped", "ttt", 1),
        ("latent", "ttt", 2),
        ("grouped", "stream", 2),
        pytest.param("sliding", "ttt", 1, marks=pytest.mark.slow),
    ],
)
def test_packed_documents_equal_separate_ones(attention, layout, num_mtp_modules, small):
    model, params = small(attention, num_mtp_modules=num_mtp_modules)
    lengths = np.array([7, 3, 5])
    separate = TOKENS[:, :7]
    packed = np.concatenate([separate[row, :length] for row, length in enumerate(lengths)] + [np.array([9])])[None]
    segments = np.repeat([1, 2, 3, 0], [*lengths, 1])[None]
    keywords = {"model": model, "num_depths": num_mtp_modules + 2, "attention_layout": layout}
    one = forward(params, packed, segment_ids=segments, **keywords)
    each = forward(params, separate, lengths=lengths, **keywords)
    begins = np.cumsum(lengths) - lengths
    for row, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        assert_close(one.logits[0, begin : begin + length], each.logits[row, :length])
        for depth, (found, expected) in enumerate(zip(one.mtp_logits, each.mtp_logits, strict=True), start=1):
            if length > depth:
                assert_close(found[0, begin : begin + length - depth], expected[row, : length - depth])


@pytest.mark.parametrize(
    ("attention", "changes"),
    [
        ("grouped", {"num_hidden_layers": 3}),
        ("latent", {"num_hidden_layers": 3}),
        pytest.param(
            "sparse",
            {"num_hidden_layers": 5, "indexer_types": ("full", "full", "shared", "full", "shared")},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "sliding",
            {"num_hidden_layers": 4, "layer_types": ("sliding_attention", "full_attention") * 2},
            marks=pytest.mark.slow,
        ),
        (
            "hybrid",
            {"num_hidden_layers": 4, "mlp_only_layers": (), "layer_types": ("linear_attention", "full_attention") * 2},
        ),
    ],
)
def test_the_scanned_stack_equals_the_unrolled_one(attention, changes, small):
    model, params = small(attention, **changes)
    stacked = jax.device_get(stack_layers(params, model.config))
    scanned = forward(stacked, TOKENS, model=MTPModel(model.config, scan_layers=True))
    unrolled = forward(params, TOKENS, model=model)
    jax.tree.map(assert_close, jax.device_get(scanned), jax.device_get(unrolled))
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked, model.config), params)


@pytest.mark.parametrize(
    ("attention", "layers"),
    [
        ("grouped", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("latent", 3), ("hybrid", 4), ("clamped", 2)]),
    ],
)
def test_the_scanned_stack_has_the_gradients_of_the_unrolled_one(attention, layers, small):
    """The one computes much of the forward pass again, the other keeps all of it."""
    kinds = {"layer_types": ("linear_attention", "full_attention") * 2, "mlp_only_layers": ()}
    model, params = small(attention, num_hidden_layers=layers, **(kinds if attention == "hybrid" else {}))

    @functools.partial(jax.jit, static_argnames="model")
    def gradients(params, model):
        return jax.grad(lambda params: jnp.square(forward(params, TOKENS, model=model).mtp_logits[0]).mean())(params)

    scanned = gradients(stack_layers(params, model.config), MTPModel(model.config, scan_layers=True))
    found, expected = unstack_layers(scanned, model.config), gradients(params, model)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_close(*(jax.flatten_util.ravel_pytree(tree)[0] for tree in (found, expected)))


@pytest.mark.parametrize(
    ("attention", "num_mtp_modules", "chaining"),
    [
        ("grouped", 1, "chain"),
        ("grouped", 2, "trunk"),
        ("latent", 2, "chain"),
        pytest.param("sparse", 1, "chain", marks=pytest.mark.slow),
        pytest.param("sliding", 2, "trunk", marks=pytest.mark.slow),
        pytest.param("clamped", 1, "chain", marks=pytest.mark.slow),
    ],
)
def test_a_recycled_depth_equals_cached_decoding_step_by_step(attention, num_mtp_modules, chaining, small):
    """Row i of the batch here is slot i of the sequence: true entries up to i, then one recycled step after another."""
    model, params = small(attention, num_mtp_modules=num_mtp_modules, mtp_chaining=chaining)
    config, M, T = model.config, num_mtp_modules, TOKENS.shape[1]
    apply = bind(model, params)
    output = forward(params, TOKENS[:1], model=model, num_depths=M + 2)

    @jax.jit
    def stepwise(tokens):
        view = full_view(config, jnp.ones_like(tokens))
        mtp_hidden = chained = model.mtp_input_hidden(apply(tokens, view, method="run_trunk"))
        for index in range(M):
            source = mtp_hidden if chaining == "trunk" else chained
            _, chained, entries = apply(source, shift_left(tokens, index + 1), view, index=index, method="run_module")
        memory = jax.tree.map(lambda kept: jnp.repeat(pad_slots(kept), T, axis=0), entries)
        passed, logits = chained.swapaxes(0, 1), []
        for level in (1, 2):
            view = cached_view(config, jnp.arange(T) + level, 1, T + 2)
            token = shift_left(tokens, M + level).T
            after, passed, memory = apply(passed, token, view, memory, index=M - 1, method="run_module")
            logits.append(apply(after, index=M - 1, method="logits")[:, 0])
        return logits

    for depth, logits in enumerate(stepwise(TOKENS[:1]), start=M + 1):
        assert_close(output.mtp_logits[depth - 1][0, : T - depth], logits[: T - depth])


def pad_slots(entries):
    """Two more slots behind."""
    return jnp.pad(entries, ((0, 0),) * (entries.ndim - 2) + ((0, 2), (0, 0)))
