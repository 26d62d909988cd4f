"""Connects the routes to the engine, tracks the running requests, and passes events to the event loop."""

import asyncio
import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mtpjax.data.tokenizer import Tokenizer
from mtpjax.serving.grammar import Grammars
from mtpjax.serving.request import Deliver, FinishReason, Request, Scores
from mtpjax.serving.status import EngineStatus


class Engine(Protocol):
    """The interface of the engine. Its methods are thread-safe.

    Attributes:
        max_length: maximum number of tokens in a text; a prompt must be shorter.
        max_requests: maximum number of running and waiting requests.
        grammars: compiles the grammars of requests; None if grammars are not supported.
        progress_at: time (`time.monotonic`) at which the device last answered or a pause last ended, if that is later.
    """

    max_length: int
    vocab_size: int
    max_requests: int
    grammars: Grammars | None

    @property
    def progress_at(self) -> float: ...

    @property
    def failure(self) -> str:
        """The reason why the engine does not work, or "" if it works. If there is a reason, `/health` returns 503."""
        ...

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Queues a request and returns its id.

        Args:
            request: the request.
            deliver: receives its events in the engine's thread, which it must not block.

        Raises:
            ValueError: the request is invalid.
            QueueFull: the queue is full, or the engine is shutting down.
        """
        ...

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """Ends a request with this reason. Ignores unknown ids."""
        ...

    def score(self, tokens: Sequence[int], num_top: int) -> Scores:
        """Returns the log-probabilities of a text. Blocks until they are computed."""
        ...

    def status(self) -> EngineStatus: ...

    def flush_cache(self) -> int:
        """Drops unused prefix pages and returns their number."""
        ...


class Mailbox:
    """Passes calls from other threads to an event loop.

    Calls that arrive together wake the loop only once, because a wake-up is a system call, and a tick of the engine
    produces an event per request.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._calls: collections.deque[tuple[Callable[..., None], tuple[Any, ...]]] = collections.deque()
        self._is_woken = False

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Schedules a function in the loop, in the order of the calls. Does nothing once the loop has ended."""
        self._calls.append((function, arguments))
        # `_run` resets this before it takes calls, so a call after its last one wakes the loop again.
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._is_woken = False
        try:
            while self._calls:
                function, arguments = self._calls.popleft()
                function(*arguments)
        finally:
            if self._calls:  # one of them failed
                self.loop.call_soon(self._run)


class EngineClient:
    """State that all generations share.

    Attributes:
        is_stopping: whether new requests get 503.
        running: engine ids by owner and name of the HTTP request, for `/abort_request`. An owner is the digest of a
            client's key (`owner_of`), so clients with different keys may use the same name.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        self.engine, self.tokenizer = engine, tokenizer
        self.is_stopping = False
        self.running: dict[tuple[bytes, str], set[int]] = {}
        self._mailbox: Mailbox | None = None

    def mailbox(self) -> Mailbox:
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return self._mailbox

    def abort(self, name: str | None = None, owner: bytes | None = None) -> int:
        """Aborts running requests, or those with this name or owner. Returns how many texts they were generating."""
        chosen = [ids for key, ids in self.running.items() if owner in (None, key[0]) and name in (None, key[1])]
        ids = [request_id for each in chosen for request_id in each]
        for request_id in ids:
            self.engine.abort(request_id)
        return len(ids)
