"""Defines the tasks of a regeneration, which are texts to continue and conversations to answer again."""

import abc
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

from mtpjax.data.chat import TEMPLATE_DATE, encode_answers
from mtpjax.data.jsonl import SkippedRecordError, decode_utf8
from mtpjax.data.prompts import ID_KEYS, read_turns
from mtpjax.data.record_files import RECORD_SUFFIXES, as_object, is_record_file, read_file_records
from mtpjax.data.record_forms import find_messages, has_conversation, without_conversation
from mtpjax.data.tokenizer import ConversationError, Tokenizer, TokenizerError
from mtpjax.errors import DroppedTextError

DOCUMENT_PROMPT_TOKENS = 64  # tokens of a document that are kept as its prompt
RecordKind = Literal["conversations", "prompts", "documents"]


class Task(abc.ABC):
    """A record to answer.

    Attributes:
        prompt: tokens before the next answer; None once all answers are complete.
        finish_reasons: finish reasons of the answers so far.
        is_truncated: whether the last answers were dropped because they did not fit.
    """

    prompt: list[int] | None = None
    is_truncated = False

    def __init__(self, tokenizer: Tokenizer, extra_fields: dict[str, Any]):
        self.tokenizer, self.extra_fields = tokenizer, extra_fields
        self.finish_reasons: list[str] = []

    @abc.abstractmethod
    def add_answer(self, tokens: list[int], finish_reason: str) -> bool:
        """Adds an answer and moves to the next prompt.

        Args:
            tokens: the answer without its stop token.

        Returns:
            True if training will tokenize the record's text so far into the same tokens.
        """

    @abc.abstractmethod
    def record(self) -> dict[str, Any]:
        """Returns the finished record. Raises `SkippedRecordError` if training could not read it."""


def detect_record_kind(paths: Sequence[pathlib.Path]) -> RecordKind:
    """Detects the kind of the records in files, by the same suffixes and fields as training does.

    Returns "documents" for files that are whole texts. In record files, the first readable record decides:
    "conversations" if it has a conversation (`mtpjax.data.record_forms.has_conversation`), else "prompts".
    """
    # Whole files and records cannot be mixed in one run.
    have_records = {is_record_file(path) for path in paths}
    if len(have_records) != 1:
        problem = f"some files contain records ({', '.join(RECORD_SUFFIXES)}), others plain text: select by pattern"
        raise ValueError(problem if paths else "there are no files")
    if have_records == {False}:
        return "documents"
    for _, content in read_file_records(paths):
        try:
            return "conversations" if has_conversation(as_object(content)) else "prompts"
        except SkippedRecordError:
            continue
    raise ValueError(f"{paths[0]} contains no record: none of it is a JSON object")


def make_task(
    content: bytes | dict[str, Any],
    tokenizer: Tokenizer,
    *,
    kind: RecordKind,
    max_prompt_tokens: int,
    chat: bool = False,
    prompt_tokens: int | None = None,
) -> Task:
    """Makes the task of one record.

    Args:
        prompt_tokens: number of tokens of a text to keep as its prompt; by default all tokens, or 64 for a document.

    Raises:
        SkippedRecordError: the record has no usable text or conversation.
    """
    is_text = kind == "documents"
    record = {"text": decode_utf8(content)} if is_text and isinstance(content, bytes) else as_object(content)
    if kind == "conversations":
        messages = find_messages(record)
        # Tool calls with weight 0 are allowed, because they are part of the prompt.
        if any(message.get("tool_calls") and message.get("weight") != 0 for message in messages):
            raise SkippedRecordError("unreadable", "contains tool calls, which regenerated answers do not make")
        # The output contains the conversation (only in OpenAI's format) and the record's other fields.
        return ConversationTask(messages, tokenizer, max_prompt_tokens, without_conversation(record))
    # Prompts keep their category and id. With `chat`, each turn becomes a user message that the model answers.
    extra_fields = {name: record[name] for name in ("category", *ID_KEYS) if name in record}
    turns = list(read_turns(record))
    if chat:
        messages = [{"role": role, "content": turn} for turn in turns for role in ("user", "assistant")]
        return ConversationTask(messages, tokenizer, max_prompt_tokens, extra_fields)
    if prompt_tokens is None and kind == "documents":
        prompt_tokens = DOCUMENT_PROMPT_TOKENS
    prompt = _truncate(_encode(turns[0], tokenizer), prompt_tokens, tokenizer)
    if not prompt:
        raise SkippedRecordError("empty", "has no tokens")
    if len(prompt) > max_prompt_tokens:
        raise SkippedRecordError("too long", f"has {len(prompt)} tokens; there is room for {max_prompt_tokens}")
    return TextTask(prompt, tokenizer, extra_fields)


class TextTask(Task):
    """A text to continue."""

    def __init__(self, prompt: list[int], tokenizer: Tokenizer, extra_fields: dict[str, Any]):
        super().__init__(tokenizer, extra_fields)
        self.prompt, self.text = prompt, ""

    def add_answer(self, tokens: list[int], finish_reason: str) -> bool:
        # Store the decoded text. It may tokenize differently, because a token can merge across the end of the prompt.
        all_tokens = (self.prompt or []) + tokens
        self.prompt, self.text = None, self.tokenizer.decode(all_tokens)
        self.finish_reasons.append(finish_reason)
        return _encode(self.text, self.tokenizer) == all_tokens

    def record(self) -> dict[str, Any]:
        return {**self.extra_fields, "text": self.text, "finish_reasons": self.finish_reasons}


class ConversationTask(Task):
    """A conversation whose assistant messages are generated again, except those with `"weight": 0`.

    A user message at the end is answered too.
    """

    def __init__(
        self, messages: list[dict], tokenizer: Tokenizer, max_prompt_tokens: int, extra_fields: dict[str, Any]
    ):
        super().__init__(tokenizer, extra_fields)
        self.max_prompt_tokens = max_prompt_tokens
        self.template_variables = {"tools": extra_fields.get("tools")}
        self.remaining = [*messages, {"role": "assistant"}] if messages[-1]["role"] == "user" else list(messages)
        self.messages: list[dict[str, Any]] = []
        self._advance()
        if self.prompt is None:
            raise SkippedRecordError("too long" if self.is_truncated else "empty", "has no answer to regenerate")

    def add_answer(self, tokens: list[int], finish_reason: str) -> bool:
        all_tokens = (self.prompt or []) + tokens
        self.messages.append({"role": "assistant", "content": self.tokenizer.decode(tokens)})
        self.finish_reasons.append(finish_reason)
        try:
            is_same = self._encode_messages(add_generation_prompt=False)[: len(all_tokens)] == all_tokens
        except ConversationError:
            is_same = False
        self._advance()
        return is_same

    def record(self) -> dict[str, Any]:
        try:
            encode_answers(self.messages, self.tokenizer, **self.template_variables)
        except TokenizerError as error:
            raise SkippedRecordError("unreadable", str(error)) from error
        return {**self.extra_fields, "messages": self.messages, "finish_reasons": self.finish_reasons}

    def _advance(self) -> None:
        """Moves to the next answer to generate, or ends the conversation if the answer does not fit."""
        self.prompt, num_answered = None, len(self.messages)
        while self.remaining:
            message = self.remaining.pop(0)
            # Messages before the answer are kept unchanged, including assistant messages with weight 0.
            if message["role"] != "assistant" or message.get("weight") == 0:
                self.messages.append(message)
                continue
            try:
                prompt = self._encode_messages(add_generation_prompt=True)
            except ConversationError as error:
                # A template that rejects the first prompt makes the record unusable. Later, the conversation ends
                # before the rejected prompt.
                if not self.finish_reasons:
                    reason = "unreadable" if isinstance(error, DroppedTextError) else "corrupt"
                    raise SkippedRecordError(reason, str(error)) from error
                prompt = None
            if prompt is not None and len(prompt) <= self.max_prompt_tokens:
                self.prompt = prompt
                return
            # This answer is rejected or does not fit, so drop it and everything after it.
            self.is_truncated, self.remaining = True, []
        # Drop the messages after the last answer, because they have no answer to train on.
        del self.messages[num_answered:]

    def _encode_messages(self, *, add_generation_prompt: bool) -> list[int]:
        template_variables = {"strftime_now": TEMPLATE_DATE, **self.template_variables}
        return self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=add_generation_prompt, **template_variables
        )


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    """Encodes a text without the end token that some tokenizers append."""
    try:
        tokens = tokenizer.encode(text)
    except ValueError as error:
        raise SkippedRecordError("corrupt", str(error)) from error
    return tokens[:-1] if tokens and tokens[-1] in tokenizer.eos_token_ids else tokens


def _truncate(tokens: list[int], max_tokens: int | None, tokenizer: Tokenizer) -> list[int]:
    """Returns the first `max_tokens` tokens, or up to three fewer so that no UTF-8 character is cut."""
    if max_tokens is None or len(tokens) <= max_tokens:
        return tokens
    for count in range(max_tokens, max(max_tokens - 4, 0), -1):
        if not tokenizer.decode(tokens[:count]).endswith("\ufffd"):
            return tokens[:count]
    return tokens[:max_tokens]
