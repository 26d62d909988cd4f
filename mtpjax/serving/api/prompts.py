"""Reads the prompts of a request, which are texts, token ids or a conversation."""

from typing import Any

from mtpjax.data.chat_messages import REASONING_FIELDS
from mtpjax.data.tokenizer import Tokenizer
from mtpjax.messages import count_of
from mtpjax.serving.api.errors import (
    MAX_NAME_CHARACTERS,
    ApiError,
    Body,
    check_list,
    check_text,
    check_tokens,
    require,
    unsupported,
)
from mtpjax.serving.api.settings import Limits

MAX_PROMPTS = 1024
MAX_MESSAGES = 2048
MAX_TOOLS = 128  # as in OpenAI's API
ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields of a message that templates read, in addition to role and content.
_MESSAGE_FIELDS = ("name", "tool_call_id", "tool_calls", "function_call", *REASONING_FIELDS)
_ROLE_LIST = ", ".join(ROLES)


def read_prompts(
    tokenizer: Tokenizer, value: Any, param: str, limits: Limits, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Converts the prompts of a completion to token ids.

    Args:
        value: a text, a list of texts, a list of token ids, or a list of such lists.
        param: name of the field, for messages.
        add_special_tokens: whether to add the tokenizer's special tokens, such as a beginning-of-text token.

    Raises:
        ApiError: the value has a different form, is empty, or exceeds a limit.
    """
    require(value is not None, f"{param} is missing", param=param)
    if isinstance(value, str):
        value = [value]
    require(isinstance(value, list), f"{param} must be a string, a list of strings, or lists of token ids", param=param)
    if not value or not all(each or each == 0 for each in value):
        raise ApiError(f"{param} is empty", param=param)
    # A flat list whose first element is neither a text nor a list is one prompt of token ids.
    if not isinstance(value[0], str | list):
        value = [value]
    check_list(value, param, MAX_PROMPTS)
    if isinstance(value[0], list):
        return [_token_ids(each, param, limits) for each in value]
    num_characters = 0
    for text in value:
        num_characters += len(check_text(text, param, limits.max_prompt_characters))
        require(num_characters <= limits.max_total_characters, f"{param} has too many characters", param=param)
    return [encode_text(tokenizer, text, param, add_special_tokens=add_special_tokens) for text in value]


def encode_text(tokenizer: Tokenizer, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    try:
        return tokenizer.encode(text) if add_special_tokens else tokenizer.encode_plain(text)
    except ValueError as error:  # tokenizers' messages are written for users
        raise ApiError(str(error), param=param) from error


def read_chat(tokenizer: Tokenizer, body: Body, limits: Limits, *, add_generation_prompt: bool) -> list[int]:
    """Converts a chat's conversation to token ids. Raises ApiError, for example if the chat template rejects it."""
    require(body.get("messages") is not None, "messages is missing", param="messages")
    messages = check_list(body["messages"], "messages", MAX_MESSAGES)
    require(messages, "messages is empty", param="messages")
    size = _Size(limits.max_prompt_characters)
    messages = [_message(message, f"messages[{index}]", size) for index, message in enumerate(messages)]
    tools = check_list(body["tools"], "tools", MAX_TOOLS) if body.get("tools") is not None else []
    size.add(tools, "tools")
    variables = _template_variables(body.get("chat_template_kwargs"), limits.template_variables)
    variables |= _reasoning_effort(body.get("reasoning_effort"), variables, tokenizer)
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )
    except ValueError as error:
        raise ApiError(str(error), param="messages") from error


def _reasoning_effort(value: Any, variables: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    name = "reasoning_effort"
    if value is None:
        return {}
    if not tokenizer.reads_template_variable(name):
        raise unsupported(f"{name} is not supported: the model's chat template does not read it", name)
    require(variables.get(name, value) == value, f"{name} and chat_template_kwargs.{name} differ", param=name)
    return {name: check_text(value, name, MAX_NAME_CHARACTERS)}


class _Size:
    """Counts the characters of a chat template's entire input."""

    def __init__(self, max_characters: int):
        self._max_characters, self._num_characters = max_characters, 0

    def add(self, value: Any, param: str) -> None:
        """Counts the strings, keys and long numbers of a JSON value, and checks that UTF-8 can encode all strings."""
        open_values = [value]
        while open_values:
            value = open_values.pop()
            if isinstance(value, str):
                self._num_characters += len(check_text(value, param, self._max_characters))
            elif isinstance(value, dict):
                open_values += [*value.keys(), *value.values()]
            elif isinstance(value, list):
                open_values += value
            elif isinstance(value, int):
                self._num_characters += value.bit_length() // 3
        if self._num_characters > self._max_characters:
            message = f"the text of messages and tools has more than {self._max_characters} characters"
            raise ApiError(message, param=param.partition("[")[0])


def _token_ids(value: Any, param: str, limits: Limits) -> list[int]:
    require(isinstance(value, list), f"{param} mixes token ids and other values", param=param)
    if len(value) >= limits.max_length:
        given = count_of(len(value), "token")
        message = f"{param} has {given}; a text may have at most {limits.max_length}, including a new token"
        raise ApiError(message, param=param, code="context_length_exceeded")
    return check_tokens(value, param, limits.vocab_size)


def _message(message: Any, param: str, size: _Size) -> dict[str, Any]:
    """Returns a message with its known fields, whose form only the chat template checks."""
    require(isinstance(message, dict), f"{param} must be an object", param=param)
    role = message.get("role")
    require(role in ROLES, f"{param}.role must be one of {_ROLE_LIST}", param=f"{param}.role")
    content = _content(message, param, size)
    checked = {"role": role} if content is None else {"role": role, "content": content}
    for name in _MESSAGE_FIELDS:
        if message.get(name) is not None:
            size.add(message[name], f"{param}.{name}")
            checked[name] = message[name]
    return checked


def _content(message: dict[str, Any], param: str, size: _Size) -> str | list[dict[str, Any]] | None:
    content, param = message.get("content"), f"{param}.content"
    # An answer may have no text if it only calls tools, or was cut off while the model reasoned.
    if message["role"] == "assistant" and (content is None or content == []):
        return None
    require(content is not None, f"{param} is missing", param=param)
    if isinstance(content, str):
        size.add(content, param)
        return content
    parts = []
    for index, part in enumerate(check_list(content, param, MAX_MESSAGES)):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ApiError(f"{param}[{index}] must be of type text; other types are not supported", param=param)
        if not isinstance(text := part.get("text"), str):
            raise ApiError(f"{param}[{index}].text must be a string", param=f"{param}[{index}].text")
        size.add(text, f"{param}[{index}].text")
        parts.append({"type": "text", "text": text})
    require(parts, f"{param} is empty", param=param)
    return parts


def _template_variables(value: Any, allowed: tuple[str, ...]) -> dict[str, Any]:
    param = "chat_template_kwargs"
    if value is None:
        return {}
    require(isinstance(value, dict), f"{param} must be an object", param=param)
    for name, each in value.items():
        require(name in allowed, f"{param} may set {', '.join(allowed) or 'nothing'}", param=param)
        if not isinstance(each, bool | int | float | str):
            raise ApiError(f"{param}.{name} must be a string, a number, or true or false", param=param)
        if isinstance(each, str):
            check_text(each, f"{param}.{name}", MAX_NAME_CHARACTERS)
    return value
