"""DFlash blocks behind any anchors of whole rows, without a cache: the plain twin of drafting, in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.models.dflash import DFlashConfig
from mtpjax.models.layers.rotary import rotary_angles, softmax_scale
from mtpjax.models.model import multiply_head
from pallas_kernels.rms_norm import rms_norm_reference
from pallas_kernels.rotation import rotate


def dflash_blocks(
    params: Any,
    features: jax.Array,
    tokens: jax.Array,
    anchors: jax.Array,
    embedding: jax.Array,
    *,
    config: DFlashConfig,
    head: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs one block behind each anchor, over true tokens.

    The block of an anchor at position a sees the trunk states of positions before a, and its own slots. This is the
    layout of training, too.

    Args:
        params: parameters of `DFlash` or `DSpark`.
        features: `[B, T, n * D]` trunk states side by side.
        tokens: `[B, T]` int32 tokens of these positions.
        anchors: `[B, A]` int32 positions of the anchors.
        embedding: `[V, D]` the embedding, the trunk's or the drafter's own.
        config: the architecture.
        head: `[D, R]` the head; None: the drafter's own.

    Returns:
        The states that the head reads `[B, A, X, D]`, and their logits `[B, A, X, R]` float32, before DSpark's Markov
        head.
    """
    block, X = config.block, config.block_size
    (B, A), T = anchors.shape, features.shape[1]
    N, K, H = block.num_attention_heads, block.num_key_value_heads, block.head_dim

    def norm(x: jax.Array, scale: dict[str, Any]) -> jax.Array:
        return rms_norm_reference(x, scale["scale"], eps=block.rms_norm_eps)

    def angles(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rotary_angles(block, positions.reshape(B, -1))

    context = norm(features @ params["fc"], params["norm_context"])
    # Anchor tokens, and mask tokens behind them.
    first = jnp.take_along_axis(tokens, anchors, axis=1)
    ids = jnp.concatenate([first[:, :, None], jnp.full((B, A, X - 1), config.mask_token_id, first.dtype)], axis=2)
    z = embedding[ids].astype(context.dtype)  # [B, A, X, D]
    positions = anchors[:, :, None] + jnp.arange(X)[None, None]
    context_angles = angles(jnp.broadcast_to(jnp.arange(T)[None], (B, T)))
    block_angles = angles(positions)
    for index in range(block.num_hidden_layers):
        layer = params[f"layer_{index}"]
        attention = layer["attention"]
        # 1. Queries of the block; keys and values of the context, which has no norm here, and of the block.
        projected = jnp.einsum("BAXD,DKPH->BAXKPH", norm(z, layer["norm_attention"]), attention["qkv"])
        q = norm(projected[..., :-2, :], attention["norm_q"]).reshape(B, A * X, N, H)
        q = rotate(q, block_angles, interleaved=False).reshape(B, A, X, K, N // K, H)
        own_key = rotate(
            norm(projected[..., -2, :], attention["norm_k"]).reshape(B, A * X, K, H), block_angles, interleaved=False
        ).reshape(B, A, X, K, H)
        key, value = jnp.moveaxis(jnp.einsum("BTD,DKPH->BTKPH", context, attention["qkv"][:, :, -2:]), 3, 0)
        key = rotate(norm(key, attention["norm_k"]), context_angles, interleaved=False)
        # 2. Scores of both, under the layer's window and direction.
        sees_context, sees_block = _visibility(config, index, positions, T)
        scores = jnp.concatenate(
            [jnp.einsum("BAXKGH,BTKH->BAKGXT", q, key), jnp.einsum("BAXKGH,BAYKH->BAKGXY", q, own_key)], axis=-1
        )
        mask = jnp.concatenate([sees_context, jnp.broadcast_to(sees_block, (B, A, X, X))], axis=-1)
        weights = jax.nn.softmax(jnp.where(mask[:, :, None, None], scores * softmax_scale(block, H), -jnp.inf), axis=-1)
        # 3. Add up the values, and the feed-forward layer.
        output = jnp.einsum("BAKGXT,BTKH->BAXKGH", weights[..., :T], value)
        output += jnp.einsum("BAKGXY,BAYKH->BAXKGH", weights[..., T:], projected[..., -1, :])
        z += output.reshape(B, A, X, N * H) @ attention["output"]
        gated = jnp.einsum("BAXD,DPF->PBAXF", norm(z, layer["norm_feed_forward"]), layer["dense"]["gate_up"])
        z += (jax.nn.silu(gated[0]) * gated[1]) @ layer["dense"]["down"]
    hidden = norm(z, params["norm_final"])
    return hidden, multiply_head(hidden, params["head"] if head is None else head)


def _visibility(
    config: DFlashConfig, index: int, positions: jax.Array, num_positions: int
) -> tuple[jax.Array, jax.Array]:
    """Returns which positions of the context, and which slots, each slot of a layer sees.

    Args:
        config: the architecture.
        index: the layer.
        positions: `[B, A, X]` of the slots.
        num_positions: T.

    Returns:
        `[B, A, X, T]` and `[1, 1, X, X]` bool.
    """
    window, anchor = config.windows[index], positions[:, :, :1, None]
    slots = jnp.arange(config.block_size)
    distance = slots[:, None] - slots[None, :]
    sees_block = distance >= 0 if config.is_causal[index] else jnp.ones_like(distance, bool)
    place = jnp.arange(num_positions)[None, None, None]
    sees_context = place < anchor
    if window and config.window_from_anchor:
        sees_context &= place >= anchor - window
    elif window:
        sees_context &= place > positions[..., None] - window
        sees_block &= jnp.abs(distance) < window
    return jnp.broadcast_to(sees_context, (*positions.shape, num_positions)), sees_block[None, None]
