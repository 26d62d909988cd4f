"""Ranges of keys, which describe an attention mask with two numbers per range instead of one per pair of tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KeyRanges(NamedTuple):
    """The keys that each query attends to, as R ranges of consecutive keys.

    A causal mask inside a document has one range, from the document's first token (or the window's) to the token
    itself. A block of drafts has one range here, the text before its anchor; its own slots are `OwnKeys`. A range whose
    last key comes before its first is empty. The ranges of a query must not overlap.

    With a sparse indexer, a query attends only to the keys in its ranges that the indexer chose.
    """

    first: jax.Array  # [B, T, R] int32 first key of each range
    last: jax.Array  # [B, T, R] int32 last key, inclusive
    chosen: jax.Array | None = None  # [B, T, P] int32 distinct keys, intersected with the ranges; None: all

    def dense(self, num_keys: int) -> jax.Array:
        """Returns the mask `[B, T, S]` bool over S keys."""
        index = jnp.arange(num_keys)[None, None, None]
        mask = ((index >= self.first[..., None]) & (index <= self.last[..., None])).any(axis=2)
        return mask if self.chosen is None else mask & chosen_keys(self.chosen, num_keys)

    def within(self, num_keys: int) -> "KeyRanges":
        """Clips the ranges to the S keys. An empty range becomes first = S, last = -1."""
        first, last = jnp.maximum(self.first, 0), jnp.minimum(self.last, num_keys - 1)
        is_empty = last < first
        return self._replace(first=jnp.where(is_empty, num_keys, first), last=jnp.where(is_empty, -1, last))

    def of_blocks(self, queries: int, keys: int) -> tuple[jax.Array, jax.Array]:
        """Returns the first block of keys and one past the last, for each block of queries and range.

        Both are `[T / queries, R]` int32.

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
