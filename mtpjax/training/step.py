"""Runs one training update, which computes losses and gradients and applies the optimiser."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from mtpjax.data.packing import Batch
from mtpjax.drafters.forward import mask_undraftable
from mtpjax.models.params import is_of_modules
from mtpjax.training.anchors import draw_anchors, keep_anchors
from mtpjax.training.config import TrainConfig
from mtpjax.training.data_parallel import sharded_loss_and_gradients
from mtpjax.training.gradients import Rows, TrainSpec, loss_and_gradients
from mtpjax.training.losses import BatchTotals, all_targets, batch_totals
from mtpjax.training.train_state import TrainState, trainable_params


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Makes the optimiser, either AdamW, or Muon for matrices inside the layers and AdamW for the rest, with clipping.

    Its learning rate is 1. `train_step` multiplies the update by the actual learning rate, which depends on the run's
    progress and therefore on the clock.

    Args:
        config: settings for optimizer, weight decay and clipping.

    Returns:
        The optimiser, for the parameters that `mtpjax.training.train_state.trainable_params` selects.

    Example:
        >>> from mtpjax import TrainConfig
        >>> from mtpjax.training import make_optimizer
        >>> optimizer = make_optimizer(TrainConfig(optimizer="muon", weight_decay=0.05))
    """
    core = optax.adam(1.0, b2=0.95)
    if config.optimizer == "muon":
        core = optax.contrib.muon(
            1.0,
            adam_b2=0.95,
            muon_weight_dimension_numbers=_muon_axes,
            # Match the RMS of Adam's updates, so that both parts can use one learning rate (2502.16982).
            consistent_rms=0.2,
        )
    # Add decoupled weight decay after Adam or Muon. The updates already point downhill, so the sign is negative.
    decay = optax.add_decayed_weights(-config.weight_decay, mask=_is_matrix)
    # Detached modules are clipped by their own norm, so that large draft gradients do not shrink the trunk's update.
    clip = optax.clip_by_global_norm(config.gradient_clip)
    if config.trains == "detached":
        clip = optax.partition({True: clip, False: clip}, lambda params: {name: is_of_modules(name) for name in params})
    return optax.chain(clip, core, decay)


def _is_matrix(params: dict) -> dict:
    """Selects matrices, but not norms or biases, for weight decay. The trunk's leaves also have a layer axis."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf.ndim - (path[0].key == "trunk") > 1, params)


def _muon_axes(params: Any) -> Any:
    """Returns input and output axes of each matrix inside a layer; None (AdamW) for embedding, head, norms and routers.

    Muon orthogonalises matrices, so for arrays such as `qkv [D, K, G + 2, H]` it must know which axes form its two
    sides.
    """
    # Count axes from the end, because layers and experts are stacked in front.
    axes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "qkv": ((-4,), (-3, -2, -1)),
        "gate_up": ((-3,), (-2, -1)),
        "qkvz": ((-3,), (-2, -1)),
        "ba": ((-3,), (-2, -1)),
        "key_up": ((-1,), (-2,)),
    }
    # These are plain matrices, `[in, out]`.
    plain = ("output", "down", "project", "query", "query_down", "query_up", "latent_down", "value_up")
    axes |= dict.fromkeys(plain, ((-2,), (-1,)))
    numbers = {name: optax.contrib.MuonDimensionNumbers(*sides) for name, sides in axes.items()}
    return jax.tree_util.tree_map_with_path(lambda path, leaf: numbers.get(path[-1].key), params)


def train_step(
    state: TrainState,
    batch: Batch,
    learning_rate: jax.Array,
    mtp_scale: jax.Array,
    progress: jax.Array | float = 1.0,
    states: jax.Array | np.ndarray | None = None,
    *,
    spec: TrainSpec,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Runs one update of the parameters. Skips the update if the loss or gradient norm is not finite.

    Args:
        state: the state before the update.
        batch: packed rows `[B, T]`.
        learning_rate: `[]`.
        mtp_scale: `[]` lambda, the weight of the draft losses.
        progress: `[]` fraction of the run that is done, 0..1, for the objective's warm-up.
        states: `[B, T, D]` cached hidden states of a frozen trunk, or `[B, T, (n + 1) * D]` with the states of the n
            layers that the drafter reads (`trunk_states`), or `quantise_states` of them (uint8). None: the trunk runs.
        spec: what is trained and how.
        optimizer: from `make_optimizer`.

    Returns:
        The new state, and metrics: `loss []` (the training loss), `losses [1 + num_depths]` (cross-entropy in nats),
        `gradient_norm []` and `is_finite []`.

    Raises:
        ValueError: `states` are given but the trunk is trained, or the objective does not return one number.

    Example:
        >>> import functools
        >>> import jax, numpy as np
        >>> from mtpjax import ModelConfig, MTPModel, TrainConfig, init_params
        >>> from mtpjax.training import Batch, TrainSpec, init_train_state, make_optimizer, train_step
        >>> config = ModelConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        ...                      intermediate_size=32, num_mtp_modules=1)
        >>> spec = TrainSpec(model=MTPModel(config, scan_layers=True), num_depths=1)
        >>> optimizer = make_optimizer(TrainConfig())
        >>> state = init_train_state(init_params(spec.model, jax.random.key(0)), optimizer)
        >>> step = jax.jit(functools.partial(train_step, spec=spec, optimizer=optimizer))
        >>> tokens = np.tile(np.arange(8, dtype=np.int32), (2, 2))
        >>> batch = Batch(tokens, np.ones_like(tokens), np.ones_like(tokens, bool))
        >>> state, metrics = step(state, batch, 1e-2, 0.3)  # learning rate and weight of the draft losses
        >>> int(state.step), metrics["losses"].shape
        (1, (2,))
    """
    rows, totals = prepare_rows(state, batch, states, spec=spec)
    # Compute loss and gradients. On a mesh, they are summed over the devices.
    compute_gradients = functools.partial(loss_and_gradients, spec=spec)
    if spec.mesh is not None:
        compute_gradients = sharded_loss_and_gradients(compute_gradients, spec.mesh, trains=spec.trains)
    (loss, losses), gradients = compute_gradients(state.params, rows, totals, mtp_scale, progress)
    # The optimiser gets only the trained parameters. Its learning rate is 1, so scale its update here.
    trainable = trainable_params(state.params, spec.trains)
    norm = optax.tree.norm(gradients)
    updates, new_optimizer = optimizer.update(gradients, state.optimizer, trainable)
    new: Any = optax.apply_updates(trainable, jax.tree.map(lambda update: learning_rate * update, updates))
    # A non-finite loss or gradient would destroy parameters and moments, so keep the old ones and only count the step.
    is_finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    new = TrainState({**state.params, **new}, new_optimizer, state.step)
    kept = jax.tree.map(lambda after, before: jnp.where(is_finite, after, before), new, state)
    metrics = {"loss": loss, "losses": losses, "gradient_norm": norm, "is_finite": is_finite}
    return kept.replace(step=state.step + 1), metrics


def prepare_rows(
    state: TrainState, batch: Batch, states: jax.Array | np.ndarray | None, *, spec: TrainSpec
) -> tuple[Rows, BatchTotals]:
    """Returns what loss and gradients read for a batch: its rows, with their anchors, and its target counts.

    Raises:
        ValueError: `states` are given but the trunk is trained.
    """
    num_depths, drafter = spec.num_depths, spec.drafter
    if states is not None and spec.trains != "modules":
        raise ValueError(f"cached trunk states need a frozen trunk, but trains={spec.trains!r} updates the trunk")
    # Count the targets of the whole batch first, so that the losses of its shards are shares that add up. The overlap,
    # which the LK hybrid also needs, is only known after a forward pass.
    tokens, segment_ids, loss_mask, cached = jax.tree.map(jnp.asarray, (*batch, states))
    if drafter is not None:
        loss_mask = mask_undraftable(state.params, tokens, loss_mask, spec.model.config.vocab_size)
    _, is_valid = all_targets(tokens, segment_ids, loss_mask, num_depths)
    # The anchors depend only on the seed and the step, so a resumed run draws the same ones.
    anchors = None
    if drafter is not None and drafter.draws_anchors:
        key = jax.random.fold_in(jax.random.key(spec.seed), state.step)
        anchors = draw_anchors(key, is_valid[1], spec.num_anchors)
    rows = Rows(tokens, segment_ids, loss_mask, cached, anchors)
    return rows, batch_totals(keep_anchors(is_valid, anchors), jnp.zeros(num_depths))
