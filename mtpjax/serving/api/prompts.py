"""Reads the prompts of a request: texts, token ids or a conversation."""

from typing import Any

from mtpjax.data.chat_messages import REASONING_FIELDS, text_of
from mtpjax.serving.api.errors import ApiError
from mtpjax.serving.api.fields import MAX_NAME_CHARACTERS, Body, check_list, check_text, check_tokens
from mtpjax.serving.api.option_tables import MAX_PROMPTS
from mtpjax.serving.api.server import ApiServer

MAX_MESSAGES = 2048
MAX_TOOLS = 128  # as OpenAI's API
ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields of a message that templates read besides role and content.
_MESSAGE_FIELDS = ("name", "tool_call_id", "tool_calls", "function_call", *REASONING_FIELDS)
_ROLE_LIST = ", ".join(ROLES)


async def read_prompts(
    server: ApiServer, value: Any, param: str, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Reads the prompts of a completion.

    Args:
        server: its tokenizer encodes the texts.
        value: a text, a list of texts, a list of token ids, or a list of such lists.
        param: the field, for messages.
        add_special_tokens: texts get the tokens that the tokenizer puts around a text, such as one of its beginning.

    Returns:
        Token ids of each prompt.

    Raises:
        ApiError: the value has another form, is empty, or exceeds a limit.
    """
    if value is None:
        raise ApiError(f"{param} is missing", param=param)
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise ApiError(f"{param} must be a string, a list of strings, or lists of token ids", param=param)
    if not value or not all(each or each == 0 for each in value):
        raise ApiError(f"{param} is empty", param=param)
    # A flat list that does not begin with a text or a list is one prompt of token ids.
    if not isinstance(value[0], str | list):
        value = [value]
    check_list(value, param, MAX_PROMPTS)
    if isinstance(value[0], list):
        return [_token_ids(each, param, server.engine) for each in value]
    num_characters = 0
    for text in value:
        num_characters += len(check_text(text, param, server.max_prompt_characters))
        if num_characters > server.settings.max_body_bytes:
            raise ApiError(f"{param} has too many characters", param=param)
    return await server.encode(value, add_special_tokens=add_special_tokens)


async def read_chat(server: ApiServer, body: Body, *, add_generation_prompt: bool) -> list[int]:
    """Reads the conversation of a chat.

    Args:
        server: its tokenizer has the chat template.
        body: the JSON object.
        add_generation_prompt: begin the answer.

    Returns:
        Token ids.

    Raises:
        ApiError: the messages have another form, or the chat template rejects them.
    """
    if body.get("messages") is None:
        raise ApiError("messages is missing", param="messages")
    messages = check_list(body["messages"], "messages", MAX_MESSAGES)
    if not messages:
        raise ApiError("messages is empty", param="messages")
    messages = [_message(message, f"messages[{index}]", server) for index, message in enumerate(messages)]
    num_characters = sum(len(text_of(message.get("content"))) for message in messages)
    if num_characters > server.max_prompt_characters:
        raise ApiError(
            f"messages has {num_characters} characters; at most {server.max_prompt_characters} are allowed",
            param="messages",
        )
    tools = check_list(body["tools"], "tools", MAX_TOOLS) if body.get("tools") is not None else []
    _check_strings(tools, "tools", server.max_prompt_characters)
    variables = _template_variables(body.get("chat_template_kwargs"), server.settings.template_variables)
    variables |= _reasoning_effort(body.get("reasoning_effort"), variables, server)
    variables = {**variables, "tools": tools, "add_generation_prompt": add_generation_prompt}
    return await server.encode_chat(messages, variables)


def _reasoning_effort(value: Any, variables: dict[str, Any], server: ApiServer) -> dict[str, Any]:
    """Returns OpenAI's `reasoning_effort` as a variable of the chat template."""
    name = "reasoning_effort"
    if value is None:
        return {}
    if not server.tokenizer.reads_template_variable(name):
        message = f"{name} is not supported: the chat template of this model does not read it"
        raise ApiError(message, param=name, code="unsupported_option")
    if variables.get(name, value) != value:
        raise ApiError(f"{name} and chat_template_kwargs.{name} differ", param=name)
    return {name: check_text(value, name, MAX_NAME_CHARACTERS)}


def _token_ids(value: Any, param: str, engine: Any) -> list[int]:
    if not isinstance(value, list):
        raise ApiError(f"{param} mixes token ids with other values", param=param)
    if len(value) >= engine.max_length:
        message = f"{param} has {len(value)} tokens; the longest text has {engine.max_length} tokens, one of them new"
        raise ApiError(message, param=param, code="context_length_exceeded")
    return check_tokens(value, param, engine.vocab_size)


def _message(message: Any, param: str, server: ApiServer) -> dict[str, Any]:
    """Returns a message with its known fields; the chat template decides about their forms."""
    if not isinstance(message, dict):
        raise ApiError(f"{param} must be an object", param=param)
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(f"{param}.role must be one of {_ROLE_LIST}", param=f"{param}.role")
    content = _content(message, param, server)
    checked = {"role": role} if content is None else {"role": role, "content": content}
    for name in _MESSAGE_FIELDS:
        if message.get(name) is not None:
            _check_strings(message[name], f"{param}.{name}", server.max_prompt_characters)
            checked[name] = message[name]
    return checked


def _content(message: dict[str, Any], param: str, server: ApiServer) -> str | list[dict[str, Any]] | None:
    """Returns a text, parts of text, or None."""
    content, param = message.get("content"), f"{param}.content"
    # An answer may have no text: it only calls tools, or was cut while the model reasoned.
    if message["role"] == "assistant" and (content is None or content == []):
        return None
    if content is None:
        raise ApiError(f"{param} is missing", param=param)
    if isinstance(content, str):
        return check_text(content, param, server.max_prompt_characters)
    parts = []
    for index, part in enumerate(check_list(content, param, MAX_MESSAGES)):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ApiError(f"{param}[{index}] must be of type text; other types are not supported", param=param)
        text = check_text(part.get("text"), f"{param}[{index}].text", server.max_prompt_characters)
        parts.append({"type": "text", "text": text})
    if not parts:
        raise ApiError(f"{param} is empty", param=param)
    return parts


def _check_strings(value: Any, param: str, max_characters: int) -> None:
    """Checks all strings of a JSON value."""
    open_values = [value]
    while open_values:
        value = open_values.pop()
        if isinstance(value, str):
            check_text(value, param, max_characters)
        elif isinstance(value, dict):
            open_values += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            open_values += value


def _template_variables(value: Any, allowed: tuple[str, ...]) -> dict[str, Any]:
    param = "chat_template_kwargs"
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ApiError(f"{param} must be an object", param=param)
    for name, each in value.items():
        if name not in allowed:
            raise ApiError(f"{param} may set {', '.join(allowed) or 'nothing'}", param=param)
        if not isinstance(each, bool | int | float | str):
            raise ApiError(f"{param}.{name} must be a string, a number, or true or false", param=param)
        if isinstance(each, str):
            check_text(each, f"{param}.{name}", MAX_NAME_CHARACTERS)
    return value
