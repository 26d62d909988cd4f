"""Loss and gradients of some rows: what they contribute to those of their batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.models.model import DepthsOutput, MTPModel, bind, forward_depths, is_of_modules, trunk_states
from mtpjax.training.config import Objective
from mtpjax.training.losses import Totals, all_targets, objective_loss, valid_mean
from mtpjax.training.position_losses import Terms, chunked_terms, plain_terms

Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]  # a `Batch`, and the trunk's states where it is frozen


def trained(params: dict, trains: str) -> dict:
    """The parameters that a run changes: all, or where it `trains` "modules" the modules' own."""
    return {name: leaf for name, leaf in params.items() if trains != "modules" or is_of_modules(name)}


def gradients_of_rows(
    params: dict,
    batch: Rows,
    totals: Totals,
    mtp_scale: jax.Array | float,
    progress: jax.Array | float,
    *,
    model: MTPModel,
    num_depths: int,
    attention_layout: str,
    objective: Objective,
    trains: str,
    accumulation: int = 1,
    add_devices: Callable[[jax.Array], jax.Array] = lambda share: share,
) -> tuple[tuple[jax.Array, jax.Array], dict]:
    """`(loss, losses), gradients` as in `objective_loss`: shares that add up to the batch's over all of its rows.

    `totals`, but for the overlap, are the batch's; these are rows `[b, T]` of it, and `add_devices` sums a value over
    the devices that hold the others. With `accumulation` they go through in so many parts, one after the other. The
    overlap of the whole batch, on which the LK hybrid's w depends, then takes a forward pass of its own: keeping two
    gradients of each depth until w is known would take the memory that is to be saved.
    """
    is_detached = trains == "detached"

    def terms_of(changing, rows):
        tokens, segment_ids, loss_mask, states = rows
        whole = {**params, **changing}
        if states is None:
            states = trunk_states(whole, tokens, segment_ids, model=model)
        else:
            states = states.astype(model.dtype or params["embedding"].dtype)
        shape = {"num_depths": num_depths, "attention_layout": attention_layout, "is_detached": is_detached}
        output = forward_depths(whole, states, tokens, segment_ids, model=model, **shape)
        targets, is_valid = all_targets(tokens, segment_ids, loss_mask, num_depths)
        return _terms(whole, output, targets, model=model, objective=objective, is_detached=is_detached), is_valid

    def overlap_of(terms, is_valid):
        return jax.lax.stop_gradient(valid_mean(terms.overlap, is_valid[1:], totals.valid[1:]))

    def loss_of(changing, rows, overlap=None):
        terms, is_valid = terms_of(changing, rows)
        overlap = add_devices(overlap_of(terms, is_valid)) if overlap is None else overlap
        whole = totals._replace(overlap=overlap)
        return objective_loss(
            terms, is_valid, mtp_scale=mtp_scale, objective=objective, progress=progress, totals=whole
        )

    changing, differentiate = trained(params, trains), jax.value_and_grad(loss_of, has_aux=True)
    if accumulation == 1:
        return differentiate(changing, batch)
    parts, overlap = split_rows(batch, accumulation), jnp.zeros(num_depths)
    if "lk_hybrid" in objective.names:
        overlap = add_devices(add_up(lambda rows: overlap_of(*terms_of(changing, rows)), parts))
    return add_up(lambda rows: differentiate(changing, rows, overlap), parts)


def split_rows(batch: Any, parts: int) -> Any:
    """Arrays `[B, ...]` as `[parts, B / parts, ...]`."""
    return jax.tree.map(lambda rows: rows.reshape(parts, -1, *rows.shape[1:]), batch)


def add_up(function: Callable[[Any], Any], parts: Any) -> Any:
    """The sum of the pytrees `function(part)`, one part in memory at a time; `parts` are stacked along a first axis."""
    first = jax.tree.map(lambda array: array[0], parts)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, first))

    def add(total, part):
        return jax.tree.map(jnp.add, total, function(part)), None

    return jax.lax.scan(add, zeros, parts)[0]


def _terms(
    params, output: DepthsOutput, targets: jax.Array, *, model: MTPModel, objective: Objective, is_detached: bool
) -> Terms:
    """From the logits; or from the hidden states, `vocab_chunk` columns at a time, when jit drops the unused logits.

    The latter may be a kernel, the model's `implementation`.
    """
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
        implementation=model.implementation,
    )
