"""Kernels and references that combine the shares into which `verify_attention` splits a row's slots.

Bottleneck: the launch, because decoding has few rows. `combine_latents` also applies each head's value up-projection;
its bottleneck is reading these weights once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention_blocks import MASKED_SCORE
from pallas_kernels.backend import triton as plt
from pallas_kernels.batch_invariance import is_batch_invariant
from pallas_kernels.cost import loads_from_l2

MAX_LATENT_ROWS = 64  # maximum tokens in the batch for the kernel of `combine_latents`
_CHUNK = 64  # latent columns that are combined and multiplied at a time
_TILE_ELEMENTS = 8192  # elements of shares that a program loads at once: 64 registers for each of 128 threads


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

    The result is [B, T, K, G, Hv] in `dtype`, with tokens before heads because the next product needs this order.

    Args:
        outputs: [B, K, Z, T, G, Hv] float32, the attention over each of Z shares of the slots.
        log_sums: [parts, B, K, Z, T * G] float32, the base-2 logarithm of each share's softmax sum, for each part of
            the columns.
    """
    B, K, Z, T, G, width = outputs.shape
    num_parts = len(log_sums)
    columns_per_part = width // num_parts
    # Load all shares at once or, inside `batch_invariant`, one at a time, because then the order of additions must not
    # depend on the number of shares, which follows from the cache's capacity.
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
    """Combines some columns of one query row; each step processes some of the shares, [shares, columns]."""
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

    # Weight each share by its softmax sum relative to the largest sum.
    share = jnp.arange(shares)
    if shares >= num_shares:
        log_sums, outputs = load(share)
        weights = jnp.exp2(log_sums - jnp.max(log_sums, axis=0))
        combined = jnp.sum(weights[:, None] * outputs, axis=0) / jnp.sum(weights, axis=0)
    else:

        def add_share(index, carry):
            combined, highest, total = carry
            log_sums, outputs = load(index + share)
            log_sum, output = jnp.max(log_sums, axis=0), jnp.sum(outputs, axis=0)  # of the single share
            new_highest = jnp.maximum(highest, log_sum)
            rescale, weight = jnp.exp2(highest - new_highest), jnp.exp2(log_sum - new_highest)
            return rescale * combined + weight * output, new_highest, rescale * total + weight

        carry = jnp.zeros(columns, jnp.float32), jnp.float32(MASKED_SCORE), jnp.float32(0)
        combined, _, total = jax.lax.fori_loop(jnp.int32(0), jnp.int32(num_shares), add_share, carry)
        combined = combined / total
    token, member = jax.lax.div(query, group_size), jax.lax.rem(query, group_size)
    plt.store(out_ref.at[batch, token, head, member, column], combined.astype(out_ref.dtype), mask=is_column)


def combine_latents_reference(outputs, log_sums, value_up, *, dtype):
    """Computes `combine_latents` in plain JAX, which defines its meaning."""
    latents = combine_shares_reference(outputs, log_sums, dtype=dtype)[:, :, 0]
    return jnp.einsum("BTNR,NRV->BTNV", latents, value_up)


def combine_latents(outputs, log_sums, value_up, *, dtype, interpret=False) -> jax.Array:
    """Averages the shares of each query, weighted by softmax sums, and multiplies the average by the head's matrix.

    Args:
        outputs: [B, 1, Z, T, N, R] float32, the attention over each of Z shares of the slots; B * T <= 64.
        log_sums: [parts, B, 1, Z, T * N] float32, the base-2 logarithm of each share's softmax sum, for each part of
            the columns.
        value_up: [N, R, V] in `dtype`. The result is [B, T, N, V] in `dtype`.
    """
    B, _, Z, T, N, R = outputs.shape
    V, n = value_up.shape[2], B * T
    # All tokens form one tile of at least 16 rows, the minimum for tensor cores.
    rows = max(16, pl.next_power_of_2(n))
    # For few rows, use narrow slices of the values to get enough programs. For many rows, use wide slices, because each
    # slice repeats the combination.
    columns = min(max(16, pl.next_power_of_2(V)), 32 if rows == 16 else 128)
    slices = pl.cdiv(V, columns)
    shares_bytes = outputs.nbytes + 2 * log_sums.nbytes
    return pl.pallas_call(
        functools.partial(
            _combine_latents_kernel, tile=(rows, columns), slices=slices, num_rows=n, num_tokens=T, dtype=dtype
        ),
        out_shape=jax.ShapeDtypeStruct((B, T, N, V), dtype),
        grid=(N * slices,),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * N * R * V + 2 * slices * outputs.size,
            transcendentals=slices * Z * n * N,
            bytes_accessed=value_up.nbytes + slices * shares_bytes + n * N * V * jnp.dtype(dtype).itemsize,
        ),
        metadata=loads_from_l2((outputs.nbytes, slices), (log_sums.nbytes, 2 * slices)),
        interpret=interpret,
        name="combine_latents",
    )(outputs.reshape(B, Z, T, N, R), log_sums.reshape(len(log_sums), B, Z, T, N), value_up)


def _combine_latents_kernel(
    outputs_ref, log_sums_ref, value_up_ref, out_ref, *, tile, slices, num_rows, num_tokens, dtype
):
    """Computes a slice of one head's values from outputs_ref [B, Z, T, N, R] and log_sums_ref [parts, B, Z, T, N]."""
    _, num_shares, _, _, R = (int(size) for size in outputs_ref.shape)
    num_parts, V = int(log_sums_ref.shape[0]), int(value_up_ref.shape[2])
    head, part_of_values = jax.lax.div(pl.program_id(0), slices), jax.lax.rem(pl.program_id(0), slices)
    row, column = jnp.arange(tile[0]), part_of_values * tile[1] + jnp.arange(tile[1])
    batch, token = jax.lax.div(row, num_tokens), jax.lax.rem(row, num_tokens)
    is_row, is_column = row < num_rows, column < V

    def combine_and_multiply(part, result):
        """Adds the product for one part of the latent's columns."""
        size = R // num_parts

        def load_log_sum(share):
            return plt.load(log_sums_ref.at[part, batch, share, token, head], mask=is_row, other=0.0)

        # Find the largest softmax sum, relative to which the shares are weighted, and the sum of the weights.
        def add_weight(share, carry):
            highest, total = carry
            log_sum = load_log_sum(share)
            new_highest = jnp.maximum(highest, log_sum)
            return new_highest, total * jnp.exp2(highest - new_highest) + jnp.exp2(log_sum - new_highest)

        first = load_log_sum(jnp.int32(0))
        shares = jnp.int32(1), jnp.int32(num_shares)
        highest, total = jax.lax.fori_loop(*shares, add_weight, (first, jnp.ones_like(first)))

        # Average a chunk of latent columns over the shares, and multiply it by the head's matrix.
        def add_chunk(index, result):
            inner = index * _CHUNK + jnp.arange(_CHUNK)
            latent, is_latent = part * size + inner, inner < size
            mask = is_row[:, None] & is_latent[None, :]

            def add_share(share, combined):
                where = jnp.broadcast_arrays(batch[:, None], token[:, None], latent[None, :])
                outputs = plt.load(outputs_ref.at[where[0], share, where[1], head, where[2]], mask=mask, other=0.0)
                return combined + jnp.exp2(load_log_sum(share) - highest)[:, None] * outputs

            combined = jnp.zeros((tile[0], _CHUNK), jnp.float32)
            combined = jax.lax.fori_loop(jnp.int32(0), jnp.int32(num_shares), add_share, combined) / total[:, None]
            where = jnp.broadcast_arrays(latent[:, None], column[None, :])
            up = plt.load(value_up_ref.at[head, *where], mask=is_latent[:, None] & is_column[None, :], other=0.0)
            precision = jax.lax.Precision.HIGHEST
            return result + jnp.dot(combined.astype(dtype), up, precision=precision, preferred_element_type=jnp.float32)

        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(pl.cdiv(size, _CHUNK)), add_chunk, result)

    # Each part of the latent's columns has its own softmax sums.
    result = jnp.zeros(tile, jnp.float32)
    for part in range(num_parts):
        result = combine_and_multiply(jnp.int32(part), result)
    where = jnp.broadcast_arrays(batch[:, None], token[:, None], column[None, :])
    plt.store(
        out_ref.at[where[0], where[1], head, where[2]],
        result.astype(out_ref.dtype),
        mask=is_row[:, None] & is_column[None, :],
    )
