"""Positions, attention masks and cache slots for the tokens in a pass."""

import jax
import jax.numpy as jnp

from mtpjax.messages import require
from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.context import AXIS, is_context_split, own_tokens
from mtpjax.models.layers.rotary import rotary_angles
from mtpjax.models.parallel import all_rows
from mtpjax.models.view import Masks, Reach, Span, TreeSlots, View, Window
from pallas_kernels.range_attention import KeyRanges

MAX_DENSE = 128  # tokens of a row up to which a pass over whole rows stores masks and scores of all pairs
SLIDING = LayerKind("grouped", False, is_sliding=True)  # its heads and angles do not depend on the feed-forward layer


def segment_positions(segment_ids: jax.Array) -> jax.Array:
    """Computes positions `[B, T]` int32 in packed rows, counted from the first token of each segment."""
    index = jnp.arange(segment_ids.shape[1])[None, :]
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def full_view(config: ModelConfig, segment_ids: jax.Array, *, shift: int = 0) -> View:
    """Makes the view of whole rows without a cache, causal within each segment, with positions counted from its start.

    `shift` is added to the rotary positions, for recycled MTP depths. If the mesh splits rows by tokens, the view is
    that of the device's own tokens, which attend to the keys of whole rows (`mtpjax.models.context`).
    """
    # 1. A token attends from the first token of its segment, or of its window, to itself.
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    index, positions = own_tokens(index), own_tokens(segment_positions(segment_ids))
    require(
        not (config.index_topk and is_context_split()),
        f"mesh axis {AXIS} does not support the sparse indexer (index_topk {config.index_topk})",
    )
    is_dense = not is_context_split() and segment_ids.shape[1] <= MAX_DENSE

    def mask(window: int) -> jax.Array | KeyRanges:
        first = index - positions
        first = jnp.maximum(first, index + shift - window + 1) if window else first
        ranges = KeyRanges(first[..., None], index[..., None])
        return ranges.dense(segment_ids.shape[1]) if is_dense else ranges

    # 2. Layers with a sliding window have their own angles.
    view = View(rotary_angles(config, positions + shift), mask(0), segment_ids=segment_ids)
    if not config.has_sliding_layers:
        return view
    angles = rotary_angles(config.of_layer(SLIDING), positions + shift)
    return view.replace(sliding=Window(angles, mask(config.sliding_window), window=config.sliding_window))


def empty_selection(view: View, config: ModelConfig) -> Masks:
    """Makes masks with the structure of an indexer's selection over whole rows."""
    mask = view.mask
    if isinstance(mask, KeyRanges) and mask.first.shape[1] > config.index_topk:
        mask = mask._replace(chosen=jnp.zeros((*mask.first.shape[:2], config.index_topk), jnp.int32))
    return (mask,)


def cached_view(
    config: ModelConfig,
    start: jax.Array,
    width: int,
    capacity: int,
    *,
    num_valid: jax.Array | None = None,
    tree: TreeSlots | None = None,
    window: tuple[int, int] | None = None,
    is_used: jax.Array | None = None,
) -> View:
    """Makes the view for tokens that are written to cache slots `start .. start + width - 1`.

    Args:
        start: `[B]` int32 first slot.
        width: tokens of the pass, T.
        capacity: slots of the cache, S.
        num_valid: `[B]` number of leading tokens that are certain to be committed, if that is known before the pass;
            recurrent layers then advance their state at once. None: acceptance decides later.
        tree: the tokens form a draft tree. None: each token follows the previous one.
        window: (window size, number of sinks). A token attends to the newest positions within the window, including its
            own, and to the first slots (the sinks). Other slots are not read. None: a token attends to all text before
            it.
        is_used: `[B, T]` bool, True for tokens whose outputs are read. The others (free rows and padding) are not
            routed to experts. None: all are used.
    """
    # Positions are consecutive in a chain, and follow the node depths in a tree.
    positions = start[:, None] + jnp.arange(width)[None, :] if tree is None else tree.base[:, None] + tree.depths
    mask, span, reach = _visible_slots(start, positions, capacity, tree, window)
    # Sliding-window layers never attend beyond their own window, whatever the window of the pass.
    sliding = None
    if config.has_sliding_layers:
        own = config.sliding_window if window is None else min(config.sliding_window, window[0])
        near = tree if tree is None else tree.replace(ancestor_mask=_newest(tree.ancestor_mask, own))
        seen = _visible_slots(start, positions, capacity, near, (own, 0))
        sliding = Window(rotary_angles(config.of_layer(SLIDING), positions), *seen, config.sliding_window)
    angles = rotary_angles(config, positions)
    # Experts process the rows of all devices, so gather all devices' masks here, once for all layers.
    all_used = None if is_used is None else all_rows(is_used)
    return View(
        angles, mask, start, num_valid=num_valid, span=span, reach=reach, is_used=is_used, all_used=all_used,
        sliding=sliding,
    )  # fmt: skip


def _visible_slots(
    start: jax.Array, positions: jax.Array, capacity: int, tree: TreeSlots | None, window: tuple[int, int] | None
) -> tuple[jax.Array, Span | None, Reach]:
    """Makes mask, span and reach for a pass over tokens at `positions [B, T]`; other arguments as in `cached_view`."""
    width = positions.shape[1]

    def is_visible(slots: jax.Array) -> jax.Array:
        """Maps `slots [B, X]` to `[B, T, X]`, True for text up to the token, inside the window, and for ancestors."""
        slots, place = slots[:, None], positions[:, :, None]
        is_text = slots <= place if tree is None else slots < tree.base[:, None, None]
        if window is not None:
            is_text &= (slots > place - window[0]) | (slots < window[1])
        return is_text if tree is None else is_text | _is_ancestor(tree, slots[:, 0])

    # 1. The compact form, which the kernels read.
    if tree is None:
        reach = Reach(start, is_visible(positions), is_chain=True)
    else:
        reach = Reach(tree.base, tree.ancestor_mask)
    if window is not None:
        reach = reach.replace(begin=positions - window[0] + 1, sinks=window[1])

    # 2. The mask over the slots that are read, which are all slots or, with a window, the sinks and the newest slots.
    size = capacity
    if window is not None:
        # Use at least two sinks, because `attend` treats a source with one slot specially.
        drafted = 0 if tree is None else tree.ancestor_mask.shape[2]
        sinks, size = max(window[1], 2), window[0] + max(drafted, width)
    if window is None or sinks + size >= capacity:
        return is_visible(jnp.arange(capacity)[None, :]), None, reach
    first = start if tree is None else tree.base
    begin = jnp.clip(first + 1 - window[0], 0, capacity - size)
    near = begin[:, None] + jnp.arange(size)[None, :]
    far = jnp.broadcast_to(jnp.arange(sinks)[None, :], (len(start), sinks))
    mask = jnp.concatenate([is_visible(far) & (far < window[1])[:, None], is_visible(near)], axis=-1)
    # The two ranges overlap in short texts, so mask out sinks in the second range.
    is_sink = jnp.concatenate([jnp.zeros_like(far, bool), near < window[1]], axis=-1)
    return mask & ~is_sink[:, None], Span(begin, sinks, size), reach


def _newest(ancestor_mask: jax.Array, window: int) -> jax.Array:
    """Keeps the newest `window` ancestors of each node, including itself. Ancestors precede their descendants."""
    from_end = jnp.cumsum(ancestor_mask[:, :, ::-1].astype(jnp.int32), axis=2)[:, :, ::-1]
    return ancestor_mask & (from_end <= window)


def _is_ancestor(tree: TreeSlots, slots: jax.Array) -> jax.Array:
    """Returns `[B, T, X]` bool: True where slot x holds a token that node t of the tree attends to."""
    # Pack the mask into 32-bit words and read it with shifts, because this arithmetic fuses into every layer's score
    # computation. The result of a gather would have slots as its slowest axis, which is slow to read on a CPU.
    index = (slots - tree.base[:, None])[:, None]
    is_seen = jnp.zeros((), bool)
    for begin in range(0, tree.ancestor_mask.shape[2], 32):
        bits = tree.ancestor_mask[:, :, begin : begin + 32].astype(jnp.uint32)
        bits = bits << jax.lax.broadcasted_iota(jnp.uint32, bits.shape, 2)
        bits = bits.sum(axis=2, keepdims=True, dtype=jnp.uint32)
        place = index - begin
        bit = bits >> jnp.clip(place, 0, 31).astype(jnp.uint32)
        is_seen |= (place >= 0) & (place < 32) & ((bit & 1) == 1)
    return is_seen
