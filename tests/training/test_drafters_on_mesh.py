"""Drafters and MTP modules on a mesh: losses, parameters and runs of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mtpjax import TrainConfig, compat
from mtpjax.data.packing import Batch
from mtpjax.models.params import is_of_modules
from mtpjax.models.trunk import stack_layers
from mtpjax.training.data_parallel import shard_batch, shard_train_state
from mtpjax.training.gradients import TrainSpec
from mtpjax.training.step import make_optimizer, train_step
from mtpjax.training.train_state import init_train_state
from tests.helpers.new_drafters import KIND_SETTINGS, LEVELS, V, new_drafter

UPDATES, ROWS, LENGTH = 50, 8, 12
FOUR, EIGHT, EXPERTS = {"data": 2, "fsdp": 2}, {"fsdp": 8}, {"expert": 2, "fsdp": 2}
METHODS = (*KIND_SETTINGS, "modules")


@pytest.fixture(scope="module")
def batches():
    """Packed rows with different numbers of targets."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(V, size=(UPDATES, ROWS, LENGTH)).astype(np.int32)
    segment_ids = np.ones_like(tokens)
    segment_ids[:, ::2, 7:], segment_ids[:, 1::2, 10:] = 2, 0
    mask = rng.random(tokens.shape) < 0.8
    mask[:, 3] = False
    return [Batch(*arrays) for arrays in zip(tokens, segment_ids, mask, strict=True)]


def make_step(small, method, axes=None, attention="grouped"):
    """A jitted update, its initial state and its mesh."""
    if method == "modules":
        model, params = small(attention, num_mtp_modules=1)
        params, model, drafter = stack_layers(params, model.config), model.clone(scan_layers=True), None
    else:
        model, params, drafter = new_drafter(small, method, attention=attention)
    optimizer = make_optimizer(TrainConfig())
    state, mesh = init_train_state(jax.tree.map(jnp.copy, params), optimizer, "modules"), None
    if axes:
        mesh = compat.make_mesh(axes)
        state = shard_train_state(state, mesh, optimizer=optimizer, trains="modules")
    settings = {"num_depths": LEVELS, "trains": "modules", "drafter": drafter, "mesh": mesh, "num_anchors": 4}
    spec = TrainSpec(model=model, **settings)
    return jax.jit(functools.partial(train_step, spec=spec, optimizer=optimizer)), state, mesh


def trained(small, batches, method, axes=None, attention="grouped"):
    """Losses of every update, and the trained parameters and what the optimiser keeps, on the devices."""
    step, state, mesh = make_step(small, method, axes, attention)
    losses = []
    # The learning rate rises as in a run. Adam's first update of an element is as large as the learning rate, even if
    # the element's gradient is only rounding.
    for number, batch in enumerate(batches, 1):
        batch = batch if mesh is None else shard_batch(batch, mesh)
        state, metrics = step(state, batch, 1e-3 * number / UPDATES, 1.0)
        losses.append(np.asarray(metrics["losses"]))
    params = {name: leaf for name, leaf in state.params.items() if is_of_modules(name)}
    return np.array(losses), params, state.optimizer


@pytest.fixture(scope="module")
def on_one_device(small, batches):
    return functools.cache(functools.partial(trained, small, batches))


FAST = [("eagle3", FOUR), ("dspark", EIGHT), ("medusa", EXPERTS)]
CASES = FAST + [
    pytest.param(method, axes, marks=pytest.mark.slow)
    for method in METHODS
    for axes in (FOUR, EIGHT, EXPERTS)
    if (method, axes) not in FAST
]


@pytest.mark.parametrize(("method", "axes"), CASES, ids=str)
def test_updates_on_a_mesh_are_those_of_one_device(method, axes, small, batches, on_one_device):
    """Losses of fifty updates, and the parameters after them; and a device holds its share of each matrix."""
    attention = "latent" if "expert" in axes else "grouped"  # latent: has experts
    losses, params, optimizer = trained(small, batches, method, axes, attention)
    wanted_losses, wanted, _ = on_one_device(method, attention=attention)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    for found, expected in zip(*map(jax.tree.leaves, (jax.device_get(params), wanted)), strict=True):
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
    assert int(optax.tree_utils.tree_get(optimizer, "count")) == UPDATES  # none was skipped
    parts = axes["fsdp"]
    matrices = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.size >= 32 * 32}
    large = [leaf for leaf in jax.tree.leaves((params, optimizer)) if leaf.shape in matrices]
    assert len(large) >= 3 * len(matrices)
    assert all(parts * leaf.addressable_shards[0].data.size <= leaf.size for leaf in large)
