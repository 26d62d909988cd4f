"""Attention by blocks, `remat`, and losses by chunks, against all scores and logits without remat, over 50 updates."""

import functools

import jax
import numpy as np
import pytest

from mtpjax import MTPModel, Objective, TrainConfig, init_params, presets
from mtpjax.data.packing import Batch
from mtpjax.models import masks
from mtpjax.training import TrainSpec, init_train_state, make_optimizer, train_step

CONFIG = presets["tiny"]


@pytest.fixture
def by_blocks(monkeypatch):
    """Rows of any length compute attention by blocks, whose results a policy can keep."""
    jax.clear_caches()
    monkeypatch.setattr(masks, "MAX_DENSE", 0)


def curve(trains, remat, vocab_chunk):
    """Losses of 50 updates `[50]`, and the parameters after them."""
    model = MTPModel(CONFIG, scan_layers=True, remat=remat)
    mix = {"cross_entropy" if trains == "all" else "kl": 1.0}
    settings = TrainConfig(trains=trains, objective=Objective(mix=mix, vocab_chunk=vocab_chunk), init_from="given")
    optimizer = make_optimizer(settings)
    spec = TrainSpec(model=model, num_depths=2, trains=trains, objective=settings.objective)
    step = jax.jit(functools.partial(train_step, spec=spec, optimizer=optimizer), donate_argnames="state")
    state = init_train_state(init_params(model, jax.random.key(0)), optimizer, trains)
    draw, losses = np.random.default_rng(0), []
    for _ in range(50):
        tokens = draw.integers(0, CONFIG.vocab_size, (2, 24), np.int32)
        documents = np.repeat([[1, 2, 0]], [10, 12, 2], axis=1) * np.ones((2, 1), np.int32)
        state, metrics = step(state, Batch(tokens, documents.astype(np.int32), documents > 0), 1e-3, 0.3)
        losses.append(metrics["loss"])
    return jax.device_get((losses, state.params))


@functools.cache
def plain(trains):
    """The curve with all scores of attention, all logits and no remat."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "MAX_DENSE", 1024)
        jax.clear_caches()
        found = curve(trains, "none", 0)
    jax.clear_caches()
    return found


@pytest.mark.parametrize(
    ("trains", "remat"),
    [
        ("all", "attention"),
        ("modules", "attention"),
        ("detached", "layers"),
        pytest.param("all", "layers", marks=pytest.mark.slow),
        pytest.param("all", "none", marks=pytest.mark.slow),
        pytest.param("modules", "layers", marks=pytest.mark.slow),
        pytest.param("detached", "attention", marks=pytest.mark.slow),
    ],
)
def test_every_policy_gives_the_curve_of_the_plain_update(trains, remat, by_blocks):
    losses, params = curve(trains, remat, 100)
    expected_losses, expected = plain(trains)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(got - wanted) <= 1e-5 * np.linalg.norm(wanted)


def test_attention_is_kept(by_blocks):
    """The backward pass runs attention's forward pass again with "layers", and not with "attention"."""

    def count(remat):
        model = MTPModel(CONFIG, scan_layers=True, remat=remat)
        params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
        spec = TrainSpec(model=model, num_depths=1, objective=Objective(vocab_chunk=0))
        optimizer = make_optimizer(TrainConfig())
        state = jax.eval_shape(functools.partial(init_train_state, optimizer=optimizer), params)
        rows = np.ones((1, 24), np.int32)
        batch = Batch(rows, rows, rows > 0)
        step = functools.partial(train_step, spec=spec, optimizer=optimizer)
        return jax.jit(step).lower(state, batch, 1e-3, 0.3).as_text().count("stablehlo.while")

    assert count("attention") < count("layers")
