"""Conversations in the forms that data sets have, as messages in OpenAI's form.

OpenAI     {"messages": [{"role": "user", "content": "…"}, …]}
ShareGPT   {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}], "system": "…"}
Alpaca     {"instruction": "…", "input": "…", "output": "…", "system": "…", "history": [["…", "…"], …]}

Names and roles are those that LLaMA-Factory documents (data/README.md), and FastChat and Stanford Alpaca use.
"""

from typing import Any

from mtpjax.data.chat_messages import drop_nulls
from mtpjax.data.jsonl import SkippedRecordError, json_type_name
from mtpjax.errors import printable
from mtpjax.safe_open import parse_json

# `from` of ShareGPT -> role of OpenAI.
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
    """Checks for the fields of one of the forms, whatever they hold.

    Args:
        record: an object of a data file.

    Returns:
        True if `find_messages` would read it as a conversation.
    """
    return "messages" in record or "conversations" in record or "instruction" in record


def find_messages(record: dict[str, Any], field: str = "messages") -> list[dict[str, Any]]:
    """Reads the conversation of a record.

    Args:
        record: an object of a data file.
        field: the field with the conversation, in OpenAI's or ShareGPT's form. Without it, a record may also be
            ShareGPT's `conversations` or Alpaca's `instruction`.

    Returns:
        Messages in OpenAI's form, without null fields.

    Raises:
        SkippedRecordError: as "corrupt"; the message names the field that is missing or wrong.
    """
    if field not in record and field == "messages":
        if "conversations" in record:
            field = "conversations"
        elif "instruction" in record:
            return _from_alpaca(record)
    # Arrow fills missing fields with nulls, which mean the same as no field.
    messages = drop_nulls(record.get(field))
    if not isinstance(messages, list) or not messages:
        raise SkippedRecordError("corrupt", f"has no '{field}', a list of objects with a role each")
    # The form of a list shows in its objects: ShareGPT's have `from`, OpenAI's `role`.
    if isinstance(messages[0], dict) and "from" in messages[0] and "role" not in messages[0]:
        system = record.get("system") or ""
        _check_text(system, "'system'")
        start = [{"role": "system", "content": system}] if system else []
        return start + [_from_sharegpt(each, f"'{field}' item {n}") for n, each in enumerate(messages, start=1)]
    for number, message in enumerate(messages, start=1):
        _check_message(message, field, number)
    return messages


def _check_message(message: Any, field: str, number: int) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise SkippedRecordError(
            "corrupt", f"has no '{field}', a list of objects with a role each: item {number} has no 'role'"
        )
    # Null beside tool calls, and lists of parts, are OpenAI's too; the chat template decides about them.
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        problem = f"'content' is {json_type_name(content)}, not text"
        raise SkippedRecordError("corrupt", f"'{field}' item {number}: {problem}")


def _from_sharegpt(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise SkippedRecordError("corrupt", f"{place} is {json_type_name(message)}, not an object")
    sender = message.get("from")
    if not isinstance(sender, str) or sender not in SHAREGPT_ROLES:
        raise SkippedRecordError(
            "corrupt", f"{place}: 'from' is {printable(repr(sender), 60)}, not one of {', '.join(SHAREGPT_ROLES)}"
        )
    _check_text(message.get("value"), f"{place}: 'value'")
    if sender == "function_call" and (calls := _parse_calls(message["value"])):
        return {"role": "assistant", "tool_calls": calls}
    return {"role": SHAREGPT_ROLES[sender], "content": message["value"]}


def _parse_calls(text: str) -> list[dict[str, Any]]:
    """Returns the tool calls of a text that is the JSON of one call or of a list; other text has none."""
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        return []
    calls = value if isinstance(value, list) else [value]
    return calls if all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls) else []


def _from_alpaca(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Builds the conversation: system, earlier turns, instruction and input, output."""
    # `instruction` and `output` are required; a missing or null `input`, `system` or `history` is an empty one.
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
