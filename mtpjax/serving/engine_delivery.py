"""Takes the reports of an engine's calls, and delivers tokens, scores and ends to requests."""

import collections
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.report import RowReport
from mtpjax.models.model import MTPModel
from mtpjax.serving.background import BackgroundCompiler
from mtpjax.serving.batches import all_allowed
from mtpjax.serving.calls import DraftCall, InFlightCall, ScoreCall
from mtpjax.serving.depth import AdaptiveDepth, Costs
from mtpjax.serving.executor import Executor
from mtpjax.serving.grammar import GrammarError
from mtpjax.serving.host_pages import page_shapes
from mtpjax.serving.multihost.connection import Followers
from mtpjax.serving.multihost.leader import LeaderExecutor
from mtpjax.serving.program_set import ProgramKey
from mtpjax.serving.rebalancing import ExpertRebalancer
from mtpjax.serving.request import (
    Delta,
    Finish,
    FinishReason,
    RequestTimes,
    Sequence,
)
from mtpjax.serving.scheduler import Scheduler
from mtpjax.serving.sizes import EngineSettings

_log = logging.getLogger(__name__)


class EngineDelivery:
    """The data of an engine. Takes reports of calls, delivers tokens, and ends requests, in the engine's thread."""

    def __init__(
        self,
        params: dict,
        *,
        model: MTPModel,
        config: DecodeConfig,
        settings: EngineSettings | None = None,
        observe: Callable[[Finish, RequestTimes], None] = lambda finish, times: None,
        followers: Followers | None = None,
        draft_params: Any = None,
    ):
        self.settings, self._observe, self.followers = settings or EngineSettings(), observe, followers
        make = Executor if followers is None else functools.partial(LeaderExecutor, followers=followers)
        self._executor: Executor = make(
            params, model=model, config=config, settings=self.settings, draft_params=draft_params
        )
        self.max_length, self.vocab_size = self._executor.sizes.max_length, model.config.vocab_size
        self._max_depth = self._executor.decoder.spec.num_steps
        self.max_requests = self.settings.num_slots + self.settings.max_waiting
        self.grammars = self.settings.grammars
        self.page_shapes = page_shapes(self._executor.state)
        self._depth: AdaptiveDepth | None = None
        if self.settings.depth_costs is not None:
            self._adapt_depth(self.settings.depth_costs)
        self._rebalancer: ExpertRebalancer | None = None
        if self.settings.rebalance_experts_every is not None:
            self._rebalancer = ExpertRebalancer(self._executor, self.settings.rebalance_experts_every)
        self._scheduler = self._new_scheduler()
        self._changed = threading.Condition()
        self._inbox: list[Callable[[], None]] = []  # calls from other threads for the engine's thread
        self._sequences: dict[int, Sequence] = {}
        self._ids = itertools.count()
        self._in_flight: list[InFlightCall | ScoreCall] = []
        self._totals: collections.Counter[str] = collections.Counter()
        self._no_counts = [0] * (1 + 2 * self._max_depth)
        self._drafts = self._no_counts  # passes, and proposed and accepted drafts per level
        self._num_warm_up_programs = 0
        self._compiler: BackgroundCompiler | None = None
        self._program_errors: dict[ProgramKey, Exception] = {}
        self._later_programs: list[ProgramKey] = []
        self._held: dict[int, Sequence] = {}  # requests that wait for a program
        self._num_held = 0  # so far
        self._is_closing = False
        self.progress_at = time.monotonic()
        self._tick_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="mtpjax-engine", daemon=True)

    def _new_scheduler(self) -> Scheduler:
        raise NotImplementedError

    def _run(self) -> None:
        raise NotImplementedError

    def _adapt_depth(self, costs: Costs) -> None:
        self._depth = AdaptiveDepth(costs, self._executor.sizes.batch_sizes)
        for size, durations in zip(self._executor.sizes.batch_sizes, costs, strict=True):
            shown = ", ".join(f"{depth}: {1000 * seconds:.2f}" for depth, seconds in enumerate(durations))
            _log.info("ms of a round with %d rows, by draft levels: %s", size, shown)

    def _allowed(self, call: DraftCall) -> np.ndarray:
        """Computes the tokens `[R, W, ceil(V/32)]` that may follow each node; ends rows whose grammar fails."""
        tokens, parents = call.read()
        allowed = all_allowed(self._executor.sizes, tokens.shape)
        for row, sequence in enumerate(call.rows):
            if sequence is None or sequence.matcher is None or sequence.has_ended:
                continue
            try:
                own_parents = None if parents is None else parents[row].tolist()
                sequence.matcher.fill_masks(allowed[row], tokens[row].tolist(), own_parents)
            except GrammarError as error:
                self._end(sequence, "invalid", str(error))
        return allowed

    def _take_scores(self, call: ScoreCall) -> None:
        """Collects the scores of a chunk, and ends texts that are complete."""
        chunk = call.read()
        self.progress_at = time.monotonic()
        for index, row in enumerate(call.rows):
            if row is None:
                continue
            sequence, start, end = row
            sequence.num_unread -= 1
            # A text that was preempted after this call starts again.
            if sequence.has_ended or sequence.slot is None or sequence.scored is None:
                continue
            sequence.scored.add(chunk, index, end - start)
            if end == sequence.num_to_prefill:
                self._end(sequence, "stop")

    def _take_report(self, call: InFlightCall) -> None:
        """Delivers the new tokens of a call, and ends the rows that are done."""
        report, before = call.read(), self._drafts
        self.progress_at = time.monotonic()
        num_rounds = 0
        for sequence, row in zip(call.rows, report.rows(), strict=True):
            if sequence is not None:
                sequence.num_unread -= 1
                if not sequence.has_ended:
                    num_rounds = max(num_rounds, self._take_row(sequence, row, call.is_prefill))
        if self._depth is not None:
            _, proposed, accepted = np.split(np.subtract(self._drafts, before), [1, 1 + self._max_depth])
            self._depth.record(num_rounds, proposed, accepted)

    def _take_row(self, sequence: Sequence, row: RowReport, is_prefill: bool) -> int:
        """Delivers the new tokens of a row; returns the number of its rounds."""
        # 1. Counts.
        before = sequence.counts or self._no_counts
        new_counts = [count - old for count, old in zip(row.counts, before, strict=True)]
        self._drafts = _add(self._drafts, new_counts)
        sequence.totals = _add(sequence.totals or self._no_counts, new_counts)
        sequence.counts = row.counts
        # 2. New tokens. The first one of a row that decoded before was delivered then.
        new = slice(int(is_prefill and sequence.is_resumed), None)
        tokens = row.tokens[new]
        if tokens:
            sequence.text += tokens
            if self._rebalancer is not None:
                self._rebalancer.add(sequence)
            self._totals["new_tokens"] += len(tokens)
            sequence.times.deliveries.append((time.monotonic(), len(tokens)))
            logprobs = row.logprobs[new].tolist() if sequence.request.logprobs else None
            self._deliver(sequence, Delta(tokens, row.origins[new], logprobs))
        # 3. Pages whose entries are final serve later requests.
        if sequence.lease is not None and self._scheduler.settings.shares_prefixes:
            pool = self._scheduler.pools[sequence.shard]
            pool.store(sequence.lease, sequence.text, min(row.num_final, len(sequence.text)))
        # 4. The end.
        if row.failed:
            self._totals["nan_logits"] += 1
            self._end(sequence, "error", f"request {sequence.id} failed: the model computed NaN")
        elif row.done:
            self._end(sequence, "stop" if row.stopped else "length")
        elif sequence.matcher is not None:
            try:
                sequence.matcher.consume(tokens)
            except GrammarError as error:
                self._end(sequence, "invalid", str(error))
        return new_counts[0]

    def _end(self, sequence: Sequence, reason: FinishReason, message: str = "", *, is_retryable: bool = False) -> None:
        shard, has_failed = sequence.shard, reason == "error"
        # Cache entries of a failed row may be NaN: drop them from the prefix cache, and clear their pages.
        pages = self._scheduler.end(sequence, forget=has_failed)
        if has_failed and pages:
            self._executor.clear_pages(shard, pages)
        if self._rebalancer is not None and sequence.num_new:
            self._rebalancer.add(sequence)
        del self._sequences[sequence.id]
        self._held.pop(sequence.id, None)
        # Scores are part of a request that has already been counted.
        is_counted = sequence.scored is None
        self._totals["requests"] += is_counted
        self._totals["aborted"] += is_counted and reason in ("abort", "timeout")
        self._totals["failed"] += is_counted and has_failed
        totals, depth = sequence.totals or self._no_counts, self._max_depth
        finish = Finish(
            reason,
            num_prompt_tokens=len(sequence.request.prompt),
            num_cached_tokens=sequence.num_cached or 0,
            num_new_tokens=sequence.num_new,
            num_steps=totals[0],
            proposed=tuple(totals[1 : 1 + depth]),
            accepted=tuple(totals[1 + depth :]),
            message=message,
            is_retryable=is_retryable,
        )
        self._deliver(sequence, finish)
        try:
            if is_counted:
                self._observe(finish, sequence.times)
        except Exception:
            _log.exception("request %d: its metrics are lost", sequence.id)

    def _deliver(self, sequence: Sequence, event: Delta | Finish) -> None:
        try:
            sequence.deliver(event)
        except Exception:
            _log.exception("request %d: its receiver failed", sequence.id)


def _add(values: list[int], others: list[int]) -> list[int]:
    return [value + other for value, other in zip(values, others, strict=True)]


# Totals of `EngineStatus`.
TOTALS = (
    *("prompt_tokens", "cached_tokens", "new_tokens", "requests", "aborted", "failed", "nan_logits", "ticks"),
    "received_pages",
)
