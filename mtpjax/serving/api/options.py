"""Checks the options of generation requests, and makes the engine's requests."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mtpjax.decoding.config import SamplingParams
from mtpjax.messages import count_of
from mtpjax.serving.api import option_tables as tables
from mtpjax.serving.api.errors import (
    MAX_INTEGER,
    ApiError,
    Body,
    Field,
    check_list,
    check_text,
    check_token,
    check_tokens,
    read_fields,
    require,
    unsupported,
)
from mtpjax.serving.api.grammars import GrammarField, read_grammar
from mtpjax.serving.api.settings import Limits
from mtpjax.serving.completion import Job
from mtpjax.serving.matcher import Grammar
from mtpjax.serving.request import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The generation options of a request.

    Attributes:
        max_new_tokens: maximum number of new tokens; None means as many as fit.
        is_explicit: whether the request sets `max_new_tokens`, so that all of them must fit.
        sampling: the sampling parameters, without a seed.
        seed: seed of the first choice; each further choice adds 1.
        stop: stop strings.
        stop_token_ids: tokens that end the text, including the model's end tokens.
        num_choices: texts per prompt.
    """

    max_new_tokens: int | None
    is_explicit: bool
    sampling: SamplingParams
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    num_choices: int
    logprobs: bool
    speculative: bool
    grammar: GrammarField | None

    def jobs(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Limits,
        *,
        salt: bytes,
        param: str,
        grammar: Grammar | None = None,
    ) -> list[Job]:
        """Makes the engine's requests, grouped by prompt.

        Args:
            prompts: token ids.
            limits: limits of the model and the server.
            salt: only requests with the same salt share pages.
            param: name of the field with the prompts, for messages.
            grammar: the compiled grammar.

        Raises:
            ApiError: a text would be too long, or there are too many texts.
        """
        num_texts = len(prompts) * self.num_choices
        texts = f"{count_of(num_texts, 'text')} ({count_of(len(prompts), 'prompt')}, n {self.num_choices})"
        if num_texts > limits.max_requests:
            raise ApiError(f"a request is limited to {count_of(limits.max_requests, 'text')}, got {texts}", param="n")
        # Such a request would never fit into the queue.
        if num_texts > limits.max_queued:
            message = f"the request has {texts}, but the server holds at most {limits.max_queued} at once; send fewer"
            raise ApiError(message, param=param if len(prompts) > 1 else "n", code="batch_too_large")
        # Each choice is a separate engine request, whose seed is one higher than the previous choice's.
        jobs = []
        for prompt in prompts:
            length = self._new_tokens(len(prompt), limits.max_length, param)
            for index in range(self.num_choices):
                request = Request(
                    prompt=tuple(prompt),
                    max_new_tokens=length,
                    sampling=dataclasses.replace(self.sampling, seed=(self.seed + index) % 2**64),
                    stop_token_ids=self.stop_token_ids,
                    logprobs=self.logprobs,
                    speculative=self.speculative,
                    grammar=grammar,
                    salt=salt,
                )
                jobs.append(Job(request, self.stop))
        return jobs

    def _new_tokens(self, num_prompt_tokens: int, max_length: int, param: str) -> int:
        require(num_prompt_tokens, f"{param} is empty", param=param)
        left = max_length - num_prompt_tokens
        wanted = self.max_new_tokens or max(left, 1)
        if left < 1 or (self.is_explicit and wanted > left):
            message = (
                f"the prompt has {count_of(num_prompt_tokens, 'token')} and max_tokens is {wanted}, together "
                f"{num_prompt_tokens + wanted}; a text may have at most {max_length} tokens"
            )
            raise ApiError(message, param=param, code="context_length_exceeded")
        return min(wanted, left)


def read_openai(body: Body, limits: Limits, *, is_chat: bool) -> tuple[dict[str, Any], Options]:
    """Checks the options of OpenAI's completions or chats. Returns field values and options; raises ApiError."""
    values = read_fields(tables.CHAT if is_chat else tables.COMPLETION, body)
    if is_chat:
        if values["top_logprobs"] and not values["logprobs"]:
            raise ApiError("top_logprobs requires logprobs to be true", param="top_logprobs")
    elif values["best_of"] not in (None, values["n"]):
        raise ApiError(f"best_of must equal n ({values['n']}), got {values['best_of']}", param="best_of")
    stream_options = _object(body, "stream_options")
    if stream_options and not values["stream"]:
        raise ApiError("stream_options requires stream to be true", param="stream_options")
    if values["return_draft_levels"] and not values["stream"]:
        raise ApiError("return_draft_levels requires stream to be true", param="return_draft_levels")
    values |= read_fields(tables.STREAM_OPTIONS, stream_options, "stream_options.")
    # Chats have the newer `max_completion_tokens`, and no default limit.
    length = values["max_tokens"]
    if is_chat:
        length = values["max_completion_tokens"] or length
    default = None if is_chat else tables.DEFAULT_COMPLETION_TOKENS
    return values, Options(
        max_new_tokens=length or default,
        is_explicit=length is not None,
        seed=_seed(values["seed"]),
        logprobs=bool(values["logprobs"]) if is_chat else values["logprobs"] is not None,
        grammar=read_grammar((body, "")),
        **_shared_options(body, values, limits, length=length or default, min_tokens="min_tokens"),
    )


def read_generate(body: Body, limits: Limits) -> tuple[dict[str, Any], Options]:
    """Checks the options of SGLang's `/generate`. Returns field values and options; raises ApiError."""
    values, prefix = read_fields(tables.GENERATE, body), "sampling_params."
    sampling = _object(body, "sampling_params")
    reject_unsupported(sampling, tables.GENERATE_SAMPLING, prefix)
    values |= read_fields(tables.GENERATE_SAMPLING, sampling, prefix)
    length = values["max_new_tokens"]
    return values, Options(
        max_new_tokens=length,
        is_explicit=sampling.get("max_new_tokens") is not None,
        seed=_seed(values["sampling_seed"]),
        logprobs=values["return_logprob"],
        grammar=read_grammar((body, ""), (sampling, prefix)),
        **_shared_options(sampling, values, limits, length=length, min_tokens="min_new_tokens", prefix=prefix),
    )


def reject_unsupported(body: Body, fields: Mapping[str, Field], prefix: str = "") -> None:
    """Raises ApiError if a body has an unsupported option that would change the text."""
    for name, harmless in sorted(tables.UNSUPPORTED.items()):
        value = body.get(name)
        if name in fields or value is None or value in harmless:
            continue
        advice = ""
        if name == "tools" and "messages" in body:
            # The template can show tools to the model, but the server does not parse tool calls in answers.
            if body.get("tool_choice") == "none":
                continue
            advice = ", because tool calls are not parsed; tool_choice none only shows the tools to the model"
        elif name in ("enable_thinking", "thinking"):
            advice = ": set it in chat_template_kwargs"  # template variables are set elsewhere
        raise unsupported(f"{prefix}{name} is not supported{advice}", prefix + name)


def reject_unknown(body: Body, fields: Mapping[str, Field]) -> None:
    for name in body:
        if name not in fields and name not in tables.STRUCTURED and name not in tables.UNSUPPORTED:
            raise ApiError(f"unknown field {name[:64]}", param=name[:64], code="unknown_field")


def _shared_options(
    body: Body, values: dict[str, Any], limits: Limits, *, length: int | None, min_tokens: str, prefix: str = ""
) -> dict[str, Any]:
    """Returns the fields of `Options` that have the same names in all routes, except `min_tokens`."""
    if values[min_tokens] > (length or MAX_INTEGER):
        message = f"{prefix}{min_tokens} is {values[min_tokens]}, above the limit of {length} new tokens"
        raise ApiError(message, param=prefix + min_tokens)
    # A temperature so low that float32 logits would overflow counts as greedy.
    temperature, top_k = values["temperature"], values["top_k"]
    sampling = SamplingParams(
        temperature=temperature if temperature >= tables.GREEDY_TEMPERATURE else 0.0,
        # A `top_k` of at least the vocabulary size allows all tokens, as 0 does.
        top_k=top_k if 0 < top_k < limits.vocab_size else 0,
        **{name: values[name] for name in tables.SAME_NAMES},
        min_new_tokens=values[min_tokens],
        logit_bias=_logit_bias(_object(body, "logit_bias", prefix), limits.vocab_size, f"{prefix}logit_bias"),
    )
    # The model's end tokens count as stop tokens, unless the request ignores them.
    stop_ids_param = f"{prefix}stop_token_ids"
    stop_ids = check_list(_or(body.get("stop_token_ids"), []), stop_ids_param, tables.MAX_STOP_TOKENS)
    stop_ids = check_tokens(stop_ids, stop_ids_param, limits.vocab_size)
    ends = () if values["ignore_eos"] else limits.eos_token_ids
    stop_ids = tuple(dict.fromkeys([*ends, *stop_ids]))
    if len(stop_ids) > tables.MAX_STOP_TOKENS:
        message = f"{stop_ids_param} and the model's {len(ends)} end tokens are more than {tables.MAX_STOP_TOKENS}"
        raise ApiError(message, param=stop_ids_param)
    return {
        "sampling": sampling,
        "stop": _stop_strings(body.get("stop"), f"{prefix}stop"),
        "stop_token_ids": stop_ids,
        "num_choices": values["n"],
        "speculative": values["speculative"],
    }


def _seed(value: int | None) -> int:
    return _or(value, int.from_bytes(os.urandom(8))) % 2**64


def _stop_strings(value: Any, param: str) -> tuple[str, ...]:
    strings = check_list([value] if isinstance(value, str) else _or(value, []), param, tables.MAX_STOP_STRINGS)
    for string in strings:
        if not 1 <= len(check_text(string, param, tables.MAX_STOP_BYTES).encode()) <= tables.MAX_STOP_BYTES:
            raise ApiError(f"{param}: a stop string must have 1 to {tables.MAX_STOP_BYTES} bytes", param=param)
    return tuple(dict.fromkeys(strings))


def _logit_bias(bias: Body, vocab_size: int, param: str) -> dict[int, float] | None:
    if len(bias) > tables.MAX_BIASES:
        raise ApiError(f"{param} has {len(bias)} entries; at most {tables.MAX_BIASES} are allowed", param=param)
    checked = {}
    for name, value in bias.items():
        # JSON keys are strings.
        is_number = name.isascii() and name.removeprefix("-").isdigit() and len(name) < 20
        token = check_token(int(name) if is_number else name, param, vocab_size)
        checked[token] = tables.BIAS.check(value, param)
    return checked or None


def _object(body: Body, name: str, prefix: str = "") -> dict[str, Any]:
    value = _or(body.get(name), {})
    require(isinstance(value, dict), f"{prefix}{name} must be an object", param=prefix + name)
    return value


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
