"""The key/value cache: append, then commit, and nothing else.

Every layer has one array per kind of entry. A pass appends its entries at `length ..` without moving `length`;
committing a chain only moves `length`, since the entries already stand in place. Slots from `length` on are garbage.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from mtpjax.config import ModelConfig
from mtpjax.layers.attend import Entries, Recycled, View


class Cache(flax.struct.PyTreeNode):
    """Entries of the committed positions: per layer `key`, `value` `[B, K, S, H]`, or `latent` `[B, S, R+P]`."""

    layers: tuple[Entries, ...]
    length: jax.Array  # [B] int32, committed slots


def empty_cache(config: ModelConfig, num_layers: int, batch: int, capacity: int, dtype=jnp.float32) -> Cache:
    """A zero-filled cache of `capacity` slots."""
    if config.attention == "latent":
        shapes = {"latent": (batch, capacity, config.kv_lora_rank + config.qk_rope_head_dim)}
    else:
        heads = (batch, config.num_key_value_heads, capacity, config.head_dim)
        shapes = {"key": heads, "value": heads}
    layers = tuple({name: jnp.zeros(shape, dtype) for name, shape in shapes.items()} for _ in range(num_layers))
    return Cache(layers, jnp.zeros(batch, jnp.int32))


def write_rows(buffer: jax.Array, rows: jax.Array, start: jax.Array, *, axis: int = 1) -> jax.Array:
    """Writes `rows` into `buffer` along `axis`, from `start [B]` on, each batch row at its own place (axis 0 is B).

    The caller guarantees room: past the end `dynamic_update_slice` would move the start back over good entries.
    """
    rows = rows.astype(buffer.dtype)
    if buffer.shape[0] == 1:  # one plain in-place update; the batched form becomes a loop on a CPU
        return jax.lax.dynamic_update_slice_in_dim(buffer, rows, start[0], axis)
    return jax.vmap(lambda b, r, s: jax.lax.dynamic_update_slice_in_dim(b, r, s, axis - 1))(buffer, rows, start)


def read_rows(buffer: jax.Array, start: jax.Array, width: int) -> jax.Array:
    """`width` entries of `buffer [B, S, ...]` from `start [B]` on: `[B, width, ...]`."""
    if buffer.shape[0] == 1:
        return jax.lax.dynamic_slice_in_dim(buffer, start[0], width, 1)
    return jax.vmap(lambda b, s: jax.lax.dynamic_slice_in_dim(b, s, width, 0))(buffer, start)


def append(entries: Entries, new: Entries, start: jax.Array) -> Entries:
    """One layer with `new` written from slot `start [B]` on. The slot axis is the last but one."""
    return {name: _pinned(write_rows(entries[name], new[name], start, axis=new[name].ndim - 2)) for name in entries}


def _pinned(array: jax.Array) -> jax.Array:
    """Keeps one device's caches in row-major order; left free, XLA turns them around within or about the loop.

    Over a mesh it stays free: the partitioner would gather the array.
    """
    if jax.sharding.get_abstract_mesh().size > 1:
        return array
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def remember(
    new: Entries, view: View, memory: Entries | Recycled | None
) -> tuple[Entries, list[tuple[Entries, jax.Array | None]]]:
    """What a layer keeps after a pass that made the entries `new`, and what its queries attend to, with masks.

    The keys are the cache with `new` appended, the levels of a recycled pass, or `new` alone.
    """
    if isinstance(memory, Recycled):
        return new, [(memory.base, view.mask), *((level, None) for level in (*memory.levels, new))]
    if memory is not None:
        assert view.start is not None, "a pass with a cache takes a cached view"
        new = append(memory, new, view.start)
    return new, [(new, view.mask)]


def commit(cache: Cache, length: jax.Array) -> Cache:
    """The cache whose committed entries are the first `length [B]`."""
    return cache.replace(length=length)
