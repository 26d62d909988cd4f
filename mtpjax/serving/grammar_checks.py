"""Checks a JSON schema before llguidance compiles it."""

import json
import math
import urllib.parse
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from mtpjax.errors import printable
from mtpjax.safe_open import parse_json

MAX_SCHEMA_DEPTH = 64
MAX_MULTIPLE = 10_000  # llguidance makes an automaton with a state per remainder
MAX_MESSAGE_CHARACTERS = 200


def checked_schema(source: str) -> str:
    """Checks a JSON schema and returns it as plain JSON. Raises ValueError with a one-line message."""
    try:
        schema = parse_json(source, max_depth=MAX_SCHEMA_DEPTH)
        # Compiling takes time and memory in proportion to the least common multiple.
        multiples = [Decimal(str(value)).normalize().as_tuple().digits for value in _multiples(schema)]
        if math.lcm(*(int("".join(map(str, digits))) for digits in multiples)) > MAX_MULTIPLE:
            raise ValueError(f"the least common multiple of all multipleOf values is above {MAX_MULTIPLE}")
        plain = json.dumps(schema, allow_nan=False)
    except (ValueError, ArithmeticError) as error:
        problem = printable(" ".join(str(error).split()), MAX_MESSAGE_CHARACTERS)
        raise ValueError(f"the JSON schema is invalid: {problem}") from error
    loop = find_ref_loop(schema)
    if loop:
        path = printable(" -> ".join(loop), 120)
        raise ValueError(f"the grammar failed: the $ref loop {path} refers only to itself and never to a type")
    return plain


def find_ref_loop(schema: Any) -> list[str]:
    """Finds references that lead back to themselves before they constrain the text.

    A schema may contain itself (for example, a list whose items are lists), because each level adds some text. A
    reference that leads only to itself adds none.

    Returns:
        The references in a loop, with the first one repeated at the end; empty if there is no loop.
    """
    targets = _targets(schema)
    # A reference is settled once it is known to end at a type. Settle the references whose target has a type, then
    # those whose target refers to settled ones, and so on. `targets` lists most references before those that their
    # targets contain, so one pass from the end settles nearly all.
    settled: set[str] = set()
    num_before = -1
    while len(settled) > num_before:
        num_before = len(settled)
        for ref in reversed(targets):
            if ref not in settled and _is_settled(targets[ref], settled, targets):
                settled.add(ref)
    ref, loop = next((ref for ref in targets if ref not in settled), None), []
    while ref is not None and ref not in loop:
        loop.append(ref)
        ref = next((each for each in _refs_in_place(targets[ref]) if each in targets and each not in settled), None)
    return [*loop[loop.index(ref) :], ref] if ref is not None else loop


def _targets(root: Any) -> dict[str, Any]:
    """Returns the references that a schema uses, with their targets, but not those in unused definitions."""
    targets: dict[str, Any] = {}
    waiting = [root]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        waiting += [value for key, value in part.items() if key not in ("$defs", "definitions", "const", "enum")]
        ref = part.get("$ref")
        if isinstance(ref, str) and ref not in targets:
            try:
                targets[ref] = _resolve(ref, root)
            except (LookupError, TypeError):
                continue  # llguidance reports what is wrong with it
            waiting.append(targets[ref])
    return targets


def _resolve(ref: str, root: Any) -> Any:
    """Returns the schema that a reference points to. Raises LookupError."""
    document, _, fragment = ref.partition("#")
    if document and document != (root.get("$id") if isinstance(root, dict) else None):
        raise LookupError(ref)
    part: Any = root
    fragment = urllib.parse.unquote(fragment)
    if fragment and not fragment.startswith("/"):
        named = [each for each in _dicts(root) if each.get("$anchor") == fragment]
        return named[0]
    for name in fragment.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        key: Any = int(name) if isinstance(part, list) and name.isdecimal() else name
        part = part[key]
    return part


def _is_settled(schema: Any, settled: set[str], targets: dict[str, Any]) -> bool:
    """Returns whether a schema's references in place end at a type, given that those in `settled` do."""
    if not isinstance(schema, dict):
        return True
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref in targets and ref not in settled:
        return False
    for key, combine in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        parts = schema.get(key)
        if isinstance(parts, list) and parts and not combine(_is_settled(part, settled, targets) for part in parts):
            return False
    return True


def _refs_in_place(schema: Any) -> Iterator[str]:
    """Yields the references that apply to a schema itself, not to what it contains."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for key in ("allOf", "anyOf", "oneOf"):
            for part in schema[key] if isinstance(schema.get(key), list) else ():
                yield from _refs_in_place(part)


def _dicts(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
    if isinstance(part, dict | list):
        for each in part.values() if isinstance(part, dict) else part:
            yield from _dicts(each)


def _multiples(schema: Any) -> Iterator[int | float]:
    for part in _dicts(schema):
        value = part.get("multipleOf")
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value
