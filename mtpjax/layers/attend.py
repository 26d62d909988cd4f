"""What all attention shares: the view of one pass, and softmax attention over one or more sources of keys."""

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.config import ModelConfig
from mtpjax.layers.rotary import rotary_angles

Entries = dict[str, jax.Array]  # what a layer keeps per position; also one layer of a cache
Masks = tuple[jax.Array, ...]  # bool, per source of keys `[B, T, S]`; `[B, T, 1]`: row i sees entry i alone


class View(flax.struct.PyTreeNode):
    """Where the T tokens of a pass stand; the same for all layers."""

    angles: tuple[jax.Array, jax.Array]  # cosines and sines, each [B, T, P]
    mask: jax.Array  # [B, T, S] bool: which keys a query sees
    start: jax.Array | None = None  # [B] first cache slot written; None: a pass without a cache
    segment_ids: jax.Array | None = None  # [B, T] of whole rows
    taken: jax.Array | None = None  # [B] how many of the tokens are committed for sure; None: that is decided later


class Recycled(flax.struct.PyTreeNode):
    """Memory of a recycled level in a full pass: row i sees `base` up to i, and entry i of every level since.

    This is what decoding sees: true entries of the prefix, then the level's own (EAGLE-3's training-time test).
    """

    base: Entries
    levels: tuple[Entries, ...] = ()


def full_view(config: ModelConfig, segment_ids: jax.Array, *, shift: int = 0) -> View:
    """View of whole rows `[B, T]`: causal within equal segment ids, positions counted from each segment's start.

    `shift` moves the rotary positions on, for recycled levels.
    """
    index = jnp.arange(segment_ids.shape[1])[None, :]
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    positions = index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1) + shift
    mask = (index[:, :, None] >= index[:, None, :]) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return View(rotary_angles(config, positions), mask, segment_ids=segment_ids)


def cached_view(
    config: ModelConfig, start: jax.Array, width: int, capacity: int, *, taken: jax.Array | None = None
) -> View:
    """View of `width` tokens written into slots `start .. start+width-1` of caches with `capacity` slots.

    Where it is known before the pass how many of them are committed, `taken [B]` saves a recurrent layer its snapshots.
    """
    positions = start[:, None] + jnp.arange(width)[None, :]
    mask = jnp.arange(capacity)[None, None, :] <= positions[:, :, None]
    return View(rotary_angles(config, positions), mask, start, taken=taken)


def attend(q: jax.Array, sources: list[tuple[jax.Array, jax.Array]], masks: Masks, *, scale: float) -> jax.Array:
    """Softmax attention of `q [B, K, T, G, H]` jointly over all `sources`; returns `[B, K, T, G, value width]`.

    A source is keys `[B, K, S, H]` and values `[B, K, S, Hv]`. Scores and softmax are float32.
    """
    scores = []
    for (key, _), mask in zip(sources, masks, strict=True):
        if mask.shape[-1] == 1:
            own = jnp.einsum("BKTGH,BKTH->BKTG", q, key, preferred_element_type=jnp.float32)
            score = own[..., None]
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


def _scores(q: jax.Array, key: jax.Array) -> jax.Array:
    """Products of `q [B, K, T, G, H]` and keys `[B, K, S, H]`: `[B, K, T, G, S]` float32.

    A batch or head axis of size one is left out of the product: with one, XLA on a CPU first transposes all keys.
    """
    ones = tuple(axis for axis in (0, 1) if key.shape[axis] == 1)
    batch = "".join(name for axis, name in enumerate("BK") if axis not in ones)
    equation = f"{batch}TGH,{batch}SH->{batch}TGS"
    scores = jnp.einsum(equation, q.squeeze(ones), key.squeeze(ones), preferred_element_type=jnp.float32)
    return jnp.expand_dims(scores, ones)
