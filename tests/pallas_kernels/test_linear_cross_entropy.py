"""Kernels against references that have all logits: terms and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_total_variation,
    linear_total_variation_reference,
)
from tests.helpers.lowering import lower_for

# (rows, width, vocabulary), chunk. Interpreted, what lies beyond an array is NaN. No size of the first and third fills
# its blocks (64 x 64 logits, 32 of the width; in bfloat16 128 x 256 or 128 x 128, and 64): 2 x 3 and 2 x 3 or 2 x 5 of
# them, of which the backward pass takes some at a time and one by itself. The second is one full block. The fourth has
# more blocks of rows than pass over the vocabulary together.
SHAPES = [
    ((70, 40, 150), 70, jnp.float32),
    ((64, 32, 64), 8192, jnp.float32),
    ((150, 72, 600), 100, jnp.bfloat16),
    ((1030, 8, 80), 1, jnp.float32),
]
IDS = ["float32", "one block", "bfloat16", "many rows"]


def inputs(key, shape, dtype, depths=1, num_heads=1):
    """Hidden, heads and targets, and weights of each row's terms, of which half are 0."""
    N, D, V = shape
    keys = jax.random.split(key, 4)
    hidden = jax.random.normal(keys[0], (depths, N, D), dtype)
    heads = [jax.random.normal(one, (D, V), dtype) * 2 / D**0.5 for one in jax.random.split(keys[1], num_heads)]
    weights = jax.random.normal(keys[3], (3, depths, N))
    return hidden, heads, jax.random.randint(keys[2], (depths, N), 0, V), weights * (jnp.arange(N) % 4 < 2)[None, None]


@functools.partial(jax.jit, static_argnames=("function", "how"))
def of_rows(hidden, heads, targets, weights, function, how=()):
    def total(hidden, head):
        losses = function(hidden[0], head, targets[0], **dict(how))
        return (weights[0, 0] * losses).sum(), losses

    return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(hidden, heads[0])


@functools.partial(jax.jit, static_argnames=("function", "how"))
def of_drafts(hidden, heads, targets, weights, function, how=()):
    """The trunk has one head with the first draft; the second has the last."""

    def total(hidden, heads):
        groups = [hidden] if len(heads) == 1 else [hidden[:-1], hidden[-1:]]
        terms = function(groups, heads, targets, **dict(how))
        total = (weights[0] * terms.cross_entropy).sum()
        return total + (weights[1, 1:] * terms.kl).sum() + (weights[2, 1:] * terms.overlap).sum(), terms

    return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(hidden, heads)


def how(chunk, implementation="interpreted"):
    return ("vocab_chunk", chunk), ("implementation", implementation)


def assert_close(found, expected, dtype):
    """Sums in other orders; and in bfloat16 the logits' gradients are rounded before their products, and these after.

    The interpreter multiplies bfloat16 with float32 sums as a GPU does, so the terms agree as in float32.
    """
    ((_, found), gradients), ((_, expected), wanted) = found, expected
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)
    for gradient, of in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        assert gradient.dtype == of.dtype
        gradient, of = gradient.astype(jnp.float32), of.astype(jnp.float32)
        assert jnp.linalg.norm(gradient - of) <= jnp.linalg.norm(of) * (1e-5 if dtype == jnp.float32 else 2**-8)


@pytest.mark.parametrize(("shape", "chunk", "dtype"), SHAPES, ids=IDS)
def test_cross_entropy_matches_the_reference(shape, chunk, dtype, key):
    given = inputs(key, shape, dtype)
    found = of_rows(*given, linear_cross_entropy, how(chunk))
    assert_close(found, of_rows(*given, linear_cross_entropy_reference), dtype)
    (_, losses), (of_hidden, _) = found
    assert losses.dtype == jnp.float32
    assert not of_hidden[0, 2::4].any()  # rows with weight 0


@pytest.mark.parametrize(("shape", "chunk", "dtype"), SHAPES[::2], ids=IDS[::2])
def test_drafts_match_the_reference(shape, chunk, dtype, key):
    given = inputs(key, shape, dtype, depths=3, num_heads=2)
    found = of_drafts(*given, linear_total_variation, how(chunk))
    assert_close(found, of_drafts(*given, linear_total_variation_reference), dtype)


def test_the_trunk_as_a_target_gets_no_gradient(key):
    hidden, heads, targets, weights = inputs(key, (20, 16, 40), jnp.float32, depths=2)
    given = hidden, heads, targets, weights.at[0].set(0.0)
    _, (of_hidden, _) = of_drafts(*given, linear_total_variation, how(64))
    assert not of_hidden[0].any()
    assert of_hidden[1].any()


def test_a_draft_like_the_trunk_overlaps_wholly(key):
    hidden, heads, targets, weights = inputs(key, (20, 16, 40), jnp.float32)
    given = jnp.concatenate([hidden, hidden]), heads, jnp.concatenate([targets] * 2), jnp.tile(weights, (1, 2, 1))
    (_, terms), _ = of_drafts(*given, linear_total_variation, how(64))
    np.testing.assert_allclose(terms.overlap, 1.0, rtol=1e-6)
    np.testing.assert_array_equal(terms.kl, 0.0)


def test_rows_do_not_depend_on_their_neighbours(key):
    hidden, heads, targets, weights = inputs(key, (20, 16, 40), jnp.float32, depths=2)
    others = hidden.at[:, 5:].multiply(3.0)
    runs = [of_drafts(each, heads, targets, weights, linear_total_variation, how(64)) for each in (hidden, others)]
    rows = [(*(term[:, :5] for term in terms), of_hidden[:, :5]) for (_, terms), (of_hidden, _) in runs]
    jax.tree.map(np.testing.assert_array_equal, *rows)


def test_logits_near_a_thousand_stay_finite(key):
    hidden, heads, targets, weights = inputs(key, (20, 16, 40), jnp.float32, depths=2)
    given = 200 * hidden, heads, targets, weights
    assert jnp.abs(given[0] @ heads[0]).max() > 1000
    (_, found), gradients = of_drafts(*given, linear_total_variation, how(64))
    (_, expected), wanted = of_drafts(*given, linear_total_variation_reference)
    # There float32 numbers lie 6e-5 apart, and a probability is as uncertain as that, relatively.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), found, expected)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-3), gradients, wanted)


def test_a_float32_head_serves_bfloat16_states(key):
    """As in training: products in bfloat16, the head's gradient in float32."""
    hidden, heads, targets, weights = inputs(key, (20, 16, 40), jnp.float32)
    given = hidden.astype(jnp.bfloat16), heads, targets, weights
    found = of_rows(*given, linear_cross_entropy, how(64))
    assert_close(found, of_rows(*given, linear_cross_entropy_reference), jnp.bfloat16)
    assert found[1][1].dtype == jnp.float32


def test_auto_is_the_reference_and_no_rows_are_fine(key):
    hidden, heads, targets, _ = inputs(key, (5, 16, 40), jnp.float32)
    losses = linear_cross_entropy(hidden[0], heads[0], targets[0])
    np.testing.assert_array_equal(losses, linear_cross_entropy_reference(hidden[0], heads[0], targets[0]))
    none = linear_cross_entropy(hidden[0, :0], heads[0], targets[0, :0], implementation="interpreted")
    assert none.shape == (0,)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_are_in_no_array_of_the_lowered_program(dtype):
    """Forward and backward, for both GPUs: no more than the gradients of a chunk of them."""
    D, N, V, chunk = 48, 300, 5000, 1024
    head = jax.ShapeDtypeStruct((D, V), dtype)
    hidden, targets = jax.ShapeDtypeStruct((2, N, D), dtype), jax.ShapeDtypeStruct((2, N), jnp.int32)
    weights = jax.ShapeDtypeStruct((3, 2, N), jnp.float32)
    run = functools.partial(of_drafts, function=linear_total_variation, how=how(chunk, "triton"))
    for lowered in lower_for(run, hidden, [head], targets, weights).values():
        text = lowered.as_text()
        assert text.count("custom_call @__gpu$xla.gpu.triton") == 4  # two forward, and a last part of the columns
        assert f"{N}x{V}x" not in text
        assert f"tensor<2x{N}x{chunk}x" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": jnp.zeros((2, 5, 8))}, r"hidden \(2, 5, 8\) and targets \(5,\) must be"),
        ({"targets": jnp.zeros(4, int)}, r"hidden \(5, 8\) and targets \(4,\) must be"),
        ({"head": jnp.zeros((7, 20))}, r"heads \[\(7, 20\)\] do not fit hidden"),
        ({"hidden": jnp.zeros((5, 8), int)}, "hidden must be bfloat16 or float32, not int32"),
        ({"vocab_chunk": 0}, "vocab_chunk must be at least 1, not 0"),
        ({"implementation": "mosaic"}, "auto, xla, triton, interpreted"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    given = {"hidden": jnp.zeros((5, 8)), "head": jnp.zeros((8, 20)), "targets": jnp.zeros(5, int)}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**given | changes)


def test_drafts_that_do_not_fit_are_refused():
    states, head, targets = jnp.zeros((2, 5, 8)), jnp.zeros((8, 20)), jnp.zeros((2, 5), int)
    for hidden, heads, rows, message in [
        ([states, states[:, :4]], [head, head], targets, "with the same N, D and dtype"),
        ([states, states.astype(jnp.bfloat16)], [head, head], targets, "with the same N, D and dtype"),
        ([states], [head, head], targets, "do not fit hidden"),
        ([states[:1], states[1:]], [head, head[:, :9]], targets, "do not fit hidden"),
        ([states], [head], targets[:1], r"targets \(1, 5\) do not fit"),
    ]:
        with pytest.raises(ValueError, match=message):
            linear_total_variation(hidden, heads, rows)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "chunk", "dtype"), SHAPES, ids=IDS)
def test_compiled_kernels_match_the_reference_on_a_gpu(shape, chunk, dtype, key):
    given = inputs(key, shape, dtype, depths=3, num_heads=2)
    run = functools.partial(of_drafts, *given, linear_total_variation, how(chunk, "triton"))
    found, again = run(), run()
    assert_close(found, of_drafts(*given, linear_total_variation_reference), dtype)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    given = inputs(key, shape, dtype)
    found = of_rows(*given, linear_cross_entropy, how(chunk, "triton"))
    assert_close(found, of_rows(*given, linear_cross_entropy_reference), dtype)
