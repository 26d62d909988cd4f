"""The routes' shared state: the engine, the tokenizer, the settings, and the running requests."""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

from mtpjax.data.template_worker import WORKER
from mtpjax.data.tokenizer import Tokenizer
from mtpjax.serving.api.errors import ApiError, server_busy, shutting_down
from mtpjax.serving.api.grammars import GrammarField
from mtpjax.serving.api.readers import Readers
from mtpjax.serving.api.settings import Limits
from mtpjax.serving.api.turns import Turns
from mtpjax.serving.grammar import MAX_COMPILE_SECONDS, Grammars, GrammarTooSlow
from mtpjax.serving.matcher import Grammar
from mtpjax.serving.request import Deliver, FinishReason, Request, Scores
from mtpjax.serving.status import EngineStatus
from mtpjax.serving.trial_compile import TRIAL_COMPILE
from mtpjax.version import __version__

DRAIN_INTERVAL = 0.02
ABORT_SECONDS = 2.0
QUICK_GRAMMAR_SECONDS = 0.25  # of CPU time; grammars that need more wait for each other, and do not delay the others
GRAMMAR_WAIT_SECONDS = 60.0  # for the turn of a grammar
GRAMMAR_SECONDS = 90.0  # from its turn on, regardless of llguidance's limits
SLOW_GRAMMARS = 2  # that compile at the same time


T = TypeVar("T")


class Engine(Protocol):
    """The interface of the engine. Its methods are thread-safe.

    Attributes:
        max_length: maximum tokens of a text; a prompt has fewer.
        max_requests: maximum requests that run and wait at the same time.
        grammars: compiles the grammars of requests; None: requests have none.
        progress_at: time (`time.monotonic`) at which the device last answered, or work came after a pause.
    """

    max_length: int
    vocab_size: int
    max_requests: int
    grammars: Grammars | None
    progress_at: float

    @property
    def failure(self) -> str:
        """The reason why the engine does not work, else "". `/health` then answers 503."""
        ...

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Queues a request and returns its id.

        Args:
            request: the request.
            deliver: receives its events in the engine's thread, which it must not block.

        Raises:
            ValueError: the request is invalid.
            QueueFull: the queue is full, or the engine shuts down.
        """
        ...

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """Ends a request for this reason. Ignores unknown ids."""
        ...

    def score(self, tokens: Sequence[int], num_top: int) -> Scores:
        """Returns the log-probabilities of a text; blocks."""
        ...

    def status(self) -> EngineStatus: ...

    def flush_cache(self) -> int:
        """Drops unused prefix pages and returns their number."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Settings of the HTTP API.

    Attributes:
        model_name: the name that clients see.
        model_aliases: further names that requests may use.
        api_keys: requests need one of them as bearer token; empty: no key is needed.
        admin_api_keys: `/flush_cache`, and `/abort_request` for all, need one of them; they are valid for every other
            route too. Empty: ordinary keys are enough.
        open_paths: paths that need no key. The page shows nothing without its data, which needs one.
        max_body_bytes: larger bodies get 413.
        max_prompt_characters: maximum length of a prompt; None: 64 per token of the longest text.
        max_requests: maximum texts of one request, prompts times `n`.
        body_timeout: seconds in which a body must arrive.
        write_timeout: seconds after which a client that does not read its stream is disconnected.
        max_buffer_bytes: maximum size of undelivered tokens per stream.
        template_variables: variables of the chat template that requests may set.
        num_readers: processes that parse, check and tokenize bodies, at least 2; 0: threads of this process, as with
            tokenizers of other packages.
        strict_fields: reject unknown fields with 400.
        server_info: settings that `/server_info` shows.
    """

    model_name: str
    model_aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    open_paths: frozenset[str] = frozenset({"/health", "/ready", "/", "/page.css", "/page.js"})
    max_body_bytes: int = 32 << 20
    max_prompt_characters: int | None = None
    max_requests: int = 4096
    body_timeout: float = 30.0
    write_timeout: float = 60.0
    max_buffer_bytes: int = 1 << 20
    template_variables: tuple[str, ...] = ("enable_thinking", "thinking", "reasoning_effort")
    num_readers: int = 2
    strict_fields: bool = False
    server_info: dict[str, Any] = dataclasses.field(default_factory=dict)


class Mailbox:
    """Passes calls from other threads to an event loop.

    Calls that arrive together wake the loop only once, because a wake-up is a system call, and a tick of the engine has
    an event per request.
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


class ApiServer:
    """State of the API.

    Attributes:
        limits: of requests.
        is_stopping: new requests get 503.
        prepare: called with the engine requests of an HTTP request before they are submitted; None disables it.
        readers: read the bodies of requests; `make_app` sets them.
        running: engine ids by owner and name of the HTTP request, for `/abort_request`. An owner is a client's key as
            `KeyCheck` gives it, so clients with different keys may use the same name.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, settings: ApiSettings):
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings
        self.is_stopping = self._is_closed = False
        self.prepare: Callable[[Sequence[Request]], Awaitable[None]] | None = None
        self.readers: Readers
        self.running: dict[tuple[bytes, str], set[int]] = {}
        self._mailbox: Mailbox | None = None
        self.limits = Limits(
            max_length=engine.max_length,
            vocab_size=engine.vocab_size,
            eos_token_ids=tuple(tokenizer.eos_token_ids),
            max_prompt_characters=settings.max_prompt_characters or 64 * engine.max_length,
            max_total_characters=settings.max_body_bytes,
            template_variables=settings.template_variables,
            max_requests=settings.max_requests,
            max_queued=engine.max_requests,
        )
        digest = hashlib.sha256(f"{__version__} {settings.model_name} {tokenizer.digest}".encode()).hexdigest()
        self.fingerprint = f"fp_{digest[:12]}"
        self._grammar_threads = concurrent.futures.ThreadPoolExecutor(1 + SLOW_GRAMMARS, "grammar")
        self._score_threads = concurrent.futures.ThreadPoolExecutor(4, "score")
        self._quick_grammars, self._slow_grammars = Turns(1), Turns(SLOW_GRAMMARS)

    def mailbox(self) -> Mailbox:
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return self._mailbox

    async def compile_grammar(self, field: GrammarField | None, client: Hashable) -> Grammar | None:
        """Compiles a request's grammar outside the event loop.

        Args:
            field: the grammar; None: the request has none.
            client: whose request it is. Clients with many grammars do not delay the others.

        Raises:
            ApiError: it is invalid or takes too long, or too many others wait.
        """
        if field is None:
            return None
        grammars = self.engine.grammars
        if grammars is None:
            message = f"{field.param} is not supported: the server was started without grammars"
            raise ApiError(message, param=field.param, code="unsupported_option")
        work = lambda seconds: lambda: grammars.compile(field.kind, field.source, seconds=seconds)
        try:
            try:
                return await self._take_turn(self._quick_grammars, client, work(QUICK_GRAMMAR_SECONDS))
            except GrammarTooSlow:
                return await self._take_turn(self._slow_grammars, client, work(MAX_COMPILE_SECONDS))
        except ValueError as error:
            raise ApiError(str(error), param=field.param) from error
        except TimeoutError as error:
            raise ApiError(f"{field.param} takes too long to compile", param=field.param) from error

    async def _take_turn(self, turns: Turns, client: Hashable, work: Callable[[], Grammar]) -> Grammar:
        """Runs work in a thread when it is the client's turn. Raises TimeoutError if it then takes too long."""
        try:
            async with asyncio.timeout(GRAMMAR_WAIT_SECONDS):
                await turns.take(client)
        except TimeoutError as error:
            raise server_busy() from error
        # The slot is freed when the thread ends, which cannot be stopped. The time limit excludes the wait.
        mailbox, running = self.mailbox(), self._submit(self._grammar_threads, work)
        running.add_done_callback(lambda _: mailbox.post(turns.release, client))
        async with asyncio.timeout(GRAMMAR_SECONDS):
            return await self._result(running)

    async def score(self, tokens: Sequence[int], num_top: int) -> Scores:
        return await self._result(self._submit(self._score_threads, lambda: self.engine.score(tokens, num_top)))

    def abort(self, name: str | None = None, owner: bytes | None = None) -> int:
        """Aborts running requests, optionally only those of a name or an owner. Returns the number of aborted texts."""
        chosen = [ids for key, ids in self.running.items() if owner in (None, key[0]) and name in (None, key[1])]
        ids = [request_id for each in chosen for request_id in each]
        for request_id in ids:
            self.engine.abort(request_id)
        return len(ids)

    async def drain(self, seconds: float) -> None:
        """Rejects new requests, waits `seconds` for running ones, and aborts the rest, which keep their text so far."""
        self.is_stopping = True
        try:
            end = time.monotonic() + seconds
            while self.running and time.monotonic() < end:
                await asyncio.sleep(DRAIN_INTERVAL)
            self.abort()
            # An unresponsive engine must not keep the process alive.
            end = time.monotonic() + ABORT_SECONDS
            while self.running and time.monotonic() < end:
                await asyncio.sleep(DRAIN_INTERVAL)
        finally:
            # Nor must threads, for which Python waits: end the processes whose answers they wait for.
            self._is_closed = True
            for threads in (self._grammar_threads, self._score_threads):
                threads.shutdown(wait=False, cancel_futures=True)
            self.readers.close()
            WORKER.kill()
            TRIAL_COMPILE.kill()

    def _submit(self, threads: concurrent.futures.Executor, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        if self._is_closed:
            raise shutting_down()
        return threads.submit(function)

    async def _result(self, running: concurrent.futures.Future[T]) -> T:
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise shutting_down() from None
            raise
