"""Draws anchors for the block drafters DFlash and DSpark, which train on one block of drafts after each anchor.

An anchor plays the role of decoding's pending token, at column a of a packed row. Level k of its block predicts token
a+k. Terms and masks keep the layout of MTP depths, in which position i of depth k predicts token i+k+1. An anchor's
block is therefore stored at position a-1, and all other positions are invalid.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mtpjax.models.forward import DepthsOutput
from mtpjax.training.position_losses import PositionTerms

MAX_ANCHORS = 512  # per row, by default (DFlash, 2602.06036)


def draw_anchors(key: jax.Array, is_valid: jax.Array, count: int) -> jax.Array:
    """Draws each row's anchors uniformly, without replacement, from the columns whose first draft has a valid target.

    Args:
        is_valid: `[B, T]` bool, valid targets of depth 1.

    Returns:
        `[B, A]` int32 columns, A = min(count, T - 1), ascending; 0 means no anchor.
    """
    # Choose the positions with the largest noise; those without a valid target come last.
    noise = jnp.where(is_valid, jax.random.uniform(key, is_valid.shape), -1.0)
    drawn, rows = jax.lax.top_k(noise, min(count, is_valid.shape[1] - 1))
    return jnp.sort(jnp.where(drawn >= 0, rows + 1, 0), axis=1)


def to_rows(values: jax.Array, anchors: jax.Array, num_columns: int) -> jax.Array:
    """Scatters one value per anchor into rows of zeros: `[K, B, A]` to `[K, B, T]`."""
    batch = jnp.arange(len(anchors))[:, None]
    rows = jnp.where(anchors > 0, anchors - 1, num_columns)  # 0 means no anchor; scatter drops indices out of bounds
    zeros = jnp.zeros((len(values), len(anchors), num_columns), values.dtype)
    return zeros.at[:, batch, rows].set(values, mode="drop")


def keep_anchors(is_valid: jax.Array, anchors: jax.Array | None) -> jax.Array:
    """Restricts the valid targets of the depths to the anchors' positions.

    Args:
        is_valid: `[1 + depths, B, T]` bool.
        anchors: `[B, A]` from `draw_anchors`; None keeps all positions.

    Returns:
        `[1 + depths, B, T]` bool; the trunk's targets (index 0) are unchanged.
    """
    if anchors is None:
        return is_valid
    is_anchor = to_rows(jnp.ones((1, *anchors.shape), bool), anchors, is_valid.shape[2])
    return jnp.concatenate([is_valid[:1], is_valid[1:] & is_anchor])


def anchor_terms(
    compute: Callable[[DepthsOutput, jax.Array], PositionTerms],
    output: DepthsOutput,
    targets: jax.Array,
    anchors: jax.Array,
) -> PositionTerms:
    """Computes the loss terms of a block drafter. They are 0 at positions without an anchor.

    Args:
        compute: computes the terms from an MTP pass's output, with arrays `[B, T, ...]`, and its targets.
        output: the forward pass. The trunk's arrays are `[B, T, ...]`, and the levels' arrays are `[B, A, ...]`.
        targets: `[1 + K, B, T]` int32.
        anchors: `[B, A]` from `draw_anchors`.

    Returns:
        The terms: cross-entropy `[1 + K, B, T]`, KL and overlap `[K, B, T]`.
    """
    (B, A), T, K = anchors.shape, targets.shape[2], len(output.mtp_logits)
    # 1. Compute the trunk's terms at all positions.
    trunk = compute(DepthsOutput(output.logits, output.hidden, (), ()), targets[:1])
    # 2. Flatten each row's drafts into the positions of a single depth. `compute` compares position r of that depth
    # with position r + 1 of the trunk. For anchor a and level k, the trunk's prediction of token a + k is in column
    # a + k - 1.
    columns = jnp.clip(anchors[:, :, None] + jnp.arange(K)[None, None], 0, T - 1).reshape(B, A * K)

    def of_trunk(array: jax.Array) -> jax.Array:
        return jnp.pad(jnp.take_along_axis(array, columns[:, :, None], axis=1), ((0, 0), (1, 0), (0, 0)))

    def of_levels(arrays: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.pad(jnp.stack(arrays, axis=2).reshape(B, A * K, -1), ((0, 0), (0, 1), (0, 0)))

    flat = DepthsOutput(
        of_trunk(output.logits),
        of_trunk(output.hidden),
        (of_levels(output.mtp_logits),),
        (of_levels(output.mtp_hidden),),
    )
    # Take the depths' targets at position a - 1.
    rows = jnp.broadcast_to(jnp.maximum(anchors - 1, 0)[None], (K, B, A))
    drafted = jnp.moveaxis(jnp.take_along_axis(targets[1:], rows, axis=2), 0, 2).reshape(B, A * K)
    drafted = jnp.pad(drafted, ((0, 0), (0, 1)))
    terms = compute(flat, jnp.stack([jnp.zeros_like(drafted), drafted]))

    # 3. Scatter the terms back to the anchors' positions.
    def back(values: jax.Array) -> jax.Array:
        return to_rows(jnp.moveaxis(values[:, : A * K].reshape(B, A, K), 2, 0), anchors, T)

    cross_entropy = jnp.concatenate([trunk.cross_entropy, back(terms.cross_entropy[1])])
    return PositionTerms(cross_entropy, back(terms.kl[0]), back(terms.overlap[0]))
