"""Multiplies rows by the matrix of the expert that each row chose.

Each program computes rows of one expert for one slab of output columns, and writes each row at its pair's index
(`route.py`). The output therefore needs no sort, no two programs write the same element, and repeated calls give the
same bits.

Bottleneck: reading the active experts with `route_few_tokens`, and multiplications with `route_many_tokens`.

fp8 weights are passed as `uint16`, with two columns per element, for two reasons. Tensor cores need two neighbouring
rows of a column packed together, but the path from shared memory can transpose 16-bit numbers only, not bytes. Also,
Pallas uses 32-bit offsets for arrays up to 2^32 bytes, which overflow for 2^31 or more one-byte elements, as in
DeepSeek-V3's `down`; with 16-bit elements they cannot overflow.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt
from pallas_kernels.cost import loads_from_l2
from pallas_kernels.device import call_by_platform, die_order, num_processors
from pallas_kernels.fp8 import FP8_DIVISOR, convert_fp8
from pallas_kernels.grouped_matmul.route import MIN_ROWS, Route

SHARED_MEMORY_BYTES = 60 * 1024  # per program; an MI300X has 64 KB, and three programs fit on an H100's SM


@dataclasses.dataclass(frozen=True)
class Tile:
    """The part of a weight matrix that a program multiplies by in one step.

    Attributes:
        columns: Elements per row in memory; with fp8, each element holds two columns.
        depth: Inputs.
        num_warps: Warps per program.
        num_stages: Pipeline stages.
    """

    columns: int
    depth: int
    num_warps: int
    num_stages: int


def _choose_tile(route: Route, x, weight, K, N, num_parts, num_lanes, block) -> Tile:
    """Chooses the tile for the shapes; `depth` does not depend on the number of tokens.

    With fp8, the depth is the number of terms that are summed before scaling, so a new depth would change a row's bits.
    """
    itemsize = weight.dtype.itemsize
    if route.rows_per_product == MIN_ROWS:
        # With few tokens, a step reads whole cache lines of 128 bytes, or half lines if whole lines would give too few
        # programs to keep the processors busy. fp8 needs more programs, because unpacking takes time.
        columns, depth = 128 // itemsize, 32 if itemsize == 4 else 64
        num_programs = min(route.num_pairs, route.num_experts) * pl.cdiv(N // num_lanes, columns)
        if num_programs < num_processors() * (0.75 if num_lanes == 1 else 1.5):
            columns //= 2
    else:
        # With many tokens, make the tile as large as registers can hold, because multiplication is the limit.
        columns, depth = (64 if num_parts == 2 else 128) // num_lanes, 32
    columns = max(MIN_ROWS, min(columns, pl.next_power_of_2(N // num_lanes)))
    depth = max(MIN_ROWS, min(depth, pl.next_power_of_2(K)))
    if num_lanes == 2:
        depth = min(depth, block & -block)  # a step has one scale per column, so its depth must divide the block
    # Keep as many tiles in flight as shared memory can hold; more than `max_stages` would spill registers.
    stage_bytes = depth * (
        columns * num_parts * itemsize + route.max_products * route.rows_per_product * x.dtype.itemsize
    )
    num_warps = 8 if route.rows_per_product * columns * num_parts >= 128 * 128 else 4
    max_stages = 4 if route.rows_per_product == MIN_ROWS and route.max_products == 1 else 3
    return Tile(columns, depth, num_warps, 1 + max(1, min(max_stages, SHARED_MEMORY_BYTES // stage_bytes)))


def grouped_matmul_kernel(
    route,
    x,
    weight,
    *,
    out_dtype,
    scales=None,
    block=None,
    transposed=False,
    return_products=False,
    interpret=False,
    platform=None,
) -> Any:
    """Multiplies each pair's row of x [R, K] by its expert's matrix from weight [E, K, N]; returns [n * k, N].

    Sums are float32. Rows of pairs without an expert (id of E or more) are not written.

    Args:
        route: From `route_few_tokens` or `route_many_tokens`.
        x: [R, K] with one row per pair or per token.
        weight: [E, K, N], or [E, N, K] if `transposed`. Gate and up [E, K, 2, N] give `silu(x @ gate) * (x @ up)`.
        out_dtype: Dtype of the result.
        scales: For fp8 weights, float32 in the shape of the weight but with ceil(K / block) entries along the K axis.
        transposed: The weight is [E, N, K].
        return_products: Also return the products with gate and up, for the backward pass.
        platform: "cuda" or "rocm", which differ in the order of programs; None: the platform that the call is lowered
            for.

    Returns:
        [n * k, N], and with `return_products` also the products [n * k, 2, N] in x's dtype.
    """
    E, K, N = (weight.shape[axis] for axis in ((0, 2, 1) if transposed else (0, 1, -1)))
    num_parts, num_lanes = weight.ndim - 2, 1 if scales is None else 2
    bytes_per_expert = weight.size // E * weight.dtype.itemsize
    if scales is not None:
        # Reinterpret pairs of fp8 columns as uint16 (see the module docstring); a lane is one column of a pair.
        scales = scales.reshape(E, -1, num_parts, N // 2, 2)
        weight = jax.lax.bitcast_convert_type(weight.reshape(*weight.shape[:-1], N // 2, 2), jnp.uint16)
    if not transposed:
        weight = weight.reshape(E, K, num_parts, N // num_lanes)
    tile = _choose_tile(route, x, weight, K, N, num_parts, num_lanes, block)
    if scales is not None:
        # Scales are loaded in each step, and once before the first step.
        bytes_per_expert += 4 * N * num_parts * (pl.cdiv(K, tile.depth) + 1)
    num_slabs = pl.cdiv(N // num_lanes, tile.columns)
    outputs = [jax.ShapeDtypeStruct((route.num_pairs, N // num_lanes, num_lanes), out_dtype)]
    if return_products:
        outputs.append(jax.ShapeDtypeStruct((route.num_pairs, num_parts, N), x.dtype))
    inputs = [x, weight] + ([] if scales is None else [scales])
    # The number of active experts depends on the ids. The cost estimate assumes the largest possible number, and that
    # each block reads the weights of its expert.
    max_active_experts = min(E, route.num_pairs)
    num_weight_reads = max_active_experts
    if route.max_products == 1:
        num_weight_reads = max(max_active_experts, route.num_pairs / route.rows_per_product)
    pairs_per_row = route.num_pairs // x.shape[0]
    table_bytes = sum(array.nbytes for array in route.tables)
    bytes_moved = num_weight_reads * bytes_per_expert
    bytes_moved += num_slabs * (route.num_pairs * K * x.dtype.itemsize + route.bytes_per_slab)
    # Flatten slabs x blocks into a one-dimensional grid; the kernel maps each program to its slab and block.
    grid = (num_slabs * route.num_blocks,)
    run = lambda *operands, platform: pl.pallas_call(
        functools.partial(
            _grouped_matmul_body,
            place=functools.partial(die_order, grid=grid, is_reordered=platform == "rocm" and route.l2_group > 1),
            for_each_block=route.for_each_block,
            num_tables=len(route.tables),
            l2_group=route.l2_group,
            tile=tile,
            num_slabs=num_slabs,
            depth=K,
            pairs_per_row=pairs_per_row,
            block=block,
            is_transposed=transposed,
            has_scales=scales is not None,
        ),
        out_shape=outputs,
        grid=grid,
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * route.num_pairs * K * N * num_parts,
            transcendentals=route.num_pairs * N if num_parts == 2 else 0,
            bytes_accessed=int(bytes_moved) + sum(output.size * output.dtype.itemsize for output in outputs),
        ),
        metadata=loads_from_l2(
            (x.nbytes, num_slabs * pairs_per_row), (table_bytes, num_slabs * route.bytes_per_slab // table_bytes)
        ),
        interpret=interpret,
        name="grouped_gate_up" if num_parts == 2 else "grouped_product",
    )(*operands)
    operands = (*route.tables, *inputs)
    if platform is None:
        results = call_by_platform(run, *operands, interpret=interpret, differs=route.l2_group > 1)
    else:
        results = run(*operands, platform=platform)
    out = results[0].reshape(route.num_pairs, N)
    return (out, results[1]) if return_products else out


def _grouped_matmul_body(
    *refs,
    place,
    for_each_block,
    num_tables,
    l2_group,
    tile,
    num_slabs,
    depth,
    pairs_per_row,
    block,
    is_transposed,
    has_scales,
):
    """Computes one block of rows and one slab of columns; `depth` is K, and each row of x has `pairs_per_row` pairs."""
    table_refs, (x_ref, weight_ref, *rest) = refs[:num_tables], refs[num_tables:]
    scales_ref = rest.pop(0) if has_scales else None
    out_ref, *products_ref = rest
    num_parts = 1 if is_transposed else weight_ref.shape[2]
    width, num_lanes = out_ref.shape[1:]
    # Programs for `l2_group` blocks of one slab run consecutively, so that blocks of one expert share its slab in the
    # L2 cache.
    (program,) = place(pl.program_id(0))
    slab = jax.lax.div(jax.lax.rem(program, num_slabs * l2_group), l2_group)
    row_block = jax.lax.div(program, num_slabs * l2_group) * l2_group + jax.lax.rem(program, l2_group)
    column = slab * tile.columns + jnp.arange(tile.columns)
    columns = pl.ds(slab * tile.columns, tile.columns)
    precision = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    num_steps = pl.cdiv(depth, tile.depth)
    is_even_split = depth % tile.depth == 0 and width % tile.columns == 0

    def load_weight(expert, step, part):
        """Loads a tile [depth, columns] for each lane, in x's dtype."""
        depth_index = pl.ds(step * tile.depth, tile.depth)
        is_depth = step * tile.depth + jnp.arange(tile.depth) < depth
        mask = None if is_even_split else is_depth[:, None] & (column < width)[None, :]
        if is_transposed:
            mask = None if mask is None else mask.T
            return [_load(weight_ref.at[expert, columns, depth_index], mask).T]
        loaded = _load(weight_ref.at[expert, depth_index, np.int32(part), columns], mask)
        if not has_scales:
            return [loaded]
        # Unpack the two fp8 columns; the low byte is the even column.
        halves = (loaded.astype(jnp.uint8), (loaded >> 8).astype(jnp.uint8))
        return [convert_fp8(half, x_ref.dtype) for half in halves]

    def load_scales(expert, step):
        """Loads the scales of a step [columns], for each part and lane."""
        if scales_ref is None:
            return []
        row = jax.lax.div(step * tile.depth, block)
        mask = None if width % tile.columns == 0 else column < width
        return [
            _load(scales_ref.at[expert, row, np.int32(part), columns, np.int32(lane)], mask)
            for part in range(num_parts)
            for lane in range(num_lanes)
        ]

    def body(expert, products):
        # Gather rows of x by token, which is pair // k, or by pair if x has one row per pair.
        rows = [jax.lax.div(pairs, pairs_per_row) if pairs_per_row > 1 else pairs for pairs, _ in products]

        def step(index, carry):
            sums, scales = carry
            depth_index = index * tile.depth + jnp.arange(tile.depth)
            # Load the rows of each product and one tile of weights, which all products share.
            x = []
            for row, (_, is_valid) in zip(rows, products, strict=True):
                mask = jnp.broadcast_to(is_valid[:, None], (row.size, tile.depth))
                mask = mask if depth % tile.depth == 0 else mask & (depth_index < depth)[None, :]
                x.append(plt.load(x_ref.at[row[:, None], depth_index[None, :]], mask=mask, other=0))
            tiles = [weights for part in range(num_parts) for weights in load_weight(expert, index, part)]
            # Accumulate in float32. The scale multiplies the sum of a step, not each weight.
            sums = list(sums)
            for product, part in itertools.product(range(len(products)), range(len(tiles))):
                position = product * len(tiles) + part
                partial = jnp.dot(x[product], tiles[part], precision=precision, preferred_element_type=jnp.float32)
                sums[position] += partial * scales[part][None, :] if has_scales else partial
            # Load the next step's scales now, so that their latency overlaps.
            return tuple(sums), load_scales(expert, jnp.minimum(index + 1, num_steps - 1))

        zeros = tuple(
            jnp.zeros((row.size, tile.columns), jnp.float32) for row in rows for _ in range(num_parts * num_lanes)
        )
        sums, _ = jax.lax.fori_loop(
            jnp.int32(0), jnp.int32(num_steps), step, (zeros, load_scales(expert, jnp.int32(0)))
        )
        if has_scales:
            sums = tuple(total * FP8_DIVISOR for total in sums)
        # Write each row at its pair's index; if there are gate and up, first apply SwiGLU to the float32 sums.
        for product, (pairs, is_valid) in enumerate(products):
            mask = is_valid[:, None] & (column < width)[None, :]
            for lane in range(num_lanes):
                gate_up = [sums[(product * num_parts + part) * num_lanes + lane] for part in range(num_parts)]
                for part in range(num_parts if products_ref else 0):
                    target = products_ref[0].at[pairs[:, None], np.int32(part), column[None, :]]
                    plt.store(target, gate_up[part].astype(products_ref[0].dtype), mask=mask)
                result = gate_up[0] if num_parts == 1 else gate_up[0] * jax.nn.sigmoid(gate_up[0]) * gate_up[1]
                target = out_ref.at[pairs[:, None], column[None, :], np.int32(lane)]
                plt.store(target, result.astype(out_ref.dtype), mask=mask)

    for_each_block(table_refs, row_block, body)


def _load(ref, mask):
    """Loads a ref, with 0 where the mask is false. Pass None if no mask is needed: a mask can prevent wide loads."""
    return plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=0)
