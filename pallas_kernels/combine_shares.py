"""Combines the shares that `verify_attention` splits a row's slots into: kernel and reference.

Limit: at decoding's few rows, the launch.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention_blocks import MASKED_SCORE
from pallas_kernels.backend import triton as plt
from pallas_kernels.batch_invariance import is_batch_invariant

_TILE_ELEMENTS = 8192  # of the shares that a program loads at once: 64 registers for each of 128 threads


def combine_shares_reference(outputs, log_sums, *, dtype):
    """Computes `combine_shares` in plain JAX, which defines its meaning."""
    B, K, _, T, G, width = outputs.shape
    # Each part of the columns has its own sums, because the programs' sums may differ in the last bit.
    weights = jnp.exp2(log_sums - log_sums.max(axis=3, keepdims=True))
    weights = jnp.repeat(jnp.moveaxis(weights, 0, -1), width // len(log_sums), axis=-1)
    weights = weights.reshape(outputs.shape)
    combined = (weights * outputs).sum(axis=2) / weights.sum(axis=2)
    return combined.astype(dtype).reshape(B, K, T, G, width).swapaxes(1, 2)


def combine_shares(outputs, log_sums, *, dtype, interpret=False) -> jax.Array:
    """Averages the shares of each query row, weighted by their softmax sums (flash decoding).

    The result is [B, T, K, G, Hv] in `dtype`: tokens before heads, as the next product reads them.

    Args:
        outputs: [B, K, Z, T, G, Hv] float32, the attention over each of Z shares of the slots.
        log_sums: [parts, B, K, Z, T * G] float32, the base-2 logarithm of each share's softmax sum, for each part of
            the columns.
    """
    B, K, Z, T, G, width = outputs.shape
    num_parts = len(log_sums)
    columns_per_part = width // num_parts
    # All shares are loaded at once, but within `batch_invariant` one at a time: there the order of additions must not
    # depend on their number, which the cache's capacity determines.
    shares = 1 if is_batch_invariant() else pl.next_power_of_2(Z)
    columns = min(pl.next_power_of_2(columns_per_part), max(16, _TILE_ELEMENTS // shares))
    blocks_per_part = pl.cdiv(columns_per_part, columns)
    return pl.pallas_call(
        functools.partial(
            _combine_shares_kernel,
            tile=(shares, columns),
            blocks_per_part=blocks_per_part,
            columns_per_part=columns_per_part,
            group_size=G,
        ),
        out_shape=jax.ShapeDtypeStruct((B, T, K, G, width), dtype),
        grid=(num_parts * blocks_per_part, T * G, B * K),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=3 * outputs.size,
            transcendentals=log_sums.size,
            bytes_accessed=outputs.nbytes
            + blocks_per_part * log_sums.nbytes
            + B * T * K * G * width * jnp.dtype(dtype).itemsize,
        ),
        interpret=interpret,
        name="combine_shares",
    )(outputs.reshape(B, K, Z, T * G, width), log_sums)


def _combine_shares_kernel(outputs_ref, log_sums_ref, out_ref, *, tile, blocks_per_part, columns_per_part, group_size):
    """Combines some columns of one query row; a step takes some of the shares, [shares, columns]."""
    shares, columns = tile
    num_shares, num_heads = int(outputs_ref.shape[2]), int(outputs_ref.shape[1])
    # This program's part and columns, query row, batch row and key head.
    part, block = jax.lax.div(pl.program_id(0), blocks_per_part), jax.lax.rem(pl.program_id(0), blocks_per_part)
    query, row = pl.program_id(1), pl.program_id(2)
    batch, head = jax.lax.div(row, num_heads), jax.lax.rem(row, num_heads)
    inner = block * columns + jnp.arange(columns)
    column, is_column = part * columns_per_part + inner, inner < columns_per_part

    def load(share):
        """Loads the softmax sums [shares] and outputs [shares, columns]; missing shares have weight 0."""
        is_share = share < num_shares
        log_sums = plt.load(log_sums_ref.at[part, batch, head, share, query], mask=is_share, other=-jnp.inf)
        index = jnp.broadcast_arrays(share[:, None], column[None, :])
        mask = is_share[:, None] & is_column[None, :]
        return log_sums, plt.load(outputs_ref.at[batch, head, index[0], query, index[1]], mask=mask, other=0.0)

    # Weigh each share by its softmax sum, relative to the largest.
    share = jnp.arange(shares)
    if shares >= num_shares:
        log_sums, outputs = load(share)
        weights = jnp.exp2(log_sums - jnp.max(log_sums, axis=0))
        combined = jnp.sum(weights[:, None] * outputs, axis=0) / jnp.sum(weights, axis=0)
    else:

        def add_share(index, carry):
            combined, highest, total = carry
            log_sums, outputs = load(index + share)
            log_sum, output = jnp.max(log_sums, axis=0), jnp.sum(outputs, axis=0)  # of the one share
            new_highest = jnp.maximum(highest, log_sum)
            rescale, weight = jnp.exp2(highest - new_highest), jnp.exp2(log_sum - new_highest)
            return rescale * combined + weight * output, new_highest, rescale * total + weight

        carry = jnp.zeros(columns, jnp.float32), jnp.float32(MASKED_SCORE), jnp.float32(0)
        combined, _, total = jax.lax.fori_loop(jnp.int32(0), jnp.int32(num_shares), add_share, carry)
        combined = combined / total
    token, member = jax.lax.div(query, group_size), jax.lax.rem(query, group_size)
    plt.store(out_ref.at[batch, token, head, member, column], combined.astype(out_ref.dtype), mask=is_column)
