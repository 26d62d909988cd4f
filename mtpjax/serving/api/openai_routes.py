"""OpenAI's routes for models, completions and chats."""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mtpjax.serving.api import schemas
from mtpjax.serving.api.errors import unsupported
from mtpjax.serving.api.generation import Generation
from mtpjax.serving.api.http import client_of, owner_of
from mtpjax.serving.api.logprobs import TextOffsets, TokenScores, chat_logprobs, completion_logprobs, score_choice
from mtpjax.serving.api.options import read_openai
from mtpjax.serving.api.server import ApiServer, Reply
from mtpjax.serving.api.usage import speculation, usage
from mtpjax.serving.completion import Choice, Job, Update


class OpenAIReply(Reply):
    """Responses to completions and chats. A completion repeats its prompts if `texts` contains them."""

    def __init__(
        self, server: ApiServer, values: dict[str, Any], jobs: Sequence[Job], *, is_chat: bool, texts: tuple[str, ...]
    ):
        super().__init__(server, values, jobs, "chatcmpl" if is_chat else "cmpl")
        self._is_chat, self._prompt_texts = is_chat, texts
        self._created = int(time.time())

    async def _complete(self, generation: Generation) -> dict[str, Any]:
        choices = await generation.run()
        kind = "chat.completion" if self._is_chat else "text_completion"
        bodies = [await self._choice(choice) for choice in choices]
        return {**self._head(kind), "choices": bodies, **self._counts(choices)}

    async def _choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if choice.request.logprobs:
            num_top = self._values["top_logprobs"] if self._is_chat else self._values["logprobs"]
            scores = await score_choice(self._server.score, choice, num_top, with_prompt=bool(self._prompt_texts))
            logprobs = self._logprobs(scores, self._offsets(choice))
        if self._is_chat:
            content = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        else:
            content = {"text": self._prompt_text(choice) + choice.text}
        return {"index": choice.index, **content, "logprobs": logprobs, **self._reason(choice)}

    async def _events(self, generation: Generation) -> AsyncGenerator[Any, None]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        with_usage, is_continuous = self._values["include_usage"], self._values["continuous_usage_stats"]

        def chunk(content: dict[str, Any]) -> dict[str, Any]:
            counts = usage(generation.choices, self._values["n"]) if is_continuous else None
            return {**self._head(kind), "choices": [content], **({"usage": counts} if with_usage else {})}

        # Start with the role of each answer, or with the prompt.
        offsets = [self._offsets(choice) for choice in generation.choices]
        for choice in generation.choices:
            if self._is_chat:
                yield chunk(self._delta(choice, {"role": "assistant", "content": ""}))
            elif self._prompt_texts:
                yield chunk(self._delta(choice, {"text": self._prompt_text(choice)}))
        # Send a chunk once there is text, a log-probability or the end. Tokens whose text is held back wait until then.
        async for update in generation.updates():
            choice = update.choice
            if update.text or update.logprobs or choice.finish:
                content = {"content": update.text} if update.text or not choice.finish else {}
                fields = content if self._is_chat else {"text": update.text}
                yield chunk({**self._delta(choice, fields, update, offsets[choice.index]), **self._reason(choice)})
        if with_usage:
            yield {**self._head(kind), "choices": [], **self._counts(generation.choices)}
        yield "[DONE]"

    def _delta(
        self, choice: Choice, fields: dict[str, Any], update: Update | None = None, offsets: TextOffsets | None = None
    ) -> dict[str, Any]:
        """Makes the entry of `choices` in a chunk.

        With `return_draft_levels`, a choice with new text has `draft_levels`, which list the text of each token and the
        draft level that proposed it; level 0 means that the trunk drew the token.
        """
        logprobs = None
        if update is not None and update.logprobs and offsets is not None:
            logprobs = self._logprobs(TokenScores(update.tokens, update.logprobs), offsets)
        content = {"delta": fields} if self._is_chat else fields
        if update is not None and self._values["return_draft_levels"]:
            content = {**content, "draft_levels": [span._asdict() for span in update.spans]}
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": None}

    def _offsets(self, choice: Choice) -> TextOffsets:
        """Counts the characters before each token. With `echo`, the prompt is part of the text."""
        return TextOffsets(self._server.tokenizer, () if self._prompt_texts else choice.request.prompt)

    def _logprobs(self, scores: TokenScores, offsets: TextOffsets) -> dict[str, Any]:
        if self._is_chat:
            return chat_logprobs(self._server.tokenizer, scores)
        return completion_logprobs(self._server.tokenizer, scores, offsets)

    def _reason(self, choice: Choice) -> dict[str, Any]:
        """Returns why a text ended. As in vLLM, `stop_reason` is the request's stop string or token, if any."""
        matched = choice.stream.matched if choice.finish else None
        is_end_of_text = matched in self._server.tokenizer.eos_token_ids
        return {
            "finish_reason": choice.finish and choice.finish.reason,
            "stop_reason": None if is_end_of_text else matched,
        }

    def _prompt_text(self, choice: Choice) -> str:
        return self._prompt_texts[choice.index // self._values["n"]] if self._prompt_texts else ""

    def _head(self, kind: str) -> dict[str, Any]:
        model = self._values["model"] or self._server.settings.model_name
        head = {"id": self._id, "object": kind, "created": self._created, "model": model}
        return {**head, "system_fingerprint": self._server.fingerprint}

    def _counts(self, choices: Sequence[Choice]) -> dict[str, Any]:
        counts = {"usage": usage(choices, self._values["n"])}
        return {**counts, "metrics": {"speculative_decoding": speculation(choices)}}


def openai_router(server: ApiServer) -> APIRouter:
    router = APIRouter(prefix="/v1")
    settings, limits = server.settings, server.limits

    def model(name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": 0, "owned_by": "mtpjax"}
        return {**card, "root": settings.model_name, "max_model_len": server.engine.max_length}

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        """Lists the model."""
        names = [settings.model_name, *settings.model_aliases]
        return {"object": "list", "data": [model(name) for name in names]}

    @router.get("/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        """Describes the model."""
        server.check_model(name)
        return model(name)

    @router.post("/completions", openapi_extra=schemas.COMPLETION)
    async def complete(request: Request) -> Response:
        """Continues texts. With `return_draft_levels`, a stream reports the draft level of each token."""
        return await respond(request, "completion")

    @router.post("/chat/completions", openapi_extra=schemas.CHAT)
    async def chat(request: Request) -> Response:
        """Answers a conversation. With `return_draft_levels`, a stream reports the draft level of each token."""
        return await respond(request, "chat")

    async def respond(request: Request, kind: str) -> Response:
        is_chat = kind == "chat"
        reading = await server.read_body(request, kind)
        values, options = read_openai(reading.body, limits, is_chat=is_chat)
        server.check_model(values["model"])
        _check_stream(values, "top_logprobs" if is_chat else "logprobs")
        grammar = await server.compile_grammar(options.grammar, client_of(request))
        # Only requests with the same key and salt share prefix pages.
        salt = owner_of(request) + (values["cache_salt"] or "").encode()
        jobs = options.jobs(reading.prompts, limits, salt=salt, param=reading.param, grammar=grammar)
        return await OpenAIReply(server, values, jobs, is_chat=is_chat, texts=reading.texts).respond(request)

    return router


def _check_stream(values: dict[str, Any], param: str) -> None:
    """Rejects log-probabilities that need an additional pass over the whole text, which a stream does not support."""
    if not values["stream"]:
        return
    if values[param]:
        raise unsupported(f"streams do not support alternatives: set {param} to 0 or stream to false", param)
    if values.get("echo") and values["logprobs"] is not None:
        raise unsupported("streams do not support prompt log-probabilities: set echo or stream to false", "echo")
