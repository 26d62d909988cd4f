"""Steps that the routes share."""

import abc
from collections.abc import AsyncGenerator, Hashable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mtpjax.serving.api.errors import ApiError, shutting_down
from mtpjax.serving.api.generation import Generation, Job, new_id
from mtpjax.serving.api.http import EventStream, read_json, run_while_connected
from mtpjax.serving.api.options import Options
from mtpjax.serving.api.readers import SMALL_BODY_BYTES
from mtpjax.serving.api.reading_result import Reading
from mtpjax.serving.api.server import ApiServer


async def read_body(server: ApiServer, request: Request, kind: str) -> Reading:
    """Reads and checks a request's body, of a kind of `reading.KINDS`, outside the event loop. Raises ApiError."""
    if server.is_stopping and kind != "abort":
        raise shutting_down()
    parts = await read_json(request, server.settings)
    reading = server.readers.read(kind, parts, client_of(request))
    # Large bodies may wait for a long time, and need not be read once the client has disconnected.
    return await (run_while_connected(request, reading) if sum(map(len, parts)) > SMALL_BODY_BYTES else reading)


def check_model(server: ApiServer, name: str | None) -> None:
    """Raises ApiError if a request names a different model."""
    settings = server.settings
    if name is not None and name not in (settings.model_name, *settings.model_aliases):
        raise ApiError("the model does not exist", status=404, param="model", code="model_not_found")


def owner_of(request: Request) -> bytes:
    """Returns a digest of the client's key; b"" without a key."""
    return request.scope.get("prefix_salt", b"")


def client_of(request: Request) -> Hashable:
    """Returns the client for taking turns: its key, or without one its address."""
    return owner_of(request) or (request.client and request.client.host)


async def make_jobs(
    server: ApiServer, request: Request, reading: Reading, options: Options, cache_salt: str | None = None
) -> list[Job]:
    """Compiles a request's grammar and makes its jobs. Only those with the same key and salt share prefix pages."""
    grammar = await server.compile_grammar(options.grammar, client_of(request))
    salt = owner_of(request) + (cache_salt or "").encode()
    return options.jobs(reading.prompts, server.limits, salt=salt, param=reading.param, grammar=grammar)


class Reply(abc.ABC):
    """Makes the responses to a generation request.

    Args:
        server: state of the API.
        values: the request's fields.
        jobs: the texts, grouped by prompt.
        prefix: of the id, if the request has none.
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

    async def respond(self, request: Request) -> Response:
        """Runs the texts, and aborts them if the client disconnects. Returns a stream if the request asks for it.

        Raises:
            ApiError: the engine rejects a text, or a text ends with an error.
            QueueFull: the engine's queue is full.
        """
        server, owner = self._server, owner_of(request)
        if server.prepare is not None:
            await server.prepare([job.request for job in self._jobs])
        if self._values["stream"]:
            # Submit before the status is sent, so that a full queue is still a 429.
            generation = Generation(server, self._jobs, self._id, owner=owner, is_streaming=True)
            timeout = server.settings.write_timeout
            return EventStream(self._events(generation), write_timeout=timeout, on_close=generation.close)

        async def run() -> Any:
            with Generation(server, self._jobs, self._id, owner=owner) as generation:
                return await self._complete(generation)

        return JSONResponse(await run_while_connected(request, run()))
