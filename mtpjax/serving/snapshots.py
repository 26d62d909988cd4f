"""Snapshots of recurrent states at page boundaries, so that models with linear attention can share prefixes too.

A page holds an entry per position, but a recurrent layer keeps only its newest state. While a prompt is processed, a
chunk ends M positions before some page boundaries, where M is `Drafter.max_shift`, and the row's state is copied to a
row of the snapshots. These are arrays on the device, separate from the state (SGLang has a pool of Mamba states). A
later request that shares the pages up to that boundary copies the snapshot into its slot. It processes the last M
positions again, as every request that shares pages does, because the drafter's entries after the boundary need their
hidden states.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mtpjax.decoding.gpu_graph import one_graph
from mtpjax.models.cache import recurrent_entries
from mtpjax.models.config import ModelConfig
from mtpjax.models.decoding_layout import constrain_state, run_on_shards
from mtpjax.models.parallel import first_row
from mtpjax.models.view import Entries

NO_ROW = 2**30  # row of a shard that copies nothing; the copy reads an arbitrary row and writes none
States = tuple[Entries, ...]  # for each recurrent layer: [rows, ...] per array


class SnapshotRows:
    """The rows of one shard's snapshots. Each is free, reserved by a request, or known by the hash of its text.

    The state after a text depends only on the text, so a known row is valid until it is dropped.

    Args:
        num_rows: number of rows; ids are 0 .. num_rows - 1.
    """

    def __init__(self, num_rows: int):
        self._free = list(range(num_rows))[::-1]
        self._row_of: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._row_of

    def __len__(self) -> int:
        return len(self._row_of)

    def use(self, digest: bytes) -> int:
        """Returns the row of a known text, and marks it as most recently used."""
        self._row_of.move_to_end(digest)
        return self._row_of[digest]

    def reserve(self) -> int | None:
        """Returns a free row or the least recently used one, or None if requests have reserved all rows.

        A restore from that row must be dispatched before the copy that overwrites it.
        """
        # Prefer a free row, because using it never costs a later request a prefix hit.
        if self._free:
            return self._free.pop()
        return self._row_of.popitem(last=False)[1] if self._row_of else None

    def keep(self, digest: bytes, row: int) -> None:
        """Makes a reserved row known. If two requests computed the same text, the first one's row is kept."""
        if digest in self._row_of:
            self._free.append(row)
        else:
            self._row_of[digest] = row

    def free(self, row: int) -> None:
        """Frees a reserved row."""
        self._free.append(row)

    def drop(self, digest: bytes) -> None:
        """Forgets a text, if it is known."""
        if digest in self._row_of:
            self._free.append(self._row_of.pop(digest))

    def clear(self) -> None:
        """Forgets all texts."""
        self._free += self._row_of.values()
        self._row_of.clear()


def make_snapshots(trunk: Any, num_rows: int, *, config: ModelConfig, mesh: Mesh | None) -> States:
    """Makes zero-filled snapshots with `num_rows` rows in total over all shards, sharded like the state."""
    shapes = jax.eval_shape(recurrent_entries, trunk)

    def zeros() -> States:
        arrays = jax.tree.map(lambda leaf: jnp.zeros((num_rows, *leaf.shape[1:]), leaf.dtype), shapes)
        return arrays if mesh is None else constrain_state(arrays, config, mesh)

    return jax.jit(zeros)()


@one_graph(donate_argnames=("arrays",), static_argnames=("config",))
def copy_rows(
    arrays: tuple[States, States], sources: jax.Array, targets: jax.Array, *, config: ModelConfig
) -> tuple[States, States]:
    """Copies one row per shard from the state to its snapshots, or back.

    `arrays` contains the states to read and the states to write; both are donated and returned. `sources` and `targets`
    are the `[P]` int32 rows to read and to write; if the target is `NO_ROW`, nothing is copied.
    """

    def copy_shard(_: dict, __: dict, arrays: tuple[States, States], sources: jax.Array, targets: jax.Array):
        shard = first_row(1)
        source, target = sources[shard], targets[shard]

        def copy(origin: jax.Array, kept: jax.Array) -> jax.Array:
            # Reading the row before writing lets XLA update the donated array in place.
            row = jnp.take(origin, source, axis=0, mode="clip")
            return kept.at[target].set(row, mode="drop")

        return arrays[0], jax.tree.map(copy, *arrays)

    return run_on_shards(copy_shard, config, {}, {}, arrays, sources, targets)
