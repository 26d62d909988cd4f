"""Runs a trunk and a drafter with its own network in a teacher-forced pass, the reference for drafting."""

import jax
import jax.numpy as jnp

from mtpjax.drafters.trained import TextRows, TrainedDrafter
from mtpjax.models.forward import DepthsOutput, trunk_states
from mtpjax.models.model import MTPModel, bind, multiply_head
from mtpjax.models.params import DRAFT_IDS, DRAFTER


class DraftOutput(DepthsOutput):
    """Output of `forward_drafter`. With `anchors`, the levels' arrays are `[B, A, ...]`."""

    confidence: jax.Array | None = None  # [K, B, T or A] float32 logits of the acceptance probability


def forward_drafter(
    params: dict,
    states: jax.Array,
    tokens: jax.Array,
    segment_ids: jax.Array,
    *,
    model: MTPModel,
    drafter: TrainedDrafter,
    num_depths: int,
    anchors: jax.Array | None = None,
) -> DraftOutput:
    """Runs the trunk's head and the drafter's levels over the trunk's hidden states.

    Args:
        params: parameters of the trunk and the drafter.
        states: `[B, T, (n + 1) * D]` from `trunk_states`, for the layers that the drafter's architecture reads.
        tokens: `[B, T]` int32 tokens at these positions.
        segment_ids: `[B, T]` int32 document ids; 0 is padding.
        model: the trunk.
        drafter: the drafter.
        num_depths: number of levels to run.
        anchors: `[B, A]` int32 columns of a block drafter's anchors. Each level then has one row per anchor, and level
            k of the anchor at column a predicts token a+k. If None, the anchor of row i is token i+1.

    Returns:
        The logits of the trunk and of each level for the R tokens that can be drafted, in the order of the draft ids.
        The softmax of the trunk's logits is the trunk's distribution restricted to these tokens. As in an MTP pass, row
        i of level k predicts token i+k+1.
    """
    # 1. Compute the trunk's final state, and its distribution over the tokens that can be drafted.
    trunk_head, *heads = draft_heads(params, model=model, drafter=drafter, num_depths=num_depths)
    hidden = bind(model, params)(states[..., -model.config.hidden_size :], method="head_input_hidden")
    logits = multiply_head(hidden, trunk_head)
    # 2. Run the drafter.
    rows = TextRows(states, hidden, tokens, segment_ids, anchors)
    levels = drafter.levels(params, rows, tuple(heads), model=model, num_levels=num_depths)
    return DraftOutput(logits, hidden, levels.logits, levels.head_input, levels.confidence)


def forward_with_drafter(
    params: dict,
    tokens: jax.Array,
    segment_ids: jax.Array,
    *,
    model: MTPModel,
    drafter: TrainedDrafter,
    num_depths: int,
) -> DepthsOutput:
    """Runs the trunk and the drafter teacher-forced over whole rows, with the arguments of `forward_drafter`.

    Returns:
        Logits `[B, T, V]` over the whole vocabulary. The levels' logits are -inf for tokens that cannot be drafted.
    """
    V, layer_ids = model.config.vocab_size, read_layers(drafter)
    states = trunk_states(params, tokens, segment_ids, model=model, layer_ids=layer_ids)
    output = forward_drafter(params, states, tokens, segment_ids, model=model, drafter=drafter, num_depths=num_depths)
    return DepthsOutput(
        bind(model, params)(output.hidden, method="logits"),
        output.hidden,
        tuple(spread_logits(params, logits, V) for logits in output.mtp_logits),
        output.mtp_hidden,
    )


def read_layers(drafter: TrainedDrafter | None) -> tuple[int, ...]:
    """Returns the trunk layers whose input states a drafter reads; () for MTP modules (`drafter` is None)."""
    return () if drafter is None else drafter.architecture.layer_ids


def draft_heads(params: dict, *, model: MTPModel, drafter: TrainedDrafter, num_depths: int) -> tuple[jax.Array, ...]:
    """Returns the trunk's head `[D, R]`, restricted to the draft ids, followed by `TrainedDrafter.heads`."""
    head, ids = bind(model, params)(method="head_matrix"), params.get(DRAFT_IDS)
    trunk = head if ids is None else head.T[ids].T
    return (trunk, *drafter.heads(params[DRAFTER], head, num_depths)) if num_depths else (trunk,)


def draft_columns(params: dict, vocab_size: int) -> jax.Array | None:
    """Returns each token's column, `[V]` int32, or -1 if it cannot be drafted; returns None if column j is token j."""
    if (ids := params.get(DRAFT_IDS)) is None:
        return None
    return jnp.full(vocab_size, -1, jnp.int32).at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))


def mask_undraftable(params: dict, tokens: jax.Array, loss_mask: jax.Array, vocab_size: int) -> jax.Array:
    """Removes tokens that cannot be drafted from a loss mask `[B, T]`.

    EAGLE-3 and SpecForge instead drop positions where the trunk's arg-max token cannot be drafted. In text that the
    trunk generated greedily, these are the same positions.
    """
    column = draft_columns(params, vocab_size)
    return loss_mask if column is None else loss_mask & (column[tokens] >= 0)


def spread_logits(params: dict, logits: jax.Array, vocab_size: int) -> jax.Array:
    """Scatters a drafter's logits `[..., R]` to the vocabulary `[..., V]`; other tokens get -inf, so their q is 0."""
    if (ids := params.get(DRAFT_IDS)) is None:
        return logits
    return jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype).at[..., ids].set(logits)
