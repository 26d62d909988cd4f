"""The prefill server's route for decode servers."""

import asyncio
import logging

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.datastructures import Headers

from mtpjax.serving.api.errors import ApiError
from mtpjax.serving.api.generation import Generation, new_id
from mtpjax.serving.api.http import read_bytes, run_while_connected
from mtpjax.serving.api.server import ApiServer
from mtpjax.serving.completion import Job
from mtpjax.serving.disaggregation import protocol
from mtpjax.serving.disaggregation.protocol import PATH, Forged, Signer
from mtpjax.serving.disaggregation.transfer import Transfer
from mtpjax.serving.page_exchange import PageExchange
from mtpjax.serving.request import Request as EngineRequest

REQUEST = {"model": bytes, "tokens": bytes, "salt": bytes, "num_known": int}
_log = logging.getLogger(__name__)


def prefill_router(
    server: ApiServer, exchange: PageExchange, signer: Signer, model: bytes, transfer: Transfer
) -> APIRouter:
    """Makes the route. It serves decode servers whose `PageExchange.digest` equals `model`."""
    router = APIRouter()

    @router.post(PATH, response_class=Response, include_in_schema=False)
    async def prefill(request: Request) -> Response:
        """Computes the full pages of a prompt, and offers those that the decode server lacks."""
        # 1. Check the sender, before anything parses the body.
        max_bytes = 4 * exchange.max_length + protocol.MESSAGE_BYTES
        body = await read_bytes(request, max_bytes, server.settings.body_timeout)
        try:
            signer.check(request.headers, body)
        except Forged as error:
            _log.warning("a prefill request was rejected: %s", error)
            raise ApiError("only decode servers may send this request", status=403, code="forbidden") from error
        # 2. Read the request.
        try:
            values = protocol.unpack(body, REQUEST)
            tokens = np.frombuffer(values["tokens"], "<i4").tolist()
        except ValueError as error:
            raise ApiError(str(error)) from error
        if values["model"] != model:
            message = "the servers differ in their model, --page-size, --kv-cache-dtype or draft settings"
            raise ApiError(message, status=409, code="other_model")
        # 3. Compute the missing pages by prefill, which also generates one unused token.
        salt = values["salt"]

        async def compute() -> None:
            known = await asyncio.to_thread(exchange.count_known, tokens[:-1], salt)
            if known < (len(tokens) - 1) // exchange.page_size:
                job = Job(EngineRequest(prompt=tuple(tokens), max_new_tokens=1, salt=salt))
                with Generation(server.client, [job], new_id("prefill")) as generation:
                    await generation.run()

        await run_while_connected(request, compute())
        # 4. Offer them.
        return await asyncio.to_thread(offer, request.headers, tokens, salt, values["num_known"])

    def offer(headers: Headers, tokens: list[int], salt: bytes, num_known: int) -> Response:
        pages = [entries for _, entries in exchange.read(tokens[:-1], salt)[max(num_known, 0) :]]
        data = protocol.pages_to_bytes(pages)
        checksum = protocol.checksum(data)
        answer = protocol.pack({"size": len(data), "checksum": checksum, **transfer.send(data)})
        return Response(answer, headers=signer.sign_answer(headers, answer))

    return router
