"""The engine's dispatched calls. Their `rows` contain the request for each row of the result, or None for padding."""

import dataclasses

import jax
import numpy as np

from mtpjax.decoding.report import PackedReport, Report
from mtpjax.decoding.session import Batch
from mtpjax.decoding.state import Draft
from mtpjax.serving.program_set import ProgramKey
from mtpjax.serving.request import Sequence
from mtpjax.serving.scoring import ScoredChunk


@dataclasses.dataclass
class InFlightCall:
    """A call that decodes or, if `is_prefill`, processes prompts."""

    rows: list[Sequence | None]
    report: PackedReport
    is_prefill: bool

    def read(self) -> Report:
        """Waits for the call; returns its report as arrays on the host."""
        return self.report.read()


@dataclasses.dataclass
class ScoreCall:
    """A call that scores a chunk of a text. `rows` also contains the start and the end of the chunk."""

    rows: list[tuple[Sequence, int, int] | None]
    scores: ScoredChunk

    def read(self) -> ScoredChunk:
        """Waits for the call; returns arrays on the host."""
        return jax.device_get(self.scores)


@dataclasses.dataclass
class DraftCall:
    """A call that drafts for rows with a grammar. `Executor.verify` continues it."""

    rows: list[Sequence | None]
    batch: Batch
    key: ProgramKey
    draft: Draft

    def read(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Waits for the call, and returns the nodes' tokens and parents, both `[R, W]`; for chains, parents is None."""
        return jax.device_get((self.draft.tokens, self.draft.parents))
