"""Attention over ranges of keys by blocks in plain JAX, forward and backward.

The forward pass goes through the key blocks of each query block with a running maximum and sum. The backward pass
computes each block's weights again from the saved log-sum-exp (FlashAttention-2, 2307.08691). Key blocks that no query
of a block attends to are skipped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.range_attention.ranges import KeyRanges, chosen_keys

NO_SCORE = jnp.finfo(jnp.float32).min


BLOCK = 512  # maximum number of queries and keys per block
MIN_BLOCK = 64
# Bytes of a block's scores. On a CPU, the scores of a block stay in the L2 cache; other devices need larger products.
SCORE_BYTES = {"cpu": 2**21}
OTHER_SCORE_BYTES = 2**25


class _Operands(NamedTuple):
    """The arrays of a call, padded to whole blocks."""

    q: jax.Array  # [B, K, T, G, H]
    key: jax.Array  # [B, K, S, H]
    value: jax.Array  # [B, K, S, V]
    ranges: KeyRanges


class _Settings(NamedTuple):
    """The static numbers of a call."""

    scale: float
    queries: int  # per block
    keys: int  # per block


def forward(q, key, value, ranges: KeyRanges, *, scale: float, dtype) -> tuple[jax.Array, jax.Array]:
    """Returns the output `[B, K, T, G, V]` in `dtype` and the log-sum-exp of the scores `[B, K, T, G]` float32.

    A query without keys gets zeros and `NO_SCORE`.
    """
    num_queries = q.shape[2]
    operands, settings = _pad(q, key, value, ranges, scale)
    q, key, value, ranges = operands
    B, K, T, G, _ = q.shape
    begins, ends = ranges.of_blocks(settings.queries, settings.keys)

    def query_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        queries, chosen = _slice(q, i, settings.queries, 2), _chosen(operands, settings, i)

        def add_block(j: jax.Array, state: tuple[jax.Array, ...], which: int) -> tuple[jax.Array, ...]:
            best, total, output = state
            scores, seen = _scores(queries, operands, settings, i, j, which, chosen)
            highest = jnp.maximum(best, scores.max(axis=-1))
            weights = jnp.where(seen, jnp.exp(scores - highest[..., None]), 0)
            # When the highest score rises, scale the older sums down by the same factor.
            factor = jnp.exp(best - highest)
            sums = _product("BKTGS,BKSV->BKTGV", weights.astype(q.dtype), _slice(value, j, settings.keys, 2))
            return highest, total * factor + weights.sum(axis=-1), output * factor[..., None] + sums

        zeros = jnp.zeros((B, K, settings.queries, G))
        state = zeros + NO_SCORE, zeros, jnp.zeros((*zeros.shape, value.shape[-1]))
        for which in range(ranges.first.shape[2]):
            add = lambda j, state, which=which: add_block(j, state, which)
            state = jax.lax.fori_loop(begins[i, which], ends[i, which], add, state)
        best, total, output = state
        total = jnp.where(total == 0, 1, total)  # a query without keys
        return (output / total[..., None]).astype(dtype), best + jnp.log(total)

    blocks = jax.lax.map(query_block, jnp.arange(T // settings.queries, dtype=jnp.int32))
    output, log_sum = (_join(each)[:, :, :num_queries] for each in blocks)
    return output, log_sum


def backward(
    q, key, value, ranges: KeyRanges, gradient, log_sum, delta, *, scale: float, dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of the queries in `dtype`, and of keys and values in float32.

    Args:
        gradient: `[B, K, T, G, V]` gradient of the output, in q's dtype.
        log_sum: `[B, K, T, G]` log-sum-exp of all scores, including own keys and sinks.
        delta: `[B, K, T, G]` float32 product of the output and its gradient.
        dtype: of the queries' gradient.
    """
    num_queries, num_keys = q.shape[2], key.shape[2]
    operands, settings = _pad(q, key, value, ranges, scale)
    q, key, value, ranges = operands
    gradient, log_sum, delta = (_fill(each, settings.queries, 2) for each in (gradient, log_sum, delta))
    begins, ends = ranges.of_blocks(settings.queries, settings.keys)

    def query_block(state: tuple[jax.Array, ...], i: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        queries, outer, sums, deltas = (_slice(each, i, settings.queries, 2) for each in (q, gradient, log_sum, delta))
        chosen = _chosen(operands, settings, i)

        def add_block(j: jax.Array, state: tuple[jax.Array, ...], which: int) -> tuple[jax.Array, ...]:
            query_gradient, key_gradient, value_gradient = state
            scores, seen = _scores(queries, operands, settings, i, j, which, chosen)
            products = _product("BKTGV,BKSV->BKTGS", outer, _slice(value, j, settings.keys, 2))
            weights = jnp.where(seen, jnp.exp(scores - sums[..., None]), 0)
            slopes = (weights * (products - deltas[..., None]) * settings.scale).astype(q.dtype)
            weights = weights.astype(q.dtype)
            query_gradient += _product("BKTGS,BKSH->BKTGH", slopes, _slice(key, j, settings.keys, 2))
            key_gradient = _add_slice(key_gradient, _product("BKTGS,BKTGH->BKSH", slopes, queries), j)
            value_gradient = _add_slice(value_gradient, _product("BKTGS,BKTGV->BKSV", weights, outer), j)
            return query_gradient, key_gradient, value_gradient

        state = jnp.zeros(queries.shape, jnp.float32), *state
        for which in range(ranges.first.shape[2]):
            add = lambda j, state, which=which: add_block(j, state, which)
            state = jax.lax.fori_loop(begins[i, which], ends[i, which], add, state)
        query_gradient, *gradients = state
        return tuple(gradients), query_gradient.astype(dtype)

    empty = tuple(jnp.zeros(each.shape, jnp.float32) for each in (key, value))
    indices = jnp.arange(q.shape[2] // settings.queries, dtype=jnp.int32)
    (key_gradient, value_gradient), blocks = jax.lax.scan(query_block, empty, indices)
    return _join(blocks)[:, :, :num_queries], key_gradient[:, :, :num_keys], value_gradient[:, :, :num_keys]


def _pad(q, key, value, ranges: KeyRanges, scale: float) -> tuple[_Operands, _Settings]:
    """Pads queries and keys to whole blocks. The ranges of padded queries are empty."""
    block, pairs = BLOCK, q.size // (q.shape[2] * q.shape[4])
    while block > MIN_BLOCK and 4 * pairs * block**2 > SCORE_BYTES.get(jax.default_backend(), OTHER_SCORE_BYTES):
        block //= 2
    settings = _Settings(scale, min(block, q.shape[2]), min(block, key.shape[2]))
    first, last = _fill(ranges.first, settings.queries, 1), _fill(ranges.last, settings.queries, 1, -1)
    chosen = None if ranges.chosen is None else _fill(ranges.chosen, settings.queries, 1)
    key, value = (_fill(each, settings.keys, 2) for each in (key, value))
    return _Operands(_fill(q, settings.queries, 2), key, value, KeyRanges(first, last, chosen)), settings


def _fill(array: jax.Array, block: int, axis: int, fill: int = 0) -> jax.Array:
    """Appends `fill` up to a multiple of `block`."""
    missing = -array.shape[axis] % block
    widths = [(0, missing if each == axis else 0) for each in range(array.ndim)]
    return jnp.pad(array, widths, constant_values=fill) if missing else array


def _chosen(operands: _Operands, settings: _Settings, i: jax.Array) -> jax.Array | None:
    """Returns the keys that an indexer chose for query block i, `[B, t, S]` bool; None: it has no choice."""
    chosen, num_keys = operands.ranges.chosen, operands.key.shape[2]
    return None if chosen is None else chosen_keys(_slice(chosen, i, settings.queries, 1), num_keys)


def _scores(
    queries: jax.Array,
    operands: _Operands,
    settings: _Settings,
    i: jax.Array,
    j: jax.Array,
    which: int,
    chosen: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the scores of query block i and key block j, `[B, K, t, G, s]`, and the pairs of range `which`."""
    scores = _product("BKTGH,BKSH->BKTGS", queries, _slice(operands.key, j, settings.keys, 2)) * settings.scale
    first, last = (_slice(each[:, :, which, None], i, settings.queries, 1) for each in operands.ranges[:2])
    index = (j * settings.keys + jnp.arange(settings.keys))[None, None]
    seen = (index >= first) & (index <= last)
    if chosen is not None:
        seen &= _slice(chosen, j, settings.keys, 2)
    seen = seen[:, None, :, None]
    return jnp.where(seen, scores, NO_SCORE), seen


def _product(equation: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(equation, *arrays, preferred_element_type=jnp.float32)


def _slice(array: jax.Array, index: jax.Array, block: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, index * block, block, axis)


def _add_slice(array: jax.Array, addend: jax.Array, index: jax.Array) -> jax.Array:
    updated = _slice(array, index, addend.shape[2], 2) + addend
    return jax.lax.dynamic_update_slice_in_dim(array, updated, index * addend.shape[2], 2)


def _join(blocks: jax.Array) -> jax.Array:
    """Joins `[T / t, B, K, t, ...]` to `[B, K, T, ...]`."""
    B, K = blocks.shape[1:3]
    return jnp.moveaxis(blocks, 0, 2).reshape(B, K, -1, *blocks.shape[4:])
