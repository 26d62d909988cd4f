"""The state that the routes share, and the steps that they have in common."""

import abc
import asyncio
import concurrent.futures
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mtpjax.data.template_worker import WORKER
from mtpjax.data.tokenizer import Tokenizer
from mtpjax.serving.api.engine_client import Engine, EngineClient
from mtpjax.serving.api.errors import ApiError, server_busy, shutting_down, unsupported
from mtpjax.serving.api.generation import Generation, new_id
from mtpjax.serving.api.grammars import GrammarField
from mtpjax.serving.api.http import EventStream, client_of, owner_of, read_json, run_while_connected
from mtpjax.serving.api.readers import SMALL_BODY_BYTES, Readers
from mtpjax.serving.api.reading_result import Reading
from mtpjax.serving.api.settings import ApiSettings, Limits
from mtpjax.serving.api.turns import Turns
from mtpjax.serving.completion import Job
from mtpjax.serving.grammar import MAX_COMPILE_SECONDS, GrammarTooSlow
from mtpjax.serving.matcher import Grammar
from mtpjax.serving.request import Request, Scores
from mtpjax.serving.trial_compile import TRIAL_COMPILE
from mtpjax.version import __version__

DRAIN_INTERVAL = 0.02
ABORT_SECONDS = 2.0
QUICK_GRAMMAR_SECONDS = 0.25  # CPU time limit; slower grammars wait for each other, and do not delay quick ones
GRAMMAR_WAIT_SECONDS = 60.0  # maximum wait for a grammar's turn
GRAMMAR_SECONDS = 90.0  # time limit after a grammar's turn has come, regardless of llguidance's limits
SLOW_GRAMMARS = 2  # maximum number of slow grammars that compile at the same time


T = TypeVar("T")


class ApiServer:
    """The state of the API, which all routes share.

    Attributes:
        client: the engine and the running requests.
        limits: limits for requests.
        prepare: called with the engine requests of an HTTP request before they are submitted; None disables it.
        readers: read the bodies of requests; `make_app` sets them.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, settings: ApiSettings):
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings
        self.client = EngineClient(engine, tokenizer)
        self._is_closed = False
        self.prepare: Callable[[Sequence[Request]], Awaitable[None]] | None = None
        self.readers: Readers
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

    async def read_body(self, request: HttpRequest, kind: str) -> Reading:
        """Reads and checks a body of this kind (`reading.KINDS`) outside the event loop. Raises ApiError."""
        if self.client.is_stopping and kind != "abort":
            raise shutting_down()
        parts = await read_json(request, self.settings)
        reading = self.readers.read(kind, parts, client_of(request))
        # Large bodies may wait for a long time, and need not be read once the client has disconnected.
        return await (run_while_connected(request, reading) if sum(map(len, parts)) > SMALL_BODY_BYTES else reading)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError if a request names a different model."""
        if name is not None and name not in (self.settings.model_name, *self.settings.model_aliases):
            raise ApiError("the model does not exist", status=404, param="model", code="model_not_found")

    async def compile_grammar(self, field: GrammarField | None, client: Hashable) -> Grammar | None:
        """Compiles a request's grammar outside the event loop.

        Args:
            field: the grammar; None if the request has no grammar.
            client: the client that sent the request. Clients with many grammars do not delay other clients.

        Raises:
            ApiError: the grammar is invalid or takes too long, or too many other grammars are waiting.
        """
        if field is None:
            return None
        grammars = self.engine.grammars
        if grammars is None:
            raise unsupported(f"{field.param} is not supported: the server runs without grammars", field.param)
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
        # The thread cannot be stopped, so the slot is freed when it ends. The time limit excludes the wait for a turn.
        mailbox, running = self.client.mailbox(), self._submit(self._grammar_threads, work)
        running.add_done_callback(lambda _: mailbox.post(turns.release, client))
        async with asyncio.timeout(GRAMMAR_SECONDS):
            return await self._result(running)

    async def score(self, tokens: Sequence[int], num_top: int) -> Scores:
        return await self._result(self._submit(self._score_threads, lambda: self.engine.score(tokens, num_top)))

    async def drain(self, seconds: float) -> None:
        """Rejects new requests, waits `seconds` for running ones, and aborts the rest, which keep their text so far."""
        self.client.is_stopping = True
        try:
            end = time.monotonic() + seconds
            while self.client.running and time.monotonic() < end:
                await asyncio.sleep(DRAIN_INTERVAL)
            self.client.abort()
            # An unresponsive engine must not keep the process alive.
            end = time.monotonic() + ABORT_SECONDS
            while self.client.running and time.monotonic() < end:
                await asyncio.sleep(DRAIN_INTERVAL)
        finally:
            # Python waits for threads at exit, so end the processes whose answers the threads wait for.
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


class Reply(abc.ABC):
    """Makes the response to a generation request.

    Args:
        server: state of the API.
        values: the request's fields.
        jobs: the texts, grouped by prompt.
        prefix: prefix of the generated id, used if the request sets no `rid`.
    """

    def __init__(self, server: ApiServer, values: dict[str, Any], jobs: Sequence[Job], prefix: str):
        self._server, self._values, self._jobs = server, values, jobs
        self._id = values["rid"] or new_id(prefix)

    @abc.abstractmethod
    def _events(self, generation: Generation) -> AsyncGenerator[Any, None]:
        """Yields the events of a stream."""

    @abc.abstractmethod
    async def _complete(self, generation: Generation) -> Any:
        """Waits for the texts and returns the body of the response."""

    async def respond(self, request: HttpRequest) -> Response:
        """Generates the texts, and aborts them if the client disconnects. Returns a stream if the request asks for one.

        Raises:
            ApiError: the engine rejects a text, or a text ends with an error.
            QueueFull: the engine's queue is full.
        """
        server, owner = self._server, owner_of(request)
        if server.prepare is not None:
            await server.prepare([job.request for job in self._jobs])
        if self._values["stream"]:
            # Submit before the status is sent, so that the response to a full queue is still a 429.
            max_bytes, timeout = server.settings.max_buffer_bytes, server.settings.write_timeout
            generation = Generation(server.client, self._jobs, self._id, owner=owner, max_bytes=max_bytes)
            return EventStream(self._events(generation), write_timeout=timeout, on_close=generation.close)

        async def run() -> Any:
            with Generation(server.client, self._jobs, self._id, owner=owner) as generation:
                return await self._complete(generation)

        return JSONResponse(await run_while_connected(request, run()))
