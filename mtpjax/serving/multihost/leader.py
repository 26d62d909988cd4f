"""The executor of process 0: sends each call to the other processes, and runs it."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mtpjax.serving.executor import Executor
from mtpjax.serving.multihost.connection import Followers
from mtpjax.serving.multihost.plan import encode, encode_call
from mtpjax.serving.program_set import PendingCall


class LeaderExecutor(Executor):
    """An executor whose calls run in all processes, over whose devices `params` are spread."""

    def __init__(self, params: dict, *, followers: Followers, **arguments: Any):
        super().__init__(params, **arguments)
        self._followers, self._is_warming_up = followers, False

    def _run(self, call: PendingCall) -> Any:
        """Sends a call, then dispatches it, so that all processes start it at about the same time."""
        self._send(lambda: encode_call(call))
        return super()._run(call)

    def copy_snapshots(self, slots: np.ndarray, rows: np.ndarray, to_state: bool) -> None:
        self._send(lambda: encode("copy_snapshots", slots, rows, to_state))
        super().copy_snapshots(slots, rows, to_state=to_state)

    def count_experts(self, tokens: np.ndarray, lengths: np.ndarray) -> jax.Array:
        self._send(lambda: encode("count_experts", tokens, lengths))
        return super().count_experts(tokens, lengths)

    def move_experts(self, layer: str, expert_of_slot: np.ndarray) -> None:
        self._send(lambda: encode("move_experts", layer, expert_of_slot))
        super().move_experts(layer, expert_of_slot)

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        self._send(lambda: encode("warm_up"))
        self._is_warming_up = True
        super().warm_up(progress)
        self._is_warming_up = False

    def reset(self) -> None:
        self._send(lambda: encode("reset"))
        super().reset()

    def _send(self, make: Callable[[], bytes]) -> None:
        """Sends a call, unless it belongs to the warm-up: the other processes make those calls themselves."""
        if not self._is_warming_up:
            self._followers.send(make())
