"""The routes that a benchmark can use, with functions that write a request for each route and read its events."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class BenchRequest:
    prompt: str | tuple[int, ...]
    max_new_tokens: int
    category: str = ""


class RequestFailedError(Exception):
    """The server answered a request with an error."""


@dataclasses.dataclass(frozen=True)
class Update:
    """One event of a stream. Counts are the request's totals so far, or None if the event does not contain them.

    Attributes:
        text: new text, or all text so far if the route's `text_is_cumulative`.
        num_new_tokens: tokens delivered.
        num_verify_steps: verification passes.
        accept_length: tokens per verification pass.
    """

    text: str = ""
    num_new_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_verify_steps: int | None = None
    accept_length: float | None = None


@dataclasses.dataclass(frozen=True)
class Backend:
    """A route.

    Attributes:
        path: path of its URL.
        write: makes the body. Takes the request, the model name, and whether to stream and to ignore end tokens.
        read: reads an event, or the whole answer if it was not streamed.
        text_is_cumulative: whether each event repeats the text of the events before it.
        accepts_tokens: whether a prompt may be token ids.
    """

    path: str
    write: Callable[[BenchRequest, str, bool, bool], dict[str, Any]]
    read: Callable[[dict[str, Any]], Update]
    text_is_cumulative: bool = False
    accepts_tokens: bool = True


def _write_generate(request: BenchRequest, model: str, stream: bool, ignore_eos: bool) -> dict[str, Any]:
    prompt = {"text": request.prompt} if isinstance(request.prompt, str) else {"input_ids": list(request.prompt)}
    sampling = {"temperature": 0.0, "max_new_tokens": request.max_new_tokens, "ignore_eos": ignore_eos}
    return {**prompt, "sampling_params": sampling, "stream": stream}


def _read_generate(event: dict[str, Any]) -> Update:
    meta = event.get("meta_info") or {}
    return Update(
        text=event.get("text") or "",
        num_new_tokens=meta.get("completion_tokens"),
        num_prompt_tokens=meta.get("prompt_tokens"),
        num_verify_steps=meta.get("spec_verify_ct"),
        accept_length=meta.get("spec_accept_length"),
    )


def _write_openai(request: BenchRequest, model: str, stream: bool, ignore_eos: bool) -> dict[str, Any]:
    """Writes the fields of both OpenAI routes."""
    body: dict[str, Any] = {"model": model, "temperature": 0.0, "stream": stream}
    # A chunk may contain several tokens, so counting chunks is not enough; request a token count in each.
    if stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    # OpenAI's API has no `ignore_eos`, so a server may reject it even if it is false.
    return {**body, "ignore_eos": True} if ignore_eos else body


def _write_completion(request: BenchRequest, *rest: Any) -> dict[str, Any]:
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    return {**_write_openai(request, *rest), "prompt": prompt, "max_tokens": request.max_new_tokens}


def _write_chat(request: BenchRequest, *rest: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": request.prompt}]
    return {**_write_openai(request, *rest), "messages": messages, "max_completion_tokens": request.max_new_tokens}


def _read_openai(event: dict[str, Any]) -> Update:
    # The last chunk has the usage and no choice. A chat has a "delta" in each chunk, or a "message" without streaming.
    choice = (event.get("choices") or [{}])[0]
    message = choice.get("delta") or choice.get("message") or {}
    text = choice.get("text") or (message.get("reasoning_content") or "") + (message.get("content") or "")
    usage = event.get("usage") or {}
    return Update(
        text=text, num_new_tokens=usage.get("completion_tokens"), num_prompt_tokens=usage.get("prompt_tokens")
    )


_GENERATE = Backend("/generate", _write_generate, _read_generate, text_is_cumulative=True)
_COMPLETIONS = Backend("/v1/completions", _write_completion, _read_openai)
_CHAT = Backend("/v1/chat/completions", _write_chat, _read_openai, accepts_tokens=False)
BACKENDS = {
    "mtpjax": _GENERATE,
    "sglang": _GENERATE,
    "openai": _COMPLETIONS,
    "vllm": _COMPLETIONS,
    "openai-chat": _CHAT,
}


def read_event(backend: Backend, event: Any) -> Update:
    """Reads an event, or a whole answer. Raises RequestFailedError if it reports an error or has a different format."""
    if not isinstance(event, dict):
        raise RequestFailedError("an event is not a JSON object")
    if event.get("error"):
        error = event["error"]
        raise RequestFailedError(str(error.get("message", error) if isinstance(error, dict) else error))
    try:
        return backend.read(event)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise RequestFailedError(f"an event does not have the format of {backend.path}") from error
