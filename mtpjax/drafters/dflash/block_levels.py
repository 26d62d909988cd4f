"""The levels that a block of DFlash or DSpark drafts behind any anchors of whole rows: the teacher-forced pass."""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.drafters.dflash.forward import block_states
from mtpjax.drafters.dflash.network import DFlashConfig
from mtpjax.drafters.dspark.network import DSpark, DSparkConfig


class BlockLevels(flax.struct.PyTreeNode):
    """The drafts of blocks, per level: level k behind an anchor at position a predicts token a+k."""

    head_input: tuple[jax.Array, ...]  # [B, A, D] each; with a Markov head [B, A, D + r]
    confidence: jax.Array | None = None  # [K, B, A] float32 logits of the chance that a draft is accepted; DSpark's


def block_levels(
    params: Any,
    features: jax.Array,
    tokens: jax.Array,
    anchors: jax.Array,
    embedding: jax.Array,
    *,
    config: DFlashConfig,
    num_levels: int,
    segment_ids: jax.Array | None = None,
    implementation: str = "xla",
) -> BlockLevels:
    """Runs the levels that a block drafts; further arguments as in `dflash_blocks`.

    DSpark's heads read the true token before each level. At temperature 0 this is what decoding computes as far as a
    draft can be accepted: then all drafts before it are the true tokens.

    Args:
        params: parameters of `DFlash` or `DSpark`.
        features: `[B, T, n * D]`.
        tokens: `[B, T]` int32.
        anchors: `[B, A]` int32, below T.
        embedding: `[V, D]`.
        config: the architecture.
        num_levels: levels, at most the drafts of a block.
        segment_ids: `[B, T]` int32.
        implementation: what runs the kernels.

    Returns:
        The levels. A Markov head adds `x @ markov_out` to the logits `h @ head`: its levels are h and x side by side,
        for the head `block_head`.
    """
    shape = {"config": config, "segment_ids": segment_ids, "implementation": implementation}
    # 1. One pass of the block for all levels: a slot reads no draft, so no level waits for another.
    hidden = block_states(params, features, tokens, anchors, embedding, **shape)
    # The anchor's slot may have no draft.
    hidden = hidden[:, :, config.block_size - config.num_drafts :][:, :, :num_levels]
    if not isinstance(config, DSparkConfig):
        return BlockLevels(tuple(hidden[:, :, level] for level in range(num_levels)))
    # 2. DSpark's heads, which read the token before.
    (B, A), T = anchors.shape, tokens.shape[1]
    apply: Any = functools.partial(DSpark(config, implementation).apply, {"params": params})
    # The token before level k is at a + k - 1. Blocks are rows of their own from here on.
    columns = jnp.minimum(anchors[:, :, None] + jnp.arange(num_levels)[None, None], T - 1).reshape(B, -1)
    previous = jnp.take_along_axis(tokens, columns, axis=1).reshape(B * A, num_levels)
    flat = hidden.reshape(B * A, num_levels, -1)
    confidence = None
    if config.has_confidence:
        confidence = jnp.moveaxis(apply(flat, previous, method="confidence_logits").reshape(B, A, num_levels), 2, 0)
    levels, carry = [], apply(flat, method="first_carry")
    for level in range(num_levels):
        rows, tokens_before = flat[:, level : level + 1], previous[:, level : level + 1]
        if config.markov_rank:
            x, carry = apply(rows, tokens_before, carry, method="markov_features")
            rows = jnp.concatenate([rows, x], axis=-1)
        levels.append(rows.reshape(B, A, -1))
    return BlockLevels(tuple(levels), confidence)


def block_head(params: Any, head: jax.Array, config: DFlashConfig) -> jax.Array:
    """Returns the head of `block_levels`: `[D, R]`, with a Markov head `[D + r, R]`."""
    if not isinstance(config, DSparkConfig) or not config.markov_rank:
        return head
    return jnp.concatenate([head, params["markov_out"]])
