"""Steps that the routes share."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mtpjax.serving.api.errors import ApiError, shutting_down
from mtpjax.serving.api.generation import Generation, Job
from mtpjax.serving.api.http import EventStream, read_json, run_while_connected
from mtpjax.serving.api.options import Limits
from mtpjax.serving.api.prompts import PromptLimits
from mtpjax.serving.api.read_messages import Reading
from mtpjax.serving.api.readers import SMALL_BODY_BYTES
from mtpjax.serving.api.reading import BodyReader
from mtpjax.serving.api.server import ApiServer


async def read_body(server: ApiServer, request: Request, kind: str) -> Reading:
    """Reads and checks a request's body, of a kind of `reading.KINDS`, outside the event loop. Raises ApiError."""
    if server.is_stopping and kind != "abort":
        raise shutting_down()
    parts = await read_json(request, server.settings)
    reading = server.readers.read(kind, parts, client_of(request))
    # Large bodies may wait for long, and need not be read for a client that left.
    return await (run_while_connected(request, reading) if sum(map(len, parts)) > SMALL_BODY_BYTES else reading)


def limits_of(server: ApiServer) -> Limits:
    return Limits(
        max_length=server.engine.max_length,
        vocab_size=server.engine.vocab_size,
        eos_token_ids=tuple(server.tokenizer.eos_token_ids),
        max_prompt_characters=server.max_prompt_characters,
        max_requests=server.settings.max_requests,
        max_queued=server.engine.max_requests,
    )


def make_reader(server: ApiServer) -> BodyReader:
    limits, settings = limits_of(server), server.settings
    prompt_limits = PromptLimits(
        max_length=limits.max_length,
        vocab_size=limits.vocab_size,
        max_characters=limits.max_prompt_characters,
        max_total_characters=settings.max_body_bytes,
        template_variables=settings.template_variables,
    )
    return BodyReader(
        tokenizer=server.tokenizer, limits=limits, prompt_limits=prompt_limits, strict_fields=settings.strict_fields
    )


def check_model(server: ApiServer, name: str | None) -> None:
    """Raises ApiError if a request names another model."""
    settings = server.settings
    if name is not None and name not in (settings.model_name, *settings.model_aliases):
        raise ApiError("there is no model of this name", status=404, param="model", code="model_not_found")


def prefix_salt(request: Request, cache_salt: str | None) -> bytes:
    """Returns the prefix cache's salt: the client's key, and the salt that it gives."""
    return owner_of(request) + (cache_salt or "").encode()


def owner_of(request: Request) -> bytes:
    """Returns a digest of the client's key; b"" without a key."""
    return request.scope.get("prefix_salt", b"")


def client_of(request: Request) -> Hashable:
    """Returns the client whose requests take turns with those of others: its key, or without one its address."""
    return owner_of(request) or (request.client and request.client.host)


async def respond(
    server: ApiServer,
    request: Request,
    jobs: Sequence[Job],
    name: str,
    *,
    events: Callable[[Generation], AsyncGenerator[Any, None]] | None,
    complete: Callable[[Generation], Awaitable[Any]],
) -> Response:
    """Runs the texts of a request, and aborts them if the client disconnects.

    Args:
        server: state of the API.
        request: the request, whose body has been read.
        jobs: the texts.
        name: the request's id.
        events: makes the events of a stream; None if the request asks for none.
        complete: waits for the texts and makes the body of the response.

    Raises:
        ApiError: the engine rejects a text, or a text ends with an error.
        QueueFull: the engine's queue is full.
    """
    owner = owner_of(request)
    if server.prepare is not None:
        await server.prepare([job.request for job in jobs])
    if events is not None:
        # Submit before the status is sent, so that a full queue is still a 429.
        generation = Generation(server, jobs, name, owner=owner, is_streaming=True)
        timeout = server.settings.write_timeout
        return EventStream(events(generation), write_timeout=timeout, on_close=generation.close)

    async def run() -> Any:
        with Generation(server, jobs, name, owner=owner) as generation:
            return await complete(generation)

    return JSONResponse(await run_while_connected(request, run()))
