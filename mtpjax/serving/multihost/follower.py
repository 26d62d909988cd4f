"""Runs the calls of process 0 in every other process."""

import collections
import signal
import threading
from types import FrameType

from mtpjax.decoding.state import Draft
from mtpjax.serving.executor import Executor
from mtpjax.serving.multihost.connection import Leader
from mtpjax.serving.multihost.plan import decode, decode_call

# Methods that process 0 calls by name.
METHODS = ("warm_up", "reset", "count_experts", "move_experts", "copy_snapshots")


class Follower:
    """Runs the calls of process 0, and reads nothing from the device. All processes have the executor's parameters."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self._drafts: collections.deque[Draft] = collections.deque()  # to be verified, oldest first

    def run(self, body: bytes) -> None:
        """Dispatches a call that `plan.encode` encoded. Raises ValueError if process 0 runs a different version."""
        name, arguments, key = decode(body)
        if name in METHODS:
            if name == "reset":
                self._drafts.clear()
            owner = self.executor.programs if name == "warm_up" else self.executor.session
            getattr(owner, name)(*arguments)
        else:
            arrays = tuple(self._drafts.popleft() if each is Draft else each for each in arguments)
            result = self.executor.session.run(decode_call(name, arrays, key))
            if isinstance(result, Draft):
                self._drafts.append(result)


def follow(executor: Executor, leader: Leader) -> None:
    """Runs calls until process 0 stops. Forwards SIGTERM and Ctrl-C to process 0, which drains and then stops.

    Raises:
        ValueError: process 0 ends because of an error, or runs a different version.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        leader.ask_to_drain()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
    follower = Follower(executor)
    # Calls are dispatched as soon as they arrive, and the device runs them in this order.
    while (body := leader.receive()) is not None:
        follower.run(body)
