"""Softmax attention over whole packed rows by blocks, without an array of scores for all pairs of tokens.

The forward pass goes through the key blocks of each query block with a running maximum and sum, and the backward pass
computes each block's weights again from the saved log-sum-exp (FlashAttention-2, 2307.08691). Blocks after the queries,
before the first document of the query block, or outside the window are skipped. Memory grows linearly with the length
of the rows. `mtpjax.models.layers.attend.attend` with the dense mask is the plain version.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mtpjax.models.view import PackedMask

BLOCK = 512  # queries and keys per block
NO_SCORE = jnp.finfo(jnp.float32).min


class Operands(NamedTuple):
    """The differentiated arrays of a call, padded to whole blocks."""

    q: jax.Array  # [B, K, T, G, H]
    key: jax.Array  # [B, K, T, H]
    value: jax.Array  # [B, K, T, V]
    own_key: jax.Array  # [B, K, T, L, H] keys that only the token itself attends to, of L sources
    own_value: jax.Array  # [B, K, T, L, V]
    sinks: jax.Array | None  # [K, G]


class Layout(NamedTuple):
    """The arrays that decide which pairs of tokens attend."""

    segment_ids: jax.Array  # [B, T]; padding has ids that no token has
    first_block: jax.Array  # [T / block] first key block of each query block
    own_mask: jax.Array  # [B, T, L] bool


class Settings(NamedTuple):
    """The static numbers of a call."""

    scale: float
    window: int
    shift: int
    block: int


def packed_attention(
    q: jax.Array,
    sources: list[tuple[jax.Array, jax.Array]],
    masks: tuple[Any, ...],
    *,
    scale: float,
    sinks: jax.Array | None = None,
    block: int | None = None,
) -> jax.Array:
    """Computes `attend` for a first source with a `PackedMask`, and further sources with masks `[B, T, 1]`.

    Args:
        q: `[B, K, T, G, H]` queries.
        sources: keys `[B, K, T, H]` and values `[B, K, T, V]` of each source, in q's dtype.
        masks: the mask of each source.
        scale: factor that multiplies the scores.
        sinks: `[K, G]` learned logit per head, as in `attend`.
        block: queries and keys per block; None: `BLOCK`.

    Returns:
        `[B, K, T, G, V]` in q's dtype. Scores and sums are float32.
    """
    mask, (key, value) = masks[0], sources[0]
    assert isinstance(mask, PackedMask)
    B, T = mask.segment_ids.shape
    block = min(block or BLOCK, T)
    padding = -T % block

    def pad(array: jax.Array, axis: int) -> jax.Array:
        widths = [(0, padding if each == axis else 0) for each in range(array.ndim)]
        return jnp.pad(array, widths) if padding else array

    def stacked(arrays: list[jax.Array], width: int) -> jax.Array:
        empty = jnp.zeros((*key.shape[:3], 0, width), q.dtype)
        return pad(jnp.stack(arrays, axis=3) if arrays else empty, 2)

    own = sources[1:]
    operands = Operands(
        pad(q, 2), pad(key, 2), pad(value, 2),
        stacked([each for each, _ in own], key.shape[-1]), stacked([each for _, each in own], value.shape[-1]), sinks,
    )  # fmt: skip
    own_mask = jnp.concatenate([jnp.zeros((B, T, 0), bool), *masks[1:]], axis=-1)
    ids = jnp.pad(mask.segment_ids, ((0, 0), (0, padding)), constant_values=-1) if padding else mask.segment_ids
    layout = Layout(ids, _first_blocks(mask, block), pad(own_mask, 1))
    output: jax.Array = _attend(operands, layout, Settings(scale, mask.window, mask.shift, block))
    return jax.lax.slice_in_dim(output, 0, T, axis=2)


def _first_blocks(mask: PackedMask, block: int) -> jax.Array:
    """Returns the first key block that each query block attends to, over all rows, `[T / block]` int32."""
    ids = mask.segment_ids
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    document = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)[:, ::block].min(axis=0)
    if mask.window:
        document = jnp.maximum(document, index[::block] + mask.shift - mask.window + 1)
    return document // block


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(operands: Operands, layout: Layout, settings: Settings) -> jax.Array:
    return _forward(operands, layout, settings)[0]


def _forward(operands: Operands, layout: Layout, settings: Settings):
    """Returns the output, and what the backward pass needs."""
    block = settings.block
    q, key, value, own_key, own_value, sinks = operands
    B, K, T, G, _ = q.shape

    def query_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = lambda array, axis=2: _slice(array, i, block, axis)
        queries = rows(q)
        # 1. Start with the sink and the tokens' own keys.
        best = jnp.full((B, K, block, G), NO_SCORE)
        total = jnp.zeros((B, K, block, G))
        if sinks is not None:
            best = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None], best.shape)
            total = jnp.ones_like(best)
        output = jnp.zeros((B, K, block, G, value.shape[-1]))
        if own_key.shape[3]:
            scores, seen = _own_scores(queries, rows(own_key), rows(layout.own_mask, 1), settings.scale)
            best, total, output, weights = _add(scores, seen, best, total, output)
            output = output + jnp.einsum("BKTGL,BKTLV->BKTGV", weights, rows(own_value).astype(jnp.float32))

        # 2. Add the key blocks up to the queries' own.
        def add_block(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            scores, seen = _scores(queries, key, layout, settings, i, j)
            best, total, output, weights = _add(scores, seen, *state)
            values = _slice(value, j, block, 2)
            return best, total, output + _product("BKTGS,BKSV->BKTGV", weights.astype(q.dtype), values)

        state = jax.lax.fori_loop(layout.first_block[i], i + 1, add_block, (best, total, output))
        best, total, output = state
        total = jnp.where(total == 0, 1, total)  # padding attends to nothing
        return (output / total[..., None]).astype(q.dtype), best + jnp.log(total)

    blocks = jax.lax.map(query_block, jnp.arange(T // block, dtype=jnp.int32))
    output, log_sum = (jnp.moveaxis(each, 0, 2).reshape(B, K, T, *each.shape[4:]) for each in blocks)
    return output, (operands, layout, output, log_sum)


def _backward(settings: Settings, saved: Any, gradient: jax.Array):
    """Returns the gradients of the operands, and none for the layout."""
    (operands, layout, output, log_sum), block = saved, settings.block
    q, key, value, own_key, own_value, sinks = operands
    T, G = q.shape[2:4]
    gradient = gradient.astype(q.dtype)
    delta = jnp.einsum("BKTGV,BKTGV->BKTG", gradient, output, preferred_element_type=jnp.float32)

    def query_block(state: tuple[jax.Array, ...], i: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        rows = lambda array, axis=2: _slice(array, i, block, axis)
        queries, outer, sums, deltas = rows(q), rows(gradient), rows(log_sum), rows(delta)

        def of_scores(scores: jax.Array, seen: jax.Array, products: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Returns the weights, and the gradient of the unscaled scores, given that of the weights."""
            weights = jnp.where(seen, jnp.exp(scores - sums[..., None]), 0)
            return weights, weights * (products - deltas[..., None]) * settings.scale

        # 1. The key blocks.
        def add_block(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            query_gradient, key_gradient, value_gradient = state
            scores, seen = _scores(queries, key, layout, settings, i, j)
            products = _product("BKTGV,BKSV->BKTGS", outer, _slice(value, j, block, 2))
            weights, slopes = (each.astype(q.dtype) for each in of_scores(scores, seen, products))
            query_gradient = query_gradient + _product("BKTGS,BKSH->BKTGH", slopes, _slice(key, j, block, 2))
            key_gradient = _add_slice(key_gradient, _product("BKTGS,BKTGH->BKSH", slopes, queries), j, block)
            value_gradient = _add_slice(value_gradient, _product("BKTGS,BKTGV->BKSV", weights, outer), j, block)
            return query_gradient, key_gradient, value_gradient

        zeros = jnp.zeros(queries.shape, jnp.float32)
        query_gradient, *gradients = jax.lax.fori_loop(layout.first_block[i], i + 1, add_block, (zeros, *state))
        # 2. The tokens' own keys.
        own = rows(own_key), rows(own_value)
        scores, seen = _own_scores(queries, own[0], rows(layout.own_mask, 1), settings.scale)
        products = jnp.einsum("BKTGV,BKTLV->BKTGL", outer, own[1], preferred_element_type=jnp.float32)
        weights, slopes = of_scores(scores, seen, products)
        query_gradient = query_gradient + jnp.einsum("BKTGL,BKTLH->BKTGH", slopes, own[0].astype(jnp.float32))
        own_gradients = (
            jnp.einsum("BKTGL,BKTGH->BKTLH", slopes, queries.astype(jnp.float32)).astype(q.dtype),
            jnp.einsum("BKTGL,BKTGV->BKTLV", weights, outer.astype(jnp.float32)).astype(q.dtype),
        )
        return tuple(gradients), (query_gradient.astype(q.dtype), *own_gradients)

    empty = tuple(jnp.zeros(each.shape, jnp.float32) for each in (key, value))
    indices = jnp.arange(T // block, dtype=jnp.int32)
    (key_gradient, value_gradient), blocks = jax.lax.scan(query_block, empty, indices)
    query_gradient, own_key_gradient, own_value_gradient = (
        jnp.moveaxis(each, 0, 2).reshape(*each.shape[1:3], T, *each.shape[4:]) for each in blocks
    )
    sink_gradient = None
    if sinks is not None:
        weights = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - log_sum)
        sink_gradient = -(weights * delta).sum((0, 2)).reshape(-1, G).astype(sinks.dtype)
    gradients = Operands(
        query_gradient, key_gradient.astype(key.dtype), value_gradient.astype(value.dtype), own_key_gradient,
        own_value_gradient, sink_gradient,
    )  # fmt: skip
    return gradients, None


_attend.defvjp(_forward, _backward)


def _scores(
    queries: jax.Array,
    key: jax.Array,
    layout: Layout,
    settings: Settings,
    i: jax.Array,
    j: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes the scores of query block i and key block j, `[B, K, t, G, s]`, and which pairs attend."""
    block = settings.block
    scores = _product("BKTGH,BKSH->BKTGS", queries, _slice(key, j, block, 2)) * settings.scale
    t = i * block + jnp.arange(block)[None, :, None]
    s = j * block + jnp.arange(block)[None, None, :]
    ids = [_slice(layout.segment_ids, each, block, 1) for each in (i, j)]
    seen = (t >= s) & (ids[0][:, :, None] == ids[1][:, None, :])
    if settings.window:
        seen &= t + settings.shift - s < settings.window
    seen = seen[:, None, :, None]
    return jnp.where(seen, scores, NO_SCORE), seen


def _own_scores(queries: jax.Array, keys: jax.Array, mask: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """Computes the scores of each query with its own key of each source, `[B, K, t, G, L]`."""
    scores = jnp.einsum("BKTGH,BKTLH->BKTGL", queries, keys, preferred_element_type=jnp.float32) * scale
    seen = mask[:, None, :, None]
    return jnp.where(seen, scores, NO_SCORE), seen


def _add(scores: jax.Array, seen: jax.Array, best: jax.Array, total: jax.Array, output: jax.Array):
    """Adds scores to the running maximum and sum; returns them, the rescaled output, and the scores' weights."""
    highest = jnp.maximum(best, scores.max(axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - highest[..., None]), 0)
    factor = jnp.exp(best - highest)
    return highest, total * factor + weights.sum(axis=-1), output * factor[..., None], weights


def _product(equation: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(equation, *arrays, preferred_element_type=jnp.float32)


def _slice(array: jax.Array, index: jax.Array, block: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, index * block, block, axis)


def _add_slice(array: jax.Array, addend: jax.Array, index: jax.Array, block: int) -> jax.Array:
    updated = _slice(array, index, block, 2) + addend
    return jax.lax.dynamic_update_slice_in_dim(array, updated, index * block, 2)
