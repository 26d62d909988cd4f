"""Moves known pages of the pool to host memory when their slots are needed (SGLang's hierarchical cache).

A page is identified by the hash of its text (`page_pool`). Its entries are copied to the host before another request
gets the page, and copied back when a prompt starts with that text again. Both copies are bit-exact.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.gpu_graph import one_graph
from mtpjax.decoding.state import DecodeState
from mtpjax.models.cache import Cache, pool_arrays, replace_pool_arrays

NUM_PER_CALL = 16  # pages per copy; one program copies out and one copies in
Entries = list[np.ndarray]  # one page: [..., size, H] per pool array of the state


class HostPages:
    """Page entries in host memory, limited to `max_bytes`. The least recently used ones are dropped first."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._pages: collections.OrderedDict[bytes, Entries] = collections.OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def put(self, digest: bytes, entries: Entries) -> None:
        self.take(digest)
        self._pages[digest] = entries
        self.num_bytes += sum(array.nbytes for array in entries)
        while self.num_bytes > self.max_bytes:
            self.take(next(iter(self._pages)))

    def take(self, digest: bytes) -> Entries | None:
        """Removes a page's entries and returns them, or returns None for an unknown page."""
        entries = self._pages.pop(digest, None)
        self.num_bytes -= sum(array.nbytes for array in entries or ())
        return entries

    def read(self, digest: bytes) -> Entries:
        return self._pages[digest]

    def clear(self) -> int:
        """Drops all pages and returns their number."""
        number = len(self._pages)
        self._pages.clear()
        self.num_bytes = 0
        return number


@dataclasses.dataclass
class Outgoing:
    """Pages that are being copied to the host.

    Attributes:
        digests: hashes of their texts.
        arrays: copies of their entries on the device, `[NUM_PER_CALL, ..., size, H]` per pool array.
    """

    digests: list[bytes]
    arrays: list[jax.Array]

    def arrive(self, host: HostPages) -> None:
        """Waits for the copies and stores them on the host."""
        for digest, entries in self.read():
            host.put(digest, entries)

    def read(self) -> list[tuple[bytes, Entries]]:
        """Waits for the copies; returns the hash and the entries of each page."""
        arrays = [np.asarray(array) for array in self.arrays]
        return [(digest, [array[place].copy() for array in arrays]) for place, digest in enumerate(self.digests)]


def copy_out(state: DecodeState, pages: list[tuple[bytes, int]]) -> list[Outgoing]:
    """Starts copying pages, each given by its hash and id, to the host. The state must be on one device."""
    copies = []
    for begin in range(0, len(pages), NUM_PER_CALL):
        some = pages[begin : begin + NUM_PER_CALL]
        # A fixed number of pages per call means that one program is enough. The copies run while the engine continues.
        arrays = _read(state, _padded([page for _, page in some]))
        for array in arrays:
            array.copy_to_host_async()
        copies.append(Outgoing([digest for digest, _ in some], arrays))
    return copies


def copy_in(state: DecodeState, pages: Sequence[tuple[int, Entries]]) -> DecodeState:
    """Writes entries from the host into pages. The state must be on one device, and is donated."""
    for begin in range(0, len(pages), NUM_PER_CALL):
        some = pages[begin : begin + NUM_PER_CALL]
        # Padding repeats the first entries, but its page ids are outside the pool, so nothing is written.
        entries = [entries for _, entries in some] + [some[0][1]] * (NUM_PER_CALL - len(some))
        arrays = [np.stack(of_pages) for of_pages in zip(*entries, strict=True)]
        state = _write(state, _padded([page for page, _ in some]), arrays)
    return state


def page_shapes(state: Any) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a page's entries; the state's leaves may be shapes."""
    return [jax.ShapeDtypeStruct(pool.shape[1:], pool.dtype) for cache in _caches(state) for pool in pool_arrays(cache)]


def page_bytes(shapes: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Returns the size in bytes of entries with these shapes."""
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in shapes)


def warm_up(state: DecodeState) -> DecodeState:
    """Compiles both copy programs; changes no page."""
    arrays = jax.device_get(_read(state, _padded([])))
    return _write(state, _padded([]), arrays)


def _padded(pages: list[int]) -> np.ndarray:
    """Returns page ids `[NUM_PER_CALL]` int32, padded with ids outside the pool."""
    return np.array([*pages, *[np.iinfo(np.int32).max] * (NUM_PER_CALL - len(pages))], np.int32)


def _is_cache(node: Any) -> bool:
    return isinstance(node, Cache)


def _caches(state: Any) -> list[Cache]:
    return [node for node in jax.tree.leaves(state, is_leaf=_is_cache) if _is_cache(node)]


@one_graph()
def _read(state: DecodeState, pages: jax.Array) -> list[jax.Array]:
    """Copies pages `[n]` of every pool array; each copy is `[n, ..., size, H]`."""
    return [jnp.take(pool, pages, axis=0, mode="clip") for cache in _caches(state) for pool in pool_arrays(cache)]


@one_graph(donate_argnames=("state",))
def _write(state: DecodeState, pages: jax.Array, entries: list[jax.Array]) -> DecodeState:
    """Writes pages `[n]` of every pool array; ids outside the pool are dropped."""
    rest = iter(entries)

    def write(node: Any) -> Any:
        if not _is_cache(node):
            return node
        return replace_pool_arrays(node, [pool.at[pages].set(next(rest), mode="drop") for pool in pool_arrays(node)])

    return jax.tree.map(write, state, is_leaf=_is_cache)


PROGRAMS = (_read, _write)  # the compiled copies
