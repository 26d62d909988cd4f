"""Sums outer products of rows over each expert's pairs, which gives the gradients of the experts' weights.

Bottleneck: multiplications.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt
from pallas_kernels.grouped_matmul.route import MIN_ROWS


def grouped_outer_product(route, expert_starts, left, right, *, out_dtype, interpret=False):
    """Sums `left^T right`, [R, A] and [R, B], over each expert's pairs; returns [E, A, B], 0 for experts without pairs.

    `route` and `expert_starts [E + 1]` are from `route_many_tokens`. `left` and `right` have one row per pair or per
    token. Sums are float32; the result has dtype `out_dtype`.
    """
    A, B = left.shape[1], right.shape[1]
    # The result's tile is as large as registers can hold; each step adds `depth` pairs.
    max_size, depth = (32, 16) if left.dtype == jnp.float32 else (128, 32)
    tile = [max(MIN_ROWS, min(max_size, pl.next_power_of_2(size))) for size in (A, B)]
    num_slabs = pl.cdiv(A, tile[0]), pl.cdiv(B, tile[1])
    itemsize, (num_pairs, num_experts) = left.dtype.itemsize, (route.num_pairs, route.num_experts)
    output = jax.ShapeDtypeStruct((num_experts, A, B), out_dtype)
    bytes_read = num_pairs * (itemsize * (A * num_slabs[1] + B * num_slabs[0]) + 4 * num_slabs[0] * num_slabs[1])
    # The grid is experts x tiles of the result.
    return pl.pallas_call(
        functools.partial(
            _outer_product_body,
            tile=tile,
            num_slabs=num_slabs,
            depth=depth,
            pairs_per_row=(num_pairs // left.shape[0], num_pairs // right.shape[0]),
        ),
        out_shape=output,
        grid=(num_experts * num_slabs[0] * num_slabs[1],),
        compiler_params=plt.CompilerParams(num_warps=8 if min(tile) >= 128 else 4, num_stages=4),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_pairs * A * B,
            transcendentals=0,
            bytes_accessed=bytes_read + output.size * output.dtype.itemsize,
        ),
        interpret=interpret,
        name="grouped_outer",
    )(route.tables[0], expert_starts, left, right)


def _outer_product_body(
    order_ref, expert_starts_ref, left_ref, right_ref, out_ref, *, tile, num_slabs, depth, pairs_per_row
):
    """Computes one tile of one expert's sum; `pairs_per_row` are the numbers of pairs per row of left and of right."""
    program = pl.program_id(0)
    expert = jax.lax.div(program, num_slabs[0] * num_slabs[1])
    tile_index = jax.lax.rem(jax.lax.div(program, num_slabs[1]), num_slabs[0]), jax.lax.rem(program, num_slabs[1])
    columns = [number * size + jnp.arange(size) for number, size in zip(tile_index, tile, strict=True)]
    is_inside_axis = [column < size for column, size in zip(columns, out_ref.shape[1:], strict=True)]
    # The expert's pairs are neighbours in sorted order; an expert without pairs runs no step and stores zeros.
    begin, end = plt.load(expert_starts_ref.at[expert]), plt.load(expert_starts_ref.at[expert + 1])
    precision = jax.lax.Precision.HIGHEST if left_ref.dtype == jnp.float32 else None

    def step(index, total):
        # Gather `depth` rows of left and right by pair or token, with zeros beyond the expert's last pair, and
        # accumulate in float32.
        start = begin + index * depth
        is_valid = start + jnp.arange(depth) < end
        pairs = plt.load(order_ref.at[pl.ds(start, depth)], mask=is_valid, other=0)
        left, right = (
            plt.load(
                ref.at[jax.lax.div(pairs, np.int32(each))[:, None], column[None, :]],
                mask=is_valid[:, None] & is_inside[None, :],
                other=0,
            )
            for ref, each, column, is_inside in zip(
                (left_ref, right_ref), pairs_per_row, columns, is_inside_axis, strict=True
            )
        )
        return total + jnp.dot(left.T, right, precision=precision, preferred_element_type=jnp.float32)

    steps = jax.lax.div(end - begin + (depth - 1), jnp.int32(depth))
    total = jax.lax.fori_loop(jnp.int32(0), steps, step, jnp.zeros(tile, jnp.float32))
    out_tile = out_ref.at[expert, pl.ds(tile_index[0] * tile[0], tile[0]), pl.ds(tile_index[1] * tile[1], tile[1])]
    plt.store(out_tile, total.astype(out_ref.dtype), mask=is_inside_axis[0][:, None] & is_inside_axis[1][None, :])
