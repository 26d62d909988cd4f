"""Rows that the mesh axis `context` splits by tokens, for training on texts that do not fit on one device.

A row of T tokens is cut into 2n chunks for the n devices of the axis. Device i has the chunks i and 2n - 1 - i, so that
every device has the same number of pairs under a causal mask (the balanced order of Llama 3, 2407.21783, section
3.3.2). Integers, such as tokens and document ids, are whole rows `[B, T]` on every device, because they are small; so
masks and targets need no communication. States are of the device's own tokens, `[B, T / n, ...]`, chunk i first.

Outside `shard_map` and without the axis, a row is one chunk on one device. Then `own_tokens` and `all_tokens` return
their argument.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.models.parallel import has_decoding_layout, num_shards

AXIS = "context"


def token_order(num_tokens: int, size: int) -> np.ndarray:
    """Returns the order `[T]` in which the devices of an axis of this size have the tokens of a row."""
    chunks = np.arange(num_tokens).reshape(2 * size, -1)
    return np.stack([chunks[:size], chunks[: size - 1 : -1]], axis=1).ravel()


def is_context_split() -> bool:
    """Returns whether this device has only a part of each row's tokens, which decoding never splits."""
    return num_shards(AXIS) > 1 and not has_decoding_layout()


def own_chunks(rows: jax.Array, *, before: int = 0, fill: int = 0) -> jax.Array:
    """Cuts this device's chunks of c tokens out of whole rows.

    Args:
        rows: `[B, T]`, the same on all devices of the axis.
        before: number of tokens before each chunk that are also returned.
        fill: the values before the first token of a row.

    Returns:
        `[chunks * B, before + c]`; the chunks of a row are adjacent.
    """
    (B, T), chunks = rows.shape, _own_chunk_indices()
    size = T // _num_chunks()
    padded = jnp.pad(rows, ((0, 0), (before, 0)), constant_values=fill)
    parts = [jax.lax.dynamic_slice_in_dim(padded, index * size, before + size, 1) for index in chunks]
    return jnp.stack(parts, axis=1).reshape(len(chunks) * B, before + size)


def own_tokens(rows: jax.Array) -> jax.Array:
    """Cuts this device's tokens out of whole rows: `[B, T]` to `[B, T / n]`."""
    return own_chunks(rows).reshape(len(rows), -1) if is_context_split() else rows


def split_chunks(own: jax.Array) -> jax.Array:
    """Makes each chunk of states `[B, T / n, ...]` a row: `[chunks * B, c, ...]`, as `own_chunks`."""
    return own.reshape(len(own) * len(_own_chunk_indices()), -1, *own.shape[2:])


def all_tokens(own: jax.Array, axis: int) -> jax.Array:
    """Gathers the states of all tokens of a row, in the order of the row. The gradient is a reduce-scatter.

    Args:
        own: `[..., T / n, ...]` states of this device's tokens.
        axis: the axis of the tokens.

    Returns:
        `[..., T, ...]`.
    """
    if not is_context_split():
        return own
    axis %= own.ndim
    chunks = own.reshape(*own.shape[:axis], 2, -1, *own.shape[axis + 1 :])
    whole = jnp.moveaxis(_in_order(jnp.moveaxis(chunks, axis, 0)), 0, axis)
    return whole.reshape(*own.shape[:axis], -1, *own.shape[axis + 1 :])


def all_chunks(own: jax.Array) -> jax.Array:
    """Gathers one value per chunk, in the order of the row: `[chunks * B, ...]` to `[all chunks, B, ...]`."""
    chunks = jnp.moveaxis(own.reshape(-1, len(_own_chunk_indices()), *own.shape[1:]), 1, 0)
    return _in_order(chunks) if is_context_split() else chunks


def continues_before(segment_ids: jax.Array) -> jax.Array:
    """Returns `[all chunks, B]` bool: whether each chunk of whole rows continues the document of the chunk before."""
    chunks = segment_ids.reshape(len(segment_ids), _num_chunks(), -1)
    return jnp.pad(chunks[:, 1:, 0] == chunks[:, :-1, -1], ((0, 0), (1, 0))).T


def choose_own(chunks: jax.Array, shift: int = 0) -> jax.Array:
    """Chooses this device's chunks, or those `shift` chunks later, from `all_chunks`; there are zeros past the ends.

    Returns:
        `[chunks * B, ...]`.
    """
    padded = jnp.pad(chunks, ((1, 1), *((0, 0) for _ in chunks.shape[1:])))
    chosen = jnp.stack([padded[index + shift + 1] for index in _own_chunk_indices()], axis=1)
    return chosen.reshape(-1, *chunks.shape[2:])


def ends_before(chunks: jax.Array, count: int) -> jax.Array:
    """Returns the states of the `count` tokens before each chunk; zeros before the first one.

    Args:
        chunks: `[chunks * B, c, ...]`, with c at least `count`.

    Raises:
        ValueError: the chunks have fewer than `count` tokens.
    """
    return _of_neighbour(chunks, count, slice(chunks.shape[1] - count, None), -1)


def begins_after(chunks: jax.Array, count: int) -> jax.Array:
    """Returns the states of the `count` tokens after each chunk; arguments and errors as for `ends_before`."""
    return _of_neighbour(chunks, count, slice(count), 1)


def _of_neighbour(chunks: jax.Array, count: int, border: slice, shift: int) -> jax.Array:
    """Returns the border of the chunk before (`shift` -1) or after each chunk. A row of one chunk has no neighbours."""
    if not is_context_split():
        return jnp.zeros((len(chunks), count, *chunks.shape[2:]), chunks.dtype)
    if count > chunks.shape[1]:
        raise ValueError(
            f"a chunk of mesh axis {AXIS} has {chunks.shape[1]} tokens, but its neighbours need {count} of them: use "
            "longer rows"
        )
    # The borders of all chunks are small, so one gather serves both neighbours of a device.
    return choose_own(all_chunks(chunks[:, border]), shift)


def _num_chunks() -> int:
    return 2 * num_shards(AXIS) if is_context_split() else 1


def _own_chunk_indices() -> tuple[jax.Array | int, ...]:
    """Returns the indices of this device's chunks."""
    if not is_context_split():
        return (0,)
    first = jax.lax.axis_index(AXIS)
    return first, _num_chunks() - 1 - first


def _in_order(chunks: jax.Array) -> jax.Array:
    """Gathers this device's two chunks `[2, ...]` to the chunks of the row in order, `[2n, ...]`."""
    gathered = jax.lax.all_gather(chunks, AXIS)
    return jnp.concatenate([gathered[:, 0], gathered[::-1, 1]])
