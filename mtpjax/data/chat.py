"""Encodes conversations into tokens, and marks the tokens of the assistant's answers."""

import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtpjax.data.hidden_text import Spans
from mtpjax.data.tokenizer import HuggingFaceTokenizer, Tokenizer, TokenizerError
from mtpjax.errors import AnswerLocationError, ConversationError, DroppedTextError

# A fixed date for templates that write today's date, so that tokens do not change from day to day.
TEMPLATE_DATE = datetime.datetime(2025, 1, 1)


def encode_chat(
    messages: Sequence[dict[str, Any]], tokenizer: Tokenizer, **template_variables: Any
) -> tuple[list[int], np.ndarray]:
    """Encodes a conversation, and marks the tokens of the assistant's answers as targets.

    Answers are the contents of the template's `{% generation %}` blocks. If the template has no such blocks, an answer
    is the text that it writes after the prompt that decoding would see. An answer ends with its last end token. If an
    answer contains no end token, the end token that directly follows it is also a target, because it stops decoding
    (such as GLM's `<|user|>`, or the one that packing adds at the end). Messages with `"weight": 0` are not targets.

    Args:
        **template_variables: variables for the chat template, such as `tools`.

    Returns:
        The tokens `[n]`, and a bool mask `[n + 1]` that is true for targets. The last entry is for the end token that
        packing adds.

    Raises:
        AnswerLocationError: the answers cannot be located, because the template writes a message differently when more
            messages follow, or because a token spans the start or end of an answer.
    """
    template_variables = {"strftime_now": TEMPLATE_DATE, **template_variables}
    messages = list(messages)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        try:
            rendered = tokenizer.chat_templates.render(
                messages, add_generation_prompt=False, with_generation=True, **template_variables
            )
        except DroppedTextError as error:
            # A template that drops earlier answers may still write each of them when it is the last message.
            if error.index not in _answer_indices(messages):
                raise
            raise _not_located(error.index, messages, error) from error
        tokens, offsets = tokenizer.encode_rendered(rendered)
        if (blocks := _counted_blocks(rendered.generation, messages)) is not None:
            return tokens, _mark_blocks(tokens, offsets, blocks, tokenizer)
    else:
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=False, **template_variables)
    return tokens, _mark_by_prefixes(tokens, messages, tokenizer, template_variables)


def encode_answers(
    messages: Sequence[dict[str, Any]], tokenizer: Tokenizer, **template_variables: Any
) -> tuple[list[tuple[list[int], np.ndarray]], list[str]]:
    """Encodes a conversation as one or more documents, in which every answer that can be located is a target.

    The result is one document if `encode_chat` can locate every answer. Otherwise, each answer gets a separate document
    with the prompt as decoding sees it and the answer as the template writes it in the last message. For example,
    this happens with reasoning models, whose templates remove the reasoning from earlier answers.

    Args:
        **template_variables: variables for the chat template, such as `tools`.

    Returns:
        The tokens and the target mask of each document, as `encode_chat` returns them, and an error message for each
        answer that cannot be located.

    Raises:
        AnswerLocationError: no answer can be located.
    """
    messages = list(messages)
    try:
        return [encode_chat(messages, tokenizer, **template_variables)], []
    except AnswerLocationError:
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise
    documents, problems = [], []
    for index in _answer_indices(messages):
        try:
            documents.append(_encode_answer(messages, index, tokenizer, template_variables))
        except (AnswerLocationError, ConversationError) as error:
            problems.append(str(error))
    if not documents:
        raise AnswerLocationError(problems[0])
    return documents, problems


def _answer_indices(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Returns the indices of the answers that are targets."""
    return [n for n, each in enumerate(messages) if each["role"] == "assistant" and each.get("weight") != 0]


def _not_located(index: int, messages: Sequence[Any], problem: object) -> AnswerLocationError:
    place = f"the answer in message {index + 1} of {len(messages)}"
    return AnswerLocationError(f"{place} cannot be located: {problem}")


def _mark_by_prefixes(
    tokens: list[int], messages: list[dict[str, Any]], tokenizer: Tokenizer, template_variables: dict[str, Any]
) -> np.ndarray:
    """Locates each answer by encoding the conversation up to the start and the end of the answer.

    Both encodings must be prefixes of the whole conversation's encoding, or the positions in decoding would differ.
    """
    is_target = np.zeros(len(tokens) + 1, bool)
    for index in _answer_indices(messages):
        # Encode the prompt as decoding sees it, and the conversation up to and including this answer.
        prompt = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, **template_variables)
        through = tokenizer.apply_chat_template(
            messages[: index + 1], add_generation_prompt=False, **template_variables
        )
        begin, end = len(prompt), len(through)
        if begin > end or tokens[:begin] != prompt or tokens[:end] != through:
            problem = "writes the text before it or in it differently than in the whole conversation"
            raise _not_located(index, messages, f"the chat template or the tokenizer {problem}")
        is_target[begin : _answer_end(tokens, begin, end, tokenizer)] = True
    return is_target


def _encode_answer(
    messages: list[dict[str, Any]], index: int, tokenizer: HuggingFaceTokenizer, template_variables: dict[str, Any]
) -> tuple[list[int], np.ndarray]:
    """Encodes one answer together with its prompt."""
    template_variables = {"strftime_now": TEMPLATE_DATE, **template_variables}
    render = tokenizer.chat_templates.render
    prompt = render(messages[:index], add_generation_prompt=True, **template_variables)
    through = render(messages[: index + 1], add_generation_prompt=False, **template_variables)
    if not through.text.startswith(prompt.text):
        problem = "the chat template does not write it after the prompt that decoding would see"
        raise _not_located(index, messages, problem)
    before, (tokens, _) = tokenizer.encode_rendered(prompt)[0], tokenizer.encode_rendered(through)
    begin = len(before)
    if tokens[:begin] != before:
        # A token spans the end of the prompt, which cannot happen in decoding, so encode prompt and answer separately.
        tokens = before + tokenizer.encode_rendered(through, len(prompt.text))[0]
    is_target = np.zeros(len(tokens) + 1, bool)
    is_target[begin : _answer_end(tokens, begin, len(tokens), tokenizer)] = True
    return tokens, is_target


def _counted_blocks(blocks: Spans | None, messages: list[dict[str, Any]]) -> Spans | None:
    """Returns the generation blocks of the answers that are targets, or None if the blocks do not match the answers."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if blocks is None or all(message.get("weight") != 0 for message in answers):
        return blocks
    if len(blocks) != len(answers):
        return None
    return [block for block, message in zip(blocks, answers, strict=True) if message.get("weight") != 0]


def _mark_blocks(
    tokens: list[int], offsets: list[tuple[int, int]], blocks: Spans, tokenizer: HuggingFaceTokenizer
) -> np.ndarray:
    """Marks the tokens of generation blocks."""
    is_target = np.zeros(len(tokens) + 1, bool)
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    # Offsets may exclude a token's leading space, so let each token start where the previous one ends.
    starts = np.minimum(starts, np.maximum.accumulate(np.append(0, ends))[:-1])
    for start, stop in blocks:
        begin, end = int(np.searchsorted(ends, start, "right")), int(np.searchsorted(starts, stop, "left"))
        if begin < end and (starts[begin] < start or ends[end - 1] > stop):
            raise AnswerLocationError(
                f"the answer at characters {start} to {stop} cannot be located: a token spans its start or end"
            )
        is_target[begin : _answer_end(tokens, begin, end, tokenizer)] = True
    return is_target


def _answer_end(tokens: list[int], begin: int, end: int, tokenizer: Tokenizer) -> int:
    """Returns the end of an answer's targets, after its last end token or after an end token that directly follows it.

    Text that the template writes after the end token, such as a newline, is not a target.
    """
    stops = [place for place in range(begin, end) if tokens[place] in tokenizer.eos_token_ids]
    if stops:
        return stops[-1] + 1
    return end + (end == len(tokens) or tokens[end] in tokenizer.eos_token_ids)


def encode_formatted(text: str, tokenizer: Tokenizer) -> tuple[list[int], np.ndarray]:
    """Encodes a conversation that the chat template has already formatted, and marks the answers as targets.

    An answer starts after the text that the template adds for `add_generation_prompt`. It ends with the next end token.

    Returns the tokens `[n]` and the target mask `[n + 1]`, as `encode_chat` does.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise TokenizerError("formatted conversations need a tokenizer with a chat template")
    header = tokenizer.chat_templates.generation_prompt
    if not header:
        raise TokenizerError("the chat template writes no text before an answer, so answers cannot be located")
    tokens, starts = tokenizer.encode_with_starts(text)
    is_target = np.zeros(len(tokens) + 1, bool)
    position = text.find(header)
    while position >= 0:
        # Mark the tokens from the end of the header up to and including the next end token.
        position += len(header)
        begin = int(np.searchsorted(starts, position))
        # If there is no end token, the targets include the one that packing adds.
        ends = (place for place in range(begin, len(tokens)) if tokens[place] in tokenizer.eos_token_ids)
        is_target[begin : next(ends, len(tokens)) + 1] = True
        position = text.find(header, position)
    return tokens, is_target
