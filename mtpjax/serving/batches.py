"""The rows of the engine's calls as arrays."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from mtpjax.decoding.session import NO_START, Batch, PromptChunk
from mtpjax.decoding.state import NewRows
from mtpjax.models.pages import NO_PAGE
from mtpjax.serving.matcher import num_words
from mtpjax.serving.request import Sequence
from mtpjax.serving.sizes import EngineSizes

Grid = list[list[Sequence | None]]  # the rows of each shard; None for padding


def make_grid(sizes: EngineSizes, sequences: list[Sequence], size: int) -> Grid:
    """Returns the requests of each shard, padded to `size`."""
    grid: Grid = [[] for _ in range(sizes.num_shards)]
    for sequence in sequences:
        grid[sequence.shard].append(sequence)
    return [row + [None] * (size - len(row)) for row in grid]


def cells(grid: Grid) -> Iterator[tuple[int, int, Sequence]]:
    """Yields shard, column and request of each row that is not padding."""
    for shard, row in enumerate(grid):
        for column, sequence in enumerate(row):
            if sequence is not None:
                yield shard, column, sequence


def empty_batch(sizes: EngineSizes, size: int, width: int) -> Batch:
    """Makes a batch whose rows are all padding."""
    shape = (sizes.num_shards, size)
    return Batch(
        slots=np.full(shape, sizes.shard_slots, np.int32),
        table=np.full((*shape, width), NO_PAGE, np.int32),
        num_shared=np.zeros(shape, np.int32),
    )


def make_batch(sizes: EngineSizes, grid: Grid, width: int) -> Batch:
    """Makes the arrays of rows in slots, with `width` pages each; a call that does not read pages needs none."""
    batch = empty_batch(sizes, len(grid[0]), width)
    for shard, column, sequence in cells(grid):
        assert sequence.lease is not None and sequence.slot is not None
        pages = sequence.lease.pages[: min(sizes.max_pages, width)]
        batch.slots[shard, column] = sequence.slot
        batch.table[shard, column, : len(pages)] = pages
        batch.num_shared[shard, column] = sequence.lease.num_cached
    return batch


def no_chunk(sizes: EngineSizes, batch: Batch, allowed: np.ndarray | None) -> PromptChunk:
    """Makes the chunk of a batch whose rows are all padding."""
    nowhere = np.full(batch.slots.shape, NO_START, np.int32)
    # Chunks end before their width only for snapshots.
    end = nowhere.copy() if sizes.shard_snapshots else None
    return PromptChunk(nowhere, np.full_like(nowhere, -1), end, allowed)


def no_targets(sizes: EngineSizes, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Returns start and targets of a batch to score whose rows are all padding."""
    shape = batch.slots.shape
    return np.full(shape, NO_START, np.int32), np.zeros((*shape, sizes.decoder.spec.prefill_chunk), np.int32)


def all_allowed(sizes: EngineSizes, shape: tuple[int, ...]) -> np.ndarray:
    """Returns masks `[..., ceil(V/32)]` that allow every token."""
    return np.full((*shape, num_words(sizes.decoder.vocab_size)), -1, np.int32)


def admitted_rows(grid: Grid, padding: Sequence) -> Any:
    """Returns the arrays of requests `[P, r, ...]`. Padding repeats a request; its slot does not exist."""
    rows = [[text_rows(sequence or padding) for sequence in row] for row in grid]
    shards = [jax.tree.map(lambda *leaves: np.concatenate(leaves), *row) for row in rows]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *shards)


def text_rows(sequence: Sequence) -> NewRows:
    """Returns the arrays of a request, with its text at admission."""
    rows, size = sequence.rows, sequence.num_to_prefill
    tokens = np.zeros_like(rows.tokens)
    tokens[0, :size] = sequence.text[:size]
    first_token = sequence.text[-1] if sequence.is_resumed else -1
    return rows.replace(tokens=tokens, length=np.full(1, size, np.int32), first_token=np.full(1, first_token, np.int32))
