"""Paged caches in the form that kernels use, with a pool of pages and a table of each row's pages."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.backend import triton as plt
from pallas_kernels.fp8 import as_stored

NO_PAGE = 2**31 - 1  # table entry whose reads are masked and whose writes are dropped


def index_places(pool, page, place) -> tuple:
    """Returns the index of entries [B, T, ..., H] in a pool [P, ..., size, H], given page and offset [B, T]."""
    return (page, *(slice(None),) * (pool.ndim - 3), place)


def write_places(pool, entries, page, place) -> jax.Array:
    """Writes entries [B, T, ..., H] to their pages and offsets; drops entries whose page is outside the pool."""
    return pool.at[index_places(pool, page, place)].set(as_stored(entries, pool.dtype), mode="drop")


def append_entries(cache, entries, start, places) -> jax.Array:
    """Writes the entries [B, T, ..., H] of new tokens to a cache.

    Args:
        cache: [B, ..., S, H], or pages as in `write_places`.
        start: [B] slot of each row's first token; not read for paged caches.
        places: Page and offset of each token, [B, T] each; None: the cache is contiguous.
    """
    if places is not None:
        return write_places(cache, entries, *places)
    write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=cache.ndim - 3)
    entries = entries if cache.ndim == 3 else entries.swapaxes(1, 2)
    return jax.vmap(write)(cache, as_stored(entries, cache.dtype), start)


def find_entry(place_refs, cache_ref, row, place) -> tuple:
    """Finds a token's cache entry in a kernel; returns its row or page, the slot within it, and whether to store it.

    Args:
        place_refs: Refs of `places` in `append_entries`, or only the ref of `start`.
        cache_ref: The cache or the pool.
        row: Row of the batch.
        place: Index of the token in its row.
    """
    if len(place_refs) == 1:
        return row, plt.load(place_refs[0].at[row]) + place, True
    page, slot = (plt.load(ref.at[row, place]) for ref in place_refs)
    # To drop an entry whose page is outside the pool, clamp its address and mask its store.
    is_kept = page < cache_ref.shape[0]
    return jnp.minimum(page, cache_ref.shape[0] - 1), slot, is_kept


def gather_pages(pool, table, *, shift: int = 0, num_slots: int | None = None) -> jax.Array:
    """Copies each row's pages into a contiguous cache.

    Args:
        pool: [P, ..., size, H], P pages of `size` positions.
        table: [B, N] int32 page of positions n * size .. (n + 1) * size - 1. An index outside the pool gives zeros,
            because attention multiplies masked entries by 0, and they must not contain a different row's NaN.
        shift: Slot i of the cache is at position i + shift.
        num_slots: Slots to return; None: all slots in the table, N * size - shift.

    Returns:
        [B, ..., num_slots, H].
    """
    rows = jnp.moveaxis(pool.at[table].get(mode="fill", fill_value=0), 1, -3)  # [B, ..., N, size, H]
    rows = rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])
    end = rows.shape[-2] if num_slots is None else shift + num_slots
    return jax.lax.slice_in_dim(rows, shift, end, axis=rows.ndim - 2)
