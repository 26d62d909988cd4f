"""The result of a decoding call, with its tokens, finish reasons, and acceptance counts."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from mtpjax.compat import library_settings
from mtpjax.decoding.state import DecodeState
from mtpjax.distributed import gather_processes


@dataclasses.dataclass(frozen=True)
class DecodeStats:
    """Acceptance counts per row, and the rates over all rows.

    A step is one verification pass. It proposes each level of its depth once, regardless of how many nodes a tree has
    at that level. Prefill emits one token, and each step emits the accepted drafts and one bonus token. Drafts that a
    stop sequence or limit cut off count as accepted, and `discarded` counts all tokens that were cut off. So `emitted +
    discarded == 1 + rounds + accepted`, with `accepted` summed over the levels.

    Attributes:
        rounds: `[B]` number of verification passes.
        proposed: `[B, K]` number of rounds that drafted at least this many levels.
        accepted: `[B, K]` number of accepted drafts per level.
        discarded: `[B]` number of tokens cut off at a stop sequence or limit.
        emitted: `[B]` number of new tokens.
    """

    rounds: np.ndarray
    proposed: np.ndarray
    accepted: np.ndarray
    discarded: np.ndarray
    emitted: np.ndarray

    @property
    def accept_length(self) -> float:
        """Mean number of tokens per round over all rows, including the bonus token and tokens that were cut off.

        It is 1.0 without drafts and nan without rounds. Like vLLM's mean acceptance length, it is a micro average.
        """
        rounds = self.rounds.sum()
        return float(1 + self.accepted.sum() / rounds) if rounds else float("nan")

    @property
    def survival_rates(self) -> np.ndarray:
        """Unconditional acceptance rates `[K]`: accepted drafts of each level per round that proposed the level.

        At a fixed depth, the accept length is 1 plus the sum of these rates. vLLM reports them per position.
        """
        return self.accepted.sum(axis=0) / np.maximum(self.proposed.sum(axis=0), 1)

    @property
    def conditional_rates(self) -> np.ndarray:
        """Conditional acceptance rates `[K]`, given that the previous draft was accepted.

        They are defined only for a fixed depth, where every round proposes all levels.
        """
        survival = self.survival_rates
        before = np.concatenate([[1.0], survival])[: len(survival)]
        return survival / np.where(before > 0, before, 1)

    def check(self) -> None:
        """Checks the identities between the counts.

        Raises:
            AssertionError: if the counts contradict each other.
        """
        # Every emitted or discarded token comes from prefill, is a step's bonus token or is an accepted draft.
        gained = 1 + self.rounds + self.accepted.sum(axis=1)
        assert (self.emitted + self.discarded == gained).all(), (self.emitted, self.discarded, gained)
        # A draft is accepted only in a step that proposed its level, and only if the levels before it were accepted.
        assert (self.proposed <= self.rounds[:, None]).all(), (self.proposed, self.rounds)
        assert (self.accepted <= self.proposed).all(), (self.accepted, self.proposed)
        assert (np.diff(self.accepted, axis=1, prepend=self.rounds[:, None]) <= 0).all(), self.accepted


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """New tokens of B rows, without the prompts.

    Attributes:
        tokens: `[B, N]` int32 new tokens, right-padded with zeros.
        lengths: `[B]` int32 number of new tokens.
        origins: `[B, N]` int8 draft level that proposed each token; 0 for bonus tokens.
        finish_reasons: per row "stop" (a stop sequence), "length" (the limit) or "running" (not finished yet).
        logprobs: `[B, N]` float32 log-probabilities under the trunk's unmodified logits; None unless
            `DecodeConfig.logprobs` is set.
        is_exact: False if the acceptance rule changes the distribution of the text.
        stats: acceptance counts.

    Example:
        >>> import numpy as np
        >>> from mtpjax import GenerationResult
        >>> from mtpjax.decoding.result import DecodeStats
        >>> stats = DecodeStats(*(np.array(part) for part in ([1], [[1]], [[1]], [0], [3])))
        >>> result = GenerationResult(np.array([[5, 6, 7]]), np.array([3]), np.array([[0, 1, 0]]), ("length",), None,
        ...                           True, stats)
        >>> result.rows(), result.stats.accept_length
        ([[5, 6, 7]], 2.0)
    """

    tokens: np.ndarray
    lengths: np.ndarray
    origins: np.ndarray
    finish_reasons: tuple[Literal["stop", "length", "running"], ...]
    logprobs: np.ndarray | None
    is_exact: bool
    stats: DecodeStats

    def rows(self) -> list[list[int]]:
        """Returns the new tokens as lists without padding."""
        return [row[:length].tolist() for row, length in zip(self.tokens, self.lengths, strict=True)]


@library_settings()
def collect(state: DecodeState, slots: Sequence[int] | None = None, *, is_exact: bool = True) -> GenerationResult:
    """Copies the new tokens and the counts of rows `slots` (None: all rows) to the host.

    `is_exact` is False for a lossy acceptance rule.
    """
    # 1. Copy all fields in one transfer. The caches stay on the device.
    names = ("tokens", "origin", "length", "done", "stopped", "rounds", "proposed", "accepted", "discarded", "logprobs")
    fields = {name: getattr(state, name) for name in names} | {"prompt_length": state.settings.prompt_length}
    host = jax.device_get(gather_processes(fields))
    if slots is not None:
        host = {name: field[np.asarray(slots, np.int32)] for name, field in host.items()}
    # 2. Shift each row left by its prompt length, so that column 0 is its first new token, and zero the padding.
    lengths = host["length"] - host["prompt_length"]
    column = np.arange(lengths.max(initial=0))[None, :]
    source_column = np.minimum(host["prompt_length"][:, None] + column, host["tokens"].shape[1] - 1)
    is_new = column < lengths[:, None]

    def new_tokens(name: str) -> np.ndarray:
        return np.where(is_new, np.take_along_axis(host[name], source_column, axis=1), 0)

    # 3. Collect the finish reasons and counts. A row that ended without a stop sequence reached its limit.
    finish_reasons: list[Literal["stop", "length", "running"]] = [
        "stop" if stopped else "length" if done else "running"
        for stopped, done in zip(host["stopped"], host["done"], strict=True)
    ]
    counts = {name: host[name] for name in ("rounds", "proposed", "accepted", "discarded")}
    return GenerationResult(
        tokens=new_tokens("tokens"),
        lengths=lengths,
        origins=new_tokens("origin"),
        logprobs=new_tokens("logprobs") if host["logprobs"].shape[1] else None,
        is_exact=is_exact,
        finish_reasons=tuple(finish_reasons),
        stats=DecodeStats(**counts, emitted=lengths),
    )
