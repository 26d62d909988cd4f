"""KV caches in pages: a pool of pages that all rows share, and a table of each row's pages (vLLM, 2309.06180).

A contiguous cache reserves the longest text for every row. With pages, a row takes as many as its text needs, in any
order, and rows with a common prefix can share pages. The pages of a cache array take the place of rows, and the slots
of a page that of a row's slots: keys are `[P, K, size, H]` instead of `[B, K, S, H]`. Contiguous caches are the plain
twin; `tests/models/test_pages.py` compares them.
"""

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels import paged
from pallas_kernels.paged import NO_PAGE


class Pages(flax.struct.PyTreeNode):
    """The page table of a batch.

    Entry i of MTP module k (0-based) depends on token i + k + 1. Its cache stores it in the page of that token, at
    position i + `shift` with shift = k + 1. So the contents of a page do not depend on tokens after the page.
    """

    table: jax.Array  # [B, N] int32: the page of positions n * size .. (n + 1) * size - 1; NO_PAGE: none
    num_shared: jax.Array  # [B] int32: positions at the start that are never written, because other rows read them
    size: int = flax.struct.field(pytree_node=False)  # positions per page
    num_pages: int = flax.struct.field(pytree_node=False)  # of the pool
    max_shift: int = flax.struct.field(pytree_node=False)  # the largest shift of the batch's caches
    shift: int = flax.struct.field(pytree_node=False, default=0)  # slot i of the cache is at position i + shift
    is_of_drafter: bool = flax.struct.field(pytree_node=False, default=False)  # the cache is not the trunk's

    @property
    def num_slots(self) -> int:
        """Slots for which every cache of the batch has room."""
        return self.table.shape[1] * self.size - self.max_shift

    def locate(self, start: jax.Array, width: int, *, to_write: bool) -> tuple[jax.Array, jax.Array]:
        """Locates `width` slots from `start [B]` on. With `to_write`, slots at shared positions have no page.

        Returns:
            The page of each slot, or NO_PAGE, and the place within it, both `[B, T]` int32.
        """
        position = start[:, None] + jnp.arange(width)[None, :] + self.shift
        page = jnp.take_along_axis(self.table, position // self.size, axis=1, mode="fill", fill_value=NO_PAGE)
        if to_write:
            page = jnp.where(position < self.num_shared[:, None], NO_PAGE, page)
        return page, position % self.size


def write_pages(pool: jax.Array, rows: jax.Array, start: jax.Array, pages: Pages) -> jax.Array:
    """Writes entries `rows [B, ..., T, H]` into a pool `[P, ..., size, H]`, from slot `start [B]` of each row.

    They are converted to the pool's dtype (`pallas_kernels.fp8.as_stored`); those of slots without a page, and at
    shared positions, are dropped. Rows that write to the same page may not write the same slots of it.
    """
    # Attention multiplies masked values by 0, and NaN stays NaN. A drafter's NaN ends no request, so in its pages it
    # would spoil the drafts of every later row that gets the page. (NaN of the trunk ends the row, and clears its
    # pages.)
    if pages.is_of_drafter:
        rows = jnp.where(jnp.isfinite(rows), rows, 0)
    axis = pool.ndim - 2
    return paged.write_places(pool, jnp.moveaxis(rows, axis, 1), *pages.locate(start, rows.shape[axis], to_write=True))


def read_pages(pool: jax.Array, start: jax.Array, width: int, pages: Pages) -> jax.Array:
    """Reads `width` slots from slot `start [B]` of each row on: `[P, ..., size, H]` -> `[B, ..., width, H]`."""
    page, place = pages.locate(start, width, to_write=False)
    return jnp.moveaxis(pool.at[paged.index_places(pool, page, place)].get(mode="clip"), 1, pool.ndim - 2)


def gather_pages(pool: jax.Array, num_slots: int, pages: Pages) -> jax.Array:
    """Copies the first `num_slots` slots of each row: `[P, ..., size, H]` -> `[B, ..., num_slots, H]`."""
    return paged.gather_pages(pool, pages.table, shift=pages.shift, num_slots=num_slots)
