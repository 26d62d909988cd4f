"""Look-ups, sums and maxima over the vocabulary axis, which `tensor` may split over devices.

Inside `shard_map`, each device has the logits `[..., local V]` for its shard of the vocabulary. Each function here
combines the shards and gives every device the result for the whole vocabulary. Except in `gather`, the devices exchange
only a few numbers per row, regardless of V. Without a split, each function is plain JAX.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.models.parallel import is_split, num_shards
from pallas_kernels.top_k import top_k


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The split of the last axis of logits and probabilities over devices; `local V` is that axis's size on a device.

    Attributes:
        axis: manual mesh axis that splits the columns into equal shards; None: this device has all columns.
    """

    axis: str | None = None

    @classmethod
    def of(cls, vocab_size: int) -> "Vocabulary":
        """Returns the layout of V tokens on the current mesh, split over `tensor` if that axis divides V."""
        return cls("tensor" if is_split(vocab_size, "tensor") else None)

    # Columns and token ids.

    def size(self, own_size: int) -> int:
        """Returns V if each device has `own_size` columns."""
        return own_size if self.axis is None else own_size * num_shards(self.axis)

    def first_id(self, own_size: int) -> jax.Array | int:
        """Returns the token id of this device's first column; the device has `own_size` columns."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis) * own_size

    def ids(self, own_size: int) -> jax.Array:
        """Returns the token ids of this device's columns, `[local V]` int32."""
        ids = jnp.arange(own_size)
        return ids if self.axis is None else ids + self.first_id(own_size)

    def columns(self, tokens: jax.Array, own_size: int) -> jax.Array:
        """Returns each token's local column, or `local V` (which scatters drop) if a different device has it."""
        if self.axis is None:
            return tokens
        columns = tokens - self.first_id(own_size)
        return jnp.where((columns >= 0) & (columns < own_size), columns, own_size)

    def own(self, whole: jax.Array) -> jax.Array:
        """Slices the local columns `[..., local V]` from a replicated array `[..., V]`."""
        if self.axis is None:
            return whole
        own_size = whole.shape[-1] // num_shards(self.axis)
        return jax.lax.dynamic_slice_in_dim(whole, self.first_id(own_size), own_size, axis=-1)

    def gather(self, values: jax.Array) -> jax.Array:
        """Joins the shards `[..., local V]` into `[..., V]`. Only this function sends all columns between devices."""
        if self.axis is None:
            return values
        return jax.lax.all_gather(values, self.axis, axis=values.ndim - 1, tiled=True)

    def look_up(self, read: Callable[[jax.Array], jax.Array], tokens: jax.Array, own_size: int) -> jax.Array:
        """Reads the entries for given tokens from the devices that have them; exact, because other devices add zeros.

        Args:
            read: reads the entries of local columns, given as integers in the shape of `tokens`; its result may have
                more axes.
            tokens: global token ids, integers.
            own_size: local V.
        """
        if self.axis is None:
            return read(tokens)
        columns = self.columns(tokens, own_size)
        is_own = columns < own_size
        entries = read(jnp.where(is_own, columns, 0))
        is_own = is_own.reshape(*is_own.shape, *(1 for _ in entries.shape[is_own.ndim :]))
        return jax.lax.psum(jnp.where(is_own, entries, 0), self.axis)

    def at(self, rows: jax.Array, index: jax.Array | np.ndarray, tokens: jax.Array) -> jax.Array:
        """Reads `rows[index, tokens]` from `rows [R, local V]`; `tokens` are global ids."""
        return self.look_up(lambda columns: rows[index, columns], tokens, rows.shape[-1])

    # Reductions over the last axis. Sums over shards can round differently from sums on one device.

    def sum(self, values: jax.Array, *, keepdims: bool = False) -> jax.Array:
        """Sums `[..., local V]` over the vocabulary."""
        total = values.sum(axis=-1, keepdims=keepdims)
        return total if self.axis is None else jax.lax.psum(total, self.axis)

    def max(self, values: jax.Array, *, keepdims: bool = False) -> jax.Array:
        """Computes the maximum of `[..., local V]` over the vocabulary."""
        largest = values.max(axis=-1, keepdims=keepdims)
        return largest if self.axis is None else jax.lax.pmax(largest, self.axis)

    def argmax(self, values: jax.Array) -> jax.Array:
        """Finds the token with the largest of `[..., local V]`; returns `[...]` int32. Ties go to the lowest id."""
        tokens = jnp.argmax(values, axis=-1).astype(jnp.int32)
        if self.axis is None:
            return tokens
        return self.merge_top(values.max(axis=-1, keepdims=True), tokens[..., None], values.shape[-1])[1][..., 0]

    def top_k(self, values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """Finds the k largest of `[..., local V]`; returns values and tokens `[..., k]`. Ties go to the lower id."""
        if self.axis is None:
            return top_k(values, k)
        return self.merge_top(*top_k(values, min(k, values.shape[-1])), values.shape[-1], k)

    def merge_top(
        self, values: jax.Array, columns: jax.Array, own_size: int, k: int | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Merges the largest values of all shards by exchanging (value, token) pairs between devices.

        Args:
            values: `[..., n]` largest values of this shard, in descending order, ties by ascending column.
            columns: `[..., n]` columns of these values.
            own_size: local V.
            k: number of values to keep, in the same order; None: n.
        """
        if self.axis is None:
            return values, columns
        pairs = (values, columns + self.first_id(own_size))
        # Gather in device order, so that among equal values the first has the lowest token.
        values, tokens = jax.lax.all_gather(pairs, self.axis, axis=values.ndim - 1, tiled=True)
        largest, place = jax.lax.top_k(values, k or columns.shape[-1])
        return largest, jnp.take_along_axis(tokens, place, axis=-1)

    def softmax(self, values: jax.Array) -> jax.Array:
        """Computes the softmax of `[..., local V]`. The maximum over the whole vocabulary must be 0."""
        if self.axis is None:
            return jax.nn.softmax(values, axis=-1)
        unnormalised = jnp.exp(values)
        return unnormalised / self.sum(unnormalised, keepdims=True)

    def logsumexp(self, values: jax.Array) -> jax.Array:
        """Computes the log-sum-exp of `[..., local V]` over the vocabulary."""
        return self.merge_logsumexp(jax.nn.logsumexp(values, axis=-1))

    def merge_logsumexp(self, own: jax.Array) -> jax.Array:
        """Computes the log-sum-exp `[...]` of the whole vocabulary from each shard's log-sum-exp."""
        return own if self.axis is None else jax.nn.logsumexp(jax.lax.all_gather(own, self.axis), axis=0)

    def one_hot(self, tokens: jax.Array, own_size: int) -> jax.Array:
        """Converts tokens `[...]` to one-hot rows `[..., local V]` float32."""
        return jax.nn.one_hot(self.columns(tokens, own_size), own_size, dtype=jnp.float32)


WHOLE = Vocabulary()  # for arrays with all columns, outside `shard_map` or if `tensor` has one device
