"""Softmax attention over one or more sources of keys, shared by all attention layers."""

import jax
import jax.numpy as jnp

from mtpjax.messages import require
from mtpjax.models.view import Masks, View
from pallas_kernels.batch_invariance import is_batch_invariant
from pallas_kernels.prefill_attention import choose_implementation as prefill_implementation
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.range_attention import KeyRanges, OwnKeys, range_attention
from pallas_kernels.verify_attention import (
    MAX_QUERY_TOKENS,
    choose_implementation,
    project_values,
    verify_attention,
)


def attend(
    q: jax.Array,
    sources: list[tuple[jax.Array, jax.Array]],
    masks: Masks,
    *,
    scale: float,
    sinks: jax.Array | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """Computes softmax attention jointly over several sources of keys, in plain XLA with float32 scores.

    Args:
        q: `[B, K, T, G, H]` queries, G per key/value head.
        sources: keys `[B, K, S, H]` and values `[B, K, S, Hv]` of each source, converted to q's dtype.
        masks: `[B, T, S]` bool for each source. With a mask `[B, T, 1]`, token i attends only to entry i. The first
            mask may be `KeyRanges`, and all others `[B, T, 1]`; then the scores are never stored (`range_attention`).
        scale: factor that multiplies the scores.
        sinks: `[K, G]` learned logit per head, which enters the softmax but adds no value (StreamingLLM, 2309.17453,
            section 3.3, in gpt-oss's form). None: no sinks.
        implementation: of `range_attention`.

    Returns:
        `[B, K, T, G, Hv]` in q's dtype.

    Raises:
        ValueError: within `pallas_kernels.batch_invariant`, which XLA does not support.
    """
    require(
        not is_batch_invariant(), "deterministic decoding needs an attention kernel, but this attention runs in XLA"
    )
    sources = [(key.astype(q.dtype), value.astype(q.dtype)) for key, value in sources]
    if isinstance(masks[0], KeyRanges):
        (keys, values), *others = sources
        own = None
        if others:
            own_keys, own_values = (jnp.stack(arrays, axis=3) for arrays in zip(*others, strict=True))
            own = OwnKeys(own_keys, own_values, jnp.concatenate(masks[1:], axis=-1))
        settings = {"scale": scale, "own": own, "sinks": sinks, "implementation": implementation}
        return range_attention(q, keys, values, masks[0], **settings)
    # Score every source, then normalise over all of them together.
    scores = []
    for (key, _), mask in zip(sources, masks, strict=True):
        if mask.shape[-1] == 1:
            # Multiply elementwise, because XLA on a CPU turns a batched matmul of single rows into a loop.
            pairs = q.astype(jnp.float32) * key.astype(jnp.float32)[:, :, :, None]
            score = pairs.sum(-1, keepdims=True)
        else:
            score = _scores(q, key)
        scores.append(jnp.where(mask[:, None, :, None, :], score, jnp.finfo(jnp.float32).min))
    joined = scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1)
    joined = joined * scale
    if sinks is not None:
        # A sink is an additional column of the softmax, which takes a share of the weight but has no value.
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None, :, None], (*joined.shape[:-1], 1))
        joined = jnp.concatenate([joined, sink], axis=-1)
    weights = jax.nn.softmax(joined, axis=-1).astype(q.dtype)
    # Add up each source's weighted values.
    output, begin = jnp.zeros((), q.dtype), 0
    for (_, value), mask in zip(sources, masks, strict=True):
        weight = weights[..., begin : begin + mask.shape[-1]]
        begin += mask.shape[-1]
        is_own = mask.shape[-1] == 1
        output = output + (weight * value[:, :, :, None] if is_own else jnp.einsum("BKTGS,BKSH->BKTGH", weight, value))
    return output


def attend_cache(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    view: View,
    *,
    scale: float,
    implementation: str,
    value_up: jax.Array | None = None,
    selection: Masks | None = None,
) -> jax.Array | None:
    """Attends to one layer's whole cache with `verify_attention`, or with `prefill_attention` for many tokens.

    The kernels read only slots that the tokens attend to, so the caller need not slice out windows.

    Args:
        q: `[B, K, T, G, H]` queries.
        keys: `[B, K, S, H]` keys of the cache; in a paged cache `[P, K, size, H]`.
        values: `[B, K, S, Hv]`; None: the first Hv columns of the keys, with Hv from `value_up`.
        value_up: `[G, Hv, V]`, one matrix per head that multiplies the head's output; requires K = 1.
        selection: keys that an indexer selected, as one mask `[B, T, S]`; only `prefill_attention` supports it.

    Returns:
        `[B, K, T, G, Hv]`, or `[B, 1, T, G, V]` with `value_up`; None if the caller should use XLA (`attend`).
    """
    reach, storage = view.reach, view.storage
    if reach is None:
        return None
    value_width = None if value_up is None else value_up.shape[1]
    is_windowed, settings = reach.begin is not None, {"scale": scale, "sinks": reach.sinks, "value_width": value_width}
    # Few tokens or a draft tree.
    if q.shape[2] <= MAX_QUERY_TOKENS or not reach.is_chain:
        table = storage.table
        shape = {"is_windowed": is_windowed, "pages_per_row": None if table is None else table.shape[1]}
        chosen = choose_implementation(q, keys, reach.ancestor_mask, implementation, **shape)
        if chosen == "xla" or selection is not None:
            return None
        settings |= {"value_up": value_up, "page_shift": storage.shift}
        operands = (q, keys, values, reach.base, reach.ancestor_mask, reach.begin, table)
        return verify_attention(*operands, **settings, implementation=chosen)
    # A prefill chunk. Copying a row's pages is cheap compared with attention for a whole chunk.
    keys, values = storage.first(keys), None if values is None else storage.first(values)
    mask = selection[0] if selection else None
    if mask is not None and mask.shape[2] != keys.shape[2]:
        return None
    chosen = prefill_implementation(q, keys, implementation, is_windowed=is_windowed)
    if chosen == "xla":
        return None
    output = prefill_attention(q, keys, values, reach.base, reach.begin, mask, **settings, implementation=chosen)
    return output if value_up is None else project_values(output, value_up)


def _scores(q: jax.Array, key: jax.Array) -> jax.Array:
    """Multiplies `q [B, K, T, G, H]` by keys `[B, K, S, H]`; returns `[B, K, T, G, S]` float32."""
    # Drop batch and head axes of size one, because with them XLA on a CPU first transposes all keys.
    ones = tuple(axis for axis in (0, 1) if key.shape[axis] == 1)
    batch = "".join(name for axis, name in enumerate("BK") if axis not in ones)
    equation = f"{batch}TGH,{batch}SH->{batch}TGS"
    scores = jnp.einsum(equation, q.squeeze(ones), key.squeeze(ones), preferred_element_type=jnp.float32)
    return jnp.expand_dims(scores, ones)
