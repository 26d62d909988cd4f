"""The engine: requests in, tokens out, one thread that keeps the device busy.

A tick takes new requests and aborts, plans (`Scheduler`), dispatches the calls of the plan (`Executor`), and then reads
the reports of the tick before, while the device runs this one. Deltas reach each request's `deliver` function. Rows
with a grammar draft in that first batch of calls. Their verification is dispatched last, with masks that the host
computes from the drafts and the text so far.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as TokenSequence
from typing import Any, Literal, TypeVar

import numpy as np

from mtpjax.decoding.config import DecodeConfig, SamplingParams
from mtpjax.decoding.session import RowReport
from mtpjax.distributed import is_runtime_error
from mtpjax.errors import LostProcess, printable
from mtpjax.messages import count_of
from mtpjax.models.model import MTPModel
from mtpjax.serving.background import BackgroundCompiler
from mtpjax.serving.calls import Call, DraftCall, ScoreCall
from mtpjax.serving.depth import AdaptiveDepth, Costs, measure_costs
from mtpjax.serving.executor import Executor
from mtpjax.serving.grammar import GrammarError
from mtpjax.serving.host_pages import Entries, HostPages, Outgoing, page_shapes
from mtpjax.serving.model_digest import model_digest
from mtpjax.serving.multihost.connection import Followers
from mtpjax.serving.multihost.leader import LeaderExecutor
from mtpjax.serving.page_pool import PagePool
from mtpjax.serving.program_set import ProgramKey, split_rows
from mtpjax.serving.rebalancing import ExpertRebalancer
from mtpjax.serving.request import (
    Deliver,
    Delta,
    EngineStatus,
    Finish,
    FinishReason,
    QueueFull,
    Request,
    RequestTimes,
    Scores,
)
from mtpjax.serving.scheduler import Scheduler, SchedulerSettings, Sequence
from mtpjax.serving.scoring import ScoredText, check_text
from mtpjax.serving.sizes import EngineSettings
from mtpjax.serving.snapshots import SnapshotRows

RETRY_SECONDS = 1.0  # between two attempts to make the state anew
ASK_SECONDS = 1.0  # after which a caller looks whether the engine's thread still lives
HELD_SECONDS = 0.5  # after which time limits of requests that wait for a program are checked again

T = TypeVar("T")
WarmUp = Literal["all", "first", "none"]
_log = logging.getLogger(__name__)


class Engine:
    """Serves requests. All methods may be called from any thread.

    Args:
        params: model parameters, with unrolled layers.
        model: the model.
        config: settings of every request; limits and stop tokens are the requests' own.
        settings: sizes and limits.
        observe: called from the engine's thread with the end of each request and its times, for metrics.
        followers: the other processes of the mesh, which run the same calls; None: there are none.
        draft_params: parameters of a drafter that has its own (`mtpjax.load_drafter`); None: it has none, or the
            model's MTP modules.

    Raises:
        ValueError: for settings that contradict each other or the model.

    Attributes:
        max_length: most tokens of a text, prompt included.
        vocab_size: ids are 0 .. vocab_size - 1.
        max_requests: most requests that run and wait at the same time.
        grammars: compiles the grammars of requests; None: requests have none.
        page_shapes: shapes and dtypes of a page's entries.
        progress_at: time (`time.monotonic`) at which the device answered last, or work came after a pause.
    """

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
        self.settings, self._observe, self._followers = settings or EngineSettings(), observe, followers
        make = Executor if followers is None else functools.partial(LeaderExecutor, followers=followers)
        self._executor: Executor = make(
            params, model=model, config=config, settings=self.settings, draft_params=draft_params
        )
        self.max_length, self.vocab_size = self._executor.sizes.max_length, model.config.vocab_size
        self._max_depth = self._executor.spec.num_steps
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
        self._inbox: list[Callable[[], None]] = []  # what other threads ask the engine's own to do
        self._sequences: dict[int, Sequence] = {}
        self._ids = itertools.count()
        self._in_flight: list[Call | ScoreCall] = []
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

    def warm_up(
        self, progress: Callable[[int, int], None] = lambda done, total: None, programs: WarmUp = "all"
    ) -> None:
        """Compiles programs; call it before `start`.

        With "first" and "none" a thread compiles the others while requests run. A request that needs one that is not
        there waits for it. Several processes, experts that move and depths that are measured need all of them: "first"
        is then the same as "all", and "none" compiles a program in the call that uses it first.

        Args:
            progress: called with the number of programs done and of all programs.
            programs: which ones: all that requests may need; "first": those that serve any request without a grammar,
                and the others after `start`; "none": each when a request needs it.
        """
        executor, settings = self._executor, self.settings
        is_measured = settings.adapts_depth and settings.depth_costs is None
        has_thread = self._followers is None and settings.rebalance_experts_every is None and not is_measured
        if has_thread and programs != "all":
            executor.warm_up(progress, executor.first_programs() if programs == "first" else [])
            executor.programs.ready = set(executor.first_programs()) if programs == "first" else set()
            executor.programs.on_missing = self._want
            if programs == "first":
                keys = [key for key in executor.all_programs() if key not in executor.programs.ready]
                self._later_programs, executor.planned = keys, set(keys)
        elif programs != "none":
            executor.warm_up(progress)
        self._measure_depths()
        self._num_warm_up_programs = executor.num_compiled

    def start(self) -> None:
        """Starts the threads: one that serves requests, and one that compiles what `warm_up` has left."""
        self._measure_depths()
        self._thread.start()
        if self._executor.programs.ready is not None:
            self._compiler = BackgroundCompiler(self._later_programs, self._compile, self._end_compiling)

    def _measure_depths(self) -> None:
        if self.settings.adapts_depth and self._max_depth and self._depth is None:
            self._adapt_depth(measure_costs(self._executor))

    def _adapt_depth(self, costs: Costs) -> None:
        self._depth = AdaptiveDepth(costs, self._executor.sizes.batch_sizes)
        for size, durations in zip(self._executor.sizes.batch_sizes, costs, strict=True):
            shown = ", ".join(f"{depth}: {1000 * seconds:.2f}" for depth, seconds in enumerate(durations))
            _log.info("ms of a round with %d rows, by draft levels: %s", size, shown)

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Puts a request into the queue.

        Args:
            request: what to continue.
            deliver: gets every `Delta`, then one `Finish`. It is called from the engine's thread and must not block.

        Returns:
            The request's number, for `abort`.

        Raises:
            ValueError: for a prompt or an option out of range, in one line.
            QueueFull: too many requests wait, or the engine shuts down.
        """
        return self._submit(request, deliver)

    def _submit(self, request: Request, deliver: Deliver, scored: ScoredText | None = None) -> int:
        rows = self._executor.make_rows(request)
        is_plain = dataclasses.replace(request.sampling, seed=None) == SamplingParams() and not request.logprobs
        sequence = Sequence(
            next(self._ids),
            request,
            deliver,
            list(request.prompt),
            limit=int(rows.settings.limit[0]),
            rows=rows,
            is_plain=is_plain,
            matcher=None if request.grammar is None else request.grammar.start(),
            times=RequestTimes(time.monotonic()),
            scored=scored,
        )
        with self._changed:
            if self._is_closing:
                raise QueueFull("the server shuts down")
            # A request that finds a free slot does not wait, also if it has not entered yet.
            num_waiting = len(self._sequences) - self.settings.num_slots
            if num_waiting >= self.settings.max_waiting and scored is None:
                raise QueueFull(f"the queue is full ({count_of(num_waiting, 'request')}): try again later")
            self._sequences[sequence.id] = sequence
            self._inbox.append(lambda: self._enter(sequence))
            self._changed.notify()
        return sequence.id

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """Ends a request; one that has ended stays as it is.

        Args:
            request_id: from `submit`.
            reason: "stop" for a text that is complete, as with a stop string in the decoded text.
        """

        def end() -> None:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                self._end(sequence, reason)

        self._post(end)

    def score(self, tokens: TokenSequence[int], num_top: int) -> Scores:
        """Computes the log-probabilities of a text under the trunk. Blocks while it is processed, as a prompt is.

        Args:
            tokens: the text.
            num_top: alternatives per token, at most 20.

        Returns:
            The log-probabilities.

        Raises:
            ValueError: for a text or a number out of range.
            QueueFull: the engine shuts down, or the text ran out of time.
            RuntimeError: a call of the engine failed.
        """
        text = ScoredText(list(tokens), num_top)
        check_text(text.tokens, num_top, vocab_size=self.vocab_size, max_length=self.max_length)
        if len(text.tokens) > 1:
            # The last token is scored, but nothing follows it.
            request, ended = Request(prompt=tuple(text.tokens[:-1]), max_new_tokens=1), queue.SimpleQueue()
            self._submit(request, ended.put, text)
            finish = ended.get()
            if finish.reason == "error":
                raise RuntimeError(finish.message)
            if finish.reason != "stop":
                raise QueueFull("the text could not be scored in time")
        return text.result()

    def flush_cache(self) -> int:
        """Forgets the pages that no request uses.

        Returns:
            How many they were.
        """
        return self._ask(lambda: sum(pool.forget() for pool in self._scheduler.pools))

    def count_known_pages(self, tokens: TokenSequence[int], salt: bytes) -> int:
        """Counts the pages at the beginning of a text that the prefix cache has. Blocks.

        Args:
            tokens: the text.
            salt: the request's.

        Returns:
            The number of pages.
        """
        return self._ask(lambda: len(self._only_pool.find(tokens, salt=salt)))

    def read_pages(self, tokens: TokenSequence[int], salt: bytes) -> list[tuple[bytes, Entries]]:
        """Reads the known whole pages at the beginning of a text, for another engine's `put_pages`. Blocks.

        Args:
            tokens: the text.
            salt: the request's.

        Returns:
            Hash and entries of each page.
        """

        def start() -> tuple[list[bytes], dict[bytes, Entries], list[Outgoing]]:
            found, host = self._only_pool.find(tokens, salt=salt), self._only_pool.host
            in_host = {digest: host.read(digest) for digest, page in found if page is None and host is not None}
            copies = self._executor.read_pages([(digest, page) for digest, page in found if page is not None])
            return [digest for digest, _ in found], in_host, copies

        digests, entries, copies = self._ask(start)
        # The engine's thread goes on while the copies arrive.
        entries.update(page for some in copies for page in some.read())
        return [(digest, entries[digest]) for digest in digests]

    def put_pages(self, pages: list[tuple[bytes, Entries]]) -> None:
        """Adds pages that another engine has read to the prefix cache, in host memory. Blocks.

        Args:
            pages: hash and entries of each. The other engine's model, page size and dtypes must be the same.
        """

        def put() -> None:
            for digest, entries in pages:
                self._only_pool.put(digest, entries)
            self._totals["received_pages"] += len(pages)

        self._ask(put)

    @property
    def shares_pages(self) -> bool:
        """True if requests with the same beginning share pages, and need nothing else of each other."""
        return self._scheduler.settings.shares_prefixes and not self._executor.sizes.part_snapshots

    def model_digest(self) -> bytes:
        """Computes a hash of all that the entries of a page depend on besides the text; see `model_digest`."""
        executor = self._executor
        return model_digest(
            executor.params,
            executor.model.config,
            executor.config,
            self.settings.page_size,
            self.page_shapes,
            draft_params=executor.own_draft_params,
        )

    def status(self) -> EngineStatus:
        """Returns the load and the counts since the start."""
        scheduler, depth, drafts = self._scheduler, self._max_depth, self._drafts
        return EngineStatus(
            num_running=len(scheduler.running),
            num_waiting=len(self._sequences) - len(scheduler.running),
            num_slots=self.settings.num_slots,
            num_pages=sum(pool.num_pages for pool in scheduler.pools),
            num_used_pages=sum(pool.num_in_use for pool in scheduler.pools),
            page_size=self.settings.page_size,
            num_preempted=scheduler.num_preempted,
            num_steps=drafts[0],
            proposed=tuple(drafts[1 : 1 + depth]),
            accepted=tuple(drafts[1 + depth :]),
            num_compilations=self._executor.num_compiled - self._num_warm_up_programs,
            compile_seconds=self._executor.compile_seconds,
            num_programs_left=0 if self._compiler is None else self._compiler.num_left,
            num_compile_waits=self._num_held,
            num_rebalancings=0 if self._rebalancer is None else self._rebalancer.num_rebalancings,
            expert_imbalance=(math.nan, math.nan) if self._rebalancer is None else self._rebalancer.imbalance,
            **{f"num_{name}": self._totals[name] for name in _TOTALS},
        )

    def fail(self, message: str) -> None:
        """Ends all requests with an error, and takes no others: the process is about to end.

        The engine's thread may wait for a device that never answers, so this runs in the caller's.

        Args:
            message: why, in one line.
        """
        with self._changed:
            self._is_closing = True
        for sequence in list(self._sequences.values()):
            deliver, sequence.deliver = sequence.deliver, lambda event: None  # nothing may follow the end
            finish = Finish(
                "error",
                num_prompt_tokens=len(sequence.request.prompt),
                num_new_tokens=sequence.num_new,
                message=f"request {sequence.id} failed: {message}",
                is_retryable=True,
            )
            try:
                deliver(finish)
            except Exception:
                _log.exception("request %d: its receiver failed", sequence.id)

    @property
    def busy_since(self) -> float | None:
        """Time (`time.monotonic`) at which the running tick began; None while the engine waits or compiles."""
        if self._executor.is_compiling:
            return None
        # What the tick does after it has compiled has its own time.
        began, compiled = self._tick_began, self._executor.compiled_at
        return began if began is None else max(began, compiled)

    @property
    def failure(self) -> str:
        """Why the engine does not answer; "" if it does."""
        begin, limit = self.busy_since, self.settings.max_tick_seconds
        if begin is not None and limit is not None and (seconds := time.monotonic() - begin) > limit:
            return f"a call of the engine has not returned for {seconds:.0f} s"
        return ""

    def close(self, timeout: float | None = None) -> bool:
        """Takes no further requests, lets the others end, and stops the thread.

        Args:
            timeout: seconds after which requests that still run are aborted; None: no limit.

        Returns:
            True if all requests ended by themselves.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        is_running = self._thread.ident is not None
        while is_running and self._sequences and (deadline is None or time.monotonic() < deadline):
            time.sleep(0.01)
        if self._compiler is not None:
            self._compiler.stop()
        left = list(self._sequences)
        for request_id in left:
            self.abort(request_id)
        if is_running:
            self._thread.join()
        return not left

    def _new_scheduler(self) -> Scheduler:
        executor, settings = self._executor, self.settings
        sizes, has_recurrent_layers = executor.sizes, "linear_attention" in executor.model.config.layer_types

        def depth_of(num_rows: int) -> int:
            limit = settings.disable_drafts_at
            if limit is not None and num_rows >= limit:
                depth = 0
            else:
                depth = self._max_depth if self._depth is None else self._depth.choose(-(-num_rows // sizes.num_parts))
            return depth if self._has_depth(depth) else self._max_depth

        return Scheduler(
            SchedulerSettings(
                num_slots=sizes.part_slots,
                prefill_chunk=executor.spec.prefill_chunk,
                prefill_rows=sizes.prefill_sizes[-1],
                rounds_per_call=settings.rounds_per_call,
                overlap=executor.drafter.max_shift(executor.model),
                num_pages_of=sizes.num_pages_of,
                max_depth=self._max_depth,
                depth_of=depth_of,
                # A recurrent layer keeps only its newest state, which pages do not hold, but snapshots do.
                shares_prefixes=settings.shares_prefixes and (not has_recurrent_layers or sizes.part_snapshots > 0),
            ),
            [
                PagePool(
                    sizes.part_pages,
                    settings.page_size,
                    HostPages(settings.host_bytes) if settings.host_bytes else None,
                    SnapshotRows(sizes.part_snapshots) if sizes.part_snapshots else None,
                )
                for _ in range(sizes.num_parts)
            ],
        )

    @property
    def _only_pool(self) -> PagePool:
        [pool] = self._scheduler.pools
        return pool

    # The engine's thread.

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
                # A request that waits for a program leaves the engine nothing to do but to look at its time limits.
                while not (self._inbox or self._in_flight or len(self._sequences) > len(self._held)):
                    if self._is_closing and not self._held:
                        return
                    is_notified = self._changed.wait(HELD_SECONDS if self._held else None)
                    self.progress_at = time.monotonic()
                    if not is_notified:
                        break
                actions, self._inbox = self._inbox, []
                self._tick_began = time.monotonic()
            # One request's fault must never end the thread.
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
        calls: list[Call | ScoreCall] = []
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
                    sequence.scored.rows.clear()  # it begins again if it was preempted
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
        # 2. Read the reports of the tick before.
        for call in self._in_flight:
            if isinstance(call, ScoreCall):
                self._take_scores(call)
            else:
                self._take_report(call)
        # 3. The text of the rows with a grammar is known now, so that their drafts can be masked and verified.
        calls += [self._executor.verify(draft, self._allowed(draft)) for draft in drafts]
        self._in_flight = calls
        # 4. Pages that left the pool were copied before this tick's calls.
        for host, copies in leaving:
            copies.arrive(host)

    # Programs that are compiled while requests run.

    def _split(self, kind: str, rows: list[Sequence], depth: int = 0) -> list[list[Sequence]]:
        """Splits the rows of a call if no program that is there has enough."""
        if not rows or self._executor.programs.ready is None:
            return [rows] if rows else []
        size = self._executor.choose_program(kind, rows, depth).size
        return split_rows(rows, size, lambda row: row.part)

    def _enter(self, sequence: Sequence) -> None:
        """Puts a request into the scheduler's queue, once the programs that it needs alone are there."""
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
        """Returns whether rows can have so many draft levels; if not, their program is compiled next."""
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
        """Lets the requests go on that wait for a program."""

        def end() -> None:
            programs = self._executor.programs
            if error is not None:
                self._program_errors[key] = error
            elif programs.ready is not None:
                programs.ready.add(key)
                # Calls need not look for what is there once everything is.
                if programs.ready.issuperset(self._executor.all_programs()):
                    programs.ready = None
            for sequence in list(self._held.values()):
                if self._enter_if_ready(sequence):
                    self._held.pop(sequence.id, None)

        with contextlib.suppress(QueueFull):
            self._post(end)

    def _allowed(self, call: DraftCall) -> np.ndarray:
        """Computes the tokens `[R, W, ceil(V/32)]` that may follow each node; ends rows whose grammar fails."""
        tokens, parents = call.read()
        allowed = self._executor.all_allowed(tokens.shape)
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
            # A text that was preempted after this call begins again.
            if sequence.has_ended or sequence.slot is None or sequence.scored is None:
                continue
            sequence.scored.add(chunk, index, end - start)
            if end == sequence.num_to_prefill:
                self._end(sequence, "stop")

    def _take_report(self, call: Call) -> None:
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
            pool = self._scheduler.pools[sequence.part]
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
        part, has_failed = sequence.part, reason == "error"
        # Entries of a failed row may be NaN: nobody may find them, and they are overwritten.
        pages = self._scheduler.end(sequence, forget=has_failed)
        if has_failed and pages:
            self._executor.clear_pages(part, pages)
        if self._rebalancer is not None and sequence.num_new:
            self._rebalancer.add(sequence)
        del self._sequences[sequence.id]
        self._held.pop(sequence.id, None)
        # Scores are a part of a request that was counted.
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

    def _deliver(self, sequence: Sequence, event: Delta | Finish) -> None:
        try:
            sequence.deliver(event)
        except Exception:
            _log.exception("request %d: its receiver failed", sequence.id)

    def _ends_process(self, error: Exception) -> bool:
        """Ends this process, and so all of them, if a call on several processes failed; else returns False.

        The others may not have failed at the same call, so their states may differ from now on.
        """
        if self._followers is None or not (isinstance(error, LostProcess) or is_runtime_error(error)):
            return False
        self._followers.end_process(f"another process has ended, or a call failed: {printable(error, 200)}")
        return True

    def _recover(self, error: Exception) -> None:
        """Ends the requests that have entered, whose state may be lost, and goes on with the others."""
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
        # 2. Make the state anew. Memory may be free again later; the watchdog ends a server that fails for too long.
        while not self._is_closing:
            try:
                return self._executor.reset()
            except Exception:
                _log.exception("the engine cannot start anew; it tries again in %.0f s", RETRY_SECONDS)
                time.sleep(RETRY_SECONDS)
        raise error


def _add(values: list[int], others: list[int]) -> list[int]:
    return [value + other for value, other in zip(values, others, strict=True)]


# Totals of `EngineStatus`.
_TOTALS = (
    *("prompt_tokens", "cached_tokens", "new_tokens", "requests", "aborted", "failed", "nan_logits", "ticks"),
    "received_pages",
)
