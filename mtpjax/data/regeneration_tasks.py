"""Records that wait for a model's answers: texts to continue, and conversations to answer anew."""

import pathlib
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from mtpjax.data.chat import DAY, encode_chat, is_conversation
from mtpjax.data.jsonl import UnusableError, parse_object, parse_text, read_parts
from mtpjax.data.prompts import ID_KEYS, TEXT_KEYS
from mtpjax.data.tokenizer import ConversationError, Tokenizer, TokenizerError

REASONS = ("corrupt", "empty", "too long", "unreadable")  # why a record is skipped
DOCUMENT_PROMPT = 64  # tokens of a document that are kept as its prompt
Kind = Literal["conversations", "prompts", "documents"]


class Task(Protocol):
    """A record that waits for answers.

    Attributes:
        prompt: tokens before the next answer; None when all answers are given.
        finish_reasons: finish reasons of the answers so far.
        is_cut: the last answers had no room.
    """

    prompt: list[int] | None
    finish_reasons: list[str]
    is_cut: bool

    def take(self, tokens: list[int], finish_reason: str) -> bool:
        """Adds an answer and moves to the next prompt.

        Args:
            tokens: the answer without its stop token.
            finish_reason: why it ended.

        Returns:
            True if training will tokenize the record's text so far as the same tokens.
        """
        ...

    def record(self) -> dict[str, Any]:
        """Returns the finished record. Raises `UnusableError` if training could not read it."""
        ...


def find_kind(paths: Sequence[pathlib.Path]) -> Kind:
    """Finds the kind of records in files; in JSONL the first readable record decides.

    Args:
        paths: the files.

    Returns:
        "documents" for files other than JSONL, "conversations" for JSONL with `messages`, else "prompts".

    Raises:
        ValueError: there are no files or no records, or some files are JSONL and some are not.
    """
    # Whole files and lines cannot be mixed in one run.
    are_lines = {path.suffix == ".jsonl" for path in paths}
    if len(are_lines) != 1:
        raise ValueError(
            "some files are .jsonl and some are not: choose by a pattern" if paths else "there are no files"
        )
    if are_lines == {False}:
        return "documents"
    for _, content in read_parts(paths, by_line=True):
        try:
            return "conversations" if "messages" in parse_object(content) else "prompts"
        except UnusableError:
            continue
    raise ValueError(f"{paths[0]} holds no record: no line of it is a JSON object")


def make_task(
    content: bytes, tokenizer: Tokenizer, *, kind: Kind, room: int, chat: bool = False, prompt_tokens: int | None = None
) -> Task:
    """Makes the task of one record.

    Args:
        content: the record's bytes.
        tokenizer: the tokenizer.
        kind: the kind of the records.
        room: most tokens of a prompt.
        chat: make prompts into conversations.
        prompt_tokens: keep this many tokens of a text as its prompt; None: all, or 64 of a document.

    Returns:
        The task.

    Raises:
        UnusableError: the record has no usable text or conversation.
        TokenizerError: the tokenizer has no chat template.
    """
    record = {"text": parse_text(content)} if kind == "documents" else parse_object(content)
    if kind == "conversations":
        return Conversation(_messages(record), tokenizer, room, kept={**record, "messages": None})
    # Prompts keep their category and id. With `chat`, each turn becomes a user's message that the model answers.
    kept = {name: record[name] for name in ("category", *ID_KEYS) if name in record}
    turns = _turns(record)
    if chat:
        messages = [{"role": role, "content": turn} for turn in turns for role in ("user", "assistant")]
        return Conversation(messages, tokenizer, room, kept=kept)
    if prompt_tokens is None and kind == "documents":
        prompt_tokens = DOCUMENT_PROMPT
    return Text(turns[0], tokenizer, room, kept=kept, prompt_tokens=prompt_tokens)


class Text:
    """A text, or its first `prompt_tokens`, to continue."""

    is_cut = False

    def __init__(self, text: str, tokenizer: Tokenizer, room: int, *, kept: dict, prompt_tokens: int | None = None):
        self.tokenizer, self.kept, self.text = tokenizer, kept, ""
        self.finish_reasons: list[str] = []
        self.prompt: list[int] | None = _shortened(_encode(text, tokenizer), prompt_tokens, tokenizer)
        if not self.prompt:
            raise UnusableError("empty", "has no tokens")
        if len(self.prompt) > room:
            raise UnusableError("too long", f"has {len(self.prompt)} tokens; there is room for {room}")

    def take(self, tokens: list[int], finish_reason: str) -> bool:
        # Store the decoded text. It may tokenize differently: a continuation can merge across the cut.
        whole = (self.prompt or []) + tokens
        self.prompt, self.text = None, self.tokenizer.decode(whole)
        self.finish_reasons.append(finish_reason)
        return _encode(self.text, self.tokenizer) == whole

    def record(self) -> dict[str, Any]:
        return {**self.kept, "text": self.text, "finish_reasons": self.finish_reasons}


class Conversation:
    """A conversation whose assistant messages are answered anew, except those with `"weight": 0`.

    A user's message at the end gets an answer too.
    """

    is_cut = False

    def __init__(self, messages: list[dict[str, Any]], tokenizer: Tokenizer, room: int, *, kept: dict[str, Any]):
        self.tokenizer, self.room, self.kept = tokenizer, room, kept
        self.choices = {"tools": kept["tools"]} if "tools" in kept else {}
        self.waiting = [*messages, {"role": "assistant"}] if messages[-1]["role"] == "user" else list(messages)
        self.talk: list[dict[str, Any]] = []
        self.finish_reasons: list[str] = []
        self.prompt: list[int] | None = None
        self._go_on()
        if self.prompt is None:
            raise UnusableError("too long" if self.is_cut else "empty", "has no answer to regenerate")

    def take(self, tokens: list[int], finish_reason: str) -> bool:
        whole = (self.prompt or []) + tokens
        self.talk.append({"role": "assistant", "content": self.tokenizer.decode(tokens)})
        self.finish_reasons.append(finish_reason)
        try:
            is_same = self._tokens(add_generation_prompt=False)[: len(whole)] == whole
        except ConversationError:
            is_same = False
        self._go_on()
        return is_same

    def record(self) -> dict[str, Any]:
        try:
            encode_chat(self.talk, self.tokenizer, **self.choices)
        except TokenizerError as error:
            raise UnusableError("unreadable", str(error)) from error
        return {**self.kept, "messages": self.talk, "finish_reasons": self.finish_reasons}

    def _go_on(self) -> None:
        """Moves to the next answer to generate; ends the conversation where an answer has no room."""
        self.prompt, answered = None, len(self.talk)
        while self.waiting:
            message = self.waiting.pop(0)
            # Messages before the answer are kept as they are, including assistant messages of weight 0.
            if message["role"] != "assistant" or message.get("weight") == 0:
                self.talk.append(message)
                continue
            try:
                prompt = self._tokens(add_generation_prompt=True)
            except ConversationError as error:
                # A template that rejects the first prompt makes the record unusable; later, the conversation ends
                # there.
                if not self.finish_reasons:
                    raise UnusableError("corrupt", str(error)) from error
                prompt = None
            if prompt is not None and len(prompt) <= self.room:
                self.prompt = prompt
                return
            # No room: drop this answer and everything after it.
            self.is_cut, self.waiting = True, []
        # Messages after the last answer have no answer to train on.
        del self.talk[answered:]

    def _tokens(self, *, add_generation_prompt: bool) -> list[int]:
        choices = {"strftime_now": DAY.strftime, **self.choices}
        return self.tokenizer.chat(self.talk, add_generation_prompt=add_generation_prompt, **choices)


def _messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    messages = record.get("messages", [])
    if not is_conversation(messages):
        raise UnusableError("corrupt", "has no 'messages', a list of objects with a role each")
    if any(each.get("tool_calls") for each in messages):
        raise UnusableError("unreadable", "contains tool calls, which regenerated answers do not make")
    return messages


def _turns(record: dict[str, Any]) -> list[str]:
    """Returns all turns of a Spec-Bench record, or the one text of another record."""
    turns = record.get("turns", [next((record[key] for key in TEXT_KEYS if key in record), None)])
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise UnusableError("corrupt", f"has no text under any of turns, {', '.join(TEXT_KEYS)}")
    if not all(turn.strip() for turn in turns):
        raise UnusableError("empty", "is empty")
    return turns


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    """Encodes a text without the end token that some tokenizers append."""
    try:
        tokens = tokenizer.encode(text)
    except ValueError as error:
        raise UnusableError("corrupt", str(error)) from error
    return tokens[:-1] if tokens and tokens[-1] in tokenizer.eos_token_ids else tokens


def _shortened(tokens: list[int], most: int | None, tokenizer: Tokenizer) -> list[int]:
    """Returns the first `most` tokens, or up to three fewer so that no UTF-8 character is cut."""
    if most is None or len(tokens) <= most:
        return tokens
    for count in range(most, max(most - 4, 0), -1):
        if not tokenizer.decode(tokens[:count]).endswith("\ufffd"):
            return tokens[:count]
    return tokens[:most]
