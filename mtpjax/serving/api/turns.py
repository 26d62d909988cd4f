"""Fairness between clients, so that many requests from one client do not delay other clients."""

import asyncio
import collections
from collections.abc import Hashable
from typing import Any

MAX_WAITING = 1024  # requests that wait to be read
MAX_WAITING_BYTES = 256 << 20  # total size of their bodies


class FairQueue:
    """A queue that returns the oldest item of each client in turn. Clients with running items come last.

    Args:
        running: number of items that were taken and have not finished, by client. Queues may share it.
    """

    def __init__(self, running: collections.Counter[Hashable]):
        self._running = running
        self._waiting: collections.OrderedDict[Hashable, collections.deque[Any]] = collections.OrderedDict()

    def add(self, client: Hashable, item: Any) -> None:
        self._waiting.setdefault(client, collections.deque()).append(item)

    def take(self) -> tuple[Hashable, Any] | None:
        """Removes the next item and returns it with its client; None if the queue is empty. `finish` marks its end."""
        if not self._waiting:
            return None
        client = next((each for each in self._waiting if not self._running[each]), next(iter(self._waiting)))
        item = self._waiting[client][0]
        self.discard(client, item)
        self._running[client] += 1
        return client, item

    def finish(self, client: Hashable) -> None:
        subtract(self._running, client, 1)

    def discard(self, client: Hashable, item: Any) -> bool:
        """Removes an item if it still waits, and moves its client to the end. Returns whether it waited."""
        items = self._waiting.get(client, ())
        if not items or item not in items:
            return False
        items.remove(item)
        self._waiting.move_to_end(client)
        if not items:
            del self._waiting[client]
        return True


class Turns:
    """Limits how many tasks run at the same time, in one event loop.

    Args:
        num_slots: maximum number of tasks that run.
    """

    def __init__(self, num_slots: int):
        self._num_free, self._queue = num_slots, FairQueue(collections.Counter())

    async def take(self, client: Hashable) -> None:
        """Waits for a slot, which the caller must return with `release`."""
        turn = asyncio.get_running_loop().create_future()
        self._queue.add(client, turn)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._queue.discard(client, turn)
            else:  # the slot was granted at the same time
                self.release(client)
            raise

    def release(self, client: Hashable) -> None:
        """Frees a client's slot."""
        self._queue.finish(client)
        self._num_free += 1
        self._start_next()

    def _start_next(self) -> None:
        while self._num_free and (taken := self._queue.take()):
            client, turn = taken
            if turn.cancelled():
                self._queue.finish(client)
                continue
            self._num_free -= 1
            turn.set_result(None)


def subtract(counts: collections.Counter[Hashable], client: Hashable, number: int) -> None:
    """Lowers a client's count, and removes it at zero."""
    counts[client] -= number
    if not counts[client]:
        del counts[client]


class ReadQueue:
    """A queue of waiting requests that serves clients in turn. Not thread-safe.

    A worker takes either small requests only, or large ones first.
    """

    def __init__(self):
        running: collections.Counter[Hashable] = collections.Counter()
        self._queues = {is_small: FairQueue(running) for is_small in (True, False)}
        self._counts: collections.Counter[Hashable] = collections.Counter()  # waiting, by client
        self._bytes: collections.Counter[Hashable] = collections.Counter()

    def add(self, client: Hashable, num_bytes: int, item: Any, *, is_small: bool) -> bool:
        """Appends a request. Returns False, without adding it, if the queue and the client's share of it are full."""
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
