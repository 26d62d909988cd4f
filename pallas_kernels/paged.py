"""Caches in pages, as kernels see them: a pool of pages, and a table of each row's pages."""

import jax
import jax.numpy as jnp

from pallas_kernels.fp8 import as_stored

NO_PAGE = 2**31 - 1  # in a table: reads are masked, and writes are dropped


def index_places(pool, page, place) -> tuple:
    """Returns the index of entries [B, T, ..., H] of a pool [P, ..., size, H], by page and place [B, T]."""
    return (page, *(slice(None),) * (pool.ndim - 3), place)


def write_places(pool, entries, page, place) -> jax.Array:
    """Writes entries [B, T, ..., H] to their pages and places there; those of a page outside the pool are dropped."""
    return pool.at[index_places(pool, page, place)].set(as_stored(entries, pool.dtype), mode="drop")


def gather_pages(pool, table, *, shift: int = 0, num_slots: int | None = None) -> jax.Array:
    """Copies each row's pages side by side, as a contiguous cache has them.

    Args:
        pool: [P, ..., size, H]: pages of `size` positions.
        table: [B, N] int32 page of positions n * size .. (n + 1) * size - 1. An index outside the pool gives zeros:
            attention multiplies masked entries by 0, so they must not include another row's NaN.
        shift: Slot i of the cache is at position i + shift.
        num_slots: Slots to return; None: all that the table has, N * size - shift.

    Returns:
        [B, ..., num_slots, H].
    """
    rows = jnp.moveaxis(pool.at[table].get(mode="fill", fill_value=0), 1, -3)  # [B, ..., N, size, H]
    rows = rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])
    end = rows.shape[-2] if num_slots is None else shift + num_slots
    return jax.lax.slice_in_dim(rows, shift, end, axis=rows.ndim - 2)
