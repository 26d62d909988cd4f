"""The teacher-forced pass of a drafter with its own parameters: the plain twin of its drafting.

The parameters are those of the trunk and, beside them, `DRAFTER`: the network of `Eagle3`, `Medusa`, `DFlash` or
`DSpark`, and `DRAFT_IDS`: the token of each column of its head, if it cannot draft all tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.drafters.dflash.block_levels import block_head, block_levels
from mtpjax.drafters.dflash.network import DFlashConfig
from mtpjax.drafters.eagle3.forward import eagle3_levels
from mtpjax.drafters.eagle3.network import Eagle3Config
from mtpjax.drafters.medusa.network import Medusa, MedusaConfig
from mtpjax.models.forward import DepthsOutput, trunk_states
from mtpjax.models.model import MTPModel, bind, multiply_head
from mtpjax.models.params import DRAFT_IDS, DRAFTER

DraftArchitecture = Eagle3Config | MedusaConfig | DFlashConfig


class DraftOutput(DepthsOutput):
    """Output of `forward_drafter`. With `anchors`, the levels' arrays are `[B, A, ...]`."""

    confidence: jax.Array | None = None  # [K, B, T or A] float32 logits of the chance of acceptance; DSpark's


def draft_layer_ids(architecture: DraftArchitecture | None) -> tuple[int, ...]:
    """Returns the trunk layers whose input states a drafter reads, beside the final state that every drafter gets."""
    return architecture.layer_ids if isinstance(architecture, Eagle3Config | DFlashConfig) else ()


def forward_drafter(
    params: dict,
    states: jax.Array,
    tokens: jax.Array,
    segment_ids: jax.Array,
    *,
    model: MTPModel,
    architecture: DraftArchitecture,
    num_depths: int,
    anchors: jax.Array | None = None,
) -> DraftOutput:
    """Runs the trunk's head and the drafter's levels over hidden states of the trunk.

    Args:
        params: parameters of the trunk and the drafter.
        states: `[B, T, (n + 1) * D]` from `trunk_states` with `draft_layer_ids(architecture)`.
        tokens: `[B, T]` int32, the tokens of those states.
        segment_ids: `[B, T]` int32 documents; 0 is padding.
        model: the trunk.
        architecture: the drafter's network.
        num_depths: levels to run; of Medusa at most its heads, of a block at most its drafts.
        anchors: `[B, A]` int32 columns of the anchors of DFlash and DSpark: the levels then have a row for each anchor,
            in which level k behind the anchor at column a predicts token a+k. None: the token behind every row.

    Returns:
        Logits over the R tokens that can be drafted, in the order of the draft ids, of the trunk and of each level. A
        softmax over the trunk's is its distribution restricted to these tokens. As in an MTP pass, row i of level k
        predicts token i+k+1.
    """
    D = model.config.hidden_size
    apply, network = bind(model, params), params[DRAFTER]
    # 1. The trunk: its final state, and its distribution over the tokens that can be drafted.
    trunk_head, *heads = draft_heads(params, model=model, architecture=architecture, num_depths=num_depths)
    hidden = apply(states[..., -D:], method="head_input_hidden")
    logits = multiply_head(hidden, trunk_head)
    # 2. Medusa: all heads read the final state.
    if isinstance(architecture, MedusaConfig):
        apply_heads: Any = functools.partial(Medusa(architecture, model.implementation).apply, {"params": network})
        inputs = tuple(apply_heads(hidden, index, method="hidden") for index in range(num_depths))
        drafted = tuple(multiply_head(state, head) for state, head in zip(inputs, heads, strict=True))
        return DraftOutput(logits, hidden, drafted, inputs)
    table = network["embedding"] if architecture.own_embedding else params["embedding"]
    table = table if model.dtype is None else table.astype(model.dtype)
    shape = {"num_levels": num_depths, "segment_ids": segment_ids, "implementation": model.implementation}
    # EAGLE-3: each level reads the output of the level before (`ttt`).
    if isinstance(architecture, Eagle3Config):
        levels = eagle3_levels(network, states[..., :-D], tokens, table, config=architecture, head=heads[0], **shape)
        return DraftOutput(logits, hidden, levels.logits, levels.head_input)
    # DFlash and DSpark: one block behind each anchor. The anchor of row i is token i + 1; the last row has none.
    if anchors is None:
        T = tokens.shape[1]
        anchors = jnp.broadcast_to(jnp.minimum(jnp.arange(1, T + 1), T - 1)[None], tokens.shape)
    blocks = block_levels(network, states[..., :-D], tokens, anchors, table, config=architecture, **shape)
    drafted = tuple(multiply_head(state, heads[0]) for state in blocks.head_input)
    return DraftOutput(logits, hidden, drafted, blocks.head_input, blocks.confidence)


def forward_with_drafter(
    params: dict,
    tokens: jax.Array,
    segment_ids: jax.Array,
    *,
    model: MTPModel,
    architecture: DraftArchitecture,
    num_depths: int,
) -> DepthsOutput:
    """Runs trunk and drafter teacher-forced over whole rows; arguments as in `forward_drafter`.

    Returns:
        Logits `[B, T, V]` over the whole vocabulary: the levels' are -inf for tokens that cannot be drafted.
    """
    layer_ids, V = draft_layer_ids(architecture), model.config.vocab_size
    states = trunk_states(params, tokens, segment_ids, model=model, layer_ids=layer_ids)
    shape = {"architecture": architecture, "num_depths": num_depths}
    output = forward_drafter(params, states, tokens, segment_ids, model=model, **shape)
    return DepthsOutput(
        bind(model, params)(output.hidden, method="logits"),
        output.hidden,
        tuple(spread_logits(params, logits, V) for logits in output.mtp_logits),
        output.mtp_hidden,
    )


def draft_heads(
    params: dict, *, model: MTPModel, architecture: DraftArchitecture, num_depths: int
) -> tuple[jax.Array, ...]:
    """Returns the heads `[D, R]` of the trunk, restricted to the draft ids, and of each of `num_depths` levels.

    The levels of a block share one, which has the rows of a Markov head below (`block_head`).
    """
    head, ids = bind(model, params)(method="head_matrix"), params.get(DRAFT_IDS)
    trunk = head if ids is None else head.T[ids].T
    network, own = params[DRAFTER], []
    for level in range(num_depths):
        if isinstance(architecture, MedusaConfig):
            own.append(network[f"output_{0 if architecture.shares_output else level}"])
            continue
        matrix = network["head"] if architecture.own_head else head
        own.append(block_head(network, matrix, architecture) if isinstance(architecture, DFlashConfig) else matrix)
    return trunk, *own


def shares_head(architecture: DraftArchitecture) -> bool:
    """Returns whether all levels of a drafter have one head."""
    return not isinstance(architecture, MedusaConfig) or architecture.shares_output


def draft_columns(params: dict, vocab_size: int) -> jax.Array | None:
    """Returns the column of each token `[V]` int32, -1 for tokens that cannot be drafted; None: column j is token j."""
    if (ids := params.get(DRAFT_IDS)) is None:
        return None
    return jnp.full(vocab_size, -1, jnp.int32).at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))


def mask_undraftable(params: dict, tokens: jax.Array, loss_mask: jax.Array, vocab_size: int) -> jax.Array:
    """Takes tokens that cannot be drafted out of a loss mask `[B, T]`.

    EAGLE-3 and SpecForge leave out positions where the trunk's arg-max cannot be drafted; on text that the trunk chose
    greedily these are the same positions.
    """
    column = draft_columns(params, vocab_size)
    return loss_mask if column is None else loss_mask & (column[tokens] >= 0)


def spread_logits(params: dict, logits: jax.Array, vocab_size: int) -> jax.Array:
    """Spreads a drafter's logits `[..., R]` over the vocabulary `[..., V]`; other tokens have -inf, so their q is 0."""
    if (ids := params.get(DRAFT_IDS)) is None:
        return logits
    return jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype).at[..., ids].set(logits)
