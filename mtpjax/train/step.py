"""One jitted update."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from mtpjax.config import Objective, TrainConfig
from mtpjax.model import DepthsOutput, MTPModel, bind, forward_depths, is_of_modules, trunk_states
from mtpjax.train.data import Batch
from mtpjax.train.losses import all_targets, objective_loss
from mtpjax.train.terms import Terms, chunked_terms, plain_terms


class TrainState(flax.struct.PyTreeNode):
    """What an update changes. Parameters have stacked trunk layers."""

    params: dict
    optimizer: optax.OptState
    step: jax.Array  # [] int32


def trained(params: dict, trains: str) -> dict:
    """The parameters that a run changes: all, or where it `trains` "modules" the modules' own."""
    return {name: leaf for name, leaf in params.items() if trains != "modules" or is_of_modules(name)}


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipped AdamW, or Muon for the matrices inside the layers and AdamW for the rest, at learning rate 1.

    It is for what `trained` leaves. `train_step` scales the update, so that a run can end by the clock. Detached
    modules are clipped by a norm of their own.
    """
    if config.optimizer == "muon":
        core = optax.contrib.muon(
            1.0,
            weight_decay=config.weight_decay,
            adam_b2=0.95,
            adam_weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=_muon_axes,
            consistent_rms=0.2,  # the size of Adam's updates, so that one learning rate serves both (2502.16982)
        )
    else:
        core = optax.adamw(1.0, b2=0.95, weight_decay=config.weight_decay, mask=_is_matrix)
    clip = optax.clip_by_global_norm(config.gradient_clip)
    if config.trains == "detached":
        clip = optax.partition({True: clip, False: clip}, lambda params: {name: is_of_modules(name) for name in params})
    return optax.chain(clip, core)


def _is_matrix(params: dict) -> dict:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


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
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Loss, gradients, update. Returns the cross-entropies per depth (nats) and the gradient norm beside the new state.

    `trains` is "all"; "modules": the trunk and what is shared with it stay as they are, without a backward pass; or
    "detached": all is trained, the trunk by its own loss alone. `states [B, T, D]`, only for "modules", are what
    `trunk_states` gives for the batch: with them the trunk does not run.
    `progress` 0..1 of the run says where the objective's warm-up stands. An update that is not finite is skipped and
    reported as such. Raises `ValueError` for states of a trunk that is trained.
    """
    if states is not None and trains != "modules":
        raise ValueError(f"states are of a frozen trunk; trains '{trains}' changes it")
    tokens, segment_ids, loss_mask = (jnp.asarray(array) for array in batch)
    changing = trained(state.params, trains)

    def loss_of(changing):
        params = {**state.params, **changing}
        if states is None:
            entering = trunk_states(params, tokens, segment_ids, model=model)
        else:
            entering = jnp.asarray(states, params["embedding"].dtype)
        output = forward_depths(
            params,
            entering,
            tokens,
            segment_ids,
            model=model,
            num_depths=num_depths,
            attention_layout=attention_layout,
            is_detached=trains == "detached",
        )
        targets, is_valid = all_targets(tokens, segment_ids, loss_mask, num_depths)
        terms = _terms(params, output, targets, model=model, objective=objective, is_detached=trains == "detached")
        return objective_loss(terms, is_valid, mtp_scale=mtp_scale, objective=objective, progress=progress)

    (loss, losses), gradients = jax.value_and_grad(loss_of, has_aux=True)(changing)
    norm = optax.tree.norm(gradients)
    updates, new_optimizer = optimizer.update(gradients, state.optimizer, changing)
    new: Any = optax.apply_updates(changing, jax.tree.map(lambda update: learning_rate * update, updates))
    is_finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    new = TrainState({**state.params, **new}, new_optimizer, state.step)
    kept = jax.tree.map(lambda after, before: jnp.where(is_finite, after, before), new, state)
    metrics = {"losses": losses, "gradient_norm": norm, "is_finite": is_finite}
    return kept.replace(step=state.step + 1), metrics


def _terms(
    params, output: DepthsOutput, targets: jax.Array, *, model: MTPModel, objective: Objective, is_detached: bool
) -> Terms:
    """From the logits; or from the hidden states, `vocab_chunk` columns at a time, when jit drops the unused logits."""
    if not objective.vocab_chunk:
        return plain_terms((output.logits, *output.mtp_logits), targets)
    apply, modules, num_depths = bind(model, params), model.config.num_mtp_modules, len(output.mtp_hidden)
    heads, head_of = [apply(method="head_matrix")], [0] * (1 + num_depths)
    if model.config.mtp_own_head:
        heads += [apply(index=index, method="head_matrix") for index in range(min(modules, num_depths))]
        head_of = [0, *(min(depth, modules) for depth in range(1, num_depths + 1))]
    elif is_detached:
        heads, head_of = [heads[0], jax.lax.stop_gradient(heads[0])], [0, *[1] * num_depths]
    return chunked_terms(
        (output.hidden, *output.mtp_hidden),
        heads,
        targets,
        head_of=head_of,
        vocab_chunk=objective.vocab_chunk,
        compares_with_trunk=objective.compares_with_trunk,
    )
