"""Loss and gradients of some rows of a batch, as shares that add up to those of the whole batch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.drafters.forward import draft_columns, draft_heads, forward_drafter, read_layers
from mtpjax.drafters.trained import TrainedDrafter
from mtpjax.models.forward import DepthsOutput, forward_depths, trunk_states
from mtpjax.models.model import MTPModel, bind
from mtpjax.models.params import is_of_modules
from mtpjax.training.anchors import anchor_terms, keep_anchors, to_rows
from mtpjax.training.loss_inputs import LossInputs, ObjectiveFunction, call_objective
from mtpjax.training.losses import BatchTotals, all_targets, objective_loss, valid_mean
from mtpjax.training.objective import Objective
from mtpjax.training.position_losses import PositionTerms, chunked_terms, plain_terms

# Tokens, segment ids and loss mask of a `Batch`, the trunk's cached hidden states if it is frozen, and the anchors of a
# block drafter.
Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]


def trainable_params(params: dict, trains: str) -> dict:
    """Selects the parameters that training changes.

    Args:
        params: parameters by top-level name, or a tree of the same structure, such as their shardings.
        trains: "all", "modules" or "detached", as in `TrainConfig`.

    Returns:
        The own parameters of the MTP modules, or of the drafter, for "modules"; else all.
    """
    return {name: leaf for name, leaf in params.items() if trains != "modules" or is_of_modules(name)}


def loss_and_gradients(
    params: dict,
    batch: Rows,
    totals: BatchTotals,
    mtp_scale: jax.Array | float,
    progress: jax.Array | float,
    *,
    model: MTPModel,
    num_depths: int,
    attention_layout: str,
    objective: Objective,
    trains: str,
    accumulation: int = 1,
    objective_function: ObjectiveFunction | None = None,
    drafter: TrainedDrafter | None = None,
    sum_over_devices: Callable[[jax.Array], jax.Array] = lambda share: share,
) -> tuple[tuple[jax.Array, jax.Array], dict]:
    """Computes loss and gradients of rows `[b, T]`, as shares of those of their batch.

    Args:
        params: all parameters.
        batch: the rows.
        totals: target counts of the whole batch; its `overlap` is not read.
        mtp_scale: `[]` lambda, the weight of the draft losses.
        progress: `[]` fraction of the run that is done, 0..1.
        model: the model.
        num_depths: draft depths with a loss.
        attention_layout: "ttt" or "stream", as in `TrainConfig`.
        objective: the draft losses.
        trains: the trained part, as in `TrainConfig`.
        accumulation: number of parts that the rows are split into; they run one after the other.
        objective_function: computes the loss in the place of `objective`, whose loss it gets.
        drafter: the drafter that trains in the place of MTP modules; None: MTP modules.
        sum_over_devices: sums a value over the devices that hold the batch's other rows.

    Returns:
        `((loss, losses), gradients)`: the loss `[]` and the cross-entropy of each depth `[1 + num_depths]`, as in
        `mtpjax.training.losses.objective_loss`, and the gradients of the trained parameters. Their sums over all rows
        of the batch are the batch's.
    """
    is_detached = trains == "detached"
    # A custom objective may read KL and overlap, whatever the settings' objective needs. A confidence head
    # learns the overlap.
    has_confidence = drafter is not None and drafter.has_confidence
    compares_with_trunk = objective.compares_with_trunk or objective_function is not None or has_confidence

    # Forward pass: trunk (or its cached states), then every depth, then cross-entropy, KL and overlap per position.
    def terms_of(trainable, rows):
        tokens, segment_ids, loss_mask, states, anchors = rows
        all_params = {**params, **trainable}
        if states is None:
            layer_ids = read_layers(drafter)
            states = trunk_states(all_params, tokens, segment_ids, model=model, layer_ids=layer_ids)
        else:
            states = states.astype(model.dtype or params["embedding"].dtype)
        targets, is_valid = all_targets(tokens, segment_ids, loss_mask, num_depths)
        is_valid, confidence = keep_anchors(is_valid, anchors), None
        if drafter is None:
            shape = {"num_depths": num_depths, "attention_layout": attention_layout, "is_detached": is_detached}
            output = forward_depths(all_params, states, tokens, segment_ids, model=model, **shape)
        else:
            shape = {"num_depths": num_depths, "drafter": drafter, "anchors": anchors}
            output = forward_drafter(all_params, states, tokens, segment_ids, model=model, **shape)
            # Targets are columns of the drafter's head. Tokens without one are masked (`mask_undraftable`).
            if (column := draft_columns(all_params, model.config.vocab_size)) is not None:
                targets = jnp.maximum(column[targets], 0)
            if anchors is not None and output.confidence is not None:
                confidence = to_rows(output.confidence, anchors, tokens.shape[1])
        compute = functools.partial(
            _output_terms,
            all_params,
            model=model,
            vocab_chunk=objective.vocab_chunk,
            compares_with_trunk=compares_with_trunk,
            is_detached=is_detached,
            drafter=drafter,
        )
        terms = compute(output, targets) if anchors is None else anchor_terms(compute, output, targets, anchors)
        return terms, is_valid, targets, output, confidence

    # The LK hybrid's w depends on the overlap of the whole batch, and gets no gradient.
    def overlap_of(terms, is_valid, *_):
        return jax.lax.stop_gradient(valid_mean(terms.overlap, is_valid[1:], totals.num_valid[1:]))

    def loss_of(trainable, rows, overlap=None):
        terms, is_valid, targets, output, confidence = terms_of(trainable, rows)
        overlap = sum_over_devices(overlap_of(terms, is_valid)) if overlap is None else overlap
        whole = totals._replace(overlap=overlap)
        settings = {"mtp_scale": mtp_scale, "objective": objective, "progress": progress}
        loss, losses = objective_loss(terms, is_valid, totals=whole, confidence=confidence, **settings)
        if objective_function is not None:
            inputs = LossInputs(loss, terms, targets, is_valid, output, whole, mtp_scale, progress)
            loss = call_objective(objective_function, inputs)
        return loss, losses

    # Differentiate with respect to the trained parameters only: frozen ones then take no backward pass.
    trainable, differentiate = trainable_params(params, trains), jax.value_and_grad(loss_of, has_aux=True)
    if accumulation == 1:
        return differentiate(trainable, batch)
    # With accumulation no part knows the batch's overlap, so the LK hybrid takes an extra forward pass over all parts.
    # The alternative, two gradients per depth until w is known, would cost the memory that accumulation saves.
    parts, overlap = split_rows(batch, accumulation), jnp.zeros(num_depths)
    if "lk_hybrid" in objective.names:
        overlap = sum_over_devices(sum_over_parts(lambda rows: overlap_of(*terms_of(trainable, rows)), parts))
    return sum_over_parts(lambda rows: differentiate(trainable, rows, overlap), parts)


def split_rows(batch: Any, parts: int) -> Any:
    """Splits the first axis of each array: `[B, ...]` becomes `[parts, B / parts, ...]`."""
    return jax.tree.map(lambda rows: rows.reshape(parts, -1, *rows.shape[1:]), batch)


def sum_over_parts(function: Callable[[Any], Any], parts: Any) -> Any:
    """Sums a function over parts in a scan, so that only one part's intermediate values are in memory.

    Args:
        function: maps a part to a pytree of arrays.
        parts: pytree of arrays `[parts, ...]`.

    Returns:
        The sum of `function(part)`.
    """
    # The shapes of the sum, without computing anything.
    first = jax.tree.map(lambda array: array[0], parts)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, first))

    def add(total, part):
        return jax.tree.map(jnp.add, total, function(part)), None

    return jax.lax.scan(add, zeros, parts)[0]


def _output_terms(
    params,
    output: DepthsOutput,
    targets: jax.Array,
    *,
    model: MTPModel,
    vocab_chunk: int,
    compares_with_trunk: bool,
    is_detached: bool,
    drafter: TrainedDrafter | None = None,
) -> PositionTerms:
    """Computes the terms from logits, or with `vocab_chunk` from hidden states and heads.

    In the second case nothing reads the logits in `output`, and jit removes their computation.
    """
    if not vocab_chunk:
        return plain_terms((output.logits, *output.mtp_logits), targets)
    # `head_of[n]` is the index in `heads` of the head that the trunk (n = 0) or depth n uses. Depths beyond the modules
    # use the last module's head.
    apply, modules, num_depths = bind(model, params), model.config.num_mtp_modules, len(output.mtp_hidden)
    heads, head_of = [apply(method="head_matrix")], [0] * (1 + num_depths)
    if drafter is not None:
        # The loss reads a head that the levels share once.
        heads = list(draft_heads(params, model=model, drafter=drafter, num_depths=num_depths))
        head_of = [min(depth, len(heads) - 1) for depth in range(1 + num_depths)]
    elif model.config.mtp_own_head:
        heads += [apply(index=index, method="head_matrix") for index in range(min(modules, num_depths))]
        head_of = [0, *(min(depth, modules) for depth in range(1, num_depths + 1))]
    # A shared head gets gradients from the trunk's loss alone: the depths read a copy without gradient.
    elif is_detached:
        heads, head_of = [heads[0], jax.lax.stop_gradient(heads[0])], [0, *[1] * num_depths]
    # The kernels take heads of one width; a Markov head makes the drafter's wider than the trunk's.
    is_one_width = len({len(head) for head in heads}) == 1
    return chunked_terms(
        (output.hidden, *output.mtp_hidden),
        heads,
        targets,
        head_of=head_of,
        vocab_chunk=vocab_chunk,
        compares_with_trunk=compares_with_trunk,
        implementation=model.implementation if is_one_width else "xla",
    )
