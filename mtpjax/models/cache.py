"""The KV cache for a stack of layers, with separate append and commit steps.

Each layer has one array per kind of entry. A pass appends its entries from slot `length` on and does not change
`length`. To commit a chain, it is enough to move `length`, because the accepted entries are already in place; slots
from `length` on hold garbage. A recurrent layer has a state instead of slots. Between append and commit, it also holds
the effect of each new token, and committing applies the effects of the accepted tokens.
"""

from collections.abc import Callable, Iterable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.models.attention_kinds import ATTENTION_KINDS
from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.layers.attention_kind import AttentionKind
from mtpjax.models.view import CONTIGUOUS, Entries, Storage


class Cache(flax.struct.PyTreeNode):
    """Entries of the committed positions, one dictionary per layer; `AttentionKind.empty_entries` makes the arrays."""

    layers: tuple[Entries, ...]
    length: jax.Array  # [B] int32, committed slots
    kinds: tuple[LayerKind, ...] = flax.struct.field(pytree_node=False)  # one per layer
    is_paged: bool = flax.struct.field(pytree_node=False, default=False)  # attention layers store pools of pages


def empty_cache(
    config: ModelConfig,
    kinds: tuple[LayerKind, ...],
    batch: int,
    capacity: int,
    dtype: Any = jnp.float32,
    kv_dtype: Any = None,
    pool: tuple[int, int] | None = None,
) -> Cache:
    """Makes a zero-filled cache.

    Args:
        kinds: kind of each layer, such as `config.trunk_kinds`, or `(config.mtp_kind,)` for an MTP module.
        batch: rows, B.
        capacity: slots, S.
        dtype: activation dtype. Recurrent layers store the convolution inputs in this dtype, and the state in float32.
        kv_dtype: dtype of keys, values and latents; None: `dtype`.
        pool: (number of pages, positions per page) for paged attention layers; None: contiguous rows.
    """
    kv_dtype = kv_dtype or dtype
    layers = []
    for kind in kinds:
        attention = ATTENTION_KINDS[kind.attention]
        # A recurrent layer has one state per row; an attention layer has a slot per position, or pages of the pool.
        if attention.is_recurrent:
            layers.append(attention.empty_entries(config, kind, batch, capacity, dtype))
        else:
            layers.append(attention.empty_entries(config, kind, *(pool or (batch, capacity)), kv_dtype))
    return Cache(tuple(layers), jnp.zeros(batch, jnp.int32), tuple(kinds), is_paged=pool is not None)


def _map_layers(cache: Cache, function: Callable[..., Entries], *others: tuple[Entries, ...]) -> Cache:
    """Replaces each layer's entries with `function(attention kind, entries, *the same layer's entries in others)`."""
    layers = zip(cache.kinds, cache.layers, *others, strict=True)
    return cache.replace(layers=tuple(function(ATTENTION_KINDS[kind.attention], *entries) for kind, *entries in layers))


def commit(cache: Cache, length: jax.Array) -> Cache:
    """Commits the first `length [B]` slots.

    Attention layers keep their entries, which are already in place. Recurrent layers advance their state over the
    accepted tokens.
    """
    num_committed = length - cache.length
    advanced = _map_layers(cache, lambda attention, entries: attention.commit(entries, num_committed))
    return advanced.replace(length=length)


def reset_rows(cache: Cache, is_new: jax.Array) -> Cache:
    """Empties the rows `is_new [B]` for new texts by zeroing their lengths and recurrent states."""
    emptied = _map_layers(cache, lambda attention, entries: attention.reset(entries, is_new))
    return emptied.replace(length=jnp.where(is_new, 0, cache.length))


def take_rows(cache: Cache, rows: jax.Array) -> Cache:
    """Copies `rows [R]` of a cache; an out-of-range index copies the nearest row. Page pools are shared, not copied."""

    def take(leaf: jax.Array) -> jax.Array:
        return jnp.take(leaf, rows, axis=0, mode="clip")

    # Keep pools whole, because the page table determines which of their entries belong to a row.
    taken = _map_layers(cache, lambda kind, kept: kept if _is_pool(cache, kind) else jax.tree.map(take, kept))
    return taken.replace(length=take(cache.length))


def put_rows(cache: Cache, new: Cache, rows: jax.Array) -> Cache:
    """Writes the rows of `new` to `rows [R]` of a cache (inverse of `take_rows`); ignores out-of-range indices."""

    def put(leaf: jax.Array, new: jax.Array) -> jax.Array:
        return leaf.at[rows].set(new, mode="drop")

    written = _map_layers(
        cache, lambda kind, kept, new: new if _is_pool(cache, kind) else jax.tree.map(put, kept, new), new.layers
    )
    return written.replace(length=put(cache.length, new.length))


def _is_pool(cache: Cache, attention: AttentionKind) -> bool:
    return cache.is_paged and not attention.is_recurrent


def pool_arrays(cache: Cache) -> list[jax.Array]:
    """Returns the pools `[P, ..., size, H]` of a paged cache, layer by layer."""
    layers = zip(cache.kinds, cache.layers, strict=True)
    pools = [entries for kind, entries in layers if _is_pool(cache, ATTENTION_KINDS[kind.attention])]
    return jax.tree.leaves(pools)


def replace_pool_arrays(cache: Cache, pools: Iterable[jax.Array]) -> Cache:
    """Replaces the pools of a paged cache with `pools`, in the order of `pool_arrays`."""
    rest = iter(pools)
    return _map_layers(
        cache, lambda kind, kept: jax.tree.map(lambda _: next(rest), kept) if _is_pool(cache, kind) else kept
    )


def recurrent_entries(cache: Cache) -> tuple[Entries, ...]:
    """Returns the states `[B, ...]` of a cache's recurrent layers; the last pass must be committed."""
    layers = zip(cache.kinds, cache.layers, strict=True)
    return tuple(entries for kind, entries in layers if ATTENTION_KINDS[kind.attention].is_recurrent)


def replace_recurrent_entries(cache: Cache, states: Iterable[Entries]) -> Cache:
    """Replaces the states of a cache's recurrent layers, in the order of `recurrent_entries`."""
    rest = iter(states)
    return _map_layers(cache, lambda attention, entries: next(rest) if attention.is_recurrent else entries)


def clear_pages(cache: Cache, pages: jax.Array) -> Cache:
    """Zeroes `pages [n]` of a paged cache; ignores ids outside the pool."""
    return replace_pool_arrays(cache, [pool.at[pages].set(0, mode="drop") for pool in pool_arrays(cache)])


def gather_path(cache: Cache, start: jax.Array, path: jax.Array, width: int, storage: Storage = CONTIGUOUS) -> Cache:
    """Moves the accepted entries of a draft tree to adjacent slots, from `start + path[:, j]` to `start + j`.

    Args:
        start: `[B]` int32 first slot of the tree.
        path: `[B, J]` int32 indices of the accepted nodes within the tree, ascending.
        width: number of slots that the tree occupies.
        storage: how the cache stores its slots.
    """

    def move(kept: jax.Array) -> jax.Array:
        axis = kept.ndim - 2
        # Read the whole tree first, because an entry may move to a slot whose own entry still has to move.
        tree = storage.read(kept, start, width)
        place = jnp.expand_dims(path, tuple(other for other in range(1, kept.ndim) if other != axis))
        return storage.write(kept, jnp.take_along_axis(tree, place, axis=axis), start)

    return cache.replace(layers=tuple(jax.tree.map(move, entries) for entries in cache.layers))
