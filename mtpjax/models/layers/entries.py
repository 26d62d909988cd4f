"""Appends to one layer's cache entries, and selects the keys that the queries of a pass attend to."""

import jax
import jax.numpy as jnp

from mtpjax.models.context import all_tokens
from mtpjax.models.view import Entries, Masks, Recycled, View
from pallas_kernels.range_attention import KeyRanges


def append(entries: Entries, new: Entries, view: View) -> Entries:
    """Writes `new` into one layer's entries, from slot `view.start` on."""
    assert view.start is not None, "a pass with a cache needs a view from cached_view"
    return {name: view.storage.write(kept, new[name], view.start) for name, kept in entries.items()}


def append_and_select(
    new: Entries, view: View, layer_cache: Entries | Recycled | None
) -> tuple[Entries, tuple[Entries, ...], Masks]:
    """Stores the new entries of a pass and selects the keys that its queries attend to.

    `layer_cache` is one layer of a cache. For a pass over whole rows it is `Recycled` if the MTP depth is recycled,
    else None.

    Returns:
        The entries that the layer keeps, the sources of keys, and the mask of each source.
    """
    # A recycled depth attends to the prefix's teacher-forced entries and, at each level, to the entry at its own index.
    if isinstance(layer_cache, Recycled):
        levels = (*layer_cache.levels, new)
        # The window may start within the levels, because each earlier level's entry is one position older.
        shape, oldest = (*view.angles[0].shape[:2], 1), len(levels) - view.window if view.window else 0
        itself = (jnp.full(shape, level >= oldest) for level in range(len(levels)))
        return new, (_gather_tokens(layer_cache.base), *levels), (view.mask, *itself)
    if layer_cache is not None:
        new = append(layer_cache, new, view)
        return new, *select(new, view)
    return new, *select(_gather_tokens(new), view)


def _gather_tokens(entries: Entries) -> Entries:
    """Gathers the entries of whole rows if the mesh splits the rows by tokens.

    The backward pass gathers again and scatters the gradients. Per token and layer, a device receives 2 K H numbers for
    grouped attention. Latent attention gathers its latents, R + P numbers, before it expands them to the N (C + P + V)
    numbers of all heads: for DeepSeek-V3, 576 instead of 40,960. In return, each device expands the latents of whole
    rows.
    """
    return {name: all_tokens(kept, kept.ndim - 2) for name, kept in entries.items()}


def select(entries: Entries, view: View) -> tuple[tuple[Entries, ...], Masks]:
    """Selects from one layer's entries the keys that the queries of a pass attend to.

    Args:
        entries: one layer of a cache, with this pass's entries appended, or the entries of a pass over whole rows.

    Returns:
        The sources of keys, and the mask of each source.
    """
    storage, span, mask = view.storage, view.span, view.mask
    if isinstance(mask, KeyRanges):
        return (entries,), (mask,)
    if span is None:
        return (jax.tree.map(lambda kept: storage.first(kept, mask.shape[2]), entries),), (mask,)
    # A window reads two ranges of slots, which are the sinks at the start and the newest slots.
    oldest = jax.tree.map(lambda kept: storage.first(kept, span.sinks), entries)
    newest = jax.tree.map(lambda kept: storage.read(kept, span.begin, span.size), entries)
    return (oldest, newest), (mask[:, :, : span.sinks], mask[:, :, span.sinks :])
