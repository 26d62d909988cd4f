"""A conversation -> its tokens, and which of them are answers."""

import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtpjax.data.tokenizer import Tokenizer, TokenizerError

DAY = datetime.datetime(2025, 1, 1)  # for templates that name the date: on another day the tokens are still the same


def is_conversation(value: Any) -> bool:
    """Whether it is a list of messages in OpenAI's form."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value)
    )


def encode_chat(
    messages: Sequence[dict[str, Any]], tokenizer: Tokenizer, **choices: Any
) -> tuple[list[int], np.ndarray]:
    """The tokens of a conversation `[n]`, and which are targets `[n + 1]`, the last of the end token behind them.

    An answer is what the tokenizer's template writes behind the prompt that decoding would see, up to and with its
    last end token. Where the template writes none, the next token counts where it is one, for it stops decoding (GLM's
    `<|user|>`), and so does the end of the conversation. Only the assistant's messages count, without those of
    `"weight": 0`. `choices` are variables of the template, such as `tools`.

    Raises TokenizerError for a template whose answers cannot be told: one that writes a message otherwise once more
    follow, or whose last token before an answer or behind it spans both. ConversationError where it refuses these
    messages.
    """
    choices = {"strftime_now": DAY.strftime, **choices}
    messages = list(messages)
    tokens = tokenizer.chat(messages, add_generation_prompt=False, **choices)
    is_target = np.zeros(len(tokens) + 1, bool)
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight") == 0:
            continue
        prompt = tokenizer.chat(messages[:index], add_generation_prompt=True, **choices)
        through = tokenizer.chat(messages[: index + 1], add_generation_prompt=False, **choices)
        begin, end = len(prompt), len(through)
        if begin > end or tokens[:begin] != prompt or tokens[:end] != through:
            raise TokenizerError(
                f"the answer in message {index + 1} of {len(messages)} cannot be told: the chat template, or the"
                " tokenizer, writes what stands before it or in it otherwise than in the whole conversation"
            )
        stops = [place for place in range(begin, end) if tokens[place] in tokenizer.eos_token_ids]
        if stops:
            end = stops[-1] + 1
        elif end == len(tokens) or tokens[end] in tokenizer.eos_token_ids:
            end += 1
        is_target[begin:end] = True
    return tokens, is_target
