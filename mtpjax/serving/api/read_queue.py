"""Requests that wait to be read, in turns of their clients."""

import collections
from collections.abc import Hashable
from typing import Any

MAX_WAITING = 1024  # requests
MAX_WAITING_BYTES = 256 << 20  # of their bodies


class ReadQueue:
    """Hands out waiting requests: the oldest of each client in turn. Not thread-safe.

    Clients with a request being read come after those without. A worker takes either small requests only, or large ones
    first.
    """

    def __init__(self):
        self._turns: dict[bool, _Turns] = {is_small: collections.OrderedDict() for is_small in (True, False)}
        self._running: collections.Counter[Hashable] = collections.Counter()
        self._counts: collections.Counter[Hashable] = collections.Counter()  # waiting, by client
        self._bytes: collections.Counter[Hashable] = collections.Counter()

    def add(self, client: Hashable, num_bytes: int, item: Any, *, is_small: bool) -> bool:
        """Appends a request. Returns False, without adding it, if the queue is full and the client has its share."""
        num_clients = len(self._counts.keys() | {client})
        for used, added, most in ((self._counts, 1, MAX_WAITING), (self._bytes, num_bytes, MAX_WAITING_BYTES)):
            if used.total() + added > most and used[client] + added > most // num_clients:
                return False
        self._turns[is_small].setdefault(client, collections.deque()).append((num_bytes, item))
        self._counts[client] += 1
        self._bytes[client] += num_bytes
        return True

    def take(self, *, small_only: bool) -> tuple[Hashable, Any] | None:
        """Removes the next request and returns it with its client; None if there is none. `finish` marks its end."""
        for is_small in (True,) if small_only else (False, True):
            turns = self._turns[is_small]
            if turns:
                client = next((each for each in turns if not self._running[each]), next(iter(turns)))
                num_bytes, item = turns[client].popleft()
                self._removed(client, num_bytes, is_small)
                self._running[client] += 1
                return client, item
        return None

    def finish(self, client: Hashable) -> None:
        _subtract(self._running, client, 1)

    def discard(self, client: Hashable, item: Any, *, is_small: bool) -> None:
        """Removes a request that nobody waits for any more, if it still waits."""
        waiting = self._turns[is_small].get(client, ())
        found = next((each for each in waiting if each[1] is item), None)
        if found is not None:
            self._turns[is_small][client].remove(found)
            self._removed(client, found[0], is_small)

    def clear(self) -> list[Any]:
        waiting = [item for turns in self._turns.values() for each in turns.values() for _, item in each]
        for counts in (*self._turns.values(), self._counts, self._bytes):
            counts.clear()
        return waiting

    def _removed(self, client: Hashable, num_bytes: int, is_small: bool) -> None:
        _subtract(self._counts, client, 1)
        _subtract(self._bytes, client, num_bytes)
        turns = self._turns[is_small]
        if turns[client]:
            turns.move_to_end(client)
        else:
            del turns[client]


def _subtract(counts: collections.Counter[Hashable], client: Hashable, number: int) -> None:
    counts[client] -= number
    if not counts[client]:
        del counts[client]


_Turns = collections.OrderedDict[Hashable, collections.deque[tuple[int, Any]]]
