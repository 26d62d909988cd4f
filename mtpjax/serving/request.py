"""The engine's input and output: requests, the tokens of a tick, and the end of a request."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from mtpjax.decoding.config import SamplingParams
from mtpjax.serving.matcher import Grammar

FinishReason = Literal["stop", "length", "abort", "timeout", "error", "invalid"]


class QueueFull(Exception):
    """The engine's queue is full, or the engine shuts down; the client should try again later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One text to continue.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: maximum new tokens, at least 1.
        sampling: one value per option. A temperature above 0 needs a seed.
        stop_token_ids: the text ends after any of these tokens, which is part of the new tokens.
        stop_sequences: the text ends after any of these sequences of new tokens, which is part of them.
        logprobs: report the log-probability of each new token under the trunk's unmodified logits.
        speculative: False decodes without drafts.
        grammar: the new text matches it, or is a prefix of a match if a limit, a stop sequence or a stop token of the
            request ends it early; None: any text. `stop_token_ids` must hold all end tokens.
        salt: only requests with the same salt share pages of the prefix cache.
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
        origins: draft level that proposed each token; 0: a bonus token, which the trunk drew itself.
        logprobs: of each token; None unless requested.
    """

    tokens: list[int]
    origins: list[int]
    logprobs: list[float] | None


@dataclasses.dataclass(frozen=True)
class Finish:
    """The end of a request. Nothing follows it.

    Attributes:
        reason: "stop" (a stop token or sequence), "length" (a limit), "abort", "timeout", "error", or "invalid" (the
            request's grammar exceeds a limit).
        num_cached_tokens: tokens of the prompt whose entries came from the prefix cache.
        num_new_tokens: tokens delivered.
        num_steps: verification passes.
        proposed: per draft level, passes that drafted it.
        accepted: per draft level, passes that accepted it.
        message: one line, for the log, if the reason is "error" or "invalid".
        is_retryable: the error was not the request's fault, so it may succeed when it is sent again.
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


@dataclasses.dataclass
class RequestTimes:
    """Times of a request's events, in seconds of one clock.

    Attributes:
        started: its prefill began; None: it never left the queue.
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
        logprobs: per token; None for the first.
        top_ids: per token, the most likely ids at its position, descending; empty for the first.
        top_logprobs: their log-probabilities.
    """

    logprobs: list[float | None]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


@dataclasses.dataclass(frozen=True)
class EngineStatus:
    """The engine's load and its counts since the start.

    Attributes:
        num_running: requests in slots, including prefill.
        num_waiting: requests in the queue.
        num_slots: maximum requests that run at the same time.
        num_used_pages: pages of running requests.
        page_size: positions per page.
        num_prompt_tokens: tokens of prompts that were prefilled or found in the prefix cache.
        num_cached_tokens: prompt tokens that were found.
        num_new_tokens: tokens delivered.
        num_requests: requests that ended.
        num_aborted: requests that were aborted, or ran out of time.
        num_failed: requests that ended with an error.
        num_nan_logits: requests that ended because the model computed NaN.
        num_preempted: times that a request gave up its pages and waited again.
        num_received_pages: pages of the prefix cache that came from a prefill server.
        num_ticks: ticks of the scheduler that called the device.
        num_steps: verification passes of all rows.
        proposed: per draft level, passes that drafted it.
        accepted: per draft level, passes that accepted it.
        num_compilations: programs compiled since the engine was ready.
        compile_seconds: time spent compiling, at the start and since.
        num_programs_left: programs that a thread still compiles while requests run.
        num_compile_waits: requests that have waited for one of them.
        num_rebalancings: times that experts moved.
        expert_imbalance: as `ExpertRebalancer.imbalance`; also nan if the experts never move.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_slots: int = 0
    num_pages: int = 0
    num_used_pages: int = 0
    page_size: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_new_tokens: int = 0
    num_requests: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_nan_logits: int = 0
    num_preempted: int = 0
    num_received_pages: int = 0
    num_ticks: int = 0
    num_steps: int = 0
    proposed: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    num_compilations: int = 0
    compile_seconds: float = 0.0
    num_programs_left: int = 0
    num_compile_waits: int = 0
    num_rebalancings: int = 0
    expert_imbalance: tuple[float, float] = (math.nan, math.nan)

    @property
    def accept_length(self) -> float:
        """Mean tokens per verification pass, including the bonus token; nan without passes."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else float("nan")

    @property
    def token_usage(self) -> float:
        """Share of the pages in use, 0 to 1."""
        return self.num_used_pages / self.num_pages if self.num_pages else 0.0

    @property
    def num_used_tokens(self) -> int:
        return self.num_used_pages * self.page_size

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_proposed(self) -> int:
        return sum(self.proposed)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)

    @property
    def accept_rate(self) -> float:
        """Accepted drafts per proposed draft; nan without drafts."""
        return self.num_accepted / (self.num_proposed or math.nan)

    @property
    def imbalance_before(self) -> float:
        return self.expert_imbalance[0]

    @property
    def imbalance_after(self) -> float:
        return self.expert_imbalance[1]
