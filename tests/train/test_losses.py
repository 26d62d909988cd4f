"""Depth-k losses against a loop over positions; packed rows against the same documents apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import ModelConfig, MTPModel, forward, init_params
from mtpjax.train.losses import cross_entropy, depth_targets, mtp_scale_at, multi_depth_loss

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    num_mtp_modules=2,
)
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 0], [1, 1, 1, 1, 1, 1, 1, 2, 2, 0, 0, 0]])


def brute_force_loss(logits, tokens, segments, mask, depth):
    """One position at a time, in float64."""
    losses = []
    for row in range(tokens.shape[0]):
        for i in range(tokens.shape[1] - depth - 1):
            target = i + depth + 1
            same = segments[row, i] != 0 and all(segments[row, j] == segments[row, i] for j in range(i, target + 1))
            if same and mask[row, target]:
                line = logits[row, i].astype(np.float64)
                shifted = line - line.max()
                losses.append(np.log(np.exp(shifted).sum()) - shifted[tokens[row, target]])
    return np.mean(losses) if losses else 0.0


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5])
def test_depth_loss_equals_a_loop_over_positions(depth, key):
    logits = np.asarray(jax.random.normal(key, (2, 12, 61))) * 3
    tokens = np.asarray(jax.random.randint(key, (2, 12), 0, 61))
    mask = np.asarray(jax.random.bernoulli(key, 0.8, (2, 12)))
    targets, is_valid = depth_targets(jnp.asarray(tokens), jnp.asarray(SEGMENTS), jnp.asarray(mask), depth)
    loss = cross_entropy(jnp.asarray(logits), targets, is_valid)
    np.testing.assert_allclose(loss, brute_force_loss(logits, tokens, SEGMENTS, mask, depth), rtol=1e-5)


def test_no_valid_target_gives_zero_loss_and_zero_gradient(key):
    logits = jax.random.normal(key, (1, 4, 7))
    nothing = jnp.zeros((1, 4), bool)
    value, gradient = jax.value_and_grad(cross_entropy)(logits, jnp.zeros((1, 4), jnp.int32), nothing)
    assert value == 0
    assert not gradient.any()


def test_padding_and_last_positions_have_no_target():
    ones = jnp.ones((2, 12), bool)
    for depth in range(4):
        _, is_valid = depth_targets(jnp.zeros((2, 12), jnp.int32), jnp.asarray(SEGMENTS), ones, depth)
        lengths = [4, 6, 1, 7, 2]  # of the documents above
        assert is_valid.sum() == sum(max(length - depth - 1, 0) for length in lengths)


def losses_and_gradients(params, model, tokens, segments, layout):
    def loss_of(params):
        tokens_, segments_ = jnp.asarray(tokens), jnp.asarray(segments)
        output = forward(params, tokens_, model=model, segment_ids=segments_, num_depths=4, attention_layout=layout)
        return multi_depth_loss(output, tokens_, segments_, segments_ > 0, mtp_scale=0.3)

    (_, losses), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)
    return losses, gradients


@pytest.mark.parametrize(
    ("layout", "chaining"),
    [
        ("ttt", "chain"),
        ("stream", "trunk"),
        pytest.param("ttt", "trunk", marks=pytest.mark.slow),
        pytest.param("stream", "chain", marks=pytest.mark.slow),
    ],
)
def test_packed_documents_train_like_separate_ones(layout, chaining, key):
    """Two modules and two recycled levels; every loss and every gradient, within float32's rounding."""
    model = MTPModel(dataclasses.replace(CONFIG, mtp_chaining=chaining))
    params = init_params(model, key)
    lengths = [5, 9, 6]
    documents = [np.asarray(jax.random.randint(jax.random.key(n), (n,), 0, 61)) for n in lengths]
    packed = np.concatenate([*documents, [0] * 2])[None]
    packed_segments = np.repeat([1, 2, 3, 0], [*lengths, 2])[None]
    apart = np.stack([np.pad(document, (0, 22 - len(document))) for document in documents])
    apart_segments = (np.arange(22)[None, :] < np.array(lengths)[:, None]).astype(np.int32)

    losses, gradients = losses_and_gradients(params, model, packed, packed_segments, layout)
    expected_losses, expected_gradients = losses_and_gradients(params, model, apart, apart_segments, layout)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for got, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert jnp.linalg.norm(got - expected) <= 1e-5 * jnp.linalg.norm(expected)


def test_total_is_the_main_loss_plus_the_scaled_mean_over_depths(key):
    model = MTPModel(CONFIG)
    tokens = jax.random.randint(key, (2, 12), 0, 61)
    output = forward(init_params(model, key), tokens, model=model, num_depths=3)
    ones = jnp.ones_like(tokens)
    total, losses = multi_depth_loss(output, tokens, ones, ones > 0, mtp_scale=0.3)
    assert losses.shape == (4,)
    np.testing.assert_allclose(total, losses[0] + 0.3 * losses[1:].mean(), rtol=1e-6)


def test_lambda_falls_once():
    values = [mtp_scale_at(progress, scale=0.3, final=0.1, switch=0.7) for progress in (0, 0.69, 0.7, 1)]
    assert values == [0.3, 0.3, 0.1, 0.1]
