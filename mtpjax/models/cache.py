"""The cache: append, then commit, and nothing else.

Every layer has one array per kind of entry. A pass appends its entries at `length ..` without moving `length`;
committing a chain only moves `length`, since the entries already stand in place. Slots from `length` on are garbage.
A recurrent layer has a state instead: between append and commit it holds what each token would do to it, and committing
takes in those accepted.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.masks import Entries, Masks, Recycled, View
from pallas_kernels import gated_delta_replay


class Cache(flax.struct.PyTreeNode):
    """Entries of the committed positions.

    Per layer `key`, `value` `[B, K, S, H]`; or `latent` `[B, S, R+P]`, with an indexer `index` `[B, S, I]` too; or a
    recurrent layer's `state` and `conv` (`mtpjax.models.layers.delta_rule`).
    """

    layers: tuple[Entries, ...]
    length: jax.Array  # [B] int32, committed slots


def empty_cache(
    config: ModelConfig, kinds: tuple[LayerKind, ...], batch: int, capacity: int, dtype=jnp.float32
) -> Cache:
    """A zero-filled cache of `capacity` slots for layers of these kinds (`config.trunk_kinds`, `config.mtp_kind`)."""
    layers = tuple(_empty_entries(config, kind, batch, capacity, dtype) for kind in kinds)
    return Cache(layers, jnp.zeros(batch, jnp.int32))


def _empty_entries(config: ModelConfig, kind: LayerKind, batch: int, capacity: int, dtype) -> Entries:
    if kind.attention == "delta":
        K, J = config.linear_num_key_heads, config.linear_num_value_heads
        P, Q, C = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
        return {
            "state": jnp.zeros((batch, J, P, Q), jnp.float32),
            "conv": jnp.zeros((batch, C - 1, K, 2 * P + J // K * Q), dtype),
        }
    if kind.attention == "grouped":
        heads = (batch, config.num_key_value_heads, capacity, config.head_dim)
        return {"key": jnp.zeros(heads, dtype), "value": jnp.zeros(heads, dtype)}
    entries = {"latent": jnp.zeros((batch, capacity, config.kv_lora_rank + config.qk_rope_head_dim), dtype)}
    if kind.indexer == "full":
        entries["index"] = jnp.zeros((batch, capacity, config.index_head_dim), dtype)
    return entries


def write_rows(buffer: jax.Array, rows: jax.Array, start: jax.Array, *, axis: int = 1) -> jax.Array:
    """Writes `rows` into `buffer` along `axis`, from `start [B]` on, each batch row at its own place (axis 0 is B).

    The caller guarantees room: past the end `dynamic_update_slice` would move the start back over good entries.
    """
    rows = rows.astype(buffer.dtype)
    if buffer.shape[0] == 1:  # one plain in-place update; the batched form becomes a loop on a CPU
        return jax.lax.dynamic_update_slice_in_dim(buffer, rows, start[0], axis)
    return jax.vmap(lambda b, r, s: jax.lax.dynamic_update_slice_in_dim(b, r, s, axis - 1))(buffer, rows, start)


def read_rows(buffer: jax.Array, start: jax.Array, width: int, *, axis: int = 1) -> jax.Array:
    """`width` entries of `buffer` along `axis` from `start [B]` on: `[B, width, ...]` (axis 0 is B)."""
    if buffer.shape[0] == 1:
        return jax.lax.dynamic_slice_in_dim(buffer, start[0], width, axis)
    return jax.vmap(lambda b, s: jax.lax.dynamic_slice_in_dim(b, s, width, axis - 1))(buffer, start)


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


def remember(new: Entries, view: View, memory: Entries | Recycled | None) -> tuple[Entries, tuple[Entries, ...], Masks]:
    """What a layer keeps after a pass that made the entries `new`, and what its queries attend to, with masks.

    The keys are the cache with `new` appended (the view's span of it), the levels of a recycled pass, or `new` alone.
    """
    if isinstance(memory, Recycled):
        levels = (*memory.levels, new)
        itself = jnp.ones((*view.mask.shape[:2], 1), bool)
        return new, (memory.base, *levels), (view.mask, *(itself for _ in levels))
    if memory is not None:
        assert view.start is not None, "a pass with a cache takes a cached view"
        new = append(memory, new, view.start)
    if view.span is None:
        return new, (new,), (view.mask,)
    sinks, begin, size = view.span.sinks, view.span.begin, view.span.size
    far = {name: jax.lax.slice_in_dim(kept, 0, sinks, axis=kept.ndim - 2) for name, kept in new.items()}
    near = {name: read_rows(kept, begin, size, axis=kept.ndim - 2) for name, kept in new.items()}
    return new, (far, near), (view.mask[:, :, :sinks], view.mask[:, :, sinks:])


def commit(cache: Cache, length: jax.Array) -> Cache:
    """Keeps the first `length [B]` entries as the committed ones.

    Attention layers only move their length, since the entries are already in place. Recurrent layers advance their
    state over the tokens that were accepted.
    """
    num_committed = length - cache.length
    layers = tuple(advance_recurrent_state(entries, num_committed) for entries in cache.layers)
    return cache.replace(layers=layers, length=length)


def reset_rows(cache: Cache, is_new: jax.Array) -> Cache:
    """Prepares rows for a new text: zero recurrent states where `is_new [B]`; attention entries may stay."""

    def reset(entries: Entries) -> Entries:
        if "state" not in entries:
            return entries
        return {
            name: jnp.where(is_new.reshape(-1, *(1 for _ in kept.shape[1:])), jnp.zeros((), kept.dtype), kept)
            for name, kept in entries.items()
        }

    return cache.replace(
        layers=tuple(reset(entries) for entries in cache.layers), length=jnp.where(is_new, 0, cache.length)
    )


def gather_path(cache: Cache, start: jax.Array, path: jax.Array, width: int) -> Cache:
    """The cache with a tree's accepted entries side by side: slot `start + path[:, j]` moves to `start + j`.

    `path [B, J]` holds places within the `width` slots from `start [B]` on, in rising order.
    """

    def move(kept: jax.Array) -> jax.Array:
        axis = kept.ndim - 2
        tree = read_rows(kept, start, width, axis=axis)
        place = jnp.expand_dims(path, tuple(other for other in range(1, kept.ndim) if other != axis))
        return _pinned(write_rows(kept, jnp.take_along_axis(tree, place, axis=axis), start, axis=axis))

    return cache.replace(layers=tuple(jax.tree.map(move, entries) for entries in cache.layers))


def advance_recurrent_state(entries: Entries, num_committed: jax.Array) -> Entries:
    """Advances a recurrent layer over the first `num_committed [B]` tokens of the last pass.

    Other layers, and recurrent ones that have advanced within the pass, are returned as they are.
    """
    if "corrections" not in entries:
        return entries
    keys, log_decay, corrections, inputs = (entries[name] for name in ("keys", "log_decay", "corrections", "inputs"))
    state = gated_delta_replay(keys, log_decay, corrections, entries["state"], num_committed)
    # The convolution needs the last inputs before the next token.
    return {"state": state, "conv": read_rows(inputs, num_committed, inputs.shape[1] - keys.shape[1])}
