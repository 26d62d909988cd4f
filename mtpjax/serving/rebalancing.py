"""Moves a running model's experts according to how many tokens are routed to each (SGLang's `--enable-eplb`).

The decoding and prefill programs stay as they are. The engine keeps the newest tokens of its texts; from time to time,
an additional call runs the trunk over a block of them and counts the tokens per expert. Every `every` ticks, the engine
computes a new placement for each layer. If it clearly lowers the load of the layer's busiest device, the experts are
moved, one layer per tick. All copies of an expert have the same weights, so the output does not change.
"""

import collections
import logging
import math
from typing import Any

import jax
import numpy as np

from mtpjax.models.expert_placement import Placement, place_experts
from mtpjax.serving.engine_session import EngineSession
from mtpjax.serving.request import Sequence

BLOCKS_PER_PLACEMENT = 8  # blocks of tokens that are counted between two placements
# A layer keeps its placement unless the busiest device's load falls by this share, because counts come from a sample of
# the tokens, and a placement fits its sample better than the tokens that follow.
MIN_GAIN = 0.05

_log = logging.getLogger(__name__)


class ExpertRebalancer:
    """Counts the tokens routed to each expert, and moves experts. Called only in the engine's thread.

    Args:
        session: runs the calls.
        every: ticks between two placements.

    Attributes:
        num_rebalancings: number of placements that moved the experts of at least one layer.
        imbalance: the busiest device's load divided by the mean load, averaged over the layers, before and after the
            newest placement, according to the newest counts; nan before the first placement.
    """

    def __init__(self, session: EngineSession, every: int):
        self._session, self._every = session, every
        self._shape = session.count_shape
        self._texts: collections.deque[list[int]] = collections.deque(maxlen=math.prod(self._shape[:2]))
        self._counts: list[Any] = []  # [L, E] each, on the device
        self._placements = session.expert_placements()
        self._waiting: collections.deque[tuple[str, np.ndarray]] = collections.deque()  # layers to place, and counts
        self._changes: list[tuple[float, float]] = []  # imbalance of each layer that was placed, before and after
        self._num_ticks = self.num_rebalancings = 0
        self.imbalance = math.nan, math.nan

    def add(self, sequence: Sequence) -> None:
        """Keeps the new tokens of a text in whole rows of a block, and the remaining ones once the text has ended."""
        text, width = sequence.text, self._shape[-1]
        while len(text) - sequence.num_kept >= (1 if sequence.has_ended else width):
            row = text[sequence.num_kept : sequence.num_kept + width]
            self._texts.append(row)
            sequence.num_kept += len(row)

    def tick(self) -> None:
        """Dispatches the calls of a tick, which may move the experts of one layer and count experts."""
        self._num_ticks += 1
        # 1. Place the next layer, until all layers are placed according to the newest counts.
        if self._waiting:
            self._place_layer(*self._waiting.popleft())
        elif self._num_ticks % self._every == 0 and self._counts:
            # Reading the counts waits only if `every` is small. Otherwise, their calls were dispatched many ticks ago.
            counts, self._counts = self._counts, []
            self._waiting.extend(zip(self._placements, np.sum(jax.device_get(counts), axis=0), strict=True))
        # 2. Count the tokens routed to each expert in another block, for the next placement.
        if self._num_ticks % max(self._every // BLOCKS_PER_PLACEMENT, 1) == 0 and self._texts:
            self._count()

    def _count(self) -> None:
        tokens, lengths = np.zeros(self._shape, np.int32), np.zeros(self._shape[:2], np.int32)
        for place, text in zip(np.ndindex(lengths.shape), self._texts, strict=False):
            tokens[place][: len(text)], lengths[place] = text, len(text)
        self._texts.clear()
        self._counts.append(self._session.count_experts(tokens, lengths))

    def _place_layer(self, layer: str, counts: np.ndarray) -> None:
        """Moves the experts of a layer if that clearly reduces the imbalance."""
        slots, num_devices = self._placements[layer], self._session.num_expert_devices
        now = Placement.measured(slots, counts, num_devices)
        after = place_experts(counts, num_devices, len(slots))
        # A small gain may be chance and does not justify the move.
        if after.imbalance > (1 - MIN_GAIN) * now.imbalance:
            after = now
        else:
            self._session.move_experts(layer, after.expert_of_slot)
            self._placements[layer] = after.expert_of_slot
        self._changes.append((now.imbalance, after.imbalance))
        # The last layer completes the placement.
        if self._waiting:
            return
        changes, self._changes = self._changes, []
        num_moved = sum(before != after for before, after in changes)
        before, after = np.mean(changes, axis=0).tolist()
        self.imbalance = before, after
        self.num_rebalancings += num_moved > 0
        _log.info(
            "moved the experts of %d of %d layers: the busiest device had %.2f times the mean load, now %.2f",
            *(num_moved, len(changes), before, after),
        )
