"""Assigns (token, choice) pairs to the programs of the grouped kernels.

A pair is token t with its choice j; its index is `t * k + j`. `route_few_tokens` finds an expert's rows inside the
kernel, where one program per pair and slab scans all ids and continues only if its pair is the first with its expert.
Each expert is read once, and no other kernel has to run first. `route_many_tokens` makes a table from the sorted ids,
with one program per block of rows and slab.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt

MIN_ROWS = 16  # rows per matmul for few tokens, the minimum for tensor cores


@dataclasses.dataclass(frozen=True)
class Route:
    """Assigns pairs to programs.

    Attributes:
        tables: The kernel's first inputs.
        for_each_block: Called in the kernel with the refs of `tables`, a block index and a body; calls `body(expert,
            [(pairs [rows], is_valid [rows]), ...])` for the rows of that block.
        num_experts: E.
        num_pairs: n * k.
        num_blocks: Programs per slab of columns.
        rows_per_product: Rows of one product.
        max_products: Maximum products per program and weight tile.
        l2_group: Number of blocks whose programs for one slab run consecutively and share the slab in the L2 cache.
        bytes_per_slab: Bytes of `tables` that the programs of one slab read.
    """

    tables: tuple[jax.Array, ...]
    for_each_block: Callable
    num_experts: int
    num_pairs: int
    num_blocks: int
    rows_per_product: int
    max_products: int
    l2_group: int
    bytes_per_slab: int


def route_few_tokens(ids, num_experts: int) -> Route:
    """Routes ids [n, k] int32 with one block per pair; an expert's first pair processes all of the expert's rows.

    Products always have 16 rows, so a row's sums do not depend on other rows. Registers hold two products per pass over
    the weights, so an expert that more than 32 tokens chose is read twice.
    """
    num_tokens, k = ids.shape
    num_pairs = num_tokens * k
    padded = pl.next_power_of_2(num_pairs)
    max_products = min(2, pl.cdiv(num_tokens, MIN_ROWS))

    def for_each_block(refs, block, body):
        (ids_ref,) = refs
        # Find the pairs that chose the same expert as this program's pair. Only the first of them continues, so that
        # each active expert is read by one program per slab.
        pair = jnp.arange(padded)
        expert = plt.load(ids_ref.at[block])
        is_same_expert = plt.load(ids_ref.at[pair], mask=pair < num_pairs, other=num_experts) == expert
        running_count = jnp.cumsum(is_same_expert.astype(jnp.int32))
        count = jnp.sum(is_same_expert.astype(jnp.int32))
        is_first = jnp.sum((is_same_expert & (pair < block)).astype(jnp.int32)) == 0
        is_active = is_first & (expert < num_experts)

        def process(begin, num_products):
            """Processes the expert's rows from index `begin` on."""
            products = []
            for product in range(num_products):
                row = begin + product * MIN_ROWS + jnp.arange(MIN_ROWS)
                # The index of the expert's r-th pair, from 0, is the number of pairs whose running count is at most r.
                pairs = jnp.sum((running_count[None, :] <= row[:, None]).astype(jnp.int32), axis=1)
                products.append((jnp.where(row < count, pairs, num_pairs), row < count))
            body(expert, products)

        def process_all():
            passes = jax.lax.div(count + (max_products * MIN_ROWS - 1), jnp.int32(max_products * MIN_ROWS))
            each = lambda index, _: process(index * (max_products * MIN_ROWS), max_products)
            jax.lax.fori_loop(jnp.int32(0), passes, each, None)

        # Up to 16 tokens need one pass of one product. With more tokens, an expert with at most 16 rows needs one
        # product, and an expert with more rows needs passes of two products. A token may choose an expert several
        # times, so both cases loop.
        if max_products == 1:
            pl.when(is_active)(process_all)
        else:
            pl.when(is_active & (count <= MIN_ROWS))(lambda: process(0, 1))
            pl.when(is_active & (count > MIN_ROWS))(process_all)

    return Route(
        tables=(ids.reshape(-1),),
        for_each_block=for_each_block,
        num_experts=num_experts,
        num_pairs=num_pairs,
        num_blocks=num_pairs,
        rows_per_product=MIN_ROWS,
        max_products=max_products,
        l2_group=1,
        bytes_per_slab=4 * num_pairs * (num_pairs + 1),
    )


def route_many_tokens(ids, num_experts: int, max_rows: int = 128) -> tuple[Route, jax.Array]:
    """Routes ids [n, k] int32 through a table of blocks of pairs, sorted by expert.

    Returns:
        The route, and the indices [E + 1] at which each expert's pairs begin among the sorted pairs.
    """
    # Use as many rows per block as an average expert fills, within the registers' limit.
    num_pairs, l2_group = ids.size, 8
    sizes = (rows for rows in (128, 64, 32) if rows <= max_rows and rows * num_experts <= num_pairs)
    rows_per_product = next(sizes, MIN_ROWS)
    # Sort the pairs by expert. Ids of E or more sort to the end, and `bincount` drops them.
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    expert_starts = jnp.pad(jnp.cumsum(counts), (1, 0)).astype(jnp.int32)
    # Cut each expert's pairs into blocks. The number of blocks is a static upper bound, rounded up to whole groups.
    blocks = -(-counts // rows_per_product)
    ends = jnp.cumsum(blocks)
    num_blocks = pl.cdiv(num_pairs // rows_per_product + min(num_experts, num_pairs), l2_group) * l2_group
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    # Find each block's expert, its first pair, and its number of rows, which is 0 for blocks beyond the last.
    expert_of_block = jnp.searchsorted(ends, block, side="right", method="compare_all").astype(jnp.int32)
    clipped_expert = expert_of_block.clip(max=num_experts - 1)
    first_pair = expert_starts[clipped_expert] + (block - (ends - blocks)[clipped_expert]) * rows_per_product
    num_rows = jnp.where(expert_of_block < num_experts, expert_starts[clipped_expert + 1] - first_pair, 0).astype(
        jnp.int32
    )

    def for_each_block(refs, block, body):
        order_ref, expert_ref, first_pair_ref, num_rows_ref = refs
        num_rows = plt.load(num_rows_ref.at[block])

        @pl.when(num_rows > 0)
        def _():
            # Load the block's pairs in sorted order; invalid rows refer to the pair after the last.
            row = jnp.arange(rows_per_product)
            is_valid = row < num_rows
            indices = pl.ds(plt.load(first_pair_ref.at[block]), rows_per_product)
            pairs = plt.load(order_ref.at[indices], mask=is_valid, other=num_pairs)
            body(plt.load(expert_ref.at[block]), [(pairs, is_valid)])

    route = Route(
        tables=(order, expert_of_block, first_pair.astype(jnp.int32), num_rows),
        for_each_block=for_each_block,
        num_experts=num_experts,
        num_pairs=num_pairs,
        num_blocks=num_blocks,
        rows_per_product=rows_per_product,
        max_products=1,
        l2_group=l2_group,
        bytes_per_slab=4 * (num_pairs + 3 * num_blocks),
    )
    return route, expert_starts
