"""Every process but the first: runs the calls that process 0 sends."""

import collections
import signal
import threading
from types import FrameType
from typing import Any

from mtpjax.decoding.drafter import Draft
from mtpjax.serving.executor import Executor
from mtpjax.serving.multihost.connection import Leader
from mtpjax.serving.multihost.plan import decode, decode_call


class FollowerExecutor(Executor):
    """An executor that takes its calls from process 0. It reads nothing from the device.

    Args:
        params: as for `Executor`, spread over the devices of all processes.
        **arguments: those of `Executor`.
    """

    def __init__(self, params: dict, **arguments: Any):
        super().__init__(params, **arguments)
        self._drafts: collections.deque[Draft] = collections.deque()  # to be verified, the oldest first

    def run(self, body: bytes) -> None:
        """Dispatches a call.

        Args:
            body: from `mtpjax.serving.multihost.plan.encode`.

        Raises:
            ValueError: process 0 runs another version.
        """
        name, arguments, key = decode(body)
        if name == "warm_up":
            self.warm_up()
        elif name == "reset":
            self._drafts.clear()
            self.reset()
        elif name == "count_experts":
            self.count_experts(*arguments)
        elif name == "move_experts":
            self.move_experts(*arguments)
        elif name == "copy_snapshots":
            slots, rows, to_state = arguments
            self.copy_snapshots(slots, rows, to_state=to_state)
        else:
            arrays = tuple(self._drafts.popleft() if each is Draft else each for each in arguments)
            result = self._run(decode_call(name, arrays, key))
            if isinstance(result, Draft):
                self._drafts.append(result)


def follow(executor: FollowerExecutor, leader: Leader) -> None:
    """Runs calls until process 0 stops. SIGTERM and Ctrl-C are passed on to process 0, which drains and then stops.

    Args:
        executor: of the same model and settings as that of process 0.
        leader: the connection to process 0.

    Raises:
        ValueError: process 0 ends because of a fault, or runs another version.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        leader.ask_to_drain()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
    # Calls are dispatched as fast as they come: the device runs them in this order.
    while (body := leader.receive()) is not None:
        executor.run(body)
