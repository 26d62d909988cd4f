"""One jitted update."""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.sharding import Mesh

from mtpjax.data.packing import Batch
from mtpjax.models.model import MTPModel, is_of_modules
from mtpjax.training.config import Objective, TrainConfig
from mtpjax.training.data_parallel import over_mesh
from mtpjax.training.gradients import gradients_of_rows, trained
from mtpjax.training.losses import all_targets, batch_totals


class TrainState(flax.struct.PyTreeNode):
    """What an update changes. Parameters have stacked trunk layers."""

    params: dict
    optimizer: optax.OptState
    step: jax.Array  # [] int32


def first_state(params: dict, optimizer: optax.GradientTransformation, trains: str = "all") -> TrainState:
    """The state before the first update; the optimiser keeps something of what `trains` changes alone."""
    return TrainState(params, optimizer.init(trained(params, trains)), jnp.zeros((), jnp.int32))


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipped AdamW, or Muon for the matrices inside the layers and AdamW for the rest, at learning rate 1.

    It is for what `trained` leaves. `train_step` scales the update, so that a run can end by the clock. Detached
    modules are clipped by a norm of their own.
    """
    core = optax.adam(1.0, b2=0.95)
    if config.optimizer == "muon":
        core = optax.contrib.muon(
            1.0,
            adam_b2=0.95,
            muon_weight_dimension_numbers=_muon_axes,
            consistent_rms=0.2,  # the size of Adam's updates, so that one learning rate serves both (2502.16982)
        )
    decay = optax.add_decayed_weights(-config.weight_decay, mask=_is_matrix)  # beside updates, which go downhill
    clip = optax.clip_by_global_norm(config.gradient_clip)
    if config.trains == "detached":
        clip = optax.partition({True: clip, False: clip}, lambda params: {name: is_of_modules(name) for name in params})
    return optax.chain(clip, core, decay)


def _is_matrix(params: dict) -> dict:
    """Which leaves decay: not norms and biases. The trunk's have an axis more, over its stacked layers."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf.ndim - (path[0].key == "trunk") > 1, params)


def _muon_axes(params: Any) -> Any:
    """Which axes of each matrix inside a layer go in and out; None (AdamW) for embedding, head, norms and routers."""
    axes = {  # counted from the end, since layers and experts are stacked in front
        "qkv": ((-4,), (-3, -2, -1)),
        "gate_up": ((-3,), (-2, -1)),
        "qkvz": ((-3,), (-2, -1)),
        "ba": ((-3,), (-2, -1)),
        "key_up": ((-1,), (-2,)),
    }
    plain = ("output", "down", "project", "query", "query_down", "query_up", "latent_down", "value_up")

    def of(path, leaf):
        del leaf
        name = path[-1].key
        if name in axes or name in plain:
            return optax.contrib.MuonDimensionNumbers(*axes.get(name, ((-2,), (-1,))))
        return None

    return jax.tree_util.tree_map_with_path(of, params)


def train_step(
    state: TrainState,
    batch: Batch,
    learning_rate: jax.Array,
    mtp_scale: jax.Array,
    progress: jax.Array | float = 1.0,
    states: jax.Array | np.ndarray | None = None,
    *,
    model: MTPModel,
    optimizer: optax.GradientTransformation,
    num_depths: int,
    attention_layout: str,
    objective: Objective = Objective(),  # noqa: B008, frozen
    trains: str = "all",
    accumulation: int = 1,
    mesh: Mesh | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Loss, gradients, update. Returns the cross-entropies per depth (nats) and the gradient norm beside the new state.

    `trains` is "all"; "modules": the trunk and what is shared with it stay as they are, without a backward pass; or
    "detached": all is trained, the trunk by its own loss alone. `states [B, T, D]`, only for "modules", are what
    `trunk_states` gives for the batch: with them the trunk does not run.
    `progress` 0..1 of the run says where the objective's warm-up stands. An update that is not finite is skipped and
    reported as such. Raises `ValueError` for states of a trunk that is trained.

    With `accumulation` the batch goes through in so many parts, one after the other, to the same gradients; the LK
    hybrid then takes a forward pass more. On a `mesh` each device has its own rows (`mtpjax.training.data_parallel`).
    """
    if states is not None and trains != "modules":
        raise ValueError(f"states are of a frozen trunk; trains '{trains}' changes it")
    rows = jax.tree.map(jnp.asarray, (*batch, states))
    _, is_valid = all_targets(rows[0], rows[1], rows[2], num_depths)
    totals = batch_totals(is_valid, jnp.zeros(num_depths))  # the overlap is not known before a pass
    of_rows = functools.partial(
        gradients_of_rows,
        model=model,
        num_depths=num_depths,
        attention_layout=attention_layout,
        objective=objective,
        trains=trains,
        accumulation=accumulation,
    )
    if mesh is not None:
        of_rows = over_mesh(of_rows, mesh, trains=trains)
    (loss, losses), gradients = of_rows(state.params, rows, totals, mtp_scale, progress)
    changing = trained(state.params, trains)
    norm = optax.tree.norm(gradients)
    updates, new_optimizer = optimizer.update(gradients, state.optimizer, changing)
    new: Any = optax.apply_updates(changing, jax.tree.map(lambda update: learning_rate * update, updates))
    is_finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    new = TrainState({**state.params, **new}, new_optimizer, state.step)
    kept = jax.tree.map(lambda after, before: jnp.where(is_finite, after, before), new, state)
    metrics = {"losses": losses, "gradient_norm": norm, "is_finite": is_finite}
    return kept.replace(step=state.step + 1), metrics
