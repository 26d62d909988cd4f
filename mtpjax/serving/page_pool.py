"""Tracks which pages of a pool are free, in use, or cached because a later request may start with the same text.

Only the host knows this; the device reads page tables (`mtpjax.models.view.Pages`). A page whose positions are all
final is *known* by a hash of its tokens and of all tokens before it, as in vLLM's prefix caching. A request whose
prompt starts with known pages shares them. Unused pages stay known until evicted, the least recently used ones first.
"""

import collections
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from mtpjax.serving.host_pages import Entries, HostPages
from mtpjax.serving.request import Lease
from mtpjax.serving.sizes import EngineSettings, EngineSizes
from mtpjax.serving.snapshots import SnapshotRows


class PagePool:
    """Allocates pages.

    Args:
        num_pages: P; ids are 0 .. P - 1.
        page_size: positions per page.
        host: stores the entries of known pages that are evicted; if None, they are forgotten.
        snapshots: rows for recurrent states at page boundaries. Requests then share pages only up to a boundary with a
            snapshot. None for a model without recurrent layers.

    Attributes:
        outgoing: known pages, with the hash of their text, whose entries the caller must copy to `host` before it
            writes to any page. The caller empties the list.
        incoming: pages into which the caller must copy entries from the host before they are read. The caller empties
            it.

    Raises:
        ValueError: `num_pages` or `page_size` is below 1.
    """

    def __init__(
        self, num_pages: int, page_size: int, host: HostPages | None = None, snapshots: SnapshotRows | None = None
    ):
        if min(num_pages, page_size) < 1:
            raise ValueError(f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}")
        self.num_pages, self.page_size, self.host, self.snapshots = num_pages, page_size, host, snapshots
        self.outgoing: list[tuple[bytes, int]] = []
        self.incoming: list[tuple[int, Entries]] = []
        self._free = list(range(num_pages))[::-1]
        self._users = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._unused: collections.OrderedDict[int, None] = collections.OrderedDict()  # known pages without users

    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated, which are the free ones and the known ones that no request uses."""
        return len(self._free) + len(self._unused)

    @property
    def num_in_use(self) -> int:
        return self.num_pages - self.num_available

    def acquire(self, tokens: Sequence[int], num_pages: int, *, salt: bytes = b"") -> Lease | None:
        """Reserves known pages for the prefix of a request's prompt, and free pages for the rest of its text.

        Args:
            tokens: the prompt.
            num_pages: pages that the request needs, including shared ones.
            salt: bytes that are hashed with the tokens, for example a digest of the client's key. Only requests with
                the same salt share pages.

        Returns:
            The lease. If the pool has too few pages, returns None and changes nothing.
        """
        # The last prompt token is always processed, because its output produces the first new token.
        size = self.page_size
        shared = self.find(tokens[: min(len(tokens) - 1, num_pages * size)], salt=salt)
        num_found = len(shared)
        if self.snapshots is not None:
            # Recurrent layers can continue only from a boundary whose state was kept.
            while shared and shared[-1][0] not in self.snapshots:
                shared.pop()
        known = [page for _, page in shared if page is not None]
        num_unused = sum(page in self._unused for page in known)
        if num_pages - len(known) > self.num_available - num_unused:
            return None
        for page in known:
            self._unused.pop(page, None)
            self._users[page] += 1
        pages = [self._bring_in(digest) if page is None else page for digest, page in shared]
        pages += [self._take() for _ in range(num_pages - len(shared))]
        digest = shared[-1][0] if shared else _first_hash(salt)
        lease = Lease(pages, len(shared) * size, len(shared), digest, num_found)
        if self.snapshots is not None and shared:
            lease.snapshot = self.snapshots.use(digest)
        return lease

    def find(self, tokens: Sequence[int], *, salt: bytes = b"") -> list[tuple[bytes, int | None]]:
        """Returns the hash and id of each known full page of a text's prefix. The id is None for a page on the host."""
        found = []
        for digest in page_digests(tokens, self.page_size, salt=salt):
            page = self._page_of.get(digest)
            if page is None and (self.host is None or digest not in self.host):
                break
            found.append((digest, page))
        return found

    def put(self, digest: bytes, entries: Entries) -> None:
        """Adds the entries of a page, which were computed elsewhere, to host memory, unless the pool has the page."""
        assert self.host is not None
        if digest not in self._page_of:
            self.host.put(digest, entries)

    def extend(self, lease: Lease, num_pages: int) -> bool:
        """Adds pages to a lease. Returns False, and changes nothing, if the pool has too few."""
        if num_pages > self.num_available:
            return False
        lease.pages += [self._take() for _ in range(num_pages)]
        return True

    def reserve_snapshot(self, lease: Lease, num_pages: int) -> int | None:
        """Reserves a row for the recurrent state at a page boundary. The state becomes known when its pages do.

        Args:
            lease: a request's pages.
            num_pages: number of pages before the boundary; not all of them are stored yet.

        Returns:
            The row to which the caller must copy the state; None if no row is available.
        """
        assert self.snapshots is not None and num_pages > lease.num_stored
        row = self.snapshots.reserve()
        if row is not None:
            lease.reserved[num_pages] = row
        return row

    def store(self, lease: Lease, tokens: Sequence[int], num_final: int) -> None:
        """Makes pages known once their entries are final.

        Args:
            lease: a request's pages.
            tokens: its text, at least `num_final` tokens.
            num_final: number of leading tokens whose entries, in the trunk and all modules, will not change.
        """
        num_whole = min(num_final // self.page_size, len(lease.pages))
        size = self.page_size
        while lease.num_stored < num_whole:
            begin = lease.num_stored * size
            lease.digest = _extend_hash(lease.digest, tokens[begin : begin + size])
            page = lease.pages[lease.num_stored]
            # If two requests computed the same text at the same time, one of them does not share its page.
            if lease.digest not in self._page_of:
                self._page_of[lease.digest], self._hash_of[page] = page, lease.digest
            lease.num_stored += 1
            if self.snapshots is not None and lease.num_stored in lease.reserved:
                self.snapshots.keep(lease.digest, lease.reserved.pop(lease.num_stored))

    def release(self, lease: Lease, *, forget: bool = False) -> list[int]:
        """Releases a request's pages and returns the freed ones. If `forget`, unshared pages become unknown."""
        # Later pages of a text are forgotten first, because they cannot be found without the earlier ones.
        free = []
        if self.snapshots is not None:
            for row in lease.reserved.values():
                self.snapshots.free(row)
            lease.reserved = {}
        for page in reversed(lease.pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._hash_of and not forget:
                self._unused[page] = None
                continue
            if page in self._hash_of:
                self._unlink(page)
            free.append(page)
        self._free += free
        lease.pages = []
        return free

    def forget(self) -> int:
        """Forgets all known pages that no request uses, and returns their number."""
        number, host = len(self._unused), self.host
        self.host = None
        while self._unused:
            self._free.append(self._evict())
        self.host = host
        if self.snapshots is not None:
            self.snapshots.clear()
        return number + (0 if host is None else host.clear())

    def _bring_in(self, digest: bytes) -> int:
        """Allocates a page for entries from the host."""
        assert self.host is not None
        # Take the entries first, because a page that is evicted to make room may push them out of the host.
        entries = self.host.take(digest)
        assert entries is not None
        page = self._take()
        self._page_of[digest], self._hash_of[page] = page, digest
        self.incoming.append((page, entries))
        return page

    def _take(self) -> int:
        page = self._free.pop() if self._free else self._evict()
        self._users[page] = 1
        return page

    def _evict(self) -> int:
        page, _ = self._unused.popitem(last=False)
        if self.host is None:
            self._unlink(page)
        else:
            # The page may come back, so its snapshot stays until the row is needed.
            digest = self._hash_of.pop(page)
            del self._page_of[digest]
            self.outgoing.append((digest, page))
        return page

    def _unlink(self, page: int) -> None:
        digest = self._hash_of.pop(page)
        del self._page_of[digest]
        if self.snapshots is not None:
            self.snapshots.drop(digest)


def make_pools(sizes: EngineSizes, settings: EngineSettings) -> list[PagePool]:
    """Makes the empty pool of each shard."""
    return [
        PagePool(
            sizes.shard_pages,
            settings.page_size,
            HostPages(settings.host_bytes) if settings.host_bytes else None,
            SnapshotRows(sizes.shard_snapshots) if sizes.shard_snapshots else None,
        )
        for _ in range(sizes.num_shards)
    ]


def page_digests(tokens: Sequence[int], page_size: int, *, salt: bytes = b"") -> Iterator[bytes]:
    """Yields the hashes of the full pages of a text."""
    digest = _first_hash(salt)
    for begin in range(0, len(tokens) // page_size * page_size, page_size):
        digest = _extend_hash(digest, tokens[begin : begin + page_size])
        yield digest


def _first_hash(salt: bytes) -> bytes:
    return hashlib.sha256(salt).digest()


def _extend_hash(digest: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the hash of a text and the next page. The hash is cryptographic, so nobody can make texts collide."""
    return hashlib.sha256(digest + np.asarray(tokens, "<i4").tobytes()).digest()
