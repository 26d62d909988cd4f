"""Converts messages and tools from clients and data sets to one clean form, and then to the forms that templates read.

Clean messages are OpenAI messages without null fields. `content` is a string or a list of text parts; an answer without
text has no `content`. `tool_calls` is a list of `{"type": "function", "function": {"name", "arguments"}}`, in which the
arguments stay as given, either an object or JSON text.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from mtpjax.errors import ConversationError, printable
from mtpjax.messages import json_type_name
from mtpjax.safe_open import parse_json

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # most templates read the first


@dataclasses.dataclass(frozen=True)
class Forms:
    """The forms in which a template receives messages and tools.

    Attributes:
        content: the form of a message's content: "given" (unchanged), "text", "parts" or "one part".
        text_roles: roles whose content is always text.
        empty: the content of an answer without text: "text" (an empty string), "null", "absent", or "usual" (as in
            OpenAI's API, null with tool calls and otherwise an empty string).
        arguments: the form of a tool call's arguments: "given" (unchanged), "object", "text" (JSON), or "object or
            text" (text only if it is not the JSON text of an object).
        calls: the form of tool calls: "wrapped" in a "function" field, or "bare".
        developer: the role of developer messages.
        tools: the form of tools: "given" (unchanged), "wrapped" in a "function" field, or "bare".
    """

    content: str = "given"
    text_roles: tuple[str, ...] = ()
    empty: str = "usual"
    arguments: str = "given"
    calls: str = "wrapped"
    developer: str = "developer"
    tools: str = "given"


def drop_nulls(value: Any) -> Any:
    """Removes null fields at every depth. Arrow and `model_dump()` write null for missing fields."""
    if isinstance(value, dict):
        return {key: drop_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [drop_nulls(each) for each in value]
    return value


def clean_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Converts a conversation to the clean form."""
    return [_clean_message(message, f"message {n}") for n, message in enumerate(messages, start=1)]


def clean_tools(tools: Any) -> list[Any] | None:
    """Converts the tools of a conversation to one form.

    Args:
        tools: a list of tools, one tool, or the JSON text of either; a tool is an object or its JSON text.

    Returns:
        The tools without null fields and with their parameters as objects, or None if there are no tools.
    """
    if isinstance(tools, str):
        tools = _parse(tools, "tools") if tools.strip() else None
    if isinstance(tools, dict):
        tools = [tools]
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ConversationError(f"tools is {json_type_name(tools)}, not a list of objects")
    return [_clean_tool(tool, f"tool {number}") for number, tool in enumerate(tools, start=1)]


def text_of(content: str | list[dict[str, Any]] | None) -> str:
    """Returns the text of clean content, with parts joined by newlines, as in vLLM."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


def in_forms(
    messages: Sequence[dict[str, Any]], tools: list[Any] | None, forms: Forms
) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Converts clean messages and tools to the forms that a template reads.

    Args:
        tools: clean tools, or None.
    """
    shaped = []
    for number, message in enumerate(messages, start=1):
        message = dict(message)
        role = message["role"]
        if role == "developer":
            message["role"] = forms.developer
        content_form = "text" if role in forms.text_roles else forms.content
        if "content" in message:
            message["content"] = _content_in_form(message["content"], content_form)
        else:
            form = forms.empty if forms.empty != "usual" else "null" if message.get("tool_calls") else "text"
            empty = _content_in_form("", content_form)
            message |= {"text": {"content": empty}, "null": {"content": None}, "absent": {}}[form]
        if "tool_calls" in message:
            calls = enumerate(message["tool_calls"], start=1)
            message["tool_calls"] = [_call_in_form(c, forms, f"message {number}: tool call {n}") for n, c in calls]
        shaped.append(message)
    if tools is not None and forms.tools != "given":
        tools = [_tool_in_form(tool, forms.tools) for tool in tools]
    return shaped, tools


def _clean_message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ConversationError(f"{place} is {json_type_name(message)}, not an object with a role")
    message = drop_nulls(message)
    if not isinstance(message.get("role"), str):
        raise ConversationError(f"{place} has no role")
    content = _clean_content(message.pop("content", None), place)
    if content is not None:
        message["content"] = content
    elif message["role"] != "assistant":
        # An answer may have no text if it was cut off while reasoning or only calls tools.
        raise ConversationError(f"{place} (role {printable(message['role'], 40)}) has no content")
    # Templates read the reasoning from a field with one of three names.
    reasoning = next((message[name] for name in REASONING_FIELDS if isinstance(message.get(name), str)), None)
    if reasoning:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    calls = message.pop("tool_calls", None)
    if not calls and isinstance(message.get("function_call"), dict | str):
        calls = message.pop("function_call")  # OpenAI's older field for a single call
    if calls:
        message["tool_calls"] = _clean_calls(calls, place)
    return message


def _clean_content(content: Any, place: str) -> str | list[dict[str, Any]] | None:
    if isinstance(content, dict):
        content = [content]
    if isinstance(content, str):
        return content
    if content is None or content == []:
        return None
    if not isinstance(content, list):
        raise ConversationError(f"{place}: content is {json_type_name(content)}, not text or a list of parts")
    parts = []
    for number, part in enumerate(content, start=1):
        part = {"text": part} if isinstance(part, str) else part
        kind = part.get("type", "text") if isinstance(part, dict) else json_type_name(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            what = "has no text" if kind == "text" else f"is of type {printable(kind, 40)}"
            raise ConversationError(f"{place}: part {number} of content {what}; only parts of type text are supported")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _clean_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if isinstance(calls, str):
        calls = _parse(calls, f"{place}: tool_calls")
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list):
        raise ConversationError(f"{place}: tool_calls is {json_type_name(calls)}, not a list of objects")
    cleaned = []
    for number, call in enumerate(calls, start=1):
        if not isinstance(call, dict):
            raise ConversationError(f"{place}: tool call {number} is {json_type_name(call)}, not an object")
        call = {key: each for key, each in call.items() if each is not None}
        function = call.pop("function", None)
        if not isinstance(function, dict):
            function = {key: call.pop(key) for key in ("name", "arguments") if key in call}
            call = {"type": "function", **call}
        if not isinstance(function.get("name"), str):
            raise ConversationError(f"{place}: tool call {number} has no name")
        arguments = function.get("arguments")
        # For a call without arguments, some clients send an empty string.
        arguments = {} if arguments is None else "{}" if str(arguments).strip() in ("", "null") else arguments
        if not isinstance(arguments, dict | str):
            raise ConversationError(
                f"{place}: tool call {number}: arguments is {json_type_name(arguments)}, not an object or its JSON text"
            )
        cleaned.append(call | {"function": function | {"arguments": arguments}})
    return cleaned


def _clean_tool(tool: Any, place: str) -> Any:
    if isinstance(tool, str) and tool.lstrip().startswith("{"):
        tool = _parse(tool, place)
    tool = drop_nulls(tool)
    if isinstance(tool, dict):
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        if isinstance(function.get("parameters"), str):
            parameters = _parse(function["parameters"] or "{}", f"{place}: parameters")
            parsed = function | {"parameters": parameters}
            tool = tool | {"function": parsed} if function is not tool else parsed
    return tool


def _content_in_form(content: str | list[dict[str, Any]], form: str) -> str | list[dict[str, Any]]:
    if form == "text":
        return text_of(content)
    if form == "given" or (form == "parts" and isinstance(content, list)):
        return content
    return [{"type": "text", "text": text_of(content)}]


def _call_in_form(call: dict[str, Any], forms: Forms, place: str) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if forms.arguments == "text" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif forms.arguments in ("object", "object or text") and isinstance(arguments, str):
        try:
            parsed = _parse(arguments, f"{place}: arguments")
            if not isinstance(parsed, dict):
                problem = f"arguments is {json_type_name(parsed)}; the chat template needs an object"
                raise ConversationError(f"{place}: {problem}")
            arguments = parsed
        except ConversationError:
            if forms.arguments == "object":
                raise
    function = call["function"] | {"arguments": arguments}
    return call | {"function": function} if forms.calls == "wrapped" else {**_without(call, "function"), **function}


def _tool_in_form(tool: Any, form: str) -> Any:
    if not isinstance(tool, dict):
        return tool
    is_wrapped = isinstance(tool.get("function"), dict)
    if form == "wrapped" and not is_wrapped:
        return {"type": "function", "function": _without(tool, "type")}
    return tool["function"] if form == "bare" and is_wrapped else tool


def _parse(text: str, place: str) -> Any:
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ConversationError(f"{place} is text that is not JSON: {printable(error, 100)}") from error


def _without(value: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: each for name, each in value.items() if name != key}
