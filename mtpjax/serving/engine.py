"""The engine, which generates tokens for requests in one thread that keeps the device busy.

The thread handles new requests and aborts (`Inbox`) between ticks. A tick (`Ticks`) makes a plan (`Scheduler`),
dispatches its calls (`Executor`), and then reads the reports of the previous tick (`Delivery`) while the device runs
this one. Each request's `deliver` function receives its deltas.
"""

import concurrent.futures
import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as TokenSequence
from typing import Any

from mtpjax.decoding.config import DecodeConfig
from mtpjax.messages import count_of, require
from mtpjax.models.model import MTPModel
from mtpjax.serving.background import ENGINE_THREAD
from mtpjax.serving.compilation import Compilation
from mtpjax.serving.delivery import Delivery
from mtpjax.serving.depth import AdaptiveDepth
from mtpjax.serving.engine_session import EngineSession
from mtpjax.serving.executor import Executor, measure_costs
from mtpjax.serving.grammar import Grammars
from mtpjax.serving.inbox import Inbox
from mtpjax.serving.multihost.connection import Followers
from mtpjax.serving.multihost.plan import encode
from mtpjax.serving.page_exchange import PageExchange
from mtpjax.serving.page_pool import make_pools
from mtpjax.serving.request import (
    Deliver,
    EngineClosed,
    Finish,
    FinishReason,
    QueueFull,
    Request,
    RequestOutput,
    RequestTimes,
    ScoredText,
    Scores,
    Sequence,
)
from mtpjax.serving.running import RequestStream, close_at_exit, collect_outputs, score_text
from mtpjax.serving.scheduler import Scheduler, scheduler_settings
from mtpjax.serving.scoring import check_text
from mtpjax.serving.server_settings import WarmUp
from mtpjax.serving.sizes import EngineSettings
from mtpjax.serving.status import EngineStatus
from mtpjax.serving.tick import Ticks


class Engine:
    """Serves requests. All methods may be called from any thread.

    Args:
        params: model parameters, with unrolled layers.
        model: the model.
        config: settings that all requests share; limits and stop tokens come from each request.
        settings: sizes and limits.
        observe: called from the engine's thread with the `Finish` and the times of each request, for metrics.
        followers: the other processes of the mesh, which run the same calls; None if this is the only process.
        draft_params: the drafter's own parameters (`mtpjax.load_drafter`); None if it has no parameters or uses the
            model's MTP modules.
        grammars: compiles the grammars of requests; if None, requests cannot have grammars.

    Raises:
        ValueError: settings contradict each other or the model.

    Attributes:
        max_length: maximum number of tokens in a text, including the prompt.
        vocab_size: token ids are 0 .. vocab_size - 1.
        max_requests: maximum number of running and waiting requests.
        pages: exchanges pages of the prefix cache with other engines.

    Example:
        >>> import jax, mtpjax
        >>> model = mtpjax.MTPModel(mtpjax.presets["tiny"])
        >>> params = mtpjax.init_params(model, jax.random.key(0))
        >>> with mtpjax.Engine(params, model=model, config=mtpjax.DecodeConfig(num_steps=1)) as engine:
        ...     [output] = engine.generate([mtpjax.Request(prompt=(1, 2, 3), max_new_tokens=4)])
        >>> len(output.tokens)
        4
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
        grammars: Grammars | None = None,
    ):
        self.settings, self.followers, self.grammars = settings or EngineSettings(), followers, grammars
        self.config = config
        self.vocab_size = model.config.vocab_size
        self.max_requests = self.settings.num_slots + self.settings.max_waiting
        # 1. The inbox and the thread.
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)
        self._inbox = Inbox(self._thread)
        self._ids = itertools.count()
        # 2. The parts of a tick.
        settings = self.settings
        announce = None if followers is None else lambda *call, key: followers.send(encode(*call, key=key))
        session = EngineSession(
            params, model=model, config=config, settings=settings, draft_params=draft_params, announce=announce
        )
        self._executor = Executor(session, grammars)
        self.max_length, self._num_levels = session.sizes.max_length, session.decoder.spec.num_steps
        self._compilation = Compilation(self._executor.programs, self._inbox, self._enter)
        of_scheduler = scheduler_settings(session, self._choose_depth)
        self._scheduler = Scheduler(of_scheduler, make_pools(session.sizes, settings))
        self._delivery = Delivery(session, self._scheduler, self._executor.clear_pages, observe, self._compilation.held)
        self._ticks = Ticks(self._executor, self._scheduler, self._delivery, self._compilation, self._inbox)
        self.pages = PageExchange(session, self._scheduler, self._inbox)
        self._num_warm_up_programs = 0

    @property
    def progress_at(self) -> float:
        """Time (`time.monotonic`) at which the device last answered or a pause last ended, if that is later."""
        return self._delivery.progress_at

    def warm_up(
        self, progress: Callable[[int, int], None] = lambda done, total: None, programs: WarmUp = "all"
    ) -> None:
        """Compiles programs; call it before `start`.

        With "first" and "none", a thread compiles the remaining programs while requests run. A request that needs a
        missing program waits for it. With several processes, moving experts or measured depths, all programs are
        needed, so "first" means the same as "all", and "none" compiles a program in the call that first uses it.

        Args:
            progress: called with the number of compiled programs and the total.
            programs: "all" compiles every program that requests may need. "first" compiles those that can serve any
                request without a grammar, and the others after `start`. "none" compiles each when a request needs it.
        """
        self._compilation.warm_up(progress, programs)
        self._measure_depths()
        self._num_warm_up_programs = self._executor.session.num_compiled

    def start(self) -> None:
        """Starts the thread that serves requests, and the thread that compiles the remaining programs."""
        self._measure_depths()
        close_at_exit(self)
        self._thread.start()
        self._compilation.start()

    def _measure_depths(self) -> None:
        if self.settings.adapts_depth and self._num_levels and self._delivery.depth is None:
            costs = measure_costs(self._executor)
            self._delivery.depth = AdaptiveDepth(costs, self._executor.session.sizes.batch_sizes)

    def __enter__(self) -> "Engine":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(timeout=None if kind is None else 0.0)

    def check(self, request: Request) -> None:
        """Checks a request without running it.

        Raises:
            ValueError: the prompt or an option is out of range; the message is one line.
        """
        self._executor.programs.make_rows(request)

    def generate(
        self,
        requests: TokenSequence[Request],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[RequestOutput]:
        """Runs requests together and waits for all of them. There may be more of them than the queue holds.

        A first Ctrl-C ends the requests that still run with the reason "abort", and returns; a second one raises.

        Args:
            requests: the requests.
            progress: called with the number of requests that have ended and the total.

        Returns:
            The new tokens of each request, in order. `finish.reason` is "error" if a call of the engine failed.

        Raises:
            ValueError: a request is out of range; no request has run.
            QueueFull: the engine is shutting down.
        """
        self._inbox.require_started()
        return collect_outputs(self, requests, progress)

    def stream(self, request: Request) -> RequestStream:
        """Starts a request, whose `Delta`s and `Finish` the result yields to `for` or `async for`.

        Raises:
            ValueError: the request is out of range.
            QueueFull: too many requests wait, or the engine is shutting down.
        """
        self._inbox.require_started()
        return RequestStream(self, request)

    def update_params(self, params: dict, draft_params: Any = None) -> None:
        """Replaces the parameters, as after a training step, and drops the prefix cache. Compiles nothing.

        A request keeps the parameters with which it started: the update waits until all started requests have ended,
        and the waiting ones start afterwards, with the new parameters. Blocks until then. The engine does not copy
        arrays that are on its devices already, so do not donate them to another call.

        Args:
            params: parameters of the same model: the same names, shapes and dtypes.
            draft_params: the drafter's own parameters; None keeps the current ones.

        Raises:
            ValueError: the parameters do not match, experts move, or there are several processes.
            QueueFull: the engine is shutting down.
        """
        require(self.followers is None, "parameters cannot be replaced in an engine of several processes")
        require(not self.pages.is_in_use, "parameters cannot be replaced in a server that exchanges pages")
        if threading.current_thread() is self._thread:
            raise RuntimeError("update_params waits for the engine's thread, so it cannot be called there")
        weights = self._executor.session.fit_params(params, draft_params)
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        if self._thread.ident is None:
            self._ticks.add_update(weights, done)
            self._ticks.apply_update()
        else:
            self._inbox.post(lambda: self._ticks.add_update(weights, done))
        try:
            self._inbox.wait(done)
        except BaseException:
            # An interrupted caller does not expect the parameters to change later.
            with contextlib.suppress(EngineClosed):
                self._inbox.post(lambda: self._ticks.remove_update(done))
            raise

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Puts a request into the queue.

        Args:
            request: the text to continue, and its options.
            deliver: receives every `Delta`, then one `Finish`. It is called in the engine's thread and must not block.

        Returns:
            The request's id, for `abort`.

        Raises:
            ValueError: the prompt or an option is out of range; the message is one line.
            QueueFull: too many requests are waiting, or the engine is shutting down.
        """
        return self._submit(request, deliver)

    def _submit(self, request: Request, deliver: Deliver, scored: ScoredText | None = None) -> int:
        rows = self._executor.programs.make_rows(request)
        sequence = Sequence.new(next(self._ids), request, rows, deliver, scored)
        with self._inbox.changed:
            if self._inbox.is_closing:
                raise EngineClosed("the engine is shutting down")
            # A request with a free slot does not count as waiting, even before it is admitted.
            num_waiting = len(self._delivery.sequences) - self.settings.num_slots
            if num_waiting >= self.settings.max_waiting and scored is None:
                raise QueueFull(f"the queue is full ({count_of(num_waiting, 'request')}): try again later")
            self._delivery.sequences[sequence.id] = sequence
            self._inbox.actions.append(lambda: self._compilation.add(sequence))
            self._inbox.changed.notify()
        return sequence.id

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """Ends a request; has no effect if it has already ended.

        Args:
            request_id: from `submit`.
            reason: "stop" if the text is complete, for example because the decoded text has a stop string.
        """

        def end() -> None:
            sequence = self._delivery.sequences.get(request_id)
            if sequence is not None:
                self._delivery.end(sequence, reason)

        with contextlib.suppress(EngineClosed):  # then it has ended
            self._inbox.post(end)

    def score(self, tokens: TokenSequence[int], num_top: int) -> Scores:
        """Computes the log-probabilities of a text under the trunk. Blocks while the text is processed like a prompt.

        Args:
            num_top: alternatives per token, at most 20.

        Raises:
            ValueError: the text or `num_top` is out of range.
            QueueFull: the engine is shutting down, or the text ran out of time.
            RuntimeError: a call of the engine failed.
        """
        text = ScoredText(list(tokens), num_top)
        check_text(text.tokens, num_top, vocab_size=self.vocab_size, max_length=self.max_length)
        self._inbox.require_started()
        return score_text(self._submit, text)

    def flush_cache(self) -> int:
        """Drops the cached pages that no request uses, and returns their number."""
        return self._inbox.ask(lambda: sum(pool.forget() for pool in self._scheduler.pools))

    def status(self) -> EngineStatus:
        """Returns the load and the counts since the start."""
        session, compilation = self._executor.session, self._compilation
        return EngineStatus(
            **self._scheduler.status(),
            **self._delivery.status(),
            num_compilations=session.num_compiled - self._num_warm_up_programs,
            compile_seconds=session.compile_seconds,
            num_programs_left=compilation.num_left,
            num_compile_waits=compilation.num_held,
            num_received_pages=self.pages.num_received,
        )

    def fail(self, message: str) -> None:
        """Ends all requests with this message, and accepts no new ones, because the process is about to end.

        The engine's thread may be waiting for a device that never responds, so this runs in the caller's thread.
        """
        self._inbox.close()
        self._delivery.fail_all(message)

    @property
    def busy_since(self) -> float | None:
        """Time (`time.monotonic`) at which the running tick began; None while the engine waits or compiles."""
        if self._executor.session.is_compiling:
            return None
        # If the tick has compiled a program, count from the end of that compilation.
        began, compiled = self._ticks.began, self._executor.session.compiled_at
        return began if began is None else max(began, compiled)

    @property
    def failure(self) -> str:
        """The reason why the engine does not respond; "" if it responds."""
        begin, limit = self.busy_since, self.settings.max_tick_seconds
        if begin is not None and limit is not None and (seconds := time.monotonic() - begin) > limit:
            return f"a call of the engine has not returned for {seconds:.0f} s"
        return ""

    def close(self, timeout: float | None = None) -> bool:
        """Accepts no new requests, waits for the running ones, and stops the thread.

        Args:
            timeout: seconds after which requests that are still running are aborted; None means no limit.

        Returns:
            True if all requests ended without being aborted.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._inbox.close()
        is_running = self._thread.ident is not None
        while self._thread.is_alive() and self._delivery.sequences:
            if deadline is not None and time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        left = self.stop()
        if is_running:
            self._thread.join()
        return not left

    def stop(self) -> int:
        """Accepts no new requests, and aborts the running ones without waiting. Returns their number."""
        self._inbox.close()
        self._compilation.stop()
        left = list(self._delivery.sequences)
        for request_id in left:
            self.abort(request_id)
        if self._thread.ident is None:
            self._delivery.fail_all("the engine was closed before it was started")
        return len(left)

    # The engine's thread.

    def _run(self) -> None:
        self._ticks.loop(self.followers)

    def _choose_depth(self, num_rows: int) -> int:
        """Returns the number of draft levels for the next call with this number of decoding rows."""
        limit, adaptive = self.settings.disable_drafts_at, self._delivery.depth
        depth = self._num_levels
        if limit is not None and num_rows >= limit:
            depth = 0
        elif adaptive is not None:
            depth = adaptive.choose(-(-num_rows // self._executor.session.sizes.num_shards))
        return depth if self._compilation.has_depth(depth) else self._num_levels

    def _enter(self, sequence: Sequence, problem: str) -> None:
        """Puts a request into the scheduler's queue, or ends it if there is a problem."""
        if problem:
            self._delivery.end(sequence, "error", f"request {sequence.id} failed: {problem}")
        else:
            self._scheduler.add(sequence)
