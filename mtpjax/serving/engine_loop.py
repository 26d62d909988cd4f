"""The engine's thread: runs calls from other threads, dispatches each tick's calls, and recovers after errors."""

import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from mtpjax.distributed import is_runtime_error
from mtpjax.errors import LostProcess, printable
from mtpjax.models.attention_kinds import has_recurrent_layers
from mtpjax.serving.calls import InFlightCall, ScoreCall
from mtpjax.serving.engine_delivery import EngineDelivery
from mtpjax.serving.host_pages import HostPages
from mtpjax.serving.page_pool import PagePool
from mtpjax.serving.program_set import ProgramKey, split_rows
from mtpjax.serving.request import (
    QueueFull,
    Sequence,
)
from mtpjax.serving.scheduler import Scheduler, SchedulerSettings
from mtpjax.serving.snapshots import SnapshotRows

RETRY_SECONDS = 1.0  # between two attempts to rebuild the state
ASK_SECONDS = 1.0  # after which a caller checks whether the engine's thread is still alive
HELD_SECONDS = 0.5  # after which time limits of requests that wait for a program are checked again

T = TypeVar("T")
_log = logging.getLogger(__name__)


class EngineLoop(EngineDelivery):
    """An engine's ticks."""

    def _new_scheduler(self) -> Scheduler:
        executor, settings = self._executor, self.settings
        sizes, is_recurrent = executor.sizes, has_recurrent_layers(executor.model.config)

        def depth_of(num_rows: int) -> int:
            limit = settings.disable_drafts_at
            if limit is not None and num_rows >= limit:
                depth = 0
            else:
                depth = self._max_depth if self._depth is None else self._depth.choose(-(-num_rows // sizes.num_shards))
            return depth if self._has_depth(depth) else self._max_depth

        return Scheduler(
            SchedulerSettings(
                num_slots=sizes.shard_slots,
                prefill_chunk=executor.decoder.spec.prefill_chunk,
                prefill_rows=sizes.prefill_sizes[-1],
                rounds_per_call=settings.rounds_per_call,
                overlap=executor.decoder.drafter.max_shift(executor.model),
                num_pages_of=executor.decoder.num_pages_of,
                max_depth=self._max_depth,
                depth_of=depth_of,
                # A recurrent layer keeps only its newest state, which is stored in snapshots, not in pages.
                shares_prefixes=settings.shares_prefixes and (not is_recurrent or sizes.shard_snapshots > 0),
            ),
            [
                PagePool(
                    sizes.shard_pages,
                    settings.page_size,
                    HostPages(settings.host_bytes) if settings.host_bytes else None,
                    SnapshotRows(sizes.shard_snapshots) if sizes.shard_snapshots else None,
                )
                for _ in range(sizes.num_shards)
            ],
        )

    def _ask(self, compute: Callable[[], T]) -> T:
        """Runs a function in the engine's thread, and waits for its result."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(compute())
            except Exception as error:
                future.set_exception(error)

        self._post(run)
        while True:
            try:
                return future.result(ASK_SECONDS)
            except TimeoutError:
                if future.done():  # the function's own error
                    raise
                if not self._thread.is_alive():
                    raise QueueFull("the server shuts down") from None

    def _post(self, action: Callable[[], None]) -> None:
        with self._changed:
            if self._is_closing and not self._thread.is_alive():
                raise QueueFull("the server shuts down")
            self._inbox.append(action)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._tick_began = None
                # While a request waits for a program, the engine only checks its time limits.
                while not (self._inbox or self._in_flight or len(self._sequences) > len(self._held)):
                    if self._is_closing and not self._held:
                        return
                    is_notified = self._changed.wait(HELD_SECONDS if self._held else None)
                    self.progress_at = time.monotonic()
                    if not is_notified:
                        break
                actions, self._inbox = self._inbox, []
                self._tick_began = time.monotonic()
            # An error of one request must never end the thread.
            try:
                for action in actions:
                    action()
                self._tick()
            except Exception as error:
                if self._ends_process(error):
                    return
                self._recover(error)

    def _tick(self) -> None:
        self._end_late_requests()
        # 1. Dispatch this tick's calls. The device runs them in this order.
        plan = self._scheduler.plan()
        calls: list[InFlightCall | ScoreCall] = []
        leaving = []
        for pool in self._scheduler.pools:
            if pool.outgoing or pool.incoming:
                leaving += [(pool.host, copies) for copies in self._executor.move_pages(pool)]
        for rows in self._split("admit", plan.admitted):
            self._executor.admit(rows)
        if plan.admitted:
            # Before `saved` may overwrite these rows.
            self._executor.restore_snapshots(plan.restored)
            for sequence in plan.admitted:
                if sequence.scored is not None:
                    sequence.scored.rows.clear()  # it starts again if it was preempted
                elif sequence.times.started is None:
                    sequence.times.started = time.monotonic()
                    self._totals["prompt_tokens"] += len(sequence.request.prompt)
                    self._totals["cached_tokens"] += sequence.num_cached or 0
        prompts = [chunk for chunk in plan.prefills if chunk[0].scored is None]
        if prompts:
            chunks = {sequence.id: chunk for chunk in prompts for sequence in chunk[:1]}
            for rows in self._split("prefill", [sequence for sequence, *_ in prompts]):
                calls.append(self._executor.prefill([chunks[sequence.id] for sequence in rows]))
            self._executor.save_snapshots(plan.saved)
        calls += [self._executor.score(chunk) for chunk in plan.prefills if chunk[0].scored is not None]
        drafts = []
        for depth, sequences in plan.constrained.items():
            for rows in self._split("masked round", sequences, depth):
                drafts.append(self._executor.draft(rows, depth))
        for depth, sequences in plan.advances.items():
            for rows in self._split("advance", sequences, depth):
                calls.append(self._executor.advance(rows, depth, plan.num_rounds))
        if calls or drafts:
            self._totals["ticks"] += 1
            if self._rebalancer is not None:
                self._rebalancer.tick()
        # 2. Read the reports of the previous tick.
        for call in self._in_flight:
            if isinstance(call, ScoreCall):
                self._take_scores(call)
            else:
                self._take_report(call)
        # 3. The text of rows with a grammar is now known, so their drafts can be masked and verified.
        calls += [self._executor.verify(draft, self._allowed(draft)) for draft in drafts]
        self._in_flight = calls
        # 4. Pages that left the pool were copied before this tick's calls.
        for host, copies in leaving:
            copies.arrive(host)

    # Programs that are compiled while requests run.

    def _split(self, kind: str, rows: list[Sequence], depth: int = 0) -> list[list[Sequence]]:
        """Splits the rows of a call if no compiled program has enough rows."""
        if not rows or self._executor.programs.ready is None:
            return [rows] if rows else []
        size = self._executor.choose_program(kind, rows, depth).size
        return split_rows(rows, size, lambda row: row.shard)

    def _enter(self, sequence: Sequence) -> None:
        """Puts a request into the scheduler's queue, once the programs that it needs on its own are compiled."""
        if self._enter_if_ready(sequence):
            return
        self._held[sequence.id] = sequence
        self._num_held += 1
        for key in self._executor.programs.missing(self._executor.needed_programs(sequence)):
            self._want(key)

    def _enter_if_ready(self, sequence: Sequence) -> bool:
        missing = self._executor.programs.missing(self._executor.needed_programs(sequence))
        if not missing:
            self._scheduler.add(sequence)
            return True
        for error in (self._program_errors[key] for key in missing if key in self._program_errors):
            self._end(sequence, "error", f"request {sequence.id} failed: its program does not compile: {error}")
            return True
        return False

    def _has_depth(self, depth: int) -> bool:
        """Returns whether a program for this number of draft levels is ready; if not, it is compiled next."""
        executor = self._executor
        if executor.programs.ready is None or depth == self._max_depth:
            return True
        size, width = executor.sizes.batch_sizes[0], executor.sizes.table_widths[-1]
        kinds = ("advance", "masked round") if self.grammars is not None else ("advance",)
        missing = executor.programs.missing([ProgramKey(kind, size, width, False, depth) for kind in kinds])
        for key in missing:
            self._want(key)
        return not missing

    def _want(self, key: ProgramKey) -> None:
        if self._compiler is not None:
            self._compiler.want(key)

    def _compile(self, key: ProgramKey) -> None:
        """Compiles a program in the compiler's thread; its first call takes its turn with the ticks."""
        self._executor.compile_program(key, self._ask)

    def _end_compiling(self, key: ProgramKey, error: Exception | None) -> None:
        """Lets requests that wait for a program continue."""

        def end() -> None:
            programs = self._executor.programs
            if error is not None:
                self._program_errors[key] = error
            elif programs.ready is not None:
                programs.ready.add(key)
                # Once all programs are compiled, calls need not check.
                if programs.ready.issuperset(self._executor.all_programs()):
                    programs.ready = None
            for sequence in list(self._held.values()):
                if self._enter_if_ready(sequence):
                    self._held.pop(sequence.id, None)

        with contextlib.suppress(QueueFull):
            self._post(end)

    # Limits and faults.

    def _end_late_requests(self) -> None:
        """Ends requests that have waited or run for too long."""
        now, settings = time.monotonic(), self.settings
        if settings.max_queue_seconds is not None:
            for sequence in [*self._scheduler.waiting, *self._held.values()]:
                if now - sequence.times.arrived > settings.max_queue_seconds and not sequence.num_new:
                    self._end(sequence, "timeout")
        if settings.max_run_seconds is not None:
            for sequence in list(self._sequences.values()):
                if now - sequence.times.arrived > settings.max_run_seconds:
                    self._end(sequence, "timeout")

    def _ends_process(self, error: Exception) -> bool:
        """Ends this process, and so all of them, if a call on several processes failed; else returns False.

        The others may not have failed in the same call, so the states may now differ.
        """
        if self.followers is None or not (isinstance(error, LostProcess) or is_runtime_error(error)):
            return False
        self.followers.end_process(f"another process has ended, or a call failed: {printable(error, 200)}")
        return True

    def _recover(self, error: Exception) -> None:
        """Ends the admitted requests, whose state may be lost, and continues with the others."""
        _log.error("a call of the engine failed; its requests end", exc_info=error)
        # 1. End the requests. Their slots and pages go with the scheduler.
        scheduler = self._scheduler
        lost = [*scheduler.running, *scheduler._preempted]
        self._in_flight = []
        self._scheduler = self._new_scheduler()
        self._scheduler.waiting, self._scheduler.num_preempted = scheduler.waiting, scheduler.num_preempted
        for sequence in lost:
            sequence.slot = sequence.lease = None
            message = f"request {sequence.id} failed: the engine had to start anew"
            self._end(sequence, "error", message, is_retryable=True)
        # 2. Rebuild the state. Memory may become free later; the watchdog ends a server that fails for too long.
        while not self._is_closing:
            try:
                return self._executor.reset()
            except Exception:
                _log.exception("the engine cannot start anew; it tries again in %.0f s", RETRY_SECONDS)
                time.sleep(RETRY_SECONDS)
        raise error
