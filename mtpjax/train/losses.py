"""Depth-k losses: pure functions of logits and tokens."""

import jax
import jax.numpy as jnp

from mtpjax.model import ForwardOutput, shift_left


def depth_targets(
    tokens: jax.Array, segment_ids: jax.Array, loss_mask: jax.Array, depth: int
) -> tuple[jax.Array, jax.Array]:
    """Targets of `depth` (0: the trunk) and which count, both `[B, T]`.

    Position i aims at t[i+depth+1], which counts if it lies in the row and in the same document, and is not masked: the
    mask belongs to the target. Documents are contiguous, so equal segment ids at both ends suffice.
    """
    there = shift_left(segment_ids, depth + 1)
    is_valid = (there == segment_ids) & (segment_ids != 0) & shift_left(loss_mask, depth + 1)
    return shift_left(tokens, depth + 1), is_valid


def cross_entropy(logits: jax.Array, targets: jax.Array, is_valid: jax.Array) -> jax.Array:
    """Mean of `-log softmax(logits)[target]` in nats over the valid positions; 0 where there are none.

    `logits [B, T, V]`, the others `[B, T]`.
    """
    picked = jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]
    loss = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.where(is_valid, loss, 0).sum() / jnp.maximum(is_valid.sum(), 1)


def multi_depth_loss(
    output: ForwardOutput,
    tokens: jax.Array,
    segment_ids: jax.Array,
    loss_mask: jax.Array,
    *,
    mtp_scale: jax.Array | float,
) -> tuple[jax.Array, jax.Array]:
    """`L_main + mtp_scale / D * sum_k L_k` (DeepSeek-V3, equation 25), and the D+1 losses by themselves.

    Each is a mean over its valid targets, whatever their number (Megatron's normalisation, not the paper's by T).
    """
    losses = [
        cross_entropy(logits, *depth_targets(tokens, segment_ids, loss_mask, depth))
        for depth, logits in enumerate((output.logits, *output.mtp_logits))
    ]
    depths = losses[1:]
    total = losses[0] + mtp_scale * sum(depths, start=jnp.zeros(())) / max(len(depths), 1)
    return total, jnp.stack(losses)


def mtp_scale_at(progress: float, *, scale: float, final: float, switch: float) -> float:
    """Lambda at `progress` 0..1 of a run: `scale`, then `final` (DeepSeek-V3: 0.3, and 0.1 for the last third)."""
    return scale if progress < switch else final
