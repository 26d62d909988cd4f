"""Slots for slow work, given to clients in turn: many requests of one client do not delay the others."""

import asyncio
import collections
from collections.abc import Hashable


class Turns:
    """Limits how much work runs at the same time, to `num_places`. Used in one event loop."""

    def __init__(self, num_places: int):
        self._num_free = num_places
        # Clients in the order of their turns, and what each waits for.
        self._waiting: collections.OrderedDict[Hashable, collections.deque[asyncio.Future]] = collections.OrderedDict()

    async def take(self, client: Hashable) -> None:
        """Waits for a slot, which the caller returns with `release`."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, collections.deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # the place came at the same time
            raise

    def release(self) -> None:
        """Returns a slot, to the oldest work of the next client."""
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            while turns and turns[0].done():  # no longer wanted
                turns.popleft()
            if turns:
                turns.popleft().set_result(None)
                if turns:
                    self._waiting[client] = turns  # behind all other clients
                return
        self._num_free += 1
