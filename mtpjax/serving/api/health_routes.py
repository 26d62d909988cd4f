"""Routes that report whether the server works, accepts requests, and receives results from the device."""

import asyncio
import contextlib
import time

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mtpjax.decoding.config import SamplingParams
from mtpjax.serving.api.errors import ApiError, shutting_down
from mtpjax.serving.api.generation import Generation, new_id
from mtpjax.serving.api.http import run_while_connected
from mtpjax.serving.api.server import ApiServer
from mtpjax.serving.completion import Job
from mtpjax.serving.request import QueueFull
from mtpjax.serving.request import Request as EngineRequest

HEALTH_SECONDS = 20.0  # time limit for a device that has work to return a result, as in SGLang
IDLE_HEALTH_SECONDS = 20.0  # time limit for the token that `/health_generate` requests


def health_router(server: ApiServer) -> APIRouter:
    router, engine = APIRouter(), server.engine

    def check_health() -> None:
        if failure := engine.failure:
            raise ApiError(failure, status=503, code="unhealthy")

    @router.get("/health", response_class=Response)
    @router.get("/ping", response_class=Response)
    async def health() -> Response:
        """Returns 200 while the engine works."""
        check_health()
        return Response()

    @router.get("/ready", response_class=Response)
    async def ready() -> Response:
        """Returns 200 while the server accepts new requests."""
        check_health()
        if server.client.is_stopping:
            raise shutting_down()
        return Response()

    def check_progress() -> None:
        if (seconds := time.monotonic() - engine.progress_at) > HEALTH_SECONDS:
            raise ApiError(f"the device has not answered for {seconds:.0f} s", status=503, code="unhealthy")

    @router.get("/health_generate", response_class=Response)
    async def health_generate(request: Request) -> Response:
        """Returns 200 if the device has answered recently or, when no request is running, generates a token."""
        check_health()
        status = engine.status()
        if status.num_running or status.num_waiting:
            # A new token would wait for the running requests, and their progress already shows that the device works.
            check_progress()
            return Response()
        job = Job(EngineRequest(prompt=(0,), max_new_tokens=1, sampling=SamplingParams()))

        async def make_token() -> None:
            with Generation(server.client, [job], new_id("health")) as generation:
                await generation.run()

        # Other requests may be ahead in the queue.
        with contextlib.suppress(TimeoutError, QueueFull):
            async with asyncio.timeout(IDLE_HEALTH_SECONDS):
                await run_while_connected(request, make_token())
                return Response()
        check_progress()
        return Response()

    return router
