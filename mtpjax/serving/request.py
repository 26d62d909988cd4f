"""Requests, the events that the engine delivers for them, and their state in the engine (`Sequence`)."""

import dataclasses
import time
from collections.abc import Callable
from typing import Literal

from mtpjax.decoding.config import SamplingParams
from mtpjax.decoding.state import NewRows
from mtpjax.serving.matcher import Grammar, Matcher
from mtpjax.serving.scoring import ScoredChunk

FinishReason = Literal["stop", "length", "abort", "timeout", "error", "invalid"]


class QueueFull(Exception):
    """The engine's queue is full, or the engine is shutting down; the client should try again later."""


class EngineClosed(QueueFull):
    """The engine is shutting down and accepts no requests."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One text to continue.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: maximum number of new tokens, at least 1.
        sampling: sampling parameters, with one value each. A temperature above 0 needs a seed.
        stop_token_ids: the text ends after any of these tokens; that token is part of the new tokens.
        stop_sequences: the text ends after any of these token sequences; that sequence is part of the new tokens.
        logprobs: whether to report the log-probability of each new token under the trunk's unmodified logits.
        speculative: whether to decode with drafts.
        grammar: the new text matches it, or is a prefix of a match if a limit, a stop sequence or the request's own
            stop token ends it early; None allows any text. `stop_token_ids` must include all end tokens.
        salt: only requests with the same salt share pages of the prefix cache.

    Example:
        >>> from mtpjax import Request, SamplingParams
        >>> Request(prompt=(1, 2, 3), max_new_tokens=8, sampling=SamplingParams(temperature=0.8, seed=1)).logprobs
        False
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    logprobs: bool = False
    speculative: bool = True
    grammar: Grammar | None = None
    salt: bytes = b""


@dataclasses.dataclass(frozen=True)
class Delta:
    """New tokens of a request, at least one.

    Attributes:
        origins: draft level that proposed each token; 0 for a bonus token, which the trunk drew itself.
        logprobs: log-probability of each token; None unless requested.
    """

    tokens: list[int]
    origins: list[int]
    logprobs: list[float] | None


@dataclasses.dataclass(frozen=True)
class Finish:
    """The last event of a request.

    Attributes:
        reason: "stop" (a stop token or sequence), "length" (a limit), "abort", "timeout", "error", or "invalid" (the
            request's grammar exceeds a limit).
        num_cached_tokens: tokens of the prompt whose entries came from the prefix cache.
        num_new_tokens: tokens delivered.
        num_steps: verification passes.
        proposed: for each draft level, the number of passes that drafted it.
        accepted: for each draft level, the number of passes that accepted it.
        message: one line for the log, if the reason is "error" or "invalid".
        is_retryable: whether the request may succeed if it is sent again, because it did not cause the error itself.
    """

    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_new_tokens: int = 0
    num_steps: int = 0
    proposed: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    message: str = ""
    is_retryable: bool = False


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The new tokens of a request that has ended.

    Attributes:
        request: the request.
        tokens: the new token ids.
        origins: draft level that proposed each token; 0: a bonus token, which the trunk drew itself.
        logprobs: log-probability of each token; None unless requested.
        finish: how the request ended, and its counts.
    """

    request: Request
    tokens: list[int]
    origins: list[int]
    logprobs: list[float] | None
    finish: Finish


@dataclasses.dataclass
class RequestTimes:
    """Times of a request's events, in seconds, all from the same clock.

    Attributes:
        started: when its prefill began; None if it never left the queue.
        deliveries: time and number of tokens of each delivery.
    """

    arrived: float
    started: float | None = None
    deliveries: list[tuple[float, int]] = dataclasses.field(default_factory=list)


Deliver = Callable[[Delta | Finish], None]


@dataclasses.dataclass(frozen=True)
class Scores:
    """Log-probabilities of a given text under the trunk, without sampling options.

    Attributes:
        logprobs: one per token; None for the first token.
        top_ids: per token, the most likely ids at its position, descending; empty for the first token.
        top_logprobs: their log-probabilities.
    """

    logprobs: list[float | None]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


@dataclasses.dataclass
class ScoredText:
    """A text whose log-probabilities are being computed.

    Attributes:
        num_top: alternatives per token.
        rows: for each computed token from the second on, its log-probability, the best ids and their log-probabilities.
    """

    tokens: list[int]
    num_top: int
    rows: list[tuple[float, list[int], list[float]]] = dataclasses.field(default_factory=list)

    def add(self, chunk: ScoredChunk, row: int, count: int) -> None:
        """Adds the first `count` results of a row of a chunk on the host."""
        top = slice(0, self.num_top)
        columns = (chunk.logprobs[row, :count], chunk.ids[row, :count, top], chunk.values[row, :count, top])
        self.rows += zip(*(column.tolist() for column in columns), strict=True)

    def result(self) -> Scores:
        logprobs, ids, values = zip((None, [], []), *self.rows, strict=True)
        return Scores(logprobs=list(logprobs), top_ids=list(ids), top_logprobs=list(values))


@dataclasses.dataclass
class Lease:
    """The pages of one request.

    Attributes:
        pages: page ids, in the order of the text.
        num_cached: number of leading tokens whose entries are already in the pages.
        num_stored: number of leading pages whose text has been hashed.
        digest: hash of the text in the stored pages.
        num_found: number of leading pages that were known; `num_cached` covers fewer if no snapshot reaches that far.
        snapshot: snapshot row with the recurrent state after the cached tokens; None if there is no such state.
        reserved: snapshot rows that this request writes, by the number of pages before them.
    """

    pages: list[int]
    num_cached: int
    num_stored: int
    digest: bytes
    num_found: int = 0
    snapshot: int | None = None
    reserved: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request in the engine.

    Attributes:
        deliver: receives its deltas and its `Finish`.
        text: the prompt and the new tokens that were read from the device.
        limit: maximum number of tokens in the text.
        rows: the request as arrays, for the executor.
        is_plain: whether the request is greedy, with no sampling options or log-probabilities.
        scored: collects the log-probabilities of a text that is not continued; None for all other requests.
        matcher: follows the text through the request's grammar, up to the end of `text`; None without a grammar.
        times: when it arrived, started and received tokens, by `time.monotonic`.
        shard: shard of the mesh's `data` axis that holds its slot and pages.
        slot: its slot in that shard; None while it waits.
        lease: its pages; None while it waits.
        position: next prompt position to process.
        snapshot_stops: prompt positions where a chunk ends, so that the recurrent state there can be kept.
        num_to_prefill: positions to process before it decodes.
        max_length: maximum number of tokens in its text after the dispatched calls.
        min_length: minimum number of tokens in its text after these calls, unless it ends.
        num_unread: calls whose report has not been read yet.
        is_resumed: whether it decoded before, so that prefill ends with a token that has already been delivered.
        has_ended: whether it has ended.
        num_cached: tokens of its prompt that were in the prefix cache when it was first admitted.
        num_kept: tokens of its text that `ExpertRebalancer` has kept.
        counts: verification passes since it was last admitted, then proposed and accepted drafts per level; empty
            before its first report.
        totals: the same counts since it arrived.
    """

    id: int
    request: Request
    deliver: Deliver
    text: list[int]
    limit: int
    rows: NewRows
    is_plain: bool
    matcher: Matcher | None
    times: RequestTimes
    scored: ScoredText | None = None
    shard: int = 0
    slot: int | None = None
    lease: Lease | None = None
    position: int = 0
    snapshot_stops: list[int] = dataclasses.field(default_factory=list)
    num_to_prefill: int = 0
    max_length: int = 0
    min_length: int = 0
    num_unread: int = 0
    is_resumed: bool = False
    has_ended: bool = False
    num_cached: int | None = None
    num_kept: int = 0
    counts: list[int] = dataclasses.field(default_factory=list)
    totals: list[int] = dataclasses.field(default_factory=list)

    @classmethod
    def new(
        cls, id: int, request: Request, rows: NewRows, deliver: Deliver, scored: ScoredText | None = None
    ) -> "Sequence":
        """Makes the sequence for a request that has just arrived, given its arrays."""
        return cls(
            id,
            request,
            deliver,
            list(request.prompt),
            limit=int(rows.settings.limit[0]),
            rows=rows,
            is_plain=dataclasses.replace(request.sampling, seed=None) == SamplingParams() and not request.logprobs,
            matcher=None if request.grammar is None else request.grammar.start(),
            times=RequestTimes(time.monotonic()),
            scored=scored,
        )

    @property
    def num_new(self) -> int:
        return len(self.text) - len(self.request.prompt)

    @property
    def is_prefilled(self) -> bool:
        """True if the dispatched calls process its whole prompt."""
        return self.position >= self.num_to_prefill
