"""Routes about the server and its tokenizer: health, settings, the cache, aborts, tokenizing."""

import asyncio
import contextlib
import math
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mtpjax.decoding.config import SamplingParams
from mtpjax.serving.api import schemas
from mtpjax.serving.api.errors import ApiError, shutting_down
from mtpjax.serving.api.generation import Generation, Job, new_id
from mtpjax.serving.api.http import check_admin, check_origin, run_while_connected
from mtpjax.serving.api.option_tables import ABORT, DETOKENIZE, TOKENIZE
from mtpjax.serving.api.read_messages import Reading
from mtpjax.serving.api.route_steps import owner_of, read_body
from mtpjax.serving.api.server import ApiServer
from mtpjax.serving.request import QueueFull
from mtpjax.serving.request import Request as EngineRequest
from mtpjax.version import __version__

HEALTH_SECONDS = 20.0  # in which a device that has work must answer something; SGLang's limit
IDLE_HEALTH_SECONDS = 20.0  # the same for the token of `/health_generate`
_STRING = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def admin_router(server: ApiServer) -> APIRouter:
    router = APIRouter()
    settings, engine = server.settings, server.engine

    def check_health() -> None:
        if failure := engine.failure:
            raise ApiError(failure, status=503, code="unhealthy")

    @router.get("/health", response_class=Response)
    @router.get("/ping", response_class=Response)
    async def health() -> Response:
        """Answers 200 while the engine works."""
        check_health()
        return Response()

    @router.get("/ready", response_class=Response)
    async def ready() -> Response:
        """Answers 200 while the server accepts new requests."""
        check_health()
        if server.is_stopping:
            raise shutting_down()
        return Response()

    def check_progress() -> None:
        if (seconds := time.monotonic() - engine.progress_at) > HEALTH_SECONDS:
            raise ApiError(f"the device has not answered for {seconds:.0f} s", status=503, code="unhealthy")

    @router.get("/health_generate", response_class=Response)
    async def health_generate(request: Request) -> Response:
        """Answers 200 if the device works: it has answered just now, or it makes a token if nothing runs."""
        check_health()
        status = engine.status()
        if status.num_running or status.num_waiting:
            # A token of its own would wait for those of others, whose progress shows the same.
            check_progress()
            return Response()
        job = Job(EngineRequest(prompt=(0,), max_new_tokens=1, sampling=SamplingParams()))

        async def make_token() -> None:
            with Generation(server, [job], new_id("health")) as generation:
                await generation.run()

        # Others may have come first.
        with contextlib.suppress(TimeoutError, QueueFull):
            async with asyncio.timeout(IDLE_HEALTH_SECONDS):
                await run_while_connected(request, make_token())
                return Response()
        check_progress()
        return Response()

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        """Describes the model."""
        lengths = {"max_model_len": engine.max_length, "vocab_size": engine.vocab_size}
        return {"model_path": settings.model_name, "is_generation": True, **lengths}

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        """Describes the server: its settings, its load, and the mean tokens per verification pass."""
        status = engine.status()
        or_none = lambda value: None if math.isnan(value) else value
        # SGLang's names where it has them.
        state = {
            "avg_spec_accept_length": or_none(status.accept_length),
            "num_running_reqs": status.num_running,
            "num_queue_reqs": status.num_waiting,
            "max_running_requests": status.num_slots,
            "token_usage": status.num_used_pages / status.num_pages if status.num_pages else 0.0,
            "accepted_per_level": list(status.accepted),
            "proposed_per_level": list(status.proposed),
            "num_rebalancings": status.num_rebalancings,
            "expert_imbalance": or_none(status.expert_imbalance[1]),
        }
        info = {"served_model_name": settings.model_name, "version": __version__, "context_length": engine.max_length}
        return {**settings.server_info, **info, "internal_states": [state]}

    @router.post("/flush_cache")
    async def flush_cache(request: Request) -> dict[str, Any]:
        """Forgets prefix pages that no request uses. Needs the admin key, if there is one."""
        check_admin(request, settings)
        check_origin(request)
        return {"success": True, "num_pages": engine.flush_cache()}

    @router.post("/abort_request", openapi_extra=schemas.request_body(ABORT, {}, []))
    async def abort_request(request: Request) -> dict[str, Any]:
        """Aborts the client's requests of an id, or all requests, which needs the admin key, if there is one."""
        values = (await read_body(server, request, "abort")).body  # also while the server stops
        if not values["rid"] and not values["abort_all"]:
            raise ApiError("give rid, or abort_all true", param="rid")
        if values["abort_all"]:
            check_admin(request, settings)
        if values["abort_all"]:
            return {"num_aborted": server.abort()}
        # A client names its own requests; the admin names anybody's.
        owner = None if request.scope.get("is_admin") else owner_of(request)
        return {"num_aborted": server.abort(values["rid"], owner)}

    @router.post("/tokenize", openapi_extra=schemas.request_body(TOKENIZE, {"prompt": _STRING}, ["prompt"]))
    async def tokenize(request: Request) -> Response:
        """Encodes a text (`prompt` or `text`) or a conversation (`messages`)."""
        return _json_response(await read_body(server, request, "tokenize"))

    @router.post("/detokenize", openapi_extra=schemas.request_body(DETOKENIZE, {"tokens": _IDS}, ["tokens"]))
    async def detokenize(request: Request) -> Response:
        """Decodes token ids."""
        return _json_response(await read_body(server, request, "detokenize"))

    return router


def _json_response(reading: Reading) -> Response:
    return Response(reading.texts[0], media_type="application/json")
