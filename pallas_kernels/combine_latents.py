"""Combines the shares of latent attention and applies each head's value up-projection: kernel and reference.

Limit: the bytes of the up-projections, each read once; at decoding's few rows, the launch.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt
from pallas_kernels.combine_shares import combine_shares_reference
from pallas_kernels.cost import loads_from_l2

MAX_ROWS = 64  # tokens of the batch that the kernel takes
_CHUNK = 64  # latent columns that are combined and multiplied at a time


def combine_latents_reference(outputs, log_sums, value_up, *, dtype):
    """Computes `combine_latents` in plain JAX, which defines its meaning."""
    latents = combine_shares_reference(outputs, log_sums, dtype=dtype)[:, :, 0]
    return jnp.einsum("BTNR,NRV->BTNV", latents, value_up)


def combine_latents(outputs, log_sums, value_up, *, dtype, interpret=False) -> jax.Array:
    """Averages the shares of each query, weighted by their softmax sums, and multiplies them by the head's matrix.

    Args:
        outputs: [B, 1, Z, T, N, R] float32, the attention over each of Z shares of the slots; B * T <= 64.
        log_sums: [parts, B, 1, Z, T * N] float32, the base-2 logarithm of each share's softmax sum, for each part of
            the columns.
        value_up: [N, R, V] in `dtype`. The result is [B, T, N, V] in it.
    """
    B, _, Z, T, N, R = outputs.shape
    V, n = value_up.shape[2], B * T
    # All tokens are one tile of rows, at least the 16 that tensor cores multiply.
    rows = max(16, pl.next_power_of_2(n))
    # Few rows: narrow slices of the values, for enough programs. Many rows: wide ones, because each slice repeats the
    # combination.
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
    """Computes a slice of one head's values: outputs_ref [B, Z, T, N, R], log_sums_ref [parts, B, Z, T, N]."""
    _, num_shares, _, _, R = (int(size) for size in outputs_ref.shape)
    num_parts, V = int(log_sums_ref.shape[0]), int(value_up_ref.shape[2])
    head, part_of_values = jax.lax.div(pl.program_id(0), slices), jax.lax.rem(pl.program_id(0), slices)
    row, column = jnp.arange(tile[0]), part_of_values * tile[1] + jnp.arange(tile[1])
    batch, token = jax.lax.div(row, num_tokens), jax.lax.rem(row, num_tokens)
    is_row, is_column = row < num_rows, column < V

    def combine_and_multiply(part, result):
        """Adds the product of one part of the latent's columns."""
        size = R // num_parts

        def load_log_sum(share):
            return plt.load(log_sums_ref.at[part, batch, share, token, head], mask=is_row, other=0.0)

        # The largest softmax sum, relative to which the shares are weighed, and the sum of the weights.
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
