"""Clients take turns: many requests of one client do not delay the others."""

import asyncio
import collections
from collections.abc import Hashable
from typing import Any


class FairQueue:
    """Waiting items: the oldest of each client in turn. Clients with a running item come after those without.

    Args:
        running: items that were taken and have not ended, by client. Queues may share them.
    """

    def __init__(self, running: collections.Counter[Hashable]):
        self._running = running
        self._waiting: collections.OrderedDict[Hashable, collections.deque[Any]] = collections.OrderedDict()

    def add(self, client: Hashable, item: Any) -> None:
        self._waiting.setdefault(client, collections.deque()).append(item)

    def take(self) -> tuple[Hashable, Any] | None:
        """Removes the next item and returns it with its client; None if none waits. `finish` marks its end."""
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
        """Removes an item if it still waits; the next turn goes to other clients. Returns whether it waited."""
        items = self._waiting.get(client, ())
        if not items or item not in items:
            return False
        items.remove(item)
        self._waiting.move_to_end(client)
        if not items:
            del self._waiting[client]
        return True


class Turns:
    """Limits how much work runs at the same time. Used in one event loop.

    Args:
        num_slots: pieces of work that may run.
    """

    def __init__(self, num_slots: int):
        self._num_free, self._queue = num_slots, FairQueue(collections.Counter())

    async def take(self, client: Hashable) -> None:
        """Waits for a slot, which the caller returns with `release`."""
        turn = asyncio.get_running_loop().create_future()
        self._queue.add(client, turn)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._queue.discard(client, turn)
            else:  # the slot came at the same time
                self.release(client)
            raise

    def release(self, client: Hashable) -> None:
        """Returns a client's slot."""
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
    """Lowers a client's count, and keeps no zeros."""
    counts[client] -= number
    if not counts[client]:
        del counts[client]
