"""Requests that wait to be read; clients take turns."""

import collections
from collections.abc import Hashable
from typing import Any

from mtpjax.serving.api.turns import FairQueue, subtract

MAX_WAITING = 1024  # requests
MAX_WAITING_BYTES = 256 << 20  # of their bodies


class ReadQueue:
    """Returns waiting requests, with clients taking turns. Not thread-safe.

    A worker takes either small requests only, or large ones first.
    """

    def __init__(self):
        running: collections.Counter[Hashable] = collections.Counter()
        self._queues = {is_small: FairQueue(running) for is_small in (True, False)}
        self._counts: collections.Counter[Hashable] = collections.Counter()  # waiting, by client
        self._bytes: collections.Counter[Hashable] = collections.Counter()

    def add(self, client: Hashable, num_bytes: int, item: Any, *, is_small: bool) -> bool:
        """Appends a request. Returns False, without adding it, if the queue is full and the client has its share."""
        num_clients = len(self._counts.keys() | {client})
        for used, added, maximum in ((self._counts, 1, MAX_WAITING), (self._bytes, num_bytes, MAX_WAITING_BYTES)):
            if used.total() + added > maximum and used[client] + added > maximum // num_clients:
                return False
        self._queues[is_small].add(client, (num_bytes, item))
        self._counts[client] += 1
        self._bytes[client] += num_bytes
        return True

    def take(self, *, small_only: bool) -> tuple[Hashable, Any] | None:
        """Removes the next request and returns it with its client; None if there is none. `finish` marks its end."""
        for is_small in (True,) if small_only else (False, True):
            if taken := self._queues[is_small].take():
                client, (num_bytes, item) = taken
                self._removed(client, num_bytes)
                return client, item
        return None

    def finish(self, client: Hashable) -> None:
        self._queues[True].finish(client)

    def discard(self, client: Hashable, num_bytes: int, item: Any, *, is_small: bool) -> None:
        """Removes a cancelled request, if it still waits."""
        if self._queues[is_small].discard(client, (num_bytes, item)):
            self._removed(client, num_bytes)

    def clear(self) -> list[Any]:
        """Removes and returns all requests."""
        items = []
        while taken := self.take(small_only=False):
            self.finish(taken[0])
            items.append(taken[1])
        return items

    def _removed(self, client: Hashable, num_bytes: int) -> None:
        subtract(self._counts, client, 1)
        subtract(self._bytes, client, num_bytes)
