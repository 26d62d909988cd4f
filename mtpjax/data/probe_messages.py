"""Builds the probe messages with which `mtpjax.data.chat_template` finds out what a chat template reads."""

import json
from typing import Any

MAX_PERIOD = 6  # maximum number of messages in a repeated turn, such as question, call, result, answer
MAX_CALLS = MAX_PARTS = 2  # maximum number of calls, and of content parts, in a probe message
CALL_ID = "probecall"  # Mistral's templates require nine characters


def probe_message(message: dict[str, Any], number: int, *, own_ids: bool = False) -> dict[str, Any]:
    """Returns a message with the same fields but with unique words as texts."""
    probe: dict[str, Any] = {"role": message["role"]}
    if "content" in message:
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content[:MAX_PARTS]]
        words = [unique_word("text", f"{number}p{n}") if text.strip() else "" for n, text in enumerate(texts)]
        probe["content"] = words[0] if isinstance(content, str) else [{"type": "text", "text": w} for w in words]
    for name in ("reasoning_content", "thinking", "name"):
        if name in message:
            probe[name] = unique_word(name.replace("_", ""), number)
    if "tool_calls" in message:
        calls = enumerate(message["tool_calls"][:MAX_CALLS])
        probe["tool_calls"] = [
            _probe_call(call, f"{number}p{n}", call.get("id") if own_ids else CALL_ID) for n, call in calls
        ]
    if "tool_call_id" in message:
        probe["tool_call_id"] = message["tool_call_id"] if own_ids else CALL_ID
    return probe


def _probe_call(call: dict[str, Any], number: str, call_id: Any) -> dict[str, Any]:
    given = call["function"]["arguments"]
    arguments: Any = {unique_word("key", number): unique_word("value", number)} if given not in ({}, "", "{}") else {}
    arguments = json.dumps(arguments) if isinstance(given, str) else arguments
    function = {"name": unique_word("call", number), "arguments": arguments}
    return {**({"id": call_id} if "id" in call else {}), "type": "function", "function": function}


def tool_kind(tool: Any) -> str:
    return "text" if not isinstance(tool, dict) else "wrapped" if isinstance(tool.get("function"), dict) else "bare"


def probe_tool(tool: Any, number: int) -> Any:
    word = unique_word("tool", number)
    if not isinstance(tool, dict):
        return word
    properties = {"a": {"type": "string", "description": "b"}}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    function = {"name": word, "description": word, "parameters": parameters}
    return {"type": "function", "function": function} if tool_kind(tool) == "wrapped" else function


def message_shape(message: dict[str, Any]) -> str:
    return json.dumps(probe_message(message, 0), sort_keys=True)


def without_repetitions(shapes: list[str]) -> list[int]:
    """Returns the indices of the messages to keep, with at most two copies of each turn that is repeated in a row."""
    kept: list[int] = []
    names: list[str] = []
    for index, shape in enumerate(shapes):
        kept.append(index)
        names.append(shape)
        for period in range(1, MAX_PERIOD + 1):
            last, before, first = names[-period:], names[-2 * period : -period], names[-3 * period : -2 * period]
            if len(first) == period and last == before == first:
                del kept[-period:], names[-period:]
                break
    return kept


def unique_word(kind: str, number: int | str) -> str:
    return f"xq{kind}{number}qx"
