"""The engine's calls: before they are dispatched, and while they run."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from mtpjax.decoding.gpu_graph import OneGraph
from mtpjax.decoding.report import PackedReport, Report
from mtpjax.decoding.session import Batch
from mtpjax.decoding.state import Draft
from mtpjax.serving.program_set import ProgramKey
from mtpjax.serving.request import Sequence
from mtpjax.serving.scoring import ScoredChunk


class PendingCall(NamedTuple):
    """A call that is not dispatched yet.

    Attributes:
        program: of `mtpjax.decoding.session` or `mtpjax.serving.scoring`.
        arrays: its arguments after the state.
        key: selects its static arguments, and so the compiled program.
    """

    program: OneGraph
    arrays: tuple[Any, ...]
    key: ProgramKey


@dataclasses.dataclass
class InFlightCall:
    """A dispatched call.

    Attributes:
        rows: the request of each row of the report; None for padding.
        report: its changes, on the device.
        is_prefill: the call processes prompts.
    """

    rows: list[Sequence | None]
    report: PackedReport
    is_prefill: bool

    def read(self) -> Report:
        """Waits for the call; returns its report as arrays on the host."""
        return self.report.read()


@dataclasses.dataclass
class ScoreCall:
    """A dispatched call that scores a chunk of texts.

    Attributes:
        rows: the request of each row, and the positions of its chunk; None for padding.
        scores: arrays on the device.
    """

    rows: list[tuple[Sequence, int, int] | None]
    scores: ScoredChunk

    def read(self) -> ScoredChunk:
        """Waits for the call; returns arrays on the host."""
        return jax.device_get(self.scores)


@dataclasses.dataclass
class DraftCall:
    """A dispatched call that drafts. `Executor.verify` continues it.

    Attributes:
        rows: the request of each row; None for padding.
        batch: the rows as arrays.
        key: of the program.
        draft: arrays on the device.
    """

    rows: list[Sequence | None]
    batch: Batch
    key: ProgramKey
    draft: Draft

    def read(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Waits for the call; returns tokens `[R, W]` and parents `[R, W]` of the nodes, None for chains."""
        return jax.device_get((self.draft.tokens, self.draft.parents))
