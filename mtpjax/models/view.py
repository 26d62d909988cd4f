"""The view of a pass, which holds its tokens' positions and masks and the storage of the cache slots that they use.

A `Storage` defines how a cache stores its slots. `ContiguousRows` reserves space for the longest text in every row, in
arrays `[B, ..., S, H]`. `Pages` (vLLM, 2309.06180) has a pool of pages that all rows share, in arrays
`[P, ..., size, H]`, and a table of each row's pages. A row uses as many pages as its text needs, in any order, and rows
with a common prefix can share pages. Contiguous rows are the simple reference; `tests/models/test_pages.py` compares
the two. In both forms, the slot axis is the second to last.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels import paged
from pallas_kernels.fp8 import as_stored
from pallas_kernels.paged import NO_PAGE
from pallas_kernels.range_attention.ranges import KeyRanges

Entries = dict[str, jax.Array]  # arrays that an attention layer stores per position; also one layer of a cache
Masks = tuple[Any, ...]  # per source of keys: bool `[B, T, S]`, `[B, T, 1]` (token i sees only entry i), or `KeyRanges`


def write_rows(buffer: jax.Array, rows: jax.Array, start: jax.Array, *, axis: int = 1) -> jax.Array:
    """Writes `rows [B, ..., T, ...]` into `buffer [B, ..., S, ...]` along `axis`, from slot `start [B]` of each row.

    Rows are converted to the buffer's dtype (`pallas_kernels.fp8.as_stored`). The caller must guarantee enough slots,
    because `dynamic_update_slice` clamps a start that is too large, which would overwrite valid entries.
    """
    rows = as_stored(rows, buffer.dtype)
    # For a batch of one, use a plain update, which XLA does in place; the batched form becomes a loop on a CPU.
    if buffer.shape[0] == 1:
        return jax.lax.dynamic_update_slice_in_dim(buffer, rows, start[0], axis)
    return jax.vmap(lambda b, r, s: jax.lax.dynamic_update_slice_in_dim(b, r, s, axis - 1))(buffer, rows, start)


def read_rows(buffer: jax.Array, start: jax.Array, width: int, *, axis: int = 1) -> jax.Array:
    """Reads `width` slots of `buffer` along `axis`, from slot `start [B]` of each batch row (axis 0)."""
    if buffer.shape[0] == 1:
        return jax.lax.dynamic_slice_in_dim(buffer, start[0], width, axis)
    return jax.vmap(lambda b, s: jax.lax.dynamic_slice_in_dim(b, s, width, axis - 1))(buffer, start)


class ContiguousRows(flax.struct.PyTreeNode):
    """Storage in which each row's slots are contiguous, in cache arrays `[B, ..., S, H]`."""

    table = None  # no page table
    shift = 0

    def running(self, done: jax.Array) -> "ContiguousRows":
        """Returns the storage of the rows that are not `done [B]`."""
        return self

    def of_drafter(self, shift: int) -> "ContiguousRows":
        """Returns the storage of a drafter's cache whose entry i depends on token i + `shift`."""
        return self

    def num_slots(self, capacity: int) -> int:
        """Returns the number of slots per row, at most `capacity`."""
        return capacity

    def write(self, kept: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        """Writes entries `new [B, ..., T, H]` into a cache array, from slot `start [B]` of each row."""
        return _pin_layout(write_rows(kept, new, start, axis=kept.ndim - 2))

    def read(self, kept: jax.Array, start: jax.Array, width: int) -> jax.Array:
        """Reads `[B, ..., width, H]` from slot `start [B]` of each row."""
        return read_rows(kept, start, width, axis=kept.ndim - 2)

    def first(self, kept: jax.Array, num_slots: int | None = None) -> jax.Array:
        """Returns the first `num_slots` slots (None: all slots) of each row, `[B, ..., num_slots, H]`."""
        if num_slots in (None, kept.shape[-2]):
            return kept
        return jax.lax.slice_in_dim(kept, 0, num_slots, axis=kept.ndim - 2)

    def places(self, start: jax.Array, width: int) -> tuple[jax.Array, jax.Array] | None:
        """Returns the page and offset of each slot for the kernels that append; None for contiguous rows."""
        return None


class Pages(flax.struct.PyTreeNode):
    """Paged storage, described by a batch's page table. It has the same methods as `ContiguousRows`.

    Entry i of MTP module k (0-based) depends on token i + k + 1. The module's cache stores the entry in that token's
    page, at position i + `shift` with shift = k + 1, so a page's contents do not depend on tokens after the page.
    """

    table: jax.Array  # [B, N] int32: the page of positions n * size .. (n + 1) * size - 1; NO_PAGE: unmapped
    num_shared: jax.Array  # [B] int32: positions at the start that are never written, because other rows read them
    size: int = flax.struct.field(pytree_node=False)  # positions per page
    num_pages: int = flax.struct.field(pytree_node=False)  # in the pool
    max_shift: int = flax.struct.field(pytree_node=False)  # the largest shift among the batch's caches
    shift: int = flax.struct.field(pytree_node=False, default=0)  # slot i of the cache is at position i + shift
    is_of_drafter: bool = flax.struct.field(pytree_node=False, default=False)  # the cache belongs to a drafter

    @classmethod
    def empty(cls, batch: int, capacity: int, pool: tuple[int, int], max_shift: int) -> "Pages":
        """Makes the table for rows that have no pages yet; `pool` is (number of pages, positions per page)."""
        table = jnp.full((batch, -(-(capacity + max_shift) // pool[1])), NO_PAGE, jnp.int32)
        return cls(table, jnp.zeros(batch, jnp.int32), pool[1], pool[0], max_shift)

    def running(self, done: jax.Array) -> "Pages":
        # The pages of a finished row may already belong to a different request.
        return self.replace(table=jnp.where(done[:, None], NO_PAGE, self.table))

    def of_drafter(self, shift: int) -> "Pages":
        return self.replace(shift=shift, is_of_drafter=True)

    def num_slots(self, capacity: int) -> int:
        return min(capacity, self._num_slots)

    @property
    def _num_slots(self) -> int:
        """Number of slots that fit into every cache of the batch."""
        return self.table.shape[1] * self.size - self.max_shift

    def write(self, kept: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        """Writes entries as `ContiguousRows` does; drops entries for slots without a page and at shared positions.

        Rows that write to the same page must write to different slots.
        """
        # Attention multiplies masked values by 0, but 0 * NaN is NaN. NaN in a drafter does not end the request, so it
        # would stay in the page and spoil the drafts of every later row that reuses the page. (NaN in the trunk ends
        # the row and clears its pages.)
        if self.is_of_drafter:
            new = jnp.where(jnp.isfinite(new), new, 0)
        axis = kept.ndim - 2
        places = self.places(start, new.shape[axis])
        return _pin_layout(paged.write_places(kept, jnp.moveaxis(new, axis, 1), *places))

    def read(self, kept: jax.Array, start: jax.Array, width: int) -> jax.Array:
        page, place, _ = self._locate(start, width)
        return jnp.moveaxis(kept.at[paged.index_places(kept, page, place)].get(mode="clip"), 1, kept.ndim - 2)

    def first(self, kept: jax.Array, num_slots: int | None = None) -> jax.Array:
        return paged.gather_pages(kept, self.table, shift=self.shift, num_slots=num_slots or self._num_slots)

    def places(self, start: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
        """Returns the page and offset of each slot to write, `[B, T]` int32; slots at shared positions have no page."""
        page, place, position = self._locate(start, width)
        return jnp.where(position < self.num_shared[:, None], NO_PAGE, page), place

    def _locate(self, start: jax.Array, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns each slot's page, offset within the page, and position in the text, `[B, T]` int32."""
        position = start[:, None] + jnp.arange(width)[None, :] + self.shift
        page = jnp.take_along_axis(self.table, position // self.size, axis=1, mode="fill", fill_value=NO_PAGE)
        return page, position % self.size, position


Storage = ContiguousRows | Pages
CONTIGUOUS = ContiguousRows()


def _pin_layout(array: jax.Array) -> jax.Array:
    """Keeps a cache array in row-major order on one device.

    Without the constraint, XLA may transpose the caches inside or around the loop. On a mesh, the array stays
    unconstrained, because the partitioner would gather it.
    """
    if jax.sharding.get_abstract_mesh().size > 1:
        return array
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


class Span(flax.struct.PyTreeNode):
    """The cache slots that a windowed pass reads, the first `sinks` slots and the `size` slots from `begin [B]` on."""

    begin: jax.Array
    sinks: int = flax.struct.field(pytree_node=False)
    size: int = flax.struct.field(pytree_node=False)


class Reach(flax.struct.PyTreeNode):
    """`View.mask` in a compact form, which the attention kernels read."""

    base: jax.Array  # [B] number of text slots; each token attends to all of them, or only to those in its window
    ancestor_mask: jax.Array  # [B, T, X] bool: token t attends to slot base + x
    begin: jax.Array | None = None  # [B, T] first text slot inside the window; None: no window
    sinks: int = flax.struct.field(pytree_node=False, default=0)  # slots at the start that are always attended to
    # Token t is in slot base + t and attends to all slots up to its own.
    is_chain: bool = flax.struct.field(pytree_node=False, default=False)


class Window(flax.struct.PyTreeNode):
    """The fields of `View` that differ in layers with a sliding window."""

    angles: tuple[jax.Array, jax.Array]
    mask: jax.Array | KeyRanges
    span: Span | None = None
    reach: Reach | None = None
    window: int = flax.struct.field(pytree_node=False, default=0)


class View(flax.struct.PyTreeNode):
    """Positions and masks for the T tokens of a pass, shared by all layers of one kind."""

    angles: tuple[jax.Array, jax.Array]  # cosines and sines of the rotary embedding, each [B, T, P]
    # Keys that a query attends to: bool [B, T, S] (with a span [B, T, sinks + size]), or ranges for long whole rows.
    mask: jax.Array | KeyRanges
    start: jax.Array | None = None  # [B] first cache slot written; None: a pass without a cache
    segment_ids: jax.Array | None = None  # [B, T] document ids in packed rows, of whole rows also on a `context` mesh
    num_valid: jax.Array | None = None  # [B] tokens that are certainly committed; None: acceptance decides later
    span: Span | None = None  # None: the whole cache is read
    reach: Reach | None = None  # set in a pass with a cache
    storage: Storage = CONTIGUOUS  # how the cache stores its slots
    is_used: jax.Array | None = None  # [B, T] bool: unused tokens are not routed to experts; None: all are used
    all_used: jax.Array | None = None  # `is_used` for the rows of all devices
    sliding: Window | None = None  # replaces these fields in layers with a sliding window
    window: int = flax.struct.field(pytree_node=False, default=0)  # positions that a token attends to; 0: all

    def of_layer(self, *, is_sliding: bool) -> "View":
        """Returns the view for attention layers with or without a sliding window."""
        return self.replace(**vars(self.sliding), sliding=None) if is_sliding and self.sliding is not None else self

    @property
    def places(self) -> tuple[jax.Array, jax.Array] | None:
        """Page of each token's new entry and offset within the page, `[B, T]` int32; None for contiguous rows."""
        assert self.start is not None, "a pass with a cache needs a view from cached_view"
        return self.storage.places(self.start, self.angles[0].shape[1])


class TreeSlots(flax.struct.PyTreeNode):
    """The tokens of a draft tree, which occupy cache slots from `base` on, after the text."""

    base: jax.Array  # [B] int32
    depths: jax.Array  # [B, T] int32: token t has position base + depths[t]
    ancestor_mask: jax.Array  # [B, T, X] bool: token t attends to slot base + x


class Recycled(flax.struct.PyTreeNode):
    """Keys for a recycled MTP depth in a full pass; token i attends to `base` up to i and to entry i of each level.

    Decoding attends to the same entries, first the prefix's teacher-forced entries and then the draft's entries
    (training-time test, EAGLE-3, 2503.01840).
    """

    base: Entries
    levels: tuple[Entries, ...] = ()
