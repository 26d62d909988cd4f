"""Ranges of keys, which describe an attention mask with two numbers per range instead of one per pair of tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KeyRanges(NamedTuple):
    """The keys that each query attends to, as R ranges of consecutive keys.

    A causal mask inside a document has one range, from the document's first token (or the window's) to the token
    itself. A block of drafts after an anchor has two, the text before the anchor and the block. A range whose last key
    comes before its first is empty. The ranges of a query must not overlap.

    With a sparse indexer, a query attends only to the keys in its ranges that the indexer chose.
    """

    first: jax.Array  # [B, T, R] int32 first key of each range
    last: jax.Array  # [B, T, R] int32 last key, inclusive
    chosen: jax.Array | None = None  # [B, T, P] int32 different keys; those outside the ranges do not count. None: all

    def dense(self, num_keys: int) -> jax.Array:
        """Returns the mask `[B, T, S]` bool over S keys."""
        index = jnp.arange(num_keys)[None, None, None]
        mask = ((index >= self.first[..., None]) & (index <= self.last[..., None])).any(axis=2)
        return mask if self.chosen is None else mask & chosen_keys(self.chosen, num_keys)

    def within(self, num_keys: int) -> "KeyRanges":
        """Cuts the ranges to S keys. An empty range has the first key S and the last key -1."""
        first, last = jnp.maximum(self.first, 0), jnp.minimum(self.last, num_keys - 1)
        is_empty = last < first
        return KeyRanges(jnp.where(is_empty, num_keys, first), jnp.where(is_empty, -1, last))

    def of_blocks(self, queries: int, keys: int) -> tuple[jax.Array, jax.Array]:
        """Returns the first block of keys for each block of queries and range, and the end, `[T / queries, R]` int32.

        Args:
            queries: queries per block, which divides T.
            keys: keys per block.
        """
        blocks = [each.reshape(len(each), -1, queries, each.shape[2]) for each in self[:2]]
        is_empty = blocks[1] < blocks[0]
        first = jnp.where(is_empty, jnp.iinfo(jnp.int32).max, blocks[0]).min(axis=(0, 2)) // keys
        return first, jnp.where(is_empty, -1, blocks[1]).max(axis=(0, 2)) // keys + 1


def chosen_keys(chosen: jax.Array, num_keys: int) -> jax.Array:
    """Returns a mask `[B, T, S]` bool over S keys, True for keys in `chosen [B, T, P]`."""
    B, T = chosen.shape[:2]
    place = jnp.arange(B)[:, None, None], jnp.arange(T)[None, :, None], chosen
    return jnp.zeros((B, T, num_keys), bool).at[place].set(True, mode="drop")
