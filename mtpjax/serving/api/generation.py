"""Runs the engine requests of one HTTP request, and turns their tokens into text."""

import asyncio
import collections
import dataclasses
import math
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence

from mtpjax.serving.api.engine_client import EngineClient
from mtpjax.serving.api.errors import ApiError, log_fault, require, shutting_down
from mtpjax.serving.completion import Choice, Job, Update
from mtpjax.serving.request import Delta, Finish

BYTES_PER_TOKEN = 96  # a token, its draft level and its log-probability, as Python objects in lists
MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON does not have, as in vLLM


class Generation:
    """The texts of one HTTP request. As a context manager, it ends its engine requests on exit.

    Args:
        client: the engine and the running requests.
        jobs: the texts.
        name: the HTTP request's id.
        owner: the client that sent the request, as in `EngineClient.running`.
        max_bytes: maximum size of undelivered tokens, because a client may read its stream too slowly.

    Raises:
        ApiError: the engine rejects a request, or the server is stopping. In that case, no request runs.
        QueueFull: the queue is full. In that case, no request runs.
    """

    def __init__(
        self, client: EngineClient, jobs: Sequence[Job], name: str, *, owner: bytes = b"", max_bytes: float = math.inf
    ):
        if client.is_stopping:
            raise shutting_down()
        self._key, self._client = (owner, name), client
        require(self._key not in client.running, "a request with this rid is already running", param="rid")
        self.started = time.monotonic()
        self._max_bytes = max_bytes
        self._mailbox = client.mailbox()
        self._inbox: collections.deque[tuple[int, Delta | Finish]] = collections.deque()
        self._arrived = asyncio.Event()
        self._num_bytes = 0
        self._is_closed = self._is_too_slow = False
        self.choices: list[Choice] = []
        self._ids: list[int] = []  # the engine's numbers of the choices
        self._open: set[int] = set()
        client.running[self._key] = self._open
        try:
            for index, job in enumerate(jobs):
                self.choices.append(self._submit(index, job))
        except BaseException:
            self.close()
            raise

    def _submit(self, index: int, job: Job) -> Choice:
        def deliver(event: Delta | Finish) -> None:
            # In the engine's thread.
            self._mailbox.post(self._receive, index, event)

        try:
            request_id = self._client.engine.submit(job.request, deliver)
        except ValueError as error:
            raise ApiError(str(error)) from error
        self._open.add(request_id)
        self._ids.append(request_id)
        return Choice(index, job, job.text_stream(self._client.tokenizer))

    def _receive(self, index: int, event: Delta | Finish) -> None:
        if isinstance(event, Finish):
            self._open.discard(self._ids[index])
            self._forget_if_done()
        if self._is_closed:
            return
        if isinstance(event, Delta):
            # A client that does not read its stream must not fill the memory.
            self._num_bytes += BYTES_PER_TOKEN * len(event.tokens)
            if self._num_bytes > self._max_bytes:
                self._is_too_slow = True
        self._inbox.append((index, event))
        self._arrived.set()
        if self._is_too_slow:
            self.close()

    async def updates(self) -> AsyncIterator[Update]:
        """Yields the new output of all texts. Raises ApiError if one fails or the client reads too slowly."""
        num_ended = 0
        while num_ended < len(self.choices):
            await self._arrived.wait()
            self._arrived.clear()
            if self._is_too_slow:
                raise ApiError("the client reads the stream too slowly", status=408, code="slow_reader")
            for index, event in self._drain():
                choice = self.choices[index]
                if isinstance(event, Finish):
                    num_ended += 1
                    _check_finish(event, choice)
                    yield choice.end(event)
                elif not choice.stream.is_stopped:
                    if event.logprobs is not None:
                        event = dataclasses.replace(event, logprobs=[json_logprob(each) for each in event.logprobs])
                    update = choice.push(event)
                    if choice.stream.is_stopped:
                        self._client.engine.abort(self._ids[index], "stop")
                    yield update

    def _drain(self) -> Iterator[tuple[int, Delta | Finish]]:
        """Yields the events that have arrived; consecutive tokens of one text become one delta."""
        while self._inbox:
            index, event = self._inbox.popleft()
            while isinstance(event, Delta) and self._inbox and self._inbox[0][0] == index:
                following = self._inbox[0][1]
                if isinstance(following, Finish):
                    break
                self._inbox.popleft()
                logprobs = None if event.logprobs is None else event.logprobs + (following.logprobs or [])
                event = Delta(event.tokens + following.tokens, event.origins + following.origins, logprobs)
            if isinstance(event, Delta):
                self._num_bytes -= BYTES_PER_TOKEN * len(event.tokens)
            yield index, event

    async def run(self) -> list[Choice]:
        async for _ in self.updates():
            pass
        return self.choices

    def close(self) -> None:
        """Aborts requests that are still running."""
        self._is_closed = True
        self._inbox.clear()
        for request_id in self._open:
            self._client.engine.abort(request_id)
        self._forget_if_done()

    def _forget_if_done(self) -> None:
        if not self._open and self._client.running.get(self._key) is self._open:
            del self._client.running[self._key]

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def _check_finish(finish: Finish, choice: Choice) -> None:
    """Raises the error of a request that failed, or that ran out of time in the queue."""
    if finish.reason == "error":
        error = log_fault(finish.message)
        if finish.is_retryable:
            message = f"{error}: the engine restarted; try again"
            raise ApiError(message, status=503, code="engine_restarted", retry_after=1)
        raise error
    require(finish.reason != "invalid", finish.message, code="grammar_failed")
    if finish.reason == "timeout" and not choice.tokens:
        raise ApiError("the request timed out in the queue", status=503, code="timeout", retry_after=1)


def json_logprob(logprob: float) -> float:
    """Returns a log-probability that JSON can hold. Raises ApiError for NaN, which is an engine fault."""
    if math.isnan(logprob):
        raise log_fault("a log-probability is NaN")
    return max(logprob, MIN_LOGPROB)
