"""Encodes conversations into tokens, and marks which of them are the assistant's answers."""

import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtpjax.data.tokenizer import HuggingFaceTokenizer, Tokenizer, TokenizerError

# The date for templates that write one, so that tokens do not change by day.
TEMPLATE_DATE = datetime.datetime(2025, 1, 1)


def is_conversation(value: Any) -> bool:
    """Checks for a list of messages in OpenAI's form.

    Args:
        value: any JSON value.

    Returns:
        True if it is a list, not empty, of objects with a string `role`.
    """
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value)
    )


def encode_chat(
    messages: Sequence[dict[str, Any]], tokenizer: Tokenizer, **template_variables: Any
) -> tuple[list[int], np.ndarray]:
    """Encodes a conversation, and marks the tokens of the assistant's answers as targets.

    An answer is the text that the template writes after the prompt that decoding would see, up to and including its
    last end token. If the template writes no end token there, the next token is a target if it is an end token, because
    it stops decoding (GLM's `<|user|>`); so is the end of the conversation. Messages of `"weight": 0` do not count.

    Args:
        messages: the conversation, in OpenAI's form.
        tokenizer: a tokenizer with a chat template.
        **template_variables: variables of the template, such as `tools`.

    Returns:
        Tokens `[n]`, and `[n + 1]` bool, true where a token is a target; the last entry is the end token that packing
        adds.

    Raises:
        TokenizerError: the answers cannot be located, because the template writes a message differently when more
            messages follow, or because a token spans the start or end of an answer.
        ConversationError: the template rejects these messages.
    """
    template_variables = {"strftime_now": TEMPLATE_DATE, **template_variables}
    messages = list(messages)
    # Encode the whole conversation once. Each answer is located by encoding what comes before it and through it: both
    # must be prefixes of the whole, or positions would not match what decoding sees.
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=False, **template_variables)
    is_target = np.zeros(len(tokens) + 1, bool)
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight") == 0:
            continue
        # The prompt as decoding sees it, and the conversation through this answer.
        prompt = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, **template_variables)
        through = tokenizer.apply_chat_template(
            messages[: index + 1], add_generation_prompt=False, **template_variables
        )
        begin, end = len(prompt), len(through)
        if begin > end or tokens[:begin] != prompt or tokens[:end] != through:
            raise TokenizerError(
                f"the answer in message {index + 1} of {len(messages)} cannot be located: the chat template or the"
                " tokenizer writes the text before it or in it differently than in the whole conversation"
            )
        # End the answer at its end token. Text that the template writes after it, such as a newline, is not a target.
        stops = [place for place in range(begin, end) if tokens[place] in tokenizer.eos_token_ids]
        if stops:
            end = stops[-1] + 1
        elif end == len(tokens) or tokens[end] in tokenizer.eos_token_ids:
            end += 1
        is_target[begin:end] = True
    return tokens, is_target


def encode_formatted(text: str, tokenizer: Tokenizer) -> tuple[list[int], np.ndarray]:
    """Encodes a conversation that the chat template has written already, and marks the assistant's answers as targets.

    An answer begins after the text that the template adds for `add_generation_prompt`. It ends with the next end token.

    Args:
        text: the conversation as text, special tokens included.
        tokenizer: a tokenizer with a chat template whose generation prompt has text.

    Returns:
        Tokens `[n]`, and `[n + 1]` bool, true where a token is a target, as `encode_chat` returns them.

    Raises:
        TokenizerError: the tokenizer is not from a file, or its template has no generation prompt.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise TokenizerError("text that a chat template has written needs the tokenizer of that template")
    header = tokenizer.generation_prompt
    if not header:
        raise TokenizerError("the chat template writes nothing before an answer, so answers cannot be located")
    tokens, starts = tokenizer.encode_with_starts(text)
    is_target = np.zeros(len(tokens) + 1, bool)
    position = text.find(header)
    while position >= 0:
        # Tokens from the end of the header up to and including the next end token.
        position += len(header)
        place = int(np.searchsorted(starts, position))
        while place < len(tokens):
            is_target[place] = True
            if tokens[place] in tokenizer.eos_token_ids:
                break
            place += 1
        else:
            is_target[place] = True  # the end token that packing adds
        position = text.find(header, position)
    return tokens, is_target
