"""Every process but the first: runs the calls that process 0 sends."""

import collections
import signal
import threading
from types import FrameType
from typing import Any

from mtpjax.decoding.state import Draft
from mtpjax.serving.executor import Executor
from mtpjax.serving.multihost.connection import Leader
from mtpjax.serving.multihost.plan import decode, decode_call

METHODS = ("warm_up", "reset", "count_experts", "move_experts", "copy_snapshots")  # that process 0 calls by name


class FollowerExecutor(Executor):
    """An executor that runs the calls of process 0 and reads nothing from the device; all processes hold `params`."""

    def __init__(self, params: dict, **arguments: Any):
        super().__init__(params, **arguments)
        self._drafts: collections.deque[Draft] = collections.deque()  # to be verified, the oldest first

    def reset(self) -> None:
        self._drafts.clear()
        super().reset()

    def run(self, body: bytes) -> None:
        """Dispatches a call that `plan.encode` encoded. Raises ValueError if process 0 runs a different version."""
        name, arguments, key = decode(body)
        if name in METHODS:
            getattr(self, name)(*arguments)
        else:
            arrays = tuple(self._drafts.popleft() if each is Draft else each for each in arguments)
            result = self._run(decode_call(name, arrays, key))
            if isinstance(result, Draft):
                self._drafts.append(result)


def follow(executor: FollowerExecutor, leader: Leader) -> None:
    """Runs calls until process 0 stops. Forwards SIGTERM and Ctrl-C to process 0, which drains and then stops.

    Raises:
        ValueError: process 0 ends because of an error, or runs a different version.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        leader.ask_to_drain()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
    # Calls are dispatched as soon as they arrive: the device runs them in this order.
    while (body := leader.receive()) is not None:
        executor.run(body)
