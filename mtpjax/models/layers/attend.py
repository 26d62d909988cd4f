"""What all attention shares: the view of one pass, and softmax attention over one or more sources of keys."""

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.models.config import ModelConfig
from mtpjax.models.layers.rotary import rotary_angles
from pallas_kernels.verify_attention import choose_for, verify_attention

Entries = dict[str, jax.Array]  # what a layer keeps per position; also one layer of a cache
Masks = tuple[jax.Array, ...]  # bool, per source of keys `[B, T, S]`; `[B, T, 1]`: row i sees entry i alone


class Span(flax.struct.PyTreeNode):
    """The slots of a cache that a pass reads: the first `sinks`, and `size` from `begin [B]` on."""

    begin: jax.Array
    sinks: int = flax.struct.field(pytree_node=False)
    size: int = flax.struct.field(pytree_node=False)


class Reach(flax.struct.PyTreeNode):
    """What the tokens of a pass see of a cache, in few numbers: a kernel's form of `View.mask`."""

    base: jax.Array  # [B] slots of text, all of which is seen but for a window
    sees: jax.Array  # [B, T, X] bool: token t sees slot base + x
    begin: jax.Array | None = None  # [B, T] with a window: the first slot of text in it
    sinks: int = flax.struct.field(pytree_node=False, default=0)  # and so many at the beginning


class View(flax.struct.PyTreeNode):
    """Where the T tokens of a pass stand; the same for all layers."""

    angles: tuple[jax.Array, jax.Array]  # cosines and sines, each [B, T, P]
    mask: jax.Array  # [B, T, S] bool: which keys a query sees; with a span [B, T, sinks + size]
    start: jax.Array | None = None  # [B] first cache slot written; None: a pass without a cache
    segment_ids: jax.Array | None = None  # [B, T] of whole rows
    taken: jax.Array | None = None  # [B] how many of the tokens are committed for sure; None: that is decided later
    span: Span | None = None  # None: a cache is read whole
    reach: Reach | None = None  # of a pass with a cache


class Branches(flax.struct.PyTreeNode):
    """Tokens of a tree whose slots begin at `base [B]`, behind the text."""

    base: jax.Array
    depth: jax.Array  # [B, T] int32: the token stands at position base + depth
    sees: jax.Array  # [B, T, X] bool: token t sees slot base + x


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
    config: ModelConfig,
    start: jax.Array,
    width: int,
    capacity: int,
    *,
    taken: jax.Array | None = None,
    branches: Branches | None = None,
    window: tuple[int, int] | None = None,
) -> View:
    """View of `width` tokens written into slots `start .. start+width-1` of caches with `capacity` slots.

    Where it is known before the pass how many of them are committed, `taken [B]` saves a recurrent layer work. Tokens
    follow each other unless `branches` say how they do. With a `window` of (newest positions, sinks) a token
    sees itself and the text's newest positions before it, so many in all, and the first ones; other slots are not read.
    """
    if branches is None:
        positions = start[:, None] + jnp.arange(width)[None, :]
    else:
        positions = branches.base[:, None] + branches.depth

    def sees(slots: jax.Array) -> jax.Array:
        """`slots [B, X] -> [B, T, X]`."""
        slots, place = slots[:, None], positions[:, :, None]
        is_near = slots <= place if branches is None else slots < branches.base[:, None, None]
        if window is not None:
            is_near &= (slots > place - window[0]) | (slots < window[1])
        return is_near if branches is None else is_near | _on_branch(branches, slots[:, 0])

    if branches is None:
        reach = Reach(start, sees(positions))
    else:
        reach = Reach(branches.base, branches.sees)
    if window is not None:
        reach = reach.replace(begin=positions - window[0] + 1, sinks=window[1])

    span = None
    size = capacity
    if window is not None:  # two sinks at least: a source of one slot means something else to `attend`
        tree = 0 if branches is None else branches.sees.shape[2]
        sinks, size = max(window[1], 2), window[0] + max(tree, width)
    if window is None or sinks + size >= capacity:
        mask = sees(jnp.arange(capacity)[None, :])
    else:
        first = start if branches is None else branches.base
        begin = jnp.clip(first + 1 - window[0], 0, capacity - size)
        near = begin[:, None] + jnp.arange(size)[None, :]
        far = jnp.broadcast_to(jnp.arange(sinks)[None, :], (len(start), sinks))
        mask = jnp.concatenate([sees(far) & (far < window[1])[:, None], sees(near)], axis=-1)
        is_sink = jnp.concatenate([jnp.zeros_like(far, bool), near < window[1]], axis=-1)
        mask, span = mask & ~is_sink[:, None], Span(begin, sinks, size)
    return View(rotary_angles(config, positions), mask, start, taken=taken, span=span, reach=reach)


def _on_branch(branches: Branches, slots: jax.Array) -> jax.Array:
    """Which slots `[B, X]` hold a token that those of a tree see: `[B, T, X]`.

    What a token sees is kept in bits, and read by arithmetic that goes along with every layer's scores: a gather's
    result lies slots first, and reading it took a CPU as long as the layer's softmax.
    """
    index = (slots - branches.base[:, None])[:, None]
    is_seen = jnp.zeros((), bool)
    for begin in range(0, branches.sees.shape[2], 32):
        bits = branches.sees[:, :, begin : begin + 32].astype(jnp.uint32)
        bits = bits << jax.lax.broadcasted_iota(jnp.uint32, bits.shape, 2)
        bits = bits.sum(axis=2, keepdims=True, dtype=jnp.uint32)
        place = index - begin
        bit = bits >> jnp.clip(place, 0, 31).astype(jnp.uint32)
        is_seen |= (place >= 0) & (place < 32) & ((bit & 1) == 1)
    return is_seen


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
    chosen = choose_for(q, keys, reach.sees, implementation, is_windowed=reach.begin is not None)
    if chosen == "xla":
        return None
    return verify_attention(
        q,
        keys,
        values,
        reach.base,
        reach.sees,
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
