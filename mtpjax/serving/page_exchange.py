"""Exchanges pages of the prefix cache with the engine of another process."""

from collections.abc import Sequence

from mtpjax.serving.engine_session import EngineSession
from mtpjax.serving.host_pages import Entries, Outgoing, page_shapes
from mtpjax.serving.inbox import Inbox
from mtpjax.serving.model_digest import model_digest
from mtpjax.serving.page_pool import PagePool
from mtpjax.serving.scheduler import Scheduler


class PageExchange:
    """Reads and adds an engine's pages, for prefill and decode on different machines. The methods block the caller.

    Attributes:
        shapes: shapes and dtypes of a page's entries.
        num_received: number of pages that `put` has added.
        is_in_use: another process has been told which parameters the pages come from.
    """

    def __init__(self, session: EngineSession, scheduler: Scheduler, inbox: Inbox):
        self._session, self._scheduler, self._inbox = session, scheduler, inbox
        self.page_size, self.max_length = session.settings.page_size, session.sizes.max_length
        self.shapes = page_shapes(session.state)
        self.num_received, self.is_in_use = 0, False

    @property
    def is_supported(self) -> bool:
        """True if requests with a common prefix share only pages, and pages may be stored in host memory."""
        session, shares = self._session, self._scheduler.settings.shares_prefixes
        return shares and not session.sizes.shard_snapshots and session.settings.host_bytes > 0

    def digest(self) -> bytes:
        """Computes a hash of everything that a page's entries depend on, except the text; see `model_digest`."""
        session, self.is_in_use = self._session, True
        return model_digest(
            session.params,
            session.decoder.model.config,
            session.config,
            self.page_size,
            self.shapes,
            draft_params=session.own_draft_params,
        )

    def count_known(self, tokens: Sequence[int], salt: bytes) -> int:
        """Counts the pages of a text's prefix that are in the prefix cache."""
        return self._inbox.ask(lambda: len(self._pool.find(tokens, salt=salt)))

    def read(self, tokens: Sequence[int], salt: bytes) -> list[tuple[bytes, Entries]]:
        """Returns the hash and entries of each cached full page of a text's prefix, for another engine's `put`."""

        def start() -> tuple[list[bytes], dict[bytes, Entries], list[Outgoing]]:
            found, host = self._pool.find(tokens, salt=salt), self._pool.host
            in_host = {digest: host.read(digest) for digest, page in found if page is None and host is not None}
            copies = self._session.move_pages([(digest, page) for digest, page in found if page is not None])
            return [digest for digest, _ in found], in_host, copies

        digests, entries, copies = self._inbox.ask(start)
        # The engine's thread continues while the copies arrive.
        entries.update(page for some in copies for page in some.read())
        return [(digest, entries[digest]) for digest in digests]

    def put(self, pages: list[tuple[bytes, Entries]]) -> None:
        """Adds pages, given by their hashes and entries, to the prefix cache in host memory.

        The pages must come from an engine with the same model, page size and dtypes.
        """

        def put() -> None:
            for digest, entries in pages:
                self._pool.put(digest, entries)
            self.num_received += len(pages)

        self._inbox.ask(put)

    @property
    def _pool(self) -> PagePool:
        [pool] = self._scheduler.pools
        return pool
