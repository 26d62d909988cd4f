"""Reads the grammar of a request, under the field names of OpenAI, SGLang and vLLM."""

import dataclasses
import json
from typing import Any

from mtpjax.serving.api.errors import ApiError, Body, check_text, require, unsupported
from mtpjax.serving.grammar import MAX_GRAMMAR_BYTES, GrammarKind

ANY_JSON = "$$ANY$$"  # SGLang's schema for any JSON value
RESPONSE_FORMATS = ("text", "json_object", "json_schema")


@dataclasses.dataclass(frozen=True)
class GrammarField:
    """A grammar that has not been compiled yet, and the name of its field, for messages."""

    kind: GrammarKind
    source: str
    param: str


def read_grammar(*bodies: tuple[Body, str]) -> GrammarField | None:
    """Reads the grammar of a request. Returns None if no field sets one.

    Args:
        *bodies: JSON objects whose fields may set a grammar, each with the prefix for its field names in messages.

    Raises:
        ApiError: a value is invalid, or there are several grammars.
    """
    # The three APIs use different fields for a grammar, so find all that are set, and allow only one.
    found = [
        grammar
        for body, prefix in bodies
        for name, read in _READERS.items()
        if body.get(name) is not None and (grammar := read(body[name], prefix + name)) is not None
    ]
    if len(found) > 1:
        raise ApiError(f"{found[0].param} and {found[1].param} cannot be combined", param=found[1].param)
    return found[0] if found else None


def _read_schema(value: Any, param: str) -> GrammarField:
    """Reads a JSON schema, given as an object, true, or JSON text."""
    if value == ANY_JSON or value is True:
        value = "true"
    elif isinstance(value, dict):
        value = json.dumps(value)
    return GrammarField("json_schema", check_text(value, param, MAX_GRAMMAR_BYTES), param)


def _read_regex(value: Any, param: str) -> GrammarField:
    return GrammarField("regex", check_text(value, param, MAX_GRAMMAR_BYTES), param)


def _read_response_format(value: Any, param: str) -> GrammarField | None:
    """Reads OpenAI's `{"type": "json_schema", "json_schema": {"schema": ...}}`, or one of the other types."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in RESPONSE_FORMATS:
        raise unsupported(f"{param}.type must be one of {', '.join(RESPONSE_FORMATS)}", param)
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarField("json_schema", '{"type": "object"}', param)
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    require(schema is not None, f"{param}.json_schema.schema is missing", param=f"{param}.json_schema.schema")
    return _read_schema(schema, f"{param}.json_schema.schema")


def _read_structured_outputs(value: Any, param: str) -> GrammarField | None:
    """Reads vLLM's object with a key for each kind of grammar."""
    readers = {"json": _read_schema, "regex": _read_regex}
    given = {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else {}
    # "json_object" is short for a schema that allows any object.
    if given.get("json_object") is True:
        given = {**given, "json": {"type": "object"}}
    unknown = [name for name in given if name not in (*readers, "json_object")]
    if not isinstance(value, dict) or unknown or len(given.keys() & readers) != 1:
        raise unsupported(f"{param} must have exactly one of json, regex and json_object", param)
    return next(read(given[name], f"{param}.{name}") for name, read in readers.items() if name in given)


_READERS = {
    "response_format": _read_response_format,
    "json_schema": _read_schema,
    "regex": _read_regex,
    "guided_json": _read_schema,
    "guided_regex": _read_regex,
    "structured_outputs": _read_structured_outputs,
}
