"""Reads the reports of an engine's calls, delivers tokens and scores to requests, and ends the requests."""

import collections
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mtpjax.decoding.report import RowReport
from mtpjax.serving.batches import all_allowed
from mtpjax.serving.calls import DraftCall, InFlightCall, ScoreCall
from mtpjax.serving.depth import AdaptiveDepth
from mtpjax.serving.engine_session import EngineSession
from mtpjax.serving.matcher import GrammarError
from mtpjax.serving.rebalancing import ExpertRebalancer
from mtpjax.serving.request import Deliver, Delta, Finish, FinishReason, RequestTimes, Sequence
from mtpjax.serving.scheduler import Scheduler

_log = logging.getLogger(__name__)
# Counts that `EngineStatus` reports.
TOTALS = ("prompt_tokens", "cached_tokens", "new_tokens", "requests", "aborted", "failed", "nan_logits", "ticks")


class Delivery:
    """Tracks an engine's unfinished requests and delivers their results, in the engine's thread.

    Args:
        observe: called with the `Finish` and the times of each request.
        held: requests that wait for a program.

    Attributes:
        sequences: the requests, by id.
        totals: the counts of `TOTALS`.
        drafts: numbers of verification passes, and of proposed and accepted drafts per level.
        depth: chooses the depth from these counts; None if the depth is fixed.
        rebalancer: receives the new tokens; None if experts do not move.
        progress_at: time (`time.monotonic`) at which the device last answered or a pause last ended, if that is later.
    """

    def __init__(
        self,
        session: EngineSession,
        scheduler: Scheduler,
        clear_pages: Callable[[int, list[int]], None],
        observe: Callable[[Finish, RequestTimes], None],
        held: dict[int, Sequence],
    ):
        self._session, self._scheduler, self._clear_pages = session, scheduler, clear_pages
        self._observe, self._held = observe, held
        self.sequences: dict[int, Sequence] = {}
        self.totals: collections.Counter[str] = collections.Counter()
        self._no_counts = [0] * (1 + 2 * session.decoder.spec.num_steps)
        self.drafts = self._no_counts
        costs, every = session.settings.depth_costs, session.settings.rebalance_experts_every
        self.depth = None if costs is None else AdaptiveDepth(costs, session.sizes.batch_sizes)
        self.rebalancer = None if every is None else ExpertRebalancer(session, every)
        self.progress_at = time.monotonic()

    def count_admitted(self, sequences: list[Sequence]) -> None:
        """Counts requests that get a slot for the first time."""
        for sequence in sequences:
            if sequence.scored is not None:
                sequence.scored.rows.clear()  # a preempted text starts again
            elif sequence.times.started is None:
                sequence.times.started = time.monotonic()
                self.totals["prompt_tokens"] += len(sequence.request.prompt)
                self.totals["cached_tokens"] += sequence.num_cached or 0

    def allowed(self, call: DraftCall) -> np.ndarray:
        """Returns masks `[R, W, ceil(V/32)]` of the tokens that may follow each node. Ends rows whose grammar fails."""
        tokens, parents = call.read()
        allowed = all_allowed(self._session.sizes, tokens.shape)
        for row, sequence in enumerate(call.rows):
            if sequence is None or sequence.matcher is None or sequence.has_ended:
                continue
            try:
                own_parents = None if parents is None else parents[row].tolist()
                sequence.matcher.fill_masks(allowed[row], tokens[row].tolist(), own_parents)
            except GrammarError as error:
                self.end(sequence, "invalid", str(error))
        return allowed

    def take(self, call: InFlightCall | ScoreCall) -> None:
        """Waits for a call, and delivers its results."""
        if isinstance(call, ScoreCall):
            self._take_scores(call)
        else:
            self._take_report(call)

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
                self.end(sequence, "stop")

    def _take_report(self, call: InFlightCall) -> None:
        """Delivers the new tokens of a call, and ends the rows that are done."""
        report, before = call.read(), self.drafts
        self.progress_at = time.monotonic()
        num_rounds = 0
        for sequence, row in zip(call.rows, report.rows(), strict=True):
            if sequence is not None:
                sequence.num_unread -= 1
                if not sequence.has_ended:
                    num_rounds = max(num_rounds, self._take_row(sequence, row, call.is_prefill))
        if self.depth is not None:
            proposed, accepted = np.split(np.subtract(self.drafts, before)[1:], 2)
            self.depth.record(num_rounds, proposed, accepted)

    def _take_row(self, sequence: Sequence, row: RowReport, is_prefill: bool) -> int:
        """Delivers the new tokens of a row; returns how many rounds it ran."""
        # 1. Counts.
        before = sequence.counts or self._no_counts
        new_counts = [count - old for count, old in zip(row.counts, before, strict=True)]
        self.drafts = _add(self.drafts, new_counts)
        sequence.totals = _add(sequence.totals or self._no_counts, new_counts)
        sequence.counts = row.counts
        # 2. New tokens. The first token of a resumed row has already been delivered.
        new = slice(int(is_prefill and sequence.is_resumed), None)
        tokens = row.tokens[new]
        if tokens:
            sequence.text += tokens
            if self.rebalancer is not None:
                self.rebalancer.add(sequence)
            self.totals["new_tokens"] += len(tokens)
            sequence.times.deliveries.append((time.monotonic(), len(tokens)))
            logprobs = row.logprobs[new].tolist() if sequence.request.logprobs else None
            _deliver(sequence.id, sequence.deliver, Delta(tokens, row.origins[new], logprobs))
        # 3. Make pages whose entries are final available to later requests.
        if sequence.lease is not None and self._scheduler.settings.shares_prefixes:
            pool = self._scheduler.pools[sequence.shard]
            pool.store(sequence.lease, sequence.text, min(row.num_final, len(sequence.text)))
        # 4. The end.
        if row.failed:
            self.totals["nan_logits"] += 1
            self.end(sequence, "error", f"request {sequence.id} failed: the model computed NaN")
        elif row.done:
            self.end(sequence, "stop" if row.stopped else "length")
        elif sequence.matcher is not None:
            try:
                sequence.matcher.consume(tokens)
            except GrammarError as error:
                self.end(sequence, "invalid", str(error))
        return new_counts[0]

    def end(self, sequence: Sequence, reason: FinishReason, message: str = "", *, is_retryable: bool = False) -> None:
        shard, has_failed = sequence.shard, reason == "error"
        # Cache entries of a failed row may be NaN, so drop them from the prefix cache and clear their pages.
        pages = self._scheduler.end(sequence, forget=has_failed)
        if has_failed and pages:
            self._clear_pages(shard, pages)
        if self.rebalancer is not None and sequence.num_new:
            self.rebalancer.add(sequence)
        del self.sequences[sequence.id]
        self._held.pop(sequence.id, None)
        # Scores are part of a request that has already been counted.
        is_counted = sequence.scored is None
        self.totals["requests"] += is_counted
        self.totals["aborted"] += is_counted and reason in ("abort", "timeout")
        self.totals["failed"] += is_counted and has_failed
        finish = Finish(
            reason,
            num_prompt_tokens=len(sequence.request.prompt),
            num_cached_tokens=sequence.num_cached or 0,
            num_new_tokens=sequence.num_new,
            **draft_counts(sequence.totals or self._no_counts),
            message=message,
            is_retryable=is_retryable,
        )
        _deliver(sequence.id, sequence.deliver, finish)
        try:
            if is_counted:
                self._observe(finish, sequence.times)
        except Exception:
            _log.exception("request %d: its metrics are lost", sequence.id)

    def status(self) -> dict[str, Any]:
        """Returns the fields of `EngineStatus` for the requests, the tokens and the experts."""
        counts: dict[str, Any] = {f"num_{name}": self.totals[name] for name in TOTALS}
        counts["num_waiting"] = len(self.sequences) - len(self._scheduler.running)
        if (experts := self.rebalancer) is not None:
            counts |= {"num_rebalancings": experts.num_rebalancings, "expert_imbalance": experts.imbalance}
        return counts | draft_counts(self.drafts)

    def end_late(self) -> None:
        """Ends requests that have waited or run for too long."""
        now, settings = time.monotonic(), self._session.settings
        if settings.max_queue_seconds is not None:
            for sequence in [*self._scheduler.waiting, *self._held.values()]:
                if now - sequence.times.arrived > settings.max_queue_seconds and not sequence.num_new:
                    self.end(sequence, "timeout")
        if settings.max_run_seconds is not None:
            for sequence in list(self.sequences.values()):
                if now - sequence.times.arrived > settings.max_run_seconds:
                    self.end(sequence, "timeout")

    def fail_all(self, message: str) -> None:
        """Delivers an error to all requests before the process ends. May be called from any thread."""
        for sequence in list(self.sequences.values()):
            deliver, sequence.deliver = sequence.deliver, lambda event: None  # nothing may follow the end
            finish = Finish(
                "error",
                num_prompt_tokens=len(sequence.request.prompt),
                num_new_tokens=sequence.num_new,
                message=f"request {sequence.id} failed: {message}",
                is_retryable=True,
            )
            _deliver(sequence.id, deliver, finish)


def _deliver(number: int, deliver: Deliver, event: Delta | Finish) -> None:
    try:
        deliver(event)
    except Exception:
        _log.exception("request %d: its receiver failed", number)


def draft_counts(counts: list[int]) -> dict[str, Any]:
    """Returns the fields of `Finish` and `EngineStatus` for verification passes and drafts per level."""
    num_levels = len(counts) // 2
    return {
        "num_steps": counts[0],
        "proposed": tuple(counts[1 : 1 + num_levels]),
        "accepted": tuple(counts[1 + num_levels :]),
    }


def _add(values: list[int], others: list[int]) -> list[int]:
    return [value + other for value, other in zip(values, others, strict=True)]
