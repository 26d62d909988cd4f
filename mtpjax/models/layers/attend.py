"""Softmax attention over one or more sources of keys, shared by all attention layers."""

import jax
import jax.numpy as jnp

from mtpjax.models.masks import Masks, View
from pallas_kernels.verify_attention import choose_for, verify_attention


def attend(q: jax.Array, sources: list[tuple[jax.Array, jax.Array]], masks: Masks, *, scale: float) -> jax.Array:
    """Softmax attention of `q [B, K, T, G, H]` jointly over all `sources`; returns `[B, K, T, G, value width]`.

    A source is keys `[B, K, S, H]` and values `[B, K, S, Hv]`. Scores and softmax are float32.
    """
    scores = []
    for (key, _), mask in zip(sources, masks, strict=True):
        if mask.shape[-1] == 1:
            pairs = q.astype(jnp.float32) * key.astype(jnp.float32)[:, :, :, None]  # as a product: a loop on a CPU
            score = pairs.sum(-1, keepdims=True)
        else:
            score = _scores(q, key)
        scores.append(jnp.where(mask[:, None, :, None, :], score, jnp.finfo(jnp.float32).min))
    joined = scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1)
    weights = jax.nn.softmax(joined * scale, axis=-1).astype(q.dtype)
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
    value_width: int | None = None,
) -> jax.Array | None:
    """`attend` to a whole layer of a cache, by a kernel; None where that is left to XLA.

    Without `values` they are the first `value_width` columns of the keys. Only what the tokens see is read, a window's
    slots too: nobody need cut them out before.
    """
    reach = view.reach
    if reach is None:
        return None
    chosen = choose_for(q, keys, reach.ancestor_mask, implementation, is_windowed=reach.begin is not None)
    if chosen == "xla":
        return None
    return verify_attention(
        q,
        keys,
        values,
        reach.base,
        reach.ancestor_mask,
        reach.begin,
        scale=scale,
        sinks=reach.sinks,
        value_width=value_width,
        implementation=chosen,
    )


def _scores(q: jax.Array, key: jax.Array) -> jax.Array:
    """Products of `q [B, K, T, G, H]` and keys `[B, K, S, H]`: `[B, K, T, G, S]` float32.

    A batch or head axis of size one is left out of the product: with one, XLA on a CPU first transposes all keys.
    """
    ones = tuple(axis for axis in (0, 1) if key.shape[axis] == 1)
    batch = "".join(name for axis, name in enumerate("BK") if axis not in ones)
    equation = f"{batch}TGH,{batch}SH->{batch}TGS"
    scores = jnp.einsum(equation, q.squeeze(ones), key.squeeze(ones), preferred_element_type=jnp.float32)
    return jnp.expand_dims(scores, ones)
