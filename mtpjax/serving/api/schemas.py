"""JSON schemas of the request bodies, for `/openapi.json`."""

from collections.abc import Mapping, Sequence
from typing import Any

from mtpjax.serving.api import option_tables as tables
from mtpjax.serving.api.errors import MAX_INTEGER, Field
from mtpjax.serving.api.grammars import RESPONSE_FORMATS
from mtpjax.serving.api.prompts import MAX_MESSAGES, MAX_PROMPTS, ROLES

_TEXT = {"type": "string", "minLength": 1}
_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER}}
_STOP = {"type": "string", "minLength": 1, "maxLength": tables.MAX_STOP_BYTES}


def _list_of(items: dict[str, Any], max_items: int) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "maxItems": max_items, "items": items}


_SCHEMA = {"type": ["object", "string", "null"]}
_REGEX = {"type": ["string", "null"]}
# Fields that all bodies have, in addition to the fields in the tables.
_COMMON = {
    "response_format": {
        "type": ["object", "null"],
        "required": ["type"],
        "properties": {"type": {"enum": list(RESPONSE_FORMATS)}, "json_schema": {"type": "object"}},
    },
    **{"json_schema": _SCHEMA, "guided_json": _SCHEMA, "regex": _REGEX, "guided_regex": _REGEX},
    "structured_outputs": {"type": ["object", "null"], "properties": {"json": _SCHEMA, "regex": _REGEX}},
    "stop": {"anyOf": [_STOP, _list_of(_STOP, tables.MAX_STOP_STRINGS), {"type": "null"}]},
    "stop_token_ids": {**_TOKENS, "minItems": 0, "type": ["array", "null"], "maxItems": tables.MAX_STOP_TOKENS},
    "logit_bias": {
        "type": ["object", "null"],
        "maxProperties": tables.MAX_BIASES,
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],  # answers may have no content
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, _list_of(_PART, MAX_MESSAGES), {"type": "null"}]},
        "name": {"type": "string"},
        "reasoning_content": {"type": ["string", "null"]},
        "tool_calls": {"anyOf": [_list_of({"type": "object"}, MAX_MESSAGES), {"type": "null"}]},
        "tool_call_id": {"type": ["string", "null"]},
    },
}


def request_body(
    fields: Mapping[str, Field], extra: Mapping[str, Any], required: Sequence[str], *, one_of: Sequence[str] = ()
) -> dict[str, Any]:
    """Describes a route for FastAPI's `openapi_extra`; the body must have exactly one field of `one_of`."""
    schema = {**_object(fields, extra), "type": "object"}
    if required:
        schema["required"] = list(required)
    if one_of:
        schema["oneOf"] = [{"required": [name]} for name in one_of]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _object(fields: Mapping[str, Field], extra: Mapping[str, Any]) -> dict[str, Any]:
    properties = {name: field.schema for name, field in fields.items()}
    return {"type": ["object", "null"], "properties": {**properties, **extra}}


_PROMPTS = [_TEXT, _TOKENS, *(_list_of(each, MAX_PROMPTS) for each in (_TEXT, _TOKENS))]
_STREAM = {"stream_options": _object(tables.STREAM_OPTIONS, {})}
_SCALAR = {"type": ["string", "number", "boolean"]}
COMPLETION = request_body(tables.COMPLETION, {"prompt": {"anyOf": _PROMPTS}, **_COMMON, **_STREAM}, ["prompt"])
CHAT = request_body(
    tables.CHAT,
    {
        "messages": _list_of(_MESSAGE, MAX_MESSAGES),
        "chat_template_kwargs": {"type": ["object", "null"], "additionalProperties": _SCALAR},
        **_COMMON,
        **_STREAM,
    },
    ["messages"],
)
GENERATE = request_body(
    tables.GENERATE,
    {
        "text": {"anyOf": [_TEXT, _list_of(_TEXT, MAX_PROMPTS), {"type": "null"}]},
        "input_ids": {"anyOf": [_TOKENS, _list_of(_TOKENS, MAX_PROMPTS), {"type": "null"}]},
        "sampling_params": _object(tables.GENERATE_SAMPLING, _COMMON),
    },
    [],
    one_of=("text", "input_ids"),
)
_ERROR_FIELDS = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": {"type": ["string", "null"]},
    "code": {"type": ["string", "null"]},
}
_ERROR = {"type": "object", "required": list(_ERROR_FIELDS), "properties": _ERROR_FIELDS}
_ERROR_RESPONSE = {
    "description": "An error, in OpenAI's form",
    "content": {
        "application/json": {"schema": {"type": "object", "required": ["error"], "properties": {"error": _ERROR}}}
    },
}
# For all routes.
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": _ERROR_RESPONSE, "5XX": _ERROR_RESPONSE}
