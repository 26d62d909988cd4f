"""Positions, attention masks and cache slots of the tokens of a pass."""

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.layers.rotary import rotary_angles
from mtpjax.models.parallel import all_rows
from mtpjax.models.view import Pages

Entries = dict[str, jax.Array]  # what an attention layer stores per position; also one layer of a cache
SLIDING = LayerKind("grouped", False, is_sliding=True)  # its heads and angles do not depend on the feed-forward layer
Masks = tuple[jax.Array, ...]  # bool, per source of keys `[B, T, S]`; `[B, T, 1]` row i attends only to entry i


class Span(flax.struct.PyTreeNode):
    """The slots of a cache that a windowed pass reads: the first `sinks`, and `size` slots from `begin [B]` on."""

    begin: jax.Array
    sinks: int = flax.struct.field(pytree_node=False)
    size: int = flax.struct.field(pytree_node=False)


class Reach(flax.struct.PyTreeNode):
    """The same information as `View.mask` in few numbers: the form that attention kernels read."""

    base: jax.Array  # [B] slots of text; each token attends to all of them, or those within its window
    ancestor_mask: jax.Array  # [B, T, X] bool: token t attends to slot base + x
    begin: jax.Array | None = None  # [B, T] with a window: the first slot of text in it
    sinks: int = flax.struct.field(pytree_node=False, default=0)  # slots at the beginning that are always seen
    is_chain: bool = flax.struct.field(
        pytree_node=False, default=False
    )  # token t is in slot base + t and attends up to it


class Window(flax.struct.PyTreeNode):
    """The fields of `View` that differ in layers with a sliding window."""

    angles: tuple[jax.Array, jax.Array]
    mask: jax.Array
    span: Span | None = None
    reach: Reach | None = None


class View(flax.struct.PyTreeNode):
    """Positions and masks of the T tokens of a pass; the same for all layers of one kind."""

    angles: tuple[jax.Array, jax.Array]  # cosines and sines of the rotary embedding, each [B, T, P]
    mask: jax.Array  # [B, T, S] bool: keys that a query attends to; with a span [B, T, sinks + size]
    start: jax.Array | None = None  # [B] first cache slot written; None: a pass without a cache
    segment_ids: jax.Array | None = None  # [B, T] documents of packed rows
    num_valid: jax.Array | None = None  # [B] tokens that are certainly committed; None: acceptance decides later
    span: Span | None = None  # None: the whole cache is read
    reach: Reach | None = None  # of a pass with a cache
    pages: Pages | None = None  # of a pass with a cache in pages
    is_used: jax.Array | None = None  # [B, T] bool: other tokens are not routed to experts; None: all are used
    all_used: jax.Array | None = None  # `is_used` of the rows of all devices
    sliding: Window | None = None  # used instead in layers with a sliding window
    window: int = flax.struct.field(pytree_node=False, default=0)  # positions that a token attends to; 0: all

    def of_layer(self, kind: LayerKind, config: ModelConfig) -> "View":
        """Returns the view for attention layers of a kind."""
        if self.sliding is None or not kind.is_sliding:
            return self
        return self.replace(**vars(self.sliding), sliding=None, window=config.sliding_window)

    @property
    def places(self) -> tuple[jax.Array, jax.Array] | None:
        """Page of each token's new entry, and the place within it, `[B, T]` int32; None: contiguous."""
        if self.pages is None or self.start is None:
            return None
        return self.pages.locate(self.start, self.mask.shape[1], to_write=True)


class TreeSlots(flax.struct.PyTreeNode):
    """The tokens of a draft tree, which occupy cache slots from `base` on, after the text."""

    base: jax.Array  # [B] int32
    depths: jax.Array  # [B, T] int32: token t has position base + depths[t]
    ancestor_mask: jax.Array  # [B, T, X] bool: token t attends to slot base + x


class Recycled(flax.struct.PyTreeNode):
    """Keys of a recycled MTP depth in a full pass: row i attends to `base` up to i, and entry i of later levels.

    Decoding attends to the same: true entries of the prefix, then the draft's own (the training-time test of EAGLE-3,
    2503.01840).
    """

    base: Entries
    levels: tuple[Entries, ...] = ()


def segment_positions(segment_ids: jax.Array) -> jax.Array:
    """Counts the positions `[B, T]` int32 of packed rows from the first token of each segment."""
    index = jnp.arange(segment_ids.shape[1])[None, :]
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def full_view(config: ModelConfig, segment_ids: jax.Array, *, shift: int = 0) -> View:
    """Makes the view of whole rows without a cache: causal within each segment, positions from its start.

    `shift` is added to the rotary positions, for recycled MTP depths.
    """
    index, positions = jnp.arange(segment_ids.shape[1])[None, :], segment_positions(segment_ids) + shift
    # Causal, within the segment.
    mask = (index[:, :, None] >= index[:, None, :]) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    view = View(rotary_angles(config, positions), mask, segment_ids=segment_ids)
    if not config.has_sliding_layers:
        return view
    # Within a segment, differences of places are differences of positions.
    is_near = index[:, :, None] + shift - index[:, None, :] < config.sliding_window
    return view.replace(sliding=Window(rotary_angles(config.of_layer(SLIDING), positions), mask & is_near))


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
    """Makes the view of tokens that are written to cache slots `start .. start + width - 1`.

    Args:
        start: `[B]` int32 first slot.
        width: tokens of the pass, T.
        capacity: slots of the cache, S.
        num_valid: `[B]` tokens that are certainly committed, if known before the pass; recurrent layers then advance
            their state at once. None: acceptance decides later.
        tree: the tokens form a draft tree. None: each token follows the previous one.
        window: (newest positions, sinks). A token attends to that number of newest positions, itself included, and to
            the first slots, the sinks. Other slots are not read. None: a token attends to all text before it.
        is_used: `[B, T]` bool tokens whose outputs are read. Others, such as those of free rows and padding, are not
            routed to experts. None: all.
    """
    # Positions: consecutive in a chain, by depth in a tree.
    positions = start[:, None] + jnp.arange(width)[None, :] if tree is None else tree.base[:, None] + tree.depths
    mask, span, reach = _visible_slots(start, positions, capacity, tree, window)
    # Layers with a window attend at most to it, regardless of the window of the pass.
    sliding = None
    if config.has_sliding_layers:
        own = config.sliding_window if window is None else min(config.sliding_window, window[0])
        near = tree if tree is None else tree.replace(ancestor_mask=_newest(tree.ancestor_mask, own))
        seen = _visible_slots(start, positions, capacity, near, (own, 0))
        sliding = Window(rotary_angles(config.of_layer(SLIDING), positions), *seen)
    angles = rotary_angles(config, positions)
    # Experts process the rows of all devices. They are gathered here, once for all layers.
    all_used = None if is_used is None else all_rows(is_used)
    return View(
        angles, mask, start, num_valid=num_valid, span=span, reach=reach, is_used=is_used, all_used=all_used,
        sliding=sliding,
    )  # fmt: skip


def _visible_slots(
    start: jax.Array, positions: jax.Array, capacity: int, tree: TreeSlots | None, window: tuple[int, int] | None
) -> tuple[jax.Array, Span | None, Reach]:
    """Returns mask, span and reach of a pass whose tokens have `positions [B, T]`; the rest as in `cached_view`."""
    width = positions.shape[1]

    def is_visible(slots: jax.Array) -> jax.Array:
        """`slots [B, X]` -> `[B, T, X]`: text before the token, within the window; in a tree also its ancestors."""
        slots, place = slots[:, None], positions[:, :, None]
        is_text = slots <= place if tree is None else slots < tree.base[:, None, None]
        if window is not None:
            is_text &= (slots > place - window[0]) | (slots < window[1])
        return is_text if tree is None else is_text | _is_ancestor(tree, slots[:, 0])

    # 1. The kernels' form.
    if tree is None:
        reach = Reach(start, is_visible(positions), is_chain=True)
    else:
        reach = Reach(tree.base, tree.ancestor_mask)
    if window is not None:
        reach = reach.replace(begin=positions - window[0] + 1, sinks=window[1])

    # 2. The mask over the slots that are read: all of them, or with a window the sinks and the newest ones.
    size = capacity
    if window is not None:
        # At least two sinks, because `attend` treats a source of one slot specially.
        drafted = 0 if tree is None else tree.ancestor_mask.shape[2]
        sinks, size = max(window[1], 2), window[0] + max(drafted, width)
    if window is None or sinks + size >= capacity:
        return is_visible(jnp.arange(capacity)[None, :]), None, reach
    first = start if tree is None else tree.base
    begin = jnp.clip(first + 1 - window[0], 0, capacity - size)
    near = begin[:, None] + jnp.arange(size)[None, :]
    far = jnp.broadcast_to(jnp.arange(sinks)[None, :], (len(start), sinks))
    mask = jnp.concatenate([is_visible(far) & (far < window[1])[:, None], is_visible(near)], axis=-1)
    # The two ranges overlap in short texts; a sink counts once.
    is_sink = jnp.concatenate([jnp.zeros_like(far, bool), near < window[1]], axis=-1)
    return mask & ~is_sink[:, None], Span(begin, sinks, size), reach


def _newest(ancestor_mask: jax.Array, window: int) -> jax.Array:
    """Keeps the newest `window` ancestors of each node, itself included: nodes come after their ancestors."""
    from_end = jnp.cumsum(ancestor_mask[:, :, ::-1].astype(jnp.int32), axis=2)[:, :, ::-1]
    return ancestor_mask & (from_end <= window)


def _is_ancestor(tree: TreeSlots, slots: jax.Array) -> jax.Array:
    """Returns `[B, T, X]` whether slots `[B, X]` hold a token that each node of the tree attends to."""
    # The mask is packed into 32-bit words and read by shifts. Arithmetic fuses into the computation of every layer's
    # scores; the result of a gather would be laid out slots first, which is slow to read on a CPU.
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
