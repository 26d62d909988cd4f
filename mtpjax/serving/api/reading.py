"""Reads and checks request bodies, which is all the work that grows with the size of a body.

A `BodyReader` runs in a separate process (`readers`), and returns a `Reading` of limited size.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping

from mtpjax.data.tokenizer import Tokenizer
from mtpjax.serving.api import option_tables as tables
from mtpjax.serving.api.errors import (
    ApiError,
    Body,
    Field,
    check_list,
    check_text,
    check_tokens,
    parse_body,
    read_fields,
    require,
)
from mtpjax.serving.api.options import Options, read_generate, read_openai, reject_unknown, reject_unsupported
from mtpjax.serving.api.prompts import encode_text, read_chat, read_prompts
from mtpjax.serving.api.reading_result import Reading
from mtpjax.serving.api.settings import Limits

MAX_VALUES = 1 << 17  # JSON values in a body, excluding the token ids of prompts
MAX_OPTION_BYTES = 1 << 18  # JSON in a body, excluding prompts, messages and tools; a grammar may have 64 kB
# Fields that the event loop does not need; they have separate limits.
_PROMPT_FIELDS = ("prompt", "text", "input_ids", "tokens")
_READ_FIELDS = (*_PROMPT_FIELDS, "messages", "tools", "chat_template_kwargs")


@dataclasses.dataclass(frozen=True)
class BodyReader:
    """Reads bodies. The same body gives the same result in every process."""

    tokenizer: Tokenizer
    limits: Limits
    strict_fields: bool

    def read(self, kind: str, raw: bytes) -> Reading:
        """Reads a body whose `kind` is a key of `KINDS`. Raises ApiError."""
        body = parse_body(raw)
        _check_values(body)
        fields, read = KINDS[kind]
        reject_unsupported(body, fields)
        if self.strict_fields:
            reject_unknown(body, fields)
        return read(self, body)

    def _chat(self, body: Body) -> Reading:
        values, options = read_openai(body, self.limits, is_chat=True)
        prompt = read_chat(self.tokenizer, body, self.limits, add_generation_prompt=values["add_generation_prompt"])
        return self._reading(body, options, [prompt], "messages")

    def _completion(self, body: Body) -> Reading:
        values, options = read_openai(body, self.limits, is_chat=False)
        special = values["add_special_tokens"]
        prompts = read_prompts(self.tokenizer, body.get("prompt"), "prompt", self.limits, add_special_tokens=special)
        reading = self._reading(body, options, prompts, "prompt")
        # With `echo`, the response starts with the prompt's text, even if the prompt was given as token ids.
        texts = [self._decode(prompt, "prompt") for prompt in prompts] if values["echo"] else []
        return dataclasses.replace(reading, texts=tuple(texts))

    def _generate(self, body: Body) -> Reading:
        values, options = read_generate(body, self.limits)
        given = [name for name in ("text", "input_ids") if body.get(name) is not None]
        require(len(given) == 1, "exactly one of text and input_ids is required", param="text")
        param, value = given[0], body[given[0]]
        special = values["add_special_tokens"]
        prompts = read_prompts(self.tokenizer, value, param, self.limits, add_special_tokens=special)
        is_batch = isinstance(value, list) and isinstance(value[0], str | list)
        return dataclasses.replace(self._reading(body, options, prompts, param), is_batch=is_batch)

    def _tokenize(self, body: Body) -> Reading:
        values = read_fields(tables.TOKENIZE, body)
        if body.get("messages") is not None:
            begins_answer = values["add_generation_prompt"]
            tokens = read_chat(self.tokenizer, body, self.limits, add_generation_prompt=begins_answer)
        else:
            # An error names the field that the client used.
            param = "text" if body.get("prompt") is None and "text" in body else "prompt"
            text = check_text(body.get(param), param, self.limits.max_prompt_characters)
            tokens = encode_text(self.tokenizer, text, param, add_special_tokens=values["add_special_tokens"])
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": self.limits.max_length}
        return Reading({}, texts=(json.dumps(answer),))

    def _detokenize(self, body: Body) -> Reading:
        read_fields(tables.DETOKENIZE, body)
        tokens = check_list(body.get("tokens"), "tokens", self.limits.max_length)
        text = self._decode(check_tokens(tokens, "tokens", self.limits.vocab_size), "tokens")
        return Reading({}, texts=(json.dumps({"text": text, "prompt": text}),))

    def _abort(self, body: Body) -> Reading:
        return Reading(read_fields(tables.ABORT, body))

    def _decode(self, tokens: list[int], param: str) -> str:
        try:
            return self.tokenizer.decode(tokens)
        except ValueError as error:
            raise ApiError(str(error), param=param) from error

    def _reading(self, body: Body, options: Options, prompts: list[list[int]], param: str) -> Reading:
        """Checks the lengths of the texts, and keeps the other fields."""
        tuples = tuple(tuple(prompt) for prompt in prompts)
        options.jobs(tuples, self.limits, salt=b"", param=param)
        rest = {name: value for name, value in body.items() if name not in _READ_FIELDS}
        size = len(json.dumps(rest))
        if size > MAX_OPTION_BYTES:
            message = f"the fields other than {param} have {size} bytes of JSON; at most {MAX_OPTION_BYTES} are allowed"
            raise ApiError(message, code="request_too_large")
        return Reading(rest, tuples, param=param)


KINDS: dict[str, tuple[Mapping[str, Field], Callable[[BodyReader, Body], Reading]]] = {
    "chat": (tables.CHAT, BodyReader._chat),
    "completion": (tables.COMPLETION, BodyReader._completion),
    "generate": (tables.GENERATE, BodyReader._generate),
    "tokenize": (tables.TOKENIZE, BodyReader._tokenize),
    "detokenize": (tables.DETOKENIZE, BodyReader._detokenize),
    "abort": (tables.ABORT, BodyReader._abort),
}


def _check_values(body: Body) -> None:
    """Limits the values in a body, excluding prompts, because lists of token ids are checked in a few passes."""
    num_values, open_values = 0, [{name: value for name, value in body.items() if name not in _PROMPT_FIELDS}]
    while open_values:
        value = open_values.pop()
        num_values += len(value)
        if num_values > MAX_VALUES:
            message = f"the body has more than {MAX_VALUES} JSON values in addition to its prompt"
            raise ApiError(message, code="request_too_large")
        inner = value.values() if isinstance(value, dict) else value
        open_values += [each for each in inner if isinstance(each, dict | list)]
