"""The cache entries of one layer: write, read, and select the keys that the queries of a pass attend to."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from mtpjax.models.pages import gather_pages, read_pages, write_pages
from mtpjax.models.view import Entries, Masks, Pages, Recycled, View
from pallas_kernels.fp8 import as_stored


def write_rows(buffer: jax.Array, rows: jax.Array, start: jax.Array, *, axis: int = 1) -> jax.Array:
    """Writes `rows [B, ..., T, ...]` into `buffer [B, ..., S, ...]` along `axis`, from slot `start [B]` of each row.

    Rows are converted to the buffer's dtype (`pallas_kernels.fp8.as_stored`). The caller guarantees room:
    `dynamic_update_slice` clamps a start that is too late, which would overwrite valid entries.
    """
    rows = as_stored(rows, buffer.dtype)
    # A batch of one needs a plain update, which XLA does in place. The batched form becomes a loop on a CPU.
    if buffer.shape[0] == 1:
        return jax.lax.dynamic_update_slice_in_dim(buffer, rows, start[0], axis)
    return jax.vmap(lambda b, r, s: jax.lax.dynamic_update_slice_in_dim(b, r, s, axis - 1))(buffer, rows, start)


def read_rows(buffer: jax.Array, start: jax.Array, width: int, *, axis: int = 1) -> jax.Array:
    """Reads `width` slots of `buffer` along `axis`, from slot `start [B]` of each batch row (axis 0)."""
    if buffer.shape[0] == 1:
        return jax.lax.dynamic_slice_in_dim(buffer, start[0], width, axis)
    return jax.vmap(lambda b, s: jax.lax.dynamic_slice_in_dim(b, s, width, axis - 1))(buffer, start)


def append(entries: Entries, new: Entries, view: View) -> Entries:
    """Writes `new` into one layer's entries, from slot `view.start` on. The slot axis is the last but one."""
    assert view.start is not None, "a pass with a cache takes a cached view"
    return {name: write_slots(kept, new[name], view.start, view.pages) for name, kept in entries.items()}


def write_slots(kept: jax.Array, new: jax.Array, start: jax.Array, pages: Pages | None) -> jax.Array:
    """Writes entries into contiguous slots `[B, ..., S, H]` or pages `[P, ..., size, H]`, from slot `start [B]` on."""
    if pages is None:
        return pin_layout(write_rows(kept, new, start, axis=kept.ndim - 2))
    return pin_layout(write_pages(kept, new, start, pages))


def read_slots(kept: jax.Array, start: jax.Array, width: int, pages: Pages | None) -> jax.Array:
    """Reads `width` slots of each row: the twin of `write_slots`."""
    if pages is None:
        return read_rows(kept, start, width, axis=kept.ndim - 2)
    return read_pages(kept, start, width, pages)


def pin_layout(array: jax.Array) -> jax.Array:
    """Keeps a cache array in row-major order on one device.

    Without the constraint XLA may transpose the caches inside or around the loop. On a mesh the array stays
    unconstrained, because the partitioner would gather it.
    """
    if jax.sharding.get_abstract_mesh().size > 1:
        return array
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def append_and_select(
    new: Entries, view: View, layer_cache: Entries | Recycled | None
) -> tuple[Entries, tuple[Entries, ...], Masks]:
    """Stores the new entries of a pass and selects the keys that its queries attend to.

    `layer_cache` is one layer of a cache, `Recycled` for a recycled MTP depth over whole rows, or None for a pass over
    whole rows.

    Returns:
        The entries that the layer keeps, the sources of keys, and the mask of each source `[B, T, S]`.
    """
    # A recycled depth attends to the true entries of the prefix, and to its own entry of every level since.
    if isinstance(layer_cache, Recycled):
        levels = (*layer_cache.levels, new)
        # A window may end within the levels: the previous level's entry is one position older, and so on.
        shape, oldest = (*view.mask.shape[:2], 1), len(levels) - view.window if view.window else 0
        itself = (jnp.full(shape, level >= oldest) for level in range(len(levels)))
        return new, (layer_cache.base, *levels), (view.mask, *itself)
    if layer_cache is not None:
        new = append(layer_cache, new, view)
    return new, *select(new, view)


def side_by_side(entries: Entries, view: View, num_slots: int | None = None) -> Entries:
    """Returns contiguous entries as they are; of entries in pages, copies `num_slots` slots of each row (None: all)."""
    pages = view.pages
    if pages is None:
        return entries
    return {name: gather_pages(kept, num_slots or pages.num_slots, pages) for name, kept in entries.items()}


def select(entries: Entries, view: View) -> tuple[tuple[Entries, ...], Masks]:
    """Selects the keys that the queries of a pass attend to among one layer's entries.

    Args:
        entries: one layer of a cache with the entries of the pass, or the entries of a pass over whole rows.

    Returns:
        The sources of keys, and the mask of each source `[B, T, S]`.
    """
    pages, span = view.pages, view.span
    if span is None:
        return (side_by_side(entries, view, view.mask.shape[2]),), (view.mask,)
    # A window reads two ranges of slots: the sinks at the beginning, and the newest slots.
    sinks, begin, size = span.sinks, span.begin, span.size
    if pages is None:
        oldest = {name: jax.lax.slice_in_dim(kept, 0, sinks, axis=kept.ndim - 2) for name, kept in entries.items()}
    else:
        oldest = side_by_side(entries, view, sinks)
    newest = {name: read_slots(kept, begin, size, pages) for name, kept in entries.items()}
    return (oldest, newest), (view.mask[:, :, :sinks], view.mask[:, :, sinks:])
