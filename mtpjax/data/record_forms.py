"""Converts conversations from common data set formats to OpenAI messages.

OpenAI     {"messages": [{"role": "user", "content": "…"}, …]}
ShareGPT   {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}], "system": "…"}
Alpaca     {"instruction": "…", "input": "…", "output": "…", "system": "…", "history": [["…", "…"], …]}

Names and roles are as documented by LLaMA-Factory (data/README.md) and used by FastChat and Stanford Alpaca.
"""

from typing import Any

from mtpjax.data.chat_messages import drop_nulls
from mtpjax.data.jsonl import SkippedRecordError
from mtpjax.errors import printable
from mtpjax.messages import json_type_name
from mtpjax.safe_open import parse_json

ALPACA_FIELDS = ("instruction", "input", "output", "system", "history")
# ShareGPT's `from` -> OpenAI's role.
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}


def has_conversation(record: dict[str, Any]) -> bool:
    """Returns whether a record has the fields of one of these formats, regardless of their values."""
    return "messages" in record or "conversations" in record or "instruction" in record


def without_conversation(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a record that `find_messages` does not read."""
    is_alpaca = "messages" not in record and "conversations" not in record
    read = ALPACA_FIELDS if is_alpaca else ("messages", "conversations", "system")
    return {name: value for name, value in record.items() if name not in read}


def find_messages(record: dict[str, Any], field: str = "messages") -> list[dict[str, Any]]:
    """Reads the conversation in a record.

    A text in `system` becomes the first message, unless the conversation already starts with a system message.

    Returns:
        OpenAI messages without null fields. Messages that `weight` 0 or `train` false excludes from training have
        `weight` 0.

    Raises:
        SkippedRecordError: a field is missing or wrong; the message names it. The reason is "corrupt".
    """
    if field not in record and field == "messages":
        if "conversations" in record:
            field = "conversations"
        elif "instruction" in record:
            return _from_alpaca(record)
    # Arrow fills missing fields with nulls, so null means that the field is missing.
    messages = drop_nulls(record.get(field))
    if not isinstance(messages, list) or not messages:
        raise SkippedRecordError("corrupt", f"has no '{field}', which must be a list of objects that have a role")
    # The first object shows the format: ShareGPT's objects have `from`, OpenAI's have `role`.
    is_sharegpt = isinstance(messages[0], dict) and "from" in messages[0] and "role" not in messages[0]
    convert = _from_sharegpt if is_sharegpt else _from_openai
    messages = [convert(each, f"'{field}' item {number}") for number, each in enumerate(messages, start=1)]
    system = record.get("system") or ""
    _check_text(system, "'system'")
    return [{"role": "system", "content": system}] * (bool(system) and messages[0]["role"] != "system") + messages


def _from_openai(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise SkippedRecordError("corrupt", f"has no list of objects that have a role: {place} has no 'role'")
    # Null with tool calls, and lists of parts, are also valid in OpenAI's format; the chat template handles them.
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise SkippedRecordError("corrupt", f"{place}: 'content' is {json_type_name(content)}, not text")
    return {name: value for name, value in message.items() if name != "train"} | _read_weight(message, place)


def _read_weight(message: dict[str, Any], place: str) -> dict[str, int]:
    """Returns `weight` 0 for a message that OpenAI's `weight` or Axolotl's `train` excludes from training."""
    weight, train = message.get("weight", 1), message.get("train", True)
    # Reject other types. Otherwise, a message that its author excluded with the text "0" would be trained on.
    if not isinstance(weight, int | float) or weight not in (0, 1):
        raise SkippedRecordError("corrupt", f"{place}: 'weight' is {printable(repr(weight), 60)}, not 0 or 1")
    if not isinstance(train, bool):
        raise SkippedRecordError("corrupt", f"{place}: 'train' is {printable(repr(train), 60)}, not true or false")
    return {} if weight and train else {"weight": 0}


def _from_sharegpt(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise SkippedRecordError("corrupt", f"{place} is {json_type_name(message)}, not an object")
    sender = message.get("from")
    if not isinstance(sender, str) or sender not in SHAREGPT_ROLES:
        raise SkippedRecordError(
            "corrupt", f"{place}: 'from' is {printable(repr(sender), 60)}, not one of {', '.join(SHAREGPT_ROLES)}"
        )
    _check_text(message.get("value"), f"{place}: 'value'")
    weight = _read_weight(message, place)
    if sender == "function_call" and (calls := _parse_calls(message["value"])):
        return {"role": "assistant", "tool_calls": calls, **weight}
    return {"role": SHAREGPT_ROLES[sender], "content": message["value"], **weight}


def _parse_calls(text: str) -> list[dict[str, Any]]:
    """Returns the tool calls in a text that is the JSON of one call or a list of calls, or [] for any other text."""
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        return []
    calls = value if isinstance(value, list) else [value]
    return calls if all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls) else []


def _from_alpaca(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Builds a conversation from the system text, the earlier turns, the instruction with its input, and the output."""
    # `instruction` and `output` are required; a missing or null `input`, `system` or `history` counts as empty.
    texts = {name: record.get(name) or "" for name in ("input", "system")}
    texts |= {name: record.get(name) for name in ("instruction", "output")}
    for name, text in texts.items():
        _check_text(text, f"'{name}'")
    messages = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    history = record.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn) for turn in history
    ):
        raise SkippedRecordError("corrupt", "'history' is not a list of pairs of texts")
    for question, answer in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    question = "\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": texts["output"]}]


def _check_text(value: Any, name: str) -> None:
    if value is None:
        raise SkippedRecordError("corrupt", f"{name} is missing")
    if not isinstance(value, str):
        raise SkippedRecordError("corrupt", f"{name} is {json_type_name(value)}, not text")
