"""What a decoding call reports."""

import dataclasses
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class DecodeStats:
    """Counts per row (B rows, K draft levels), and the rates they give over all rows.

    A step is one verifying pass; it proposes each level of its depth once, however many nodes a tree has there. Drafts
    cut off at a stop token or limit count as accepted; `discarded` counts what was cut off. So `emitted + discarded ==
    1 + steps + accepted`, the 1 being the token that prefill gives.
    """

    steps: np.ndarray  # [B]
    proposed: np.ndarray  # [B, K]
    accepted: np.ndarray  # [B, K]
    discarded: np.ndarray  # [B]
    emitted: np.ndarray  # [B]

    @property
    def accept_length(self) -> float:
        """Tokens per step, bonus token included, cut ones too; 1.0 for plain decoding, nan without a step."""
        steps = self.steps.sum()
        return float(1 + self.accepted.sum() / steps) if steps else float("nan")

    @property
    def survival_rates(self) -> np.ndarray:
        """`[K]`: drafts accepted at each level, over steps that proposed any there.

        At a fixed depth their sum plus one is the accept length.
        """
        return self.accepted.sum(axis=0) / np.maximum(self.proposed.sum(axis=0), 1)

    @property
    def conditional_rates(self) -> np.ndarray:
        """`[K]`: at a fixed depth, the share of drafts accepted of those whose predecessor was: ratios of survival."""
        survival = self.survival_rates
        before = np.concatenate([[1.0], survival])[: len(survival)]
        return survival / np.where(before > 0, before, 1)

    def check(self) -> None:
        """Raises `AssertionError` where the counts contradict each other."""
        gained = 1 + self.steps + self.accepted.sum(axis=1)
        assert (self.emitted + self.discarded == gained).all(), (self.emitted, self.discarded, gained)
        assert (self.proposed <= self.steps[:, None]).all(), (self.proposed, self.steps)
        assert (self.accepted <= self.proposed).all(), (self.accepted, self.proposed)
        assert (np.diff(self.accepted, axis=1, prepend=self.steps[:, None]) <= 0).all(), self.accepted


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """New tokens of each row, without the prompt."""

    tokens: np.ndarray  # [B, N] int32, zeros behind each row's end
    lengths: np.ndarray  # [B] new tokens
    origins: np.ndarray  # [B, N] int8: the draft level that proposed a token, 0 where it is the trunk's own
    finish_reasons: tuple[Literal["stop", "length"], ...]
    logprobs: np.ndarray | None  # [B, N] float32 of the new tokens, by the trunk's logits as they are
    is_exact: bool  # False: the acceptance rule has changed the distribution of the text
    stats: DecodeStats

    def rows(self) -> list[list[int]]:
        """The new tokens as lists of their true lengths."""
        return [row[:length].tolist() for row, length in zip(self.tokens, self.lengths, strict=True)]
