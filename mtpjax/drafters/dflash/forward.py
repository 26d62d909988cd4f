"""Blocks after any anchors of whole rows, without a cache: the plain twin of drafting.

Training and teacher-forced predictions use it too.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.drafters.dflash.network import DFlash, DFlashConfig, context_entries
from mtpjax.models.layers.rotary import rotary_angles, softmax_scale
from mtpjax.models.masks import segment_positions
from mtpjax.models.view import Entries
from pallas_kernels.rms_norm import rms_norm_reference
from pallas_kernels.rotation import rotate

MAX_SCORES = 1 << 26  # maximum attention scores of a layer in memory at once, float32: 256 MiB


def block_states(
    params: Any,
    features: jax.Array,
    tokens: jax.Array,
    anchors: jax.Array,
    embedding: jax.Array,
    *,
    config: DFlashConfig,
    segment_ids: jax.Array | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """Runs one block after each anchor, over true tokens.

    The block of an anchor at position a attends to the trunk states of positions before a in the same document, and to
    its own slots. Blocks do not attend to each other. If they have more than `MAX_SCORES` attention scores, they run in
    groups of anchors, one at a time, and the backward pass recomputes each group.

    Args:
        params: parameters of `DFlash`, or of a network that extends it.
        features: `[B, T, n * D]` trunk states side by side.
        tokens: `[B, T]` int32 tokens of these positions.
        anchors: `[B, A]` int32 positions of the anchors, below T.
        embedding: `[V, D]` the embedding, the trunk's or the drafter's own.
        config: the architecture.
        segment_ids: `[B, T]` int32 documents of packed rows; 0 is padding. None: one document per row.
        implementation: what runs the kernels.

    Returns:
        The states that the head reads, `[B, A, X, D]`.
    """
    (B, A), T, block = anchors.shape, tokens.shape[1], config.block
    segments = jnp.ones(tokens.shape, jnp.int32) if segment_ids is None else segment_ids
    positions = segment_positions(segments)
    # 1. Keys and values of the context, once for all blocks.
    context: Any = DFlash(config, implementation).apply({"params": params}, features, method="context")
    angles = rotary_angles(block, positions)
    entries = tuple(
        context_entries(params[f"layer_{index}"]["attention"], context, angles, block)
        for index in range(block.num_hidden_layers)
    )

    # 2. The blocks of a group of anchors `[B, a]`.
    def run(anchors: jax.Array) -> jax.Array:
        first = jnp.take_along_axis(tokens, anchors, axis=1)[:, :, None]
        ids = jnp.pad(first, ((0, 0), (0, 0), (0, config.block_size - 1)), constant_values=config.mask_token_id)
        z = embedding[ids].astype(context.dtype)
        first_position = jnp.take_along_axis(positions, anchors, axis=1)
        for index, kept in enumerate(entries):
            is_seen = _visibility(config, index, anchors, segments)
            z = _block_layer(params[f"layer_{index}"], z, kept, is_seen, first_position, config)
        return rms_norm_reference(z, params["norm_final"]["scale"], eps=block.rms_norm_eps)

    scores_of_anchor = B * block.num_attention_heads * config.block_size * (T + config.block_size)
    size = max(1, MAX_SCORES // scores_of_anchor)
    if size >= A:
        return run(anchors)
    # The last group's padding repeats the last anchor.
    groups = jnp.pad(anchors, ((0, 0), (0, -A % size)), mode="edge").reshape(B, -1, size).swapaxes(0, 1)
    hidden = jax.lax.map(jax.checkpoint(run), groups)  # [groups, B, size, X, D]
    return hidden.swapaxes(0, 1).reshape(B, -1, *hidden.shape[3:])[:, :A]


def _block_layer(
    layer: dict[str, Any],
    z: jax.Array,
    context: Entries,
    is_seen: tuple[jax.Array, jax.Array],
    first_position: jax.Array,
    config: DFlashConfig,
) -> jax.Array:
    """Runs a layer over blocks.

    Args:
        layer: the layer's parameters.
        z: `[B, A, X, D]` states of the slots.
        context: the layer's keys and values of the context, from `context_entries`.
        is_seen: from `_visibility`.
        first_position: `[B, A]` int32 position of each anchor.
        config: the architecture.

    Returns:
        `[B, A, X, D]`.
    """
    block, attention = config.block, layer["attention"]
    (B, A, X, _), T = z.shape, context["key"].shape[2]
    N, H = block.num_attention_heads, block.head_dim
    slots = (first_position[:, :, None] + jnp.arange(X)[None, None]).reshape(B, A * X)

    def norm(x: jax.Array, scale: dict[str, Any]) -> jax.Array:
        return rms_norm_reference(x, scale["scale"], eps=block.rms_norm_eps)

    def turn(x: jax.Array) -> jax.Array:
        flat = x.reshape(B, A * X, -1, H)
        return rotate(flat, rotary_angles(block, slots), interleaved=block.rope_interleave).reshape(x.shape)

    # 1. Queries, keys and values of the slots.
    projected = jnp.einsum("BAXD,DKPH->BAXKPH", norm(z, layer["norm_attention"]), attention["qkv"].astype(z.dtype))
    query = turn(norm(projected[..., :-2, :], attention["norm_q"]))
    key, value = turn(norm(projected[..., -2, :], attention["norm_k"])), projected[..., -1, :]
    # 2. Scores of the context and of the block, under the layer's window and direction.
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = jnp.concatenate(
        [einsum("BAXKGH,BKTH->BAKGXT", query, context["key"]), einsum("BAXKGH,BAYKH->BAKGXY", query, key)], axis=-1
    )
    mask = jnp.concatenate([is_seen[0], jnp.broadcast_to(is_seen[1], (B, A, X, X))], axis=-1)[:, :, None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores * softmax_scale(block, H), -jnp.inf), axis=-1).astype(z.dtype)
    # 3. Add up the values, and the feed-forward layer.
    output = jnp.einsum("BAKGXT,BKTH->BAXKGH", weights[..., :T], context["value"])
    output += jnp.einsum("BAKGXY,BAYKH->BAXKGH", weights[..., T:], value)
    z += output.reshape(B, A, X, N * H) @ attention["output"].reshape(N * H, -1).astype(z.dtype)
    dense = jax.tree.map(lambda matrix: matrix.astype(z.dtype), layer["dense"])
    gated = jnp.einsum("BAXD,DPF->PBAXF", norm(z, layer["norm_feed_forward"]), dense["gate_up"])
    return z + (jax.nn.silu(gated[0]) * gated[1]) @ dense["down"]


def _visibility(
    config: DFlashConfig, index: int, anchors: jax.Array, segment_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the positions of the context `[B, A, X, T]`, and the slots `[1, 1, X, X]`, that each slot attends to."""
    window, anchor = config.windows[index], anchors[:, :, None, None]
    slots = jnp.arange(config.block_size)
    distance = slots[:, None] - slots[None, :]
    sees_block = distance >= 0 if config.is_causal[index] else jnp.ones_like(distance, bool)
    column = jnp.arange(segment_ids.shape[1])[None, None, None]
    document = jnp.take_along_axis(segment_ids, anchors, axis=1)[:, :, None, None]
    sees_context = (column < anchor) & (segment_ids[:, None, None] == document)
    if window and config.window_from_anchor:
        sees_context &= column >= anchor - window
    elif window:
        sees_context = sees_context & (column > anchor + slots[None, None, :, None] - window)
        sees_block &= jnp.abs(distance) < window
    shape = (*anchors.shape, config.block_size, segment_ids.shape[1])
    return jnp.broadcast_to(sees_context, shape), sees_block[None, None]
