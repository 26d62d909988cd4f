"""One update: it learns, skips what is not finite, and both optimisers know every parameter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mtpjax.training.train_state import init_train_state

from mtpjax import MTPModel, Objective, TrainConfig, forward, init_params, presets
from mtpjax.data.packing import Batch
from mtpjax.training.gradients import TrainSpec
from mtpjax.training.losses import multi_depth_loss
from mtpjax.training.progress import learning_rate_at
from mtpjax.training.step import make_optimizer, train_step


def make(optimizer_name, config):
    model = MTPModel(config, scan_layers=True)
    optimizer = make_optimizer(TrainConfig(optimizer=optimizer_name))
    params = init_params(model, jax.random.key(0))
    state = init_train_state(params, optimizer)
    step = functools.partial(train_step, spec=TrainSpec(model=model, num_depths=2), optimizer=optimizer)
    return state, jax.jit(step)


def small(name):
    narrow = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 0}
    return dataclasses.replace(presets[name], **narrow, num_key_value_heads=0)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param("tiny", "muon", marks=pytest.mark.slow),
        pytest.param("tiny-moe", "adamw", marks=pytest.mark.slow),
        pytest.param("tiny", "adamw", marks=pytest.mark.slow),
        pytest.param("tiny-moe", "muon", marks=pytest.mark.slow),
    ],
)
def test_repeating_text_is_learnt_at_every_depth(name, optimizer):
    state, step = make(optimizer, small(name))
    tokens = np.tile(np.arange(8, dtype=np.int32), (4, 4))
    batch = Batch(tokens, np.ones_like(tokens), np.ones_like(tokens, bool))
    first = None
    for _ in range(30):
        state, metrics = step(state, batch, jnp.float32(1e-2), jnp.float32(0.3))
        first = metrics["losses"] if first is None else first
    assert metrics["losses"].shape == (3,)
    assert (metrics["losses"] < 0.5 * first).all()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_matrices_decay_and_norms_do_not(optimizer):
    params = init_params(MTPModel(small("tiny"), scan_layers=True), jax.random.key(0))
    made = make_optimizer(TrainConfig(optimizer=optimizer, weight_decay=0.5))
    updates, _ = made.update(jax.tree.map(jnp.zeros_like, params), made.init(params), params)
    after = jax.tree_util.tree_leaves_with_path(optax.apply_updates(params, updates))
    for (path, leaf), before in zip(after, jax.tree.leaves(params), strict=True):
        expected = before if path[-1].key == "scale" else 0.5 * before
        np.testing.assert_allclose(leaf, expected, rtol=1e-6, err_msg=jax.tree_util.keystr(path))


def test_an_update_that_is_not_finite_changes_nothing():
    state, step = make("adamw", small("tiny"))
    tokens = np.zeros((1, 8), np.int32)
    batch = Batch(tokens, np.ones_like(tokens), np.ones_like(tokens, bool))
    after, metrics = step(state, batch, jnp.float32(1e-2), jnp.float32(jnp.nan))
    assert not metrics["is_finite"]
    assert after.step == 1
    for old, new in zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow  # `test_position_losses.py` compares the terms themselves
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_by_vocabulary_chunks_equal_those_from_all_logits(tied):
    """Two modules, with heads of their own or the embedding, and a recycled level; halfway through a warm-up."""
    config = dataclasses.replace(small("tiny"), num_mtp_modules=2, tie_word_embeddings=tied, mtp_own_head=not tied)
    model = MTPModel(config, scan_layers=True)
    keep = optax.trace(0.0)  # its state is the gradient
    params = init_params(model, jax.random.key(0))
    state = init_train_state(params, keep)
    tokens = np.asarray(jax.random.randint(jax.random.key(1), (2, 16), 0, config.vocab_size))
    batch = Batch(tokens, np.repeat([[1, 2, 0], [1, 2, 3]], [6, 7, 3], axis=1), tokens % 7 > 0)
    mix = {"lk_hybrid": 1.0, "end_to_end_tv": 0.5}
    objective = Objective(mix=mix, start={"cross_entropy": 1.0}, warmup=0.5, vocab_chunk=100)
    settings = {"model": model, "num_depths": 3, "attention_layout": "ttt"}
    step = jax.jit(functools.partial(train_step, spec=TrainSpec(**settings, objective=objective), optimizer=keep))
    after, metrics = step(state, batch, 0.0, 0.3, 0.25)

    def plain_loss(params):
        output = forward(params, batch.tokens, segment_ids=jnp.asarray(batch.segment_ids), **settings)
        rest = {"mtp_scale": 0.3, "objective": objective, "progress": 0.25}
        return multi_depth_loss(output, *map(jnp.asarray, batch), **rest)

    gradients, losses = jax.jit(jax.grad(plain_loss, has_aux=True))(params)
    np.testing.assert_allclose(metrics["losses"], losses, rtol=1e-5)
    for got, expected in zip(jax.tree.leaves(after.optimizer.trace), jax.tree.leaves(gradients), strict=True):
        assert jnp.linalg.norm(expected) > 0
        assert jnp.linalg.norm(got - expected) <= 1e-5 * jnp.linalg.norm(expected)


def test_learning_rate_warms_up_and_falls():
    config = TrainConfig(learning_rate=1.0, warmup=0.1, final_learning_rate=0.05)
    rates = [learning_rate_at(progress, config) for progress in np.linspace(0, 1, 101)]
    assert rates[0] == 0
    assert np.argmax(rates) == 10
    assert rates[-1] == pytest.approx(0.05)
