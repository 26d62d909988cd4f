"""SGLang's route `/generate`."""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mtpjax.serving.api import schemas
from mtpjax.serving.api.generation import Generation
from mtpjax.serving.api.http import client_of, owner_of
from mtpjax.serving.api.options import read_generate
from mtpjax.serving.api.server import ApiServer, Reply
from mtpjax.serving.api.usage import meta_info
from mtpjax.serving.completion import Choice, Job


class GenerateReply(Reply):
    """Responses to `/generate`. They are lists if `is_list`, because the request has several prompts or choices."""

    def __init__(self, server: ApiServer, values: dict[str, Any], jobs: Sequence[Job], *, is_list: bool):
        super().__init__(server, values, jobs, "gen")
        self._is_list = is_list

    async def _complete(self, generation: Generation) -> Any:
        bodies = [self._body(choice, generation) for choice in await generation.run()]
        return bodies if self._is_list else bodies[0]

    async def _events(self, generation: Generation) -> AsyncGenerator[Any, None]:
        async for update in generation.updates():
            # Each event contains the whole text so far.
            if update.tokens or update.choice.finish:
                body = self._body(update.choice, generation)
                yield {**body, "index": update.choice.index} if self._is_list else body
        yield "[DONE]"

    def _body(self, choice: Choice, generation: Generation) -> dict[str, Any]:
        seconds = time.monotonic() - generation.started
        info = meta_info(self._id, choice, seconds, self._server.settings.model_name)
        body = {"text": choice.text, "meta_info": info}
        # The lists of tokens are sent only at the end, because sending them in every event would take quadratic time.
        if choice.finish:
            body["output_ids"] = choice.tokens
            if choice.request.logprobs:
                rows = zip(choice.logprobs, choice.tokens, strict=True)
                info["output_token_logprobs"] = [[logprob, token, None] for logprob, token in rows]
        return body


def generate_router(server: ApiServer) -> APIRouter:
    router, limits = APIRouter(), server.limits

    @router.post("/generate", openapi_extra=schemas.GENERATE)
    async def generate(request: Request) -> Response:
        """Continues texts. In a stream, each event contains the whole text so far."""
        reading = await server.read_body(request, "generate")
        values, options = read_generate(reading.body, limits)
        grammar, salt = await server.compile_grammar(options.grammar, client_of(request)), owner_of(request)
        jobs = options.jobs(reading.prompts, limits, salt=salt, param=reading.param, grammar=grammar)
        return await GenerateReply(server, values, jobs, is_list=reading.is_batch or len(jobs) > 1).respond(request)

    return router
