"""The engine: requests in, tokens out, one thread that keeps the device busy.

A tick takes new requests and aborts, plans (`Scheduler`), dispatches the calls of the plan (`Executor`), and then reads
the reports of the previous tick, while the device runs this one. Deltas reach each request's `deliver` function. Rows
with a grammar draft in that first batch of calls. Their verification is dispatched last, with masks that the host
computes from the drafts and the text so far.
"""

import dataclasses
import logging
import math
import queue
import time
from collections.abc import Callable
from collections.abc import Sequence as TokenSequence
from typing import Literal

from mtpjax.decoding.config import SamplingParams
from mtpjax.messages import count_of
from mtpjax.serving.background import BackgroundCompiler
from mtpjax.serving.delivery import TOTALS
from mtpjax.serving.depth_costs import measure_costs
from mtpjax.serving.engine_loop import EngineLoop
from mtpjax.serving.host_pages import Entries, Outgoing
from mtpjax.serving.model_digest import model_digest
from mtpjax.serving.page_pool import PagePool
from mtpjax.serving.request import (
    Deliver,
    Finish,
    FinishReason,
    QueueFull,
    Request,
    RequestTimes,
    ScoredText,
    Scores,
    Sequence,
)
from mtpjax.serving.scoring import check_text
from mtpjax.serving.status import EngineStatus

WarmUp = Literal["all", "first", "none"]
_log = logging.getLogger(__name__)


class Engine(EngineLoop):
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
        max_length: maximum tokens of a text, prompt included.
        vocab_size: ids are 0 .. vocab_size - 1.
        max_requests: maximum number of requests that run and wait at the same time.
        grammars: compiles the grammars of requests; None: requests have none.
        followers: the other processes of the mesh; None: there are none.
        page_shapes: shapes and dtypes of a page's entries.
        progress_at: time (`time.monotonic`) at which the device answered last, or work came after a pause.
    """

    def warm_up(
        self, progress: Callable[[int, int], None] = lambda done, total: None, programs: WarmUp = "all"
    ) -> None:
        """Compiles programs; call it before `start`.

        With "first" and "none" a thread compiles the others while requests run. A request that needs a missing program
        waits for it. Several processes, moving experts and measured depths need all programs: "first" then means "all",
        and "none" compiles a program in the call that first uses it.

        Args:
            progress: called with the number of programs done and of all programs.
            programs: which ones: all that requests may need; "first": those that serve any request without a grammar,
                and the others after `start`; "none": each when a request needs it.
        """
        executor, settings = self._executor, self.settings
        is_measured = settings.adapts_depth and settings.depth_costs is None
        has_thread = self.followers is None and settings.rebalance_experts_every is None and not is_measured
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
        """Starts the threads: one that serves requests, and one that compiles the remaining programs."""
        self._measure_depths()
        self._thread.start()
        if self._executor.programs.ready is not None:
            self._compiler = BackgroundCompiler(self._later_programs, self._compile, self._end_compiling)

    def _measure_depths(self) -> None:
        if self.settings.adapts_depth and self._max_depth and self._depth is None:
            self._adapt_depth(measure_costs(self._executor))

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
            # A request with a free slot does not count as waiting, even before it is admitted.
            num_waiting = len(self._sequences) - self.settings.num_slots
            if num_waiting >= self.settings.max_waiting and scored is None:
                raise QueueFull(f"the queue is full ({count_of(num_waiting, 'request')}): try again later")
            self._sequences[sequence.id] = sequence
            self._inbox.append(lambda: self._enter(sequence))
            self._changed.notify()
        return sequence.id

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """Ends a request; has no effect on one that has ended.

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
            num_top: alternatives per token, at most 20.

        Raises:
            ValueError: for a text or a number out of range.
            QueueFull: the engine shuts down, or the text ran out of time.
            RuntimeError: a call of the engine failed.
        """
        text = ScoredText(list(tokens), num_top)
        check_text(text.tokens, num_top, vocab_size=self.vocab_size, max_length=self.max_length)
        if len(text.tokens) > 1:
            # The last token is scored, but no token follows it.
            request, ended = Request(prompt=tuple(text.tokens[:-1]), max_new_tokens=1), queue.SimpleQueue()
            self._submit(request, ended.put, text)
            finish = ended.get()
            if finish.reason == "error":
                raise RuntimeError(finish.message)
            if finish.reason != "stop":
                raise QueueFull("the text could not be scored in time")
        return text.result()

    def flush_cache(self) -> int:
        """Drops the pages that no request uses; returns their number."""
        return self._ask(lambda: sum(pool.forget() for pool in self._scheduler.pools))

    def count_known_pages(self, tokens: TokenSequence[int], salt: bytes) -> int:
        """Counts the pages of a text's prefix that are in the prefix cache. Blocks."""
        return self._ask(lambda: len(self._only_pool.find(tokens, salt=salt)))

    def read_pages(self, tokens: TokenSequence[int], salt: bytes) -> list[tuple[bytes, Entries]]:
        """Reads the cached full pages of a text's prefix, for `put_pages` of another engine. Blocks.

        Returns:
            Hash and entries of each page.
        """

        def start() -> tuple[list[bytes], dict[bytes, Entries], list[Outgoing]]:
            found, host = self._only_pool.find(tokens, salt=salt), self._only_pool.host
            in_host = {digest: host.read(digest) for digest, page in found if page is None and host is not None}
            copies = self._executor.read_pages([(digest, page) for digest, page in found if page is not None])
            return [digest for digest, _ in found], in_host, copies

        digests, entries, copies = self._ask(start)
        # The engine's thread continues while the copies arrive.
        entries.update(page for some in copies for page in some.read())
        return [(digest, entries[digest]) for digest in digests]

    def put_pages(self, pages: list[tuple[bytes, Entries]]) -> None:
        """Adds hashes and entries of pages to the prefix cache, in host memory. Blocks.

        The engine that has read them must have the same model, page size and dtypes.
        """

        def put() -> None:
            for digest, entries in pages:
                self._only_pool.put(digest, entries)
            self._totals["received_pages"] += len(pages)

        self._ask(put)

    @property
    def shares_pages(self) -> bool:
        """True if requests with a common prefix can share pages without anything else."""
        return self._scheduler.settings.shares_prefixes and not self._executor.sizes.shard_snapshots

    def model_digest(self) -> bytes:
        """Computes a hash of everything except the text that a page's entries depend on; see `model_digest`."""
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
            **{f"num_{name}": self._totals[name] for name in TOTALS},
        )

    def fail(self, message: str) -> None:
        """Ends all requests with an error and accepts no new ones: the process is about to end.

        The engine's thread may be waiting for a device that never responds, so this runs in the caller's.

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
        # The time starts anew after the tick has compiled.
        began, compiled = self._tick_began, self._executor.compiled_at
        return began if began is None else max(began, compiled)

    @property
    def failure(self) -> str:
        """Why the engine does not respond; "" if it does."""
        begin, limit = self.busy_since, self.settings.max_tick_seconds
        if begin is not None and limit is not None and (seconds := time.monotonic() - begin) > limit:
            return f"a call of the engine has not returned for {seconds:.0f} s"
        return ""

    def close(self, timeout: float | None = None) -> bool:
        """Accepts no new requests, waits for the others, and stops the thread.

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

    @property
    def _only_pool(self) -> PagePool:
        [pool] = self._scheduler.pools
        return pool
