"""Draft counts per prompt, from which `mtpjax.evaluation.metrics` computes rates and accept lengths."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np


class TeacherForcedSums(NamedTuple):
    """Sums over the positions of each prompt's continuation, `[P, K]`, from one teacher-forced pass.

    A position counts at level k if its k-1 draft inputs are tokens of the text and the trunk's choice for the drafted
    token is known.

    Attributes:
        positions: number of positions that count.
        agrees: number of positions where level k's arg-max equals the trunk's.
        reached: number of positions where levels 1..k-1 agree.
        survives: number of positions where levels 1..k agree.
        overlap: sum of 1 - TV between level k's distribution and the trunk's.
        overlap_reached: sum of the product of the overlaps of levels 1..k-1.
        overlap_survives: sum of the product of the overlaps of levels 1..k.
    """

    positions: np.ndarray
    agrees: np.ndarray
    reached: np.ndarray
    survives: np.ndarray
    overlap: np.ndarray
    overlap_reached: np.ndarray
    overlap_survives: np.ndarray


class Predicted(NamedTuple):
    """Counts predicted for decoding, `[P, K]` float64; nan unless `is_predictable`.

    Attributes:
        accepted: number of accepted drafts per level.
        rounds_at_depth: number of rounds for each draft depth 1..K.
        accepted_at_depth: number of accepted drafts, summed over levels, for each draft depth 1..K.
    """

    accepted: np.ndarray
    rounds_at_depth: np.ndarray
    accepted_at_depth: np.ndarray

    @property
    def rounds(self) -> np.ndarray:
        """`[P]` predicted number of rounds at the depth of the call."""
        return self.rounds_at_depth[:, -1]


class AcceptanceCounts(NamedTuple):
    """Counts for P prompts and K draft levels.

    Attributes:
        teacher_forced: sums from the teacher-forced pass.
        predicted: counts predicted for decoding.
        rounds: `[P]` number of verification passes in decoding.
        accepted: `[P, K]` number of drafts that decoding accepted, per level.
        is_identical: `[P]` bool, True if decoding with drafts returned the same text as plain decoding
            (`equals_plain_decoding`).
        texts: `[P]` lists of the new tokens from plain decoding.
    """

    teacher_forced: TeacherForcedSums
    predicted: Predicted
    rounds: np.ndarray
    accepted: np.ndarray
    is_identical: np.ndarray
    texts: np.ndarray

    def select(self, mask: np.ndarray) -> "AcceptanceCounts":
        """Returns the counts for the prompts at which `mask`, `[P]` bool, is True."""
        return jax.tree.map(lambda counts: counts[mask], self)

    @classmethod
    def concatenate(cls, batches: "Sequence[AcceptanceCounts]") -> "AcceptanceCounts":
        """Joins the counts from several batches of prompts."""
        return jax.tree.map(lambda *counts: np.concatenate(counts), *batches)
