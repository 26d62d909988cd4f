"""The kernels behind `grouped_matmul`: products of rows with the matrix of the expert that each row chose.

A pair is token t with its choice j; its number is `t * k + j`. Each program takes rows of one expert and one slab of
output columns, and writes each row at its pair's number. So the output needs no sort, no two programs write the same
element, and the same call gives the same bits.

A `Route` assigns rows to programs. `route_few` finds them inside the kernel: one program per pair and slab scans all
ids and continues only if its pair is the first with this expert. An expert is read once, and no other kernel has to run
before. `route_many` makes a table from the sorted ids: one program per block of rows and slab.

Limit: with `route_few` the bytes of the active experts, with `route_many` multiplications.

fp8 weights enter as `uint16`, two columns each, for two reasons. Tensor cores need two neighbouring rows of a column
side by side, and the path from shared memory transposes 16-bit numbers but not bytes. And Pallas uses 32-bit offsets
for arrays up to 2^32 bytes, which overflow for 2^31 or more one-byte elements, as in DeepSeek-V3's `down`; with 16-bit
elements they cannot.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.cost import loads_from_l2

ROWS = 16  # rows per product for few tokens: the fewest that tensor cores take
SHARED = 60 * 1024  # bytes of shared memory per program: an MI300X has 64 KB, and three programs fit an H100's SM


@dataclasses.dataclass(frozen=True)
class Route:
    """Assigns pairs to programs.

    Attributes:
        arrays: The kernel's first inputs.
        visit: Called in the kernel with the refs of `arrays`, a block number and a body; calls `body(expert, [(pairs
            [rows], is_valid [rows]), ...])` for the rows of that block.
        num_experts: E.
        num_pairs: n * k.
        num_blocks: Programs per slab of columns.
        rows: Rows per product.
        groups: Products per program and weight tile, at most.
        together: Blocks whose programs for one slab run next to each other and share it in the L2 cache.
        loads: Bytes of `arrays` that the programs of one slab read.
    """

    arrays: tuple[jax.Array, ...]
    visit: Callable
    num_experts: int
    num_pairs: int
    num_blocks: int
    rows: int
    groups: int
    together: int
    loads: int


def route_few(ids, num_experts: int) -> Route:
    """Routes ids [n, k] int32: one block per pair; the first pair with an expert takes all of the expert's rows.

    Products have 16 rows however many tokens chose the expert, so a row's sums do not depend on other rows. Registers
    hold two products per pass over the weights, so an expert that more than 32 tokens chose is read twice.
    """
    num_tokens, k = ids.shape
    num_pairs = num_tokens * k
    padded = pl.next_power_of_2(num_pairs)
    groups = min(2, pl.cdiv(num_tokens, ROWS))

    def visit(refs, block, body):
        (ids_ref,) = refs
        # Find the pairs that chose the same expert as this program's pair. Only the first of them continues, so that
        # each active expert is read by one program per slab.
        place = jnp.arange(padded)
        expert = plt.load(ids_ref.at[block])
        is_mine = plt.load(ids_ref.at[place], mask=place < num_pairs, other=num_experts) == expert
        so_far = jnp.cumsum(is_mine.astype(jnp.int32))
        count = jnp.sum(is_mine.astype(jnp.int32))
        is_first = jnp.sum((is_mine & (place < block)).astype(jnp.int32)) == 0
        is_active = is_first & (expert < num_experts)

        def take(begin, groups):
            """Processes the expert's rows from number `begin` on."""
            taken = []
            for group in range(groups):
                row = begin + group * ROWS + jnp.arange(ROWS)
                # The expert's r-th pair is at the place before which the running count is at most r.
                pairs = jnp.sum((so_far[None, :] <= row[:, None]).astype(jnp.int32), axis=1)
                taken.append((jnp.where(row < count, pairs, num_pairs), row < count))
            body(expert, taken)

        def take_all():
            passes = jax.lax.div(count + (groups * ROWS - 1), jnp.int32(groups * ROWS))
            jax.lax.fori_loop(jnp.int32(0), passes, lambda i, _: take(i * (groups * ROWS), groups), None)

        # Up to 16 tokens need one pass of one product. With more, an expert of at most 16 rows takes one product, and a
        # larger one takes passes of two. A token may choose an expert several times, hence the loop in both cases.
        if groups == 1:
            pl.when(is_active)(take_all)
        else:
            pl.when(is_active & (count <= ROWS))(lambda: take(0, 1))
            pl.when(is_active & (count > ROWS))(take_all)

    return Route(
        arrays=(ids.reshape(-1),),
        visit=visit,
        num_experts=num_experts,
        num_pairs=num_pairs,
        num_blocks=num_pairs,
        rows=ROWS,
        groups=groups,
        together=1,
        loads=4 * num_pairs * (num_pairs + 1),
    )


def route_many(ids, num_experts: int, most_rows: int = 128) -> tuple[Route, jax.Array]:
    """Routes ids [n, k] int32 by a table of blocks of pairs that are sorted by expert.

    Returns:
        The route, and the place among the sorted pairs at which each expert's begin, [E + 1].
    """
    # As many rows per block as an average expert fills, within the registers' limit.
    num_pairs, together = ids.size, 8
    rows = next(
        rows for rows in (128, 64, 32, ROWS) if rows <= most_rows and (rows * num_experts <= num_pairs or rows == ROWS)
    )
    # Sort the pairs by expert. Ids of E or more sort to the end, and `bincount` drops them.
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    begins = jnp.pad(jnp.cumsum(counts), (1, 0)).astype(jnp.int32)
    # Cut each expert's pairs into blocks. Their number is static: an upper bound, rounded up to whole groups.
    blocks = -(-counts // rows)
    ends = jnp.cumsum(blocks)
    num_blocks = pl.cdiv(num_pairs // rows + min(num_experts, num_pairs), together) * together
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    # For each block: its expert, its first pair, and its number of rows, 0 for blocks beyond the last.
    owner = jnp.searchsorted(ends, block, side="right").astype(jnp.int32)
    own = owner.clip(max=num_experts - 1)
    begin = begins[own] + (block - (ends - blocks)[own]) * rows
    num_rows = jnp.where(owner < num_experts, begins[own + 1] - begin, 0).astype(jnp.int32)

    def visit(refs, block, body):
        order_ref, owner_ref, begin_ref, num_rows_ref = refs
        num_rows = plt.load(num_rows_ref.at[block])

        @pl.when(num_rows > 0)
        def _():
            # The block's pairs in sorted order; invalid rows name the pair beyond the last.
            row = jnp.arange(rows)
            is_valid = row < num_rows
            place = pl.ds(plt.load(begin_ref.at[block]), rows)
            pairs = plt.load(order_ref.at[place], mask=is_valid, other=num_pairs)
            body(plt.load(owner_ref.at[block]), [(pairs, is_valid)])

    route = Route(
        arrays=(order, owner, begin.astype(jnp.int32), num_rows),
        visit=visit,
        num_experts=num_experts,
        num_pairs=num_pairs,
        num_blocks=num_blocks,
        rows=rows,
        groups=1,
        together=together,
        loads=4 * (num_pairs + 3 * num_blocks),
    )
    return route, begins


@dataclasses.dataclass(frozen=True)
class Tile:
    """The part of a weight matrix that a program multiplies by in one step.

    Attributes:
        columns: Elements in memory; with fp8 each holds two columns.
        depth: Inputs.
        warps: Warps per program.
        stages: Pipeline stages.
    """

    columns: int
    depth: int
    warps: int
    stages: int


def _tile(route: Route, x, weight, K, N, parts, lanes, block) -> Tile:
    """Chooses the tile by shapes; `depth` does not depend on the number of tokens.

    In fp8 the depth decides how many terms are summed before the scale is applied, so it would change a row's bits.
    """
    itemsize = weight.dtype.itemsize
    if route.rows == ROWS:
        # Few tokens: a step reads whole cache lines of 128 bytes, or half lines where whole ones would give too few
        # programs to keep an H100's 132 SMs busy. fp8 needs more programs, because unpacking takes time.
        columns, depth = 128 // itemsize, 32 if itemsize == 4 else 64
        if min(route.num_pairs, route.num_experts) * pl.cdiv(N // lanes, columns) < (100 if lanes == 1 else 200):
            columns //= 2
    else:
        # Many tokens: as large as the registers hold, since multiplication is the limit.
        columns, depth = (64 if parts == 2 else 128) // lanes, 32
    columns = max(ROWS, min(columns, pl.next_power_of_2(N // lanes)))
    depth = max(ROWS, min(depth, pl.next_power_of_2(K)))
    if lanes == 2:
        depth = min(depth, block & -block)  # a step has one scale per column, so its depth divides the block
    # Stages: as many tiles in flight as shared memory holds; more than `most` would spill registers.
    step = depth * (columns * parts * itemsize + route.groups * route.rows * x.dtype.itemsize)
    warps = 8 if route.rows * columns * parts >= 128 * 128 else 4
    most = 4 if route.rows == ROWS and route.groups == 1 else 3
    return Tile(columns, depth, warps, 1 + max(1, min(most, SHARED // step)))


def product(
    route, x, weight, *, out_dtype, scales=None, block=None, transposed=False, keep=False, interpret=False
) -> Any:
    """Multiplies each pair's row by its expert's matrix: x [R, K], weight [E, K, N] -> [n * k, N].

    Sums are float32. Rows of pairs without an expert (id of E or more) are not written.

    Args:
        route: A route of either kind.
        x: [R, K] with a row for each pair or for each token.
        weight: [E, K, N]; [E, N, K] if `transposed`; or gate and up [E, K, 2, N], which give `silu(x gate) * (x up)`.
        out_dtype: Dtype of the result.
        scales: float32 for fp8 weights [..., K, ...]: [..., ceil(K / block), ...], otherwise of the same shape.
        block: Number of inputs that share a scale.
        transposed: The weight is [E, N, K].
        keep: Also return the products with gate and up, for the backward pass.
        interpret: Run in Pallas's interpreter.

    Returns:
        [n * k, N], and with `keep` also the products [n * k, 2, N] in x's dtype.
    """
    E, K, N = (weight.shape[axis] for axis in ((0, 2, 1) if transposed else (0, 1, -1)))
    parts, lanes = weight.ndim - 2, 1 if scales is None else 2
    weights_size = weight.size // E * weight.dtype.itemsize
    if scales is not None:
        # Reinterpret pairs of fp8 columns as uint16 (see the module docstring); a lane is one of the two.
        scales = scales.reshape(E, -1, parts, N // 2, 2)
        weight = jax.lax.bitcast_convert_type(weight.reshape(*weight.shape[:-1], N // 2, 2), jnp.uint16)
    if not transposed:
        weight = weight.reshape(E, K, parts, N // lanes)
    tile = _tile(route, x, weight, K, N, parts, lanes, block)
    if scales is not None:
        weights_size += 4 * N * parts * (pl.cdiv(K, tile.depth) + 1)  # loaded in each step, and once before the first
    slabs = pl.cdiv(N // lanes, tile.columns)
    outputs = [jax.ShapeDtypeStruct((route.num_pairs, N // lanes, lanes), out_dtype)]
    if keep:
        outputs.append(jax.ShapeDtypeStruct((route.num_pairs, parts, N), x.dtype))
    inputs = [x, weight] + ([] if scales is None else [scales])
    # Only the ids know how many experts are active. The cost assumes as many as possible, read again for each block.
    touched = min(E, route.num_pairs)
    visits = max(touched, route.num_pairs / route.rows) if route.groups == 1 else touched
    choices = route.num_pairs // x.shape[0]
    tables = sum(array.nbytes for array in route.arrays)
    moved = visits * weights_size + route.num_pairs * slabs * K * x.dtype.itemsize + route.loads * slabs
    # Grid: slabs x blocks in one dimension; the kernel orders them.
    made = pl.pallas_call(
        functools.partial(
            _product_kernel,
            visit=route.visit,
            num_arrays=len(route.arrays),
            together=route.together,
            tile=tile,
            slabs=slabs,
            depth=K,
            choices=choices,
            block=block,
            is_transposed=transposed,
            has_scales=scales is not None,
        ),
        out_shape=outputs,
        grid=(slabs * route.num_blocks,),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * route.num_pairs * K * N * parts,
            transcendentals=route.num_pairs * N if parts == 2 else 0,
            bytes_accessed=int(moved) + sum(output.size * output.dtype.itemsize for output in outputs),
        ),
        metadata=loads_from_l2((x.nbytes, slabs * choices), (tables, slabs * route.loads // tables)),
        interpret=interpret,
        name="grouped_gate_up" if parts == 2 else "grouped_product",
    )(*route.arrays, *inputs)
    out = made[0].reshape(route.num_pairs, N)
    return (out, made[1]) if keep else out


def _product_kernel(*refs, visit, num_arrays, together, tile, slabs, depth, choices, block, is_transposed, has_scales):
    """Computes one block of rows and one slab of columns; `depth` is K, `choices` the number of pairs per row of x."""
    route_refs, (x_ref, weight_ref, *rest) = refs[:num_arrays], refs[num_arrays:]
    scales_ref = rest.pop(0) if has_scales else None
    out_ref, *kept_ref = rest
    parts = 1 if is_transposed else weight_ref.shape[2]
    width, lanes = out_ref.shape[1:]
    # Order of programs: `together` blocks of one slab follow each other, so that blocks of one expert share its slab in
    # the L2 cache.
    program = pl.program_id(0)
    slab = jax.lax.div(jax.lax.rem(program, slabs * together), together)
    row_block = jax.lax.div(program, slabs * together) * together + jax.lax.rem(program, together)
    column = slab * tile.columns + jnp.arange(tile.columns)
    columns = pl.ds(slab * tile.columns, tile.columns)
    precision = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    num_steps = pl.cdiv(depth, tile.depth)
    is_whole = depth % tile.depth == 0 and width % tile.columns == 0

    def load_weight(expert, step, part):
        """Loads a tile [depth, columns] for each lane, in x's dtype."""
        inner = pl.ds(step * tile.depth, tile.depth)
        inside = step * tile.depth + jnp.arange(tile.depth) < depth
        mask = None if is_whole else inside[:, None] & (column < width)[None, :]
        if is_transposed:
            mask = None if mask is None else mask.T
            return [_load(weight_ref.at[expert, columns, inner], mask).T]
        loaded = _load(weight_ref.at[expert, inner, np.int32(part), columns], mask)
        if not has_scales:
            return [loaded]
        # Unpack the two fp8 columns: the low byte is the even column.
        halves = (loaded.astype(jnp.uint8), (loaded >> 8).astype(jnp.uint8))
        return [_from_fp8(half, x_ref.dtype) for half in halves]

    def load_scales(expert, step):
        """Loads the scales of a step [columns], for each part and lane."""
        if scales_ref is None:
            return []
        row = jax.lax.div(step * tile.depth, block)
        mask = None if width % tile.columns == 0 else column < width
        return [
            _load(scales_ref.at[expert, row, np.int32(part), columns, np.int32(lane)], mask)
            for part in range(parts)
            for lane in range(lanes)
        ]

    def body(expert, groups):
        # Rows of x are gathered by token: pair // k, or the pair itself if x has a row per pair.
        rows = [jax.lax.div(pairs, choices) if choices > 1 else pairs for pairs, _ in groups]

        def step(index, carry):
            sums, scales = carry
            inner = index * tile.depth + jnp.arange(tile.depth)
            # Load the rows of each group and one tile of weights, which all groups share.
            x = []
            for row, (_, is_valid) in zip(rows, groups, strict=True):
                mask = jnp.broadcast_to(is_valid[:, None], (row.size, tile.depth))
                mask = mask if depth % tile.depth == 0 else mask & (inner < depth)[None, :]
                x.append(plt.load(x_ref.at[row[:, None], inner[None, :]], mask=mask, other=0))
            tiles = [made for part in range(parts) for made in load_weight(expert, index, part)]
            # Accumulate in float32. The scale multiplies the sum of a step, not each weight.
            sums = list(sums)
            for group, part in itertools.product(range(len(groups)), range(len(tiles))):
                place = group * len(tiles) + part
                made = jnp.dot(x[group], tiles[part], precision=precision, preferred_element_type=jnp.float32)
                sums[place] += made * scales[part][None, :] if has_scales else made
            # Load the next step's scales now, so that their latency overlaps.
            return tuple(sums), load_scales(expert, jnp.minimum(index + 1, num_steps - 1))

        zeros = tuple(jnp.zeros((row.size, tile.columns), jnp.float32) for row in rows for _ in range(parts * lanes))
        sums, _ = jax.lax.fori_loop(
            jnp.int32(0), jnp.int32(num_steps), step, (zeros, load_scales(expert, jnp.int32(0)))
        )
        if has_scales:
            sums = tuple(total * 256 for total in sums)  # `_from_fp8` divided by 256
        # Write each row at its pair's number, with SwiGLU applied to float32 sums if there are gate and up.
        for group, (pairs, is_valid) in enumerate(groups):
            mask = is_valid[:, None] & (column < width)[None, :]
            for lane in range(lanes):
                made = [sums[(group * parts + part) * lanes + lane] for part in range(parts)]
                for part in range(parts if kept_ref else 0):
                    place = kept_ref[0].at[pairs[:, None], np.int32(part), column[None, :]]
                    plt.store(place, made[part].astype(kept_ref[0].dtype), mask=mask)
                result = made[0] if parts == 1 else made[0] * jax.nn.sigmoid(made[0]) * made[1]
                place = out_ref.at[pairs[:, None], column[None, :], np.int32(lane)]
                plt.store(place, result.astype(out_ref.dtype), mask=mask)

    visit(route_refs, row_block, body)


def _load(ref, mask):
    """Loads a ref, zero where the mask is false; without a mask the compiler need not prove that loads are wide."""
    return plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=0)


def _from_fp8(bits, dtype):
    """Converts float8_e4m3fn bits, as uint8, to float32 or bfloat16, divided by 256.

    Exact, except that NaN becomes 480. The bits of sign, exponent and fraction move to their places in float16, whose
    exponent bias is larger by 8; bfloat16 holds every digit of the result. This needs no fp8 hardware, takes no more
    instructions on an H100 than Triton's own conversion, and works on an MI300X, which has another fp8 format.
    """
    # s eeee fff -> s 0 eeee fff 0000000: the arithmetic shift repeats the sign, and the mask clears the copy.
    number = (((bits.astype(jnp.int32) << 24) >> 1) >> 16).astype(jnp.int16) & np.int16(0xBF80 - 2**16)
    number = jax.lax.bitcast_convert_type(number, jnp.float16).astype(jnp.float32)
    if dtype == jnp.float32:
        return number
    # bfloat16 is the upper half of float32, and the lower half is zero here.
    upper = (jax.lax.bitcast_convert_type(number, jnp.int32) >> 16).astype(jnp.int16)
    return jax.lax.bitcast_convert_type(upper, jnp.bfloat16)


def outer(route, begins, left, right, *, out_dtype, interpret=False):
    """Sums `left^T right` over each expert's pairs: [R, A] and [R, B] -> [E, A, B], zero for experts without pairs.

    Args:
        route: A route of `route_many`.
        begins: [E + 1], from `route_many`.
        left: [R, A] with a row for each pair or for each token.
        right: [R, B], likewise.
        out_dtype: Dtype of the result; sums are float32.
        interpret: Run in Pallas's interpreter.

    Returns:
        [E, A, B].
    """
    A, B = left.shape[1], right.shape[1]
    # Limit: multiplications. The tile of the result is as large as registers hold; `depth` pairs are added per step.
    most, depth = (32, 16) if left.dtype == jnp.float32 else (128, 32)
    tile = [max(ROWS, min(most, pl.next_power_of_2(size))) for size in (A, B)]
    slabs = pl.cdiv(A, tile[0]), pl.cdiv(B, tile[1])
    itemsize, (num_pairs, num_experts) = left.dtype.itemsize, (route.num_pairs, route.num_experts)
    output = jax.ShapeDtypeStruct((num_experts, A, B), out_dtype)
    read = num_pairs * (itemsize * (A * slabs[1] + B * slabs[0]) + 4 * slabs[0] * slabs[1])
    # Grid: experts x tiles of the result.
    return pl.pallas_call(
        functools.partial(
            _outer_kernel,
            tile=tile,
            slabs=slabs,
            depth=depth,
            choices=(num_pairs // left.shape[0], num_pairs // right.shape[0]),
        ),
        out_shape=output,
        grid=(num_experts * slabs[0] * slabs[1],),
        compiler_params=plt.CompilerParams(num_warps=8 if min(tile) >= 128 else 4, num_stages=4),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_pairs * A * B,
            transcendentals=0,
            bytes_accessed=read + output.size * output.dtype.itemsize,
        ),
        interpret=interpret,
        name="grouped_outer",
    )(route.arrays[0], begins, left, right)


def _outer_kernel(order_ref, begins_ref, left_ref, right_ref, out_ref, *, tile, slabs, depth, choices):
    """Computes one tile of one expert's sum; `choices` are the numbers of pairs per row of left and of right."""
    program = pl.program_id(0)
    expert = jax.lax.div(program, slabs[0] * slabs[1])
    at = jax.lax.rem(jax.lax.div(program, slabs[1]), slabs[0]), jax.lax.rem(program, slabs[1])
    columns = [place * size + jnp.arange(size) for place, size in zip(at, tile, strict=True)]
    inside = [column < size for column, size in zip(columns, out_ref.shape[1:], strict=True)]
    # The expert's pairs are neighbours in sorted order; an expert without pairs runs no step and stores zeros.
    begin, end = plt.load(begins_ref.at[expert]), plt.load(begins_ref.at[expert + 1])
    precision = jax.lax.Precision.HIGHEST if left_ref.dtype == jnp.float32 else None

    def step(index, total):
        # Gather `depth` rows of left and right by pair or token, zero beyond the expert's last pair, and accumulate in
        # float32.
        start = begin + index * depth
        is_valid = start + jnp.arange(depth) < end
        pairs = plt.load(order_ref.at[pl.ds(start, depth)], mask=is_valid, other=0)
        left, right = (
            plt.load(
                ref.at[jax.lax.div(pairs, np.int32(each))[:, None], column[None, :]],
                mask=is_valid[:, None] & is_inside[None, :],
                other=0,
            )
            for ref, each, column, is_inside in zip((left_ref, right_ref), choices, columns, inside, strict=True)
        )
        return total + jnp.dot(left.T, right, precision=precision, preferred_element_type=jnp.float32)

    steps = jax.lax.div(end - begin + (depth - 1), jnp.int32(depth))
    total = jax.lax.fori_loop(jnp.int32(0), steps, step, jnp.zeros(tile, jnp.float32))
    place = out_ref.at[expert, pl.ds(at[0] * tile[0], tile[0]), pl.ds(at[1] * tile[1], tile[1])]
    plt.store(place, total.astype(out_ref.dtype), mask=inside[0][:, None] & inside[1][None, :])
