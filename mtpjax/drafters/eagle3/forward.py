"""The teacher-forced pass of an EAGLE-3 drafter over whole rows: the plain twin of drafting with a cache."""

from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.drafters.eagle3.network import Eagle3, Eagle3Config
from mtpjax.drafters.trained import DraftLevels
from mtpjax.models.forward import shift_left
from mtpjax.models.masks import full_view
from mtpjax.models.model import multiply_head
from mtpjax.models.view import Entries, Recycled


class Eagle3Levels(DraftLevels):
    """Outputs per level. Rows from T-k on of level k hold garbage."""

    recycled: tuple[jax.Array, ...] = ()  # [B, T, D] each: what the next level reads


def eagle3_levels(
    params: Any,
    features: jax.Array,
    tokens: jax.Array,
    embedding: jax.Array,
    *,
    config: Eagle3Config,
    num_levels: int,
    segment_ids: jax.Array | None = None,
    implementation: str = "xla",
) -> Eagle3Levels:
    """Runs the levels that decoding drafts, over true tokens (the training-time test of EAGLE-3, 2503.01840).

    Level 1 reads the trunk's states. Each later level reads the output of the level before. It attends to the entries
    of level 1 up to its own row, and to those of its own row in later levels, as decoding does.

    Args:
        params: parameters of `Eagle3`; "head" is the drafter's, or the trunk's.
        features: `[B, T, n * Dt]` trunk states side by side.
        tokens: `[B, T]` int32 tokens of these positions.
        embedding: `[V, D]` the embedding, the trunk's or the drafter's own.
        config: the architecture.
        num_levels: levels to run.
        segment_ids: `[B, T]` int32 documents of packed rows; 0 is padding. None: one document per row.
        implementation: what runs the kernels.

    Returns:
        The outputs of every level.
    """

    def apply(*arguments: Any, method: str) -> Any:
        return Eagle3(config, implementation).apply({"params": params}, *arguments, method=method)

    segments = jnp.ones(tokens.shape, jnp.int32) if segment_ids is None else segment_ids
    hidden = apply(features, method="fuse")
    base: tuple[Entries, ...] = ()
    levels: list[tuple[Entries, ...]] = []
    logits, inputs, recycled = [], [], []
    for level in range(1, num_levels + 1):
        # Level k reads the token k positions further, at the rotary position of its slot.
        view = full_view(config.block, segments, shift=level - 1)
        embedded = embedding[shift_left(tokens, level)]
        layers = None
        if level > 1:
            layers = tuple(Recycled(kept, tuple(each[index] for each in levels)) for index, kept in enumerate(base))
        output, hidden, entries = apply(hidden, embedded, view, layers, method="run")
        if level == 1:
            base = entries
        else:
            levels.append(entries)
        logits.append(multiply_head(output, params["head"]))
        inputs.append(output)
        recycled.append(hidden)
    return Eagle3Levels(tuple(logits), tuple(inputs), recycled=tuple(recycled))
