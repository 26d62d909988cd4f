"""Makes the arrays for calls in which every row is padding. An executor then fills in the rows of requests."""

import numpy as np

from mtpjax.decoding.session import NO_START, Batch, PromptChunk
from mtpjax.models.view import NO_PAGE
from mtpjax.serving.matcher import num_words
from mtpjax.serving.sizes import EngineSizes


def empty_batch(sizes: EngineSizes, size: int, width: int) -> Batch:
    """Makes a batch whose rows are all padding."""
    shape = (sizes.num_shards, size)
    return Batch(
        slots=np.full(shape, sizes.shard_slots, np.int32),
        table=np.full((*shape, width), NO_PAGE, np.int32),
        num_shared=np.zeros(shape, np.int32),
    )


def no_chunk(sizes: EngineSizes, batch: Batch, allowed: np.ndarray | None) -> PromptChunk:
    """Makes the prompt chunk for a batch whose rows are all padding."""
    nowhere = np.full(batch.slots.shape, NO_START, np.int32)
    # Only snapshots can make a chunk end before its full width.
    end = nowhere.copy() if sizes.shard_snapshots else None
    return PromptChunk(nowhere, np.full_like(nowhere, -1), end, allowed)


def no_targets(sizes: EngineSizes, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Returns `start` and `targets` for a scoring batch whose rows are all padding."""
    shape = batch.slots.shape
    return np.full(shape, NO_START, np.int32), np.zeros((*shape, sizes.decoder.spec.prefill_chunk), np.int32)


def all_allowed(sizes: EngineSizes, shape: tuple[int, ...]) -> np.ndarray:
    """Returns masks `[..., ceil(V/32)]` that allow every token."""
    return np.full((*shape, num_words(sizes.decoder.vocab_size)), -1, np.int32)
