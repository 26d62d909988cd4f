"""Computes loss and gradients for part of a batch, as shares that add up to the values for the whole batch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mtpjax.drafters.forward import draft_columns, draft_heads, forward_drafter, read_layers
from mtpjax.drafters.trained import TrainedDrafter
from mtpjax.models.context import own_tokens
from mtpjax.models.forward import DepthsOutput, forward_depths, trunk_states
from mtpjax.models.model import MTPModel, bind
from mtpjax.models.sharding import platform_of
from mtpjax.training.anchors import MAX_ANCHORS, anchor_terms, keep_anchors, to_rows
from mtpjax.training.context_terms import chunk_terms
from mtpjax.training.fp8_states import dequantise_states
from mtpjax.training.losses import (
    BatchTotals,
    LossInputs,
    ObjectiveFunction,
    all_targets,
    call_objective,
    objective_loss,
    valid_mean,
)
from mtpjax.training.objective import Objective
from mtpjax.training.position_losses import PositionTerms, choose_vocab_chunk, chunked_terms, plain_terms
from mtpjax.training.train_state import trainable_params


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """The static and hashable settings of `train_step`, which determine what it trains and how.

    Attributes:
        model: the model with stacked layers; for a drafter, its unrolled trunk.
        num_depths: number of draft depths with a loss.
        trains: the trained part, as in `TrainConfig`. With "modules", the frozen parameters have no backward pass.
        objective: the draft losses.
        objective_function: custom function that computes the loss from `LossInputs` and replaces `objective`.
        attention_layout: "ttt" or "stream", as in `TrainConfig`.
        accumulation: number of microbatches that run one after the other. The gradients are the same up to rounding;
            the LK hybrid needs an additional forward pass.
        mesh: device mesh over which the rows are sharded (`mtpjax.training.data_parallel`); None: one device.
        drafter: the drafter that trains instead of MTP modules (`mtpjax.drafters.trained`); None: MTP modules.
        num_anchors: maximum number of anchors per row, for a drafter that draws them.
        seed: random seed for the anchors, which depend only on this seed and on the step.

    Example:
        >>> from mtpjax import MTPModel, presets
        >>> from mtpjax.training import TrainSpec
        >>> spec = TrainSpec(model=MTPModel(presets["tiny"], scan_layers=True), num_depths=1, trains="modules")
    """

    model: MTPModel
    num_depths: int
    trains: str = "all"
    objective: Objective = Objective()  # noqa: RUF009, frozen
    objective_function: ObjectiveFunction | None = None
    attention_layout: str = "ttt"
    accumulation: int = 1
    mesh: Mesh | None = None
    drafter: TrainedDrafter | None = None
    num_anchors: int = MAX_ANCHORS
    seed: int = 0


class Rows(NamedTuple):
    """Rows `[b, T]` from a `Batch`, with the trunk states and anchors that an update adds.

    Attributes:
        tokens: int32.
        segment_ids: int32.
        loss_mask: bool.
        states: `[b, T, D]` the trunk's cached hidden states; None: the trunk runs. If the mesh splits rows by tokens,
            they are those of the device's own tokens, and the integers are whole rows (`mtpjax.models.context`).
        anchors: `[b, A]` anchors of a block drafter; None for other drafters.
    """

    tokens: jax.Array
    segment_ids: jax.Array
    loss_mask: jax.Array
    states: jax.Array | None
    anchors: jax.Array | None


class _Forward(NamedTuple):
    """The results of a forward pass that the losses read."""

    terms: PositionTerms
    is_valid: jax.Array
    targets: jax.Array
    output: DepthsOutput
    confidence: jax.Array | None


def loss_and_gradients(
    params: dict,
    batch: Rows,
    totals: BatchTotals,
    mtp_scale: jax.Array | float,
    progress: jax.Array | float,
    *,
    spec: TrainSpec,
    sum_over_devices: Callable[[jax.Array], jax.Array] = lambda share: share,
) -> tuple[tuple[jax.Array, jax.Array], dict]:
    """Computes the shares that rows `[b, T]` contribute to the loss and gradients of their batch.

    Args:
        params: all parameters.
        batch: the rows.
        totals: target counts of the whole batch; `overlap` is ignored.
        mtp_scale: `[]` lambda, the weight of the draft losses.
        progress: `[]` fraction of the run that is done, 0..1.
        spec: what is trained and how; the rows are split into `accumulation` microbatches that run one after the other.
        sum_over_devices: sums a value over all devices that hold rows of the batch.

    Returns:
        `((loss, losses), gradients)`: the loss `[]` and the cross-entropy of each depth `[1 + num_depths]`, as in
        `mtpjax.training.losses.objective_loss`, and the gradients of the trained parameters. Summed over all parts
        of the batch, they give the values for the whole batch.
    """
    objective, trainable = spec.objective, trainable_params(params, spec.trains)

    def forward_of(trainable, rows):
        return forward_rows({**params, **trainable}, rows, spec)

    # The LK hybrid's w depends on the overlap of the whole batch, and gets no gradient.
    def overlap_of(found: _Forward):
        return jax.lax.stop_gradient(valid_mean(found.terms.overlap, found.is_valid[1:], totals.num_valid[1:]))

    def loss_of(trainable, rows, overlap=None):
        found = forward_of(trainable, rows)
        overlap = sum_over_devices(overlap_of(found)) if overlap is None else overlap
        whole = totals._replace(overlap=overlap)
        settings = {"mtp_scale": mtp_scale, "objective": objective, "progress": progress}
        loss, losses = objective_loss(
            found.terms, found.is_valid, totals=whole, confidence=found.confidence, **settings
        )
        if spec.objective_function is not None:
            inputs = LossInputs(
                loss, found.terms, found.targets, found.is_valid, found.output, whole, mtp_scale, progress
            )
            loss = call_objective(spec.objective_function, inputs)
        return loss, losses

    # Differentiate only with respect to the trained parameters, so that frozen ones have no backward pass.
    differentiate = jax.value_and_grad(loss_of, has_aux=True)
    if spec.accumulation == 1:
        return differentiate(trainable, batch)
    # The overlap of the whole batch is unknown within a microbatch, so the LK hybrid needs an extra forward pass over
    # all microbatches. The alternative, keeping two gradients per depth until w is known, would cost the memory that
    # accumulation saves.
    parts, overlap = split_rows(batch, spec.accumulation), jnp.zeros(spec.num_depths)
    if "lk_hybrid" in objective.names:
        overlap = sum_over_devices(sum_over_parts(lambda rows: overlap_of(forward_of(trainable, rows)), parts))
    return sum_over_parts(lambda rows: differentiate(trainable, rows, overlap), parts)


def forward_rows(params: dict, rows: Rows, spec: TrainSpec) -> _Forward:
    """Runs the trunk (or reads its cached states) and every depth, then computes the loss terms at each position."""
    tokens, segment_ids, loss_mask, states, anchors = rows
    model, num_depths, drafter = spec.model, spec.num_depths, spec.drafter
    if states is None:
        states = trunk_states(params, tokens, segment_ids, model=model, layer_ids=read_layers(drafter))
    else:
        states = dequantise_states(states, model.config.hidden_size) if states.dtype == jnp.uint8 else states
        states = states.astype(model.dtype or params["embedding"].dtype)
    targets, is_valid = all_targets(tokens, segment_ids, loss_mask, num_depths)
    targets, is_valid = jax.vmap(own_tokens)(targets), jax.vmap(own_tokens)(is_valid)
    is_valid, confidence = keep_anchors(is_valid, anchors), None
    if drafter is None:
        layout = {"attention_layout": spec.attention_layout, "is_detached": spec.trains == "detached"}
        output = forward_depths(params, states, tokens, segment_ids, model=model, num_depths=num_depths, **layout)
    else:
        shape = {"num_depths": num_depths, "drafter": drafter, "anchors": anchors}
        output = forward_drafter(params, states, tokens, segment_ids, model=model, **shape)
        # Targets are columns of the drafter's head. Tokens that have no column are masked (`mask_undraftable`).
        if (column := draft_columns(params, model.config.vocab_size)) is not None:
            targets = jnp.maximum(column[targets], 0)
        if anchors is not None and output.confidence is not None:
            confidence = to_rows(output.confidence, anchors, tokens.shape[1])
    compute = functools.partial(chunk_terms, functools.partial(_output_terms, params, spec=spec))
    terms = compute(output, targets) if anchors is None else anchor_terms(compute, output, targets, anchors)
    return _Forward(terms, is_valid, targets, output, confidence)


def split_rows(batch: Any, parts: int) -> Any:
    """Splits the first axis of each array: `[B, ...]` becomes `[parts, B / parts, ...]`."""
    return jax.tree.map(lambda rows: rows.reshape(parts, -1, *rows.shape[1:]), batch)


def sum_over_parts(function: Callable[[Any], Any], parts: Any) -> Any:
    """Sums a function over parts in a scan, so that only one part's intermediate values are in memory.

    Args:
        parts: pytree of arrays `[parts, ...]`.
    """
    # Get only the shapes of the sum, without computing it.
    first = jax.tree.map(lambda array: array[0], parts)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, first))

    def add(total, part):
        return jax.tree.map(jnp.add, total, function(part)), None

    return jax.lax.scan(add, zeros, parts)[0]


def _output_terms(params: dict, output: DepthsOutput, targets: jax.Array, *, spec: TrainSpec) -> PositionTerms:
    """Computes the terms from logits, or from hidden states and heads by chunks of the vocabulary.

    In the second case nothing reads the logits in `output`, so jit removes their computation.
    """
    model, drafter, vocab_chunk = spec.model, spec.drafter, spec.objective.vocab_chunk
    if vocab_chunk is None:
        shape = targets[0].size, len(targets), output.logits.shape[-1]
        vocab_chunk = choose_vocab_chunk(*shape, platform=platform_of(spec.mesh))
    # A custom objective may read KL and overlap even if the configured one does not. A confidence head learns to
    # predict the overlap.
    compares = spec.objective.comparison
    if spec.objective_function is not None or (drafter is not None and drafter.has_confidence):
        compares = "all"
    if not vocab_chunk:
        return plain_terms((output.logits, *output.mtp_logits), targets)
    # `head_of[n]` is the index in `heads` of the head that the trunk (n = 0) or depth n uses. Depths beyond the modules
    # use the last module's head.
    apply, modules, num_depths = bind(model, params), model.config.num_mtp_modules, len(output.mtp_hidden)
    heads, head_of = [apply(method="head_matrix")], [0] * (1 + num_depths)
    if drafter is not None:
        # If the levels share a head, the loss reads it once.
        heads = list(draft_heads(params, model=model, drafter=drafter, num_depths=num_depths))
        head_of = [min(depth, len(heads) - 1) for depth in range(1 + num_depths)]
    elif model.config.mtp_own_head:
        heads += [apply(index=index, method="head_matrix") for index in range(min(modules, num_depths))]
        head_of = [0, *(min(depth, modules) for depth in range(1, num_depths + 1))]
    # A shared head gets gradients only from the trunk's loss, because the depths read it through `stop_gradient`.
    elif spec.trains == "detached":
        heads, head_of = [heads[0], jax.lax.stop_gradient(heads[0])], [0, *[1] * num_depths]
    # The kernels need heads of equal width; a Markov head makes the drafter's head wider than the trunk's.
    is_one_width = len({len(head) for head in heads}) == 1
    return chunked_terms(
        (output.hidden, *output.mtp_hidden),
        heads,
        targets,
        head_of=head_of,
        vocab_chunk=vocab_chunk,
        compares=compares,
        implementation=model.implementation if is_one_width else "xla",
    )
