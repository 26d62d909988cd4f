"""Softmax attention over ranges of keys, without an array of scores for all pairs, for training and long prompts.

Bottleneck: multiplications. For T causal tokens, N query heads and keys and values of H and V columns, the forward pass
takes N T^2 (H + V) operations, and the backward pass at least N T^2 (3 H + 2 V), for 2 T (N + K) (H + V) bytes of
bfloat16 queries, keys, values and outputs. An H100 computes 295 operations in the time of a byte, so bytes limit only
rows of fewer than 600 (1 + K / N) tokens. It computes 16 exponentials per clock and processor, so with 64 columns they
take as long as the products of the forward pass.

A query attends to ranges of consecutive keys (`KeyRanges`), and optionally to keys that no other query attends to, such
as the entries of recycled MTP depths at its own position, or that only the queries of its block attend to, such as the
slots of a block of drafts. The plain form (`blocks`) and the kernels attend to the ranges. This module then adds own
keys and sinks through the log-sum-exp, and computes their gradients.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case, Shape, random_keys, random_normal
from pallas_kernels.dispatch import choose
from pallas_kernels.gradients import keep_result
from pallas_kernels.range_attention import blocks, kernels
from pallas_kernels.range_attention.blocks import NO_SCORE
from pallas_kernels.range_attention.ranges import KeyRanges, chosen_keys

__all__ = ["KeyRanges", "OwnKeys", "chosen_keys", "range_attention", "range_attention_reference"]


class OwnKeys(NamedTuple):
    """Keys that only one block of consecutive queries attends to: A blocks of T / A queries, with L keys per block."""

    key: jax.Array  # [B, K, A, L, H]
    value: jax.Array  # [B, K, A, L, V]
    mask: jax.Array  # [B, T, L] bool


def range_attention(
    q: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ranges: KeyRanges,
    *,
    scale: float,
    own: OwnKeys | None = None,
    sinks: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Computes softmax attention of each query over its ranges of keys, its own keys and a sink.

    Scores and sums are float32. Differentiable in reverse mode with respect to queries, keys, values and sinks. A query
    that attends to nothing gets zeros.

    Args:
        q: `[B, K, T, G, H]` floating, with G query heads for each of K key heads.
        key: `[B, K, S, H]` in q's dtype.
        value: `[B, K, S, V]` in q's dtype.
        ranges: the keys of each query.
        scale: factor that multiplies the scores.
        own: keys that only one block of queries attends to (a block may be one query), in q's dtype.
        sinks: `[K, G]` a learned logit per query head, which enters the softmax but adds no value (gpt-oss).
        implementation: as in `pallas_kernels`. Calls with `ranges.chosen` always run in plain JAX.

    Returns:
        `[B, K, T, G, V]` in q's dtype.

    Raises:
        ValueError: the shapes do not match, or the kernel was requested for columns that do not fit into registers.
    """
    (B, K, T, G, H), S = q.shape, key.shape[2]
    is_right = key.shape == (B, K, S, H) and value.shape[:3] == (B, K, S)
    if not is_right or ranges.first.shape[:2] != (B, T) or ranges.first.shape != ranges.last.shape:
        found = f"key {key.shape}, value {value.shape} and ranges {ranges.first.shape}, {ranges.last.shape}"
        raise ValueError(f"q {q.shape} does not fit {found}")
    if q.size * S == 0:
        return range_attention_reference(q, key, value, ranges, scale=scale, own=own, sinks=sinks)
    if own is None:
        empty = (jnp.zeros((B, K, T, 0, each.shape[-1]), q.dtype) for each in (key, value))
        own = OwnKeys(next(empty), next(empty), jnp.zeros((B, T, 0), bool))
    shape: dict[str, int | str] = {"batch": B, "heads": K, "group": G, "queries": T * G, "keys": S, "width": H}
    shape |= {"values": value.shape[-1], "ranges": ranges.first.shape[2], "dtype": str(q.dtype)}
    reason = kernels.unsupported_reason(q, value)
    offered = ("xla", "triton")
    chosen = choose("range_attention", implementation, offered, shape, unsupported_reason=reason, make_case=make_case)
    arrays = _Arrays(q, key, value, own.key, own.value, sinks)
    # The kernels do not support `ranges.chosen`.
    chosen = "xla" if ranges.chosen is not None else chosen
    output: jax.Array = _attend(arrays, (ranges.within(S), own.mask), scale, chosen)
    return output


def make_case(shape: Shape) -> Case:
    """Makes a call that also computes the gradients of queries, keys and values, for packed documents."""
    B, K, G, S, H, V, R = (shape[name] for name in ("batch", "heads", "group", "keys", "width", "values", "ranges"))
    T, keys, dtype = max(shape["queries"] // G, 1), random_keys(), shape["dtype"]
    q, key, value = (random_normal(keys, size, dtype) for size in ((B, K, T, G, H), (B, K, S, H), (B, K, S, V)))
    # Each query attends to its third of the keys, up to its own place, which is cut into R ranges.
    last = jnp.arange(T)[:, None] + (S - T)
    document = S // 3 + 1
    cuts = jnp.maximum(last // document * document, 0) + (last % document + 1) * jnp.arange(R + 1)[None] // R
    ranges = KeyRanges(
        *(jnp.broadcast_to(each.astype(jnp.int32), (B, T, R)) for each in (cuts[:, :-1], cuts[:, 1:] - 1))
    )
    gradient = random_normal(keys, (B, K, T, G, V), dtype)
    return functools.partial(with_gradients, scale=H**-0.5), (q, key, value, ranges, gradient)


def with_gradients(q, key, value, ranges: KeyRanges, gradient, **settings):
    """Computes `range_attention`, and the gradients of q, key and value for a `gradient` of the output."""

    def attend(q, key, value):
        return range_attention(q, key, value, ranges, **settings)

    output, pull = jax.vjp(attend, q, key, value)
    return output, pull(gradient)


def range_attention_reference(q, key, value, ranges, *, scale, own=None, sinks=None) -> jax.Array:
    """Computes `range_attention` in plain JAX with all scores at once, which defines its meaning."""
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores, masks = [product("BKTGH,BKSH->BKTGS", q, key)], [ranges.dense(key.shape[2])[:, None, :, None]]
    if own is not None:
        own_key, own_value = (jnp.repeat(each, q.shape[2] // each.shape[2], axis=2) for each in (own.key, own.value))
        scores.append(product("BKTGH,BKTLH->BKTGL", q, own_key))
        masks.append(own.mask[:, None, :, None])
    mask = jnp.concatenate(
        [jnp.broadcast_to(each, one.shape) for each, one in zip(masks, scores, strict=True)], axis=-1
    )
    joined = jnp.where(mask, jnp.concatenate(scores, axis=-1) * scale, NO_SCORE)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None, :, None], (*joined.shape[:-1], 1))
        joined = jnp.concatenate([joined, sink], axis=-1)
    # A second `where` after the softmax gives zeros to queries that attend to nothing.
    weights = jnp.where(mask, jax.nn.softmax(joined, axis=-1)[..., : mask.shape[-1]], 0).astype(q.dtype)
    S = key.shape[2]
    output = product("BKTGS,BKSV->BKTGV", weights[..., :S], value)
    if own is not None:
        output += product("BKTGL,BKTLV->BKTGV", weights[..., S:], own_value)
    return output.astype(q.dtype)


class _Arrays(NamedTuple):
    """The differentiated arrays of a call."""

    q: jax.Array
    key: jax.Array
    value: jax.Array
    own_key: jax.Array
    own_value: jax.Array
    sinks: jax.Array | None

    @property
    def has_more(self) -> bool:
        """True if queries attend to something outside the ranges."""
        return self.own_key.shape[3] > 0 or self.sinks is not None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _attend(arrays: _Arrays, masks: tuple[KeyRanges, jax.Array], scale: float, implementation: str) -> jax.Array:
    return _forward(arrays, masks, scale, implementation)[0]


def _forward(arrays: _Arrays, masks: tuple[KeyRanges, jax.Array], scale: float, implementation: str):
    """Returns the output, and what the backward pass needs."""
    (q, key, value, own_key, own_value, sinks), (ranges, own_mask) = arrays, masks
    # 1. The ranges.
    dtype = jnp.float32 if arrays.has_more else q.dtype
    output, log_sum = _form(implementation, "forward")(q, key, value, ranges, scale=scale, dtype=dtype)
    if not arrays.has_more:
        output, log_sum = keep_result((output, log_sum))
        return output, (arrays, masks, output, log_sum)
    # 2. The total log-sum-exp, with the queries' own keys and the sinks.
    terms = [log_sum[..., None], _own_scores(q, own_key, own_mask, scale)]
    if sinks is not None:
        terms.append(jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None, :, None], terms[0].shape))
    total = jax.nn.logsumexp(jnp.concatenate(terms, axis=-1), axis=-1)
    # 3. Scale the ranges' output down and add the own values.
    weights = _own_weights(terms[1], own_mask, total)
    own = jnp.einsum("BKAXL,BKALV->BKAXV", _fold(weights, own_value), own_value.astype(jnp.float32))
    output = (output * jnp.exp(log_sum - total)[..., None] + own.reshape(output.shape)).astype(q.dtype)
    output, total = keep_result((output, total))
    return output, (arrays, masks, output, total)


def _backward(scale: float, implementation: str, saved: Any, gradient: jax.Array):
    """Returns the gradients of the arrays, and none for the masks."""
    arrays, (ranges, own_mask), output, log_sum = saved
    q, key, value, own_key, own_value, sinks = arrays
    gradient = gradient.astype(q.dtype)
    delta = jnp.einsum("BKTGV,BKTGV->BKTG", gradient, output, preferred_element_type=jnp.float32)
    # 1. The ranges. Their weights follow from the total log-sum-exp.
    dtype = jnp.float32 if arrays.has_more else q.dtype
    query_gradient, key_gradient, value_gradient = _form(implementation, "backward")(
        q, key, value, ranges, gradient, log_sum, delta, scale=scale, dtype=dtype
    )
    # 2. The queries' own keys.
    weights = _own_weights(_own_scores(q, own_key, own_mask, scale), own_mask, log_sum)
    queries, gradients = (_fold(each, own_key) for each in (q, gradient))
    products = jnp.einsum("BKAXV,BKALV->BKAXL", gradients, own_value, preferred_element_type=jnp.float32)
    slopes = _fold(weights * (products.reshape(weights.shape) - delta[..., None]) * scale, own_key)
    if arrays.has_more:
        own = jnp.einsum("BKAXL,BKALH->BKAXH", slopes, own_key.astype(jnp.float32))
        query_gradient += own.reshape(q.shape)
    own_key_gradient = jnp.einsum("BKAXL,BKAXH->BKALH", slopes, queries.astype(jnp.float32))
    own_value_gradient = jnp.einsum("BKAXL,BKAXV->BKALV", _fold(weights, own_key), gradients.astype(jnp.float32))
    # 3. The sinks, which have no value.
    sink_gradient = None
    if sinks is not None:
        weights = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - log_sum)
        sink_gradient = -(weights * delta).sum((0, 2)).astype(sinks.dtype)
    gradients = query_gradient, key_gradient, value_gradient, own_key_gradient, own_value_gradient
    return _Arrays(*[each.astype(q.dtype) for each in gradients], sinks=sink_gradient), None


_attend.defvjp(_forward, _backward)


def _form(implementation: str, name: str) -> Callable[..., Any]:
    """Returns `forward` or `backward` of the implementation."""
    if implementation == "xla":
        return getattr(blocks, name)
    return functools.partial(getattr(kernels, name), interpret=implementation == "interpreted")


def _own_scores(q: jax.Array, keys: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    """Computes the scores of each query with its own keys, `[B, K, T, G, L]` float32."""
    scores = jnp.einsum("BKAXH,BKALH->BKAXL", _fold(q, keys), keys, preferred_element_type=jnp.float32) * scale
    return jnp.where(mask[:, None, :, None], scores.reshape(*q.shape[:4], -1), NO_SCORE)


def _fold(array: jax.Array, own: jax.Array) -> jax.Array:
    """Reshapes `[B, K, T, G, X]` to `[B, K, A, T / A * G, X]`, all queries of one block of `own [B, K, A, L, H]`."""
    (B, K, T, G, X), A = array.shape, own.shape[2]
    return array.reshape(B, K, A, T // A * G, X)


def _own_weights(scores: jax.Array, mask: jax.Array, log_sum: jax.Array) -> jax.Array:
    return jnp.where(mask[:, None, :, None], jnp.exp(scores - log_sum[..., None]), 0)
