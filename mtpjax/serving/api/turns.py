"""Places for work that takes long, given to clients in turn: many requests of one do not hold up the others."""

import asyncio
import collections
from collections.abc import Hashable


class Turns:
    """Lets a few pieces of work run at the same time. Used in one event loop.

    Args:
        num_places: of them.
    """

    def __init__(self, num_places: int):
        self._num_free = num_places
        # Clients in the order of their turns, and what each waits for.
        self._waiting: collections.OrderedDict[Hashable, collections.deque[asyncio.Future]] = collections.OrderedDict()

    async def take(self, client: Hashable) -> None:
        """Waits for a place. The caller gives it back with `release`.

        Args:
            client: whose work it is.
        """
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
        """Gives a place back: to the oldest work of the client whose turn it is."""
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
