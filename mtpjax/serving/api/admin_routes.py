"""Routes for the server's settings, the cache, aborts and tokenization."""

import math
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mtpjax.serving.api import schemas
from mtpjax.serving.api.errors import require
from mtpjax.serving.api.http import check_admin, check_origin, owner_of
from mtpjax.serving.api.option_tables import ABORT, DETOKENIZE, TOKENIZE
from mtpjax.serving.api.server import ApiServer
from mtpjax.version import __version__

_STRING = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def admin_router(server: ApiServer) -> APIRouter:
    router = APIRouter()
    settings, engine = server.settings, server.engine

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        """Describes the model."""
        lengths = {"max_model_len": engine.max_length, "vocab_size": engine.vocab_size}
        return {"model_path": settings.model_name, "is_generation": True, **lengths}

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        """Returns the server's settings, its load, and the mean number of tokens per verification pass."""
        status = engine.status()
        or_none = lambda value: None if math.isnan(value) else value
        # SGLang's names where it has them.
        state = {
            "avg_spec_accept_length": or_none(status.accept_length),
            "num_running_reqs": status.num_running,
            "num_queue_reqs": status.num_waiting,
            "max_running_requests": status.num_slots,
            "token_usage": status.token_usage,
            "accepted_per_level": list(status.accepted),
            "proposed_per_level": list(status.proposed),
            "num_rebalancings": status.num_rebalancings,
            "expert_imbalance": or_none(status.imbalance_after),
        }
        info = {"served_model_name": settings.model_name, "version": __version__, "context_length": engine.max_length}
        return {**settings.server_info, **info, "internal_states": [state]}

    @router.post("/flush_cache")
    async def flush_cache(request: Request) -> dict[str, Any]:
        """Drops unused prefix pages. Needs the admin key if there is one."""
        check_admin(request, settings)
        check_origin(request)
        return {"success": True, "num_pages": engine.flush_cache()}

    @router.post("/abort_request", openapi_extra=schemas.request_body(ABORT, {}, []))
    async def abort_request(request: Request) -> dict[str, Any]:
        """Aborts the client's request `rid`. `abort_all` aborts all, and needs the admin key if there is one."""
        values = (await server.read_body(request, "abort")).body  # also accepted while the server is stopping
        if values["abort_all"]:
            check_admin(request, settings)
            return {"num_aborted": server.client.abort()}
        require(values["rid"], "rid is missing: set it, or set abort_all to true", param="rid")
        # A client may abort its own requests; the admin may abort any.
        owner = None if request.scope.get("is_admin") else owner_of(request)
        return {"num_aborted": server.client.abort(values["rid"], owner)}

    @router.post("/tokenize", openapi_extra=schemas.request_body(TOKENIZE, {"prompt": _STRING}, ["prompt"]))
    async def tokenize(request: Request) -> Response:
        """Encodes a text (`prompt` or `text`) or a conversation (`messages`)."""
        return await respond(request, "tokenize")

    @router.post("/detokenize", openapi_extra=schemas.request_body(DETOKENIZE, {"tokens": _IDS}, ["tokens"]))
    async def detokenize(request: Request) -> Response:
        """Decodes token ids."""
        return await respond(request, "detokenize")

    async def respond(request: Request, kind: str) -> Response:
        return Response((await server.read_body(request, kind)).texts[0], media_type="application/json")

    return router
