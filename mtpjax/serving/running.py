"""Runs requests on an engine from any thread: many at a time, or one whose tokens are read as they arrive."""

import asyncio
import atexit
import collections
import contextlib
import functools
import queue
import signal
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol

from mtpjax.serving.request import (
    Deliver,
    Delta,
    EngineClosed,
    Finish,
    FinishReason,
    QueueFull,
    Request,
    RequestOutput,
    ScoredText,
    Scores,
)

FULL_SECONDS = 0.02  # between two attempts to submit a request while other callers fill the queue


class RequestEngine(Protocol):
    """The methods of `mtpjax.Engine` that this module uses."""

    @property
    def max_requests(self) -> int: ...

    def check(self, request: Request) -> None: ...

    def submit(self, request: Request, deliver: Deliver) -> int: ...

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None: ...


def run_requests(
    engine: RequestEngine, requests: Sequence[Request], receive: Callable[[int, Delta | Finish], bool | None]
) -> None:
    """Runs requests to their end; they enter the engine's queue as it has room.

    At the first Ctrl-C, all requests that have not ended end with the reason "abort". A second one raises
    `KeyboardInterrupt`. If this function raises, no request of it runs on.

    Args:
        engine: the running engine.
        requests: the requests.
        receive: called in this thread with the index of a request and its new tokens or its end. If it returns True,
            the request's text is complete, and the request ends with the reason "stop".

    Raises:
        ValueError: the engine rejects a request.
        EngineClosed: the engine is shutting down.
    """
    waiting = collections.deque(enumerate(requests))
    running: dict[int, int] = {}  # the engine's numbers of the requests, by index
    inbox: queue.SimpleQueue[tuple[int, Delta | Finish] | None] = queue.SimpleQueue()

    def deliver(index: int, event: Delta | Finish) -> None:
        inbox.put((index, event))

    def submit() -> None:
        # Leave half of the queue to other callers.
        while waiting and len(running) < max(engine.max_requests // 2, 1):
            index, request = waiting[0]
            try:
                running[index] = engine.submit(request, functools.partial(deliver, index))
            except EngineClosed:
                raise
            except QueueFull:
                return
            waiting.popleft()

    try:
        with first_interrupt_calls(lambda: inbox.put(None)):
            while waiting or running:
                submit()
                # If other callers fill the queue, none of these requests may be running.
                with contextlib.suppress(queue.Empty):
                    item = inbox.get(timeout=None if running else FULL_SECONDS)
                    if item is None:
                        for request_id in running.values():
                            engine.abort(request_id)
                        for index, request in waiting:
                            receive(index, Finish("abort", num_prompt_tokens=len(request.prompt)))
                        waiting.clear()
                        continue
                    index, event = item
                    if isinstance(event, Finish):
                        del running[index]
                    if receive(index, event) and index in running:
                        engine.abort(running[index], "stop")
    finally:
        for request_id in running.values():
            engine.abort(request_id)


def collect_outputs(
    engine: RequestEngine, requests: Sequence[Request], progress: Callable[[int, int], None]
) -> list[RequestOutput]:
    """Runs requests to their end; see `Engine.generate`."""
    check_all(engine, requests)
    tokens: list[list[int]] = [[] for _ in requests]
    origins: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    ends: dict[int, Finish] = {}

    def receive(index: int, event: Delta | Finish) -> None:
        if isinstance(event, Finish):
            ends[index] = event
            progress(len(ends), len(requests))
            return
        tokens[index] += event.tokens
        origins[index] += event.origins
        logprobs[index] += event.logprobs or []

    run_requests(engine, requests, receive)
    return [
        RequestOutput(
            request, tokens[index], origins[index], logprobs[index] if request.logprobs else None, ends[index]
        )
        for index, request in enumerate(requests)
    ]


def check_all(engine: RequestEngine, requests: Sequence[Request]) -> None:
    """Checks requests before any of them runs. Raises `ValueError` with the index of the first invalid one."""
    for index, request in enumerate(requests):
        try:
            engine.check(request)
        except ValueError as error:
            # Each request is checked alone, as prompt 0.
            raise ValueError(f"request {index}: {str(error).replace('prompt 0', 'its prompt')}") from error


def score_text(submit: Callable[[Request, Deliver, ScoredText], int], text: ScoredText) -> Scores:
    """Waits for the scores of a text; see `Engine.score`."""
    if len(text.tokens) > 1:
        # The last token is scored, but no token follows it.
        request, ended = Request(prompt=tuple(text.tokens[:-1]), max_new_tokens=1), queue.SimpleQueue()
        submit(request, ended.put, text)
        finish = ended.get()
        if finish.reason == "error":
            raise RuntimeError(finish.message)
        if finish.reason != "stop":
            raise QueueFull("the text was not scored in time")
    return text.result()


@contextlib.contextmanager
def first_interrupt_calls(stop: Callable[[], None]) -> Iterator[None]:
    """Lets the first Ctrl-C call `stop` instead of raising `KeyboardInterrupt`; later ones act as before.

    Only the main thread receives Ctrl-C, so in other threads this does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def handle(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class RequestStream:
    """One request, whose events can be read with `for` or `async for`; the last one is its `Finish`.

    Leaving the loop early ends the request, as `close` and the end of a `with` block do. Make it with `Engine.stream`.
    """

    def __init__(self, engine: RequestEngine, request: Request):
        self._engine, self._mail, self._has_ended = engine, _Mail(), False
        self._id = engine.submit(request, self._mail.deliver)
        # The engine refers only to the mail, so a stream that nobody reads any more ends its request.
        self._end = weakref.finalize(self, engine.abort, self._id)
        self._end.atexit = False

    def __iter__(self) -> Iterator[Delta | Finish]:
        try:
            while not self._has_ended:
                yield self._take(self._mail.inbox.get())
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[Delta | Finish]:
        arrived = asyncio.Event()
        self._mail.waiter = asyncio.get_running_loop(), arrived
        try:
            while not self._has_ended:
                # An event that arrives after this line is in the inbox, or sets `arrived` again.
                arrived.clear()
                try:
                    event = self._mail.inbox.get_nowait()
                except queue.Empty:
                    await arrived.wait()
                else:
                    yield self._take(event)
        finally:
            self.close()

    def _take(self, event: Delta | Finish) -> Delta | Finish:
        self._has_ended = isinstance(event, Finish)
        return event

    def close(self, reason: FinishReason = "abort") -> None:
        """Ends the request if it still runs."""
        if not self._has_ended:
            self._engine.abort(self._id, reason)

    def __enter__(self) -> "RequestStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Mail:
    """The events of a stream that it has not read, and the event loop that waits for them."""

    def __init__(self):
        self.inbox: queue.SimpleQueue[Delta | Finish] = queue.SimpleQueue()
        self.waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def deliver(self, event: Delta | Finish) -> None:
        """Takes an event, in the engine's thread."""
        self.inbox.put(event)
        if self.waiter is not None:
            loop, arrived = self.waiter
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(arrived.set)


class _Closable(Protocol):
    def close(self, timeout: float | None = None) -> bool: ...


_open: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(engine: _Closable) -> None:
    """Closes an engine before the interpreter ends: XLA crashes in a thread that is still running then."""
    _open.add(engine)


@atexit.register
def _close_all() -> None:
    for engine in list(_open):
        engine.close(timeout=0.0)
