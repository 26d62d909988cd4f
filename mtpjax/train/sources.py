"""Sources -> documents: files of text, records of JSONL, conversations; and the fingerprint of what a run reads."""

import codecs
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mtpjax.config import Source
from mtpjax.tokenizer import ByteTokenizer, ConversationError, Tokenizer, TokenizerError
from mtpjax.train.chat import encode_chat
from mtpjax.train.data import Document, python_sources

REASONS = ("corrupt", "empty", "vocabulary")  # why a document is skipped


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a source gave, and how many documents it would have given besides, by reason."""

    documents: list[Document]
    skipped: dict[str, int]


class _UnusableError(ValueError):
    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def find_files(source: Source) -> list[pathlib.Path]:
    """The files of a source, in sorted order. Raises FileNotFoundError if there is none."""
    if source.path is None:
        return python_sources()
    root = pathlib.Path(source.path)
    files = [root] if root.is_file() else sorted(path for path in root.rglob(source.pattern) if path.is_file())
    if not files:
        raise FileNotFoundError(f"no files match {source.pattern} under {root}")
    return files


def end_token_id(tokenizer: Tokenizer) -> int:
    """What ends a document: the first of the tokenizer's end tokens. Raises TokenizerError if it has none."""
    if not tokenizer.eos_token_ids:
        raise TokenizerError("the tokenizer names no end token: documents could not be told apart")
    return tokenizer.eos_token_ids[0]


def read_source(source: Source, tokenizer: Tokenizer, *, vocab_size: int) -> Reading:
    """Reads a source into documents, in the order of its files and lines.

    Skipped and counted are `corrupt` documents (no UTF-8, no JSON, no such field, a conversation that the chat template
    refuses, text with the end token inside), `empty` ones (conversations without an answer are), and those with ids
    outside of the `vocabulary`. Blank lines of JSONL are no records.

    Raises ValueError, with the counts and the last place, once more than `source.most_skipped` are skipped;
    TokenizerError, with the place, where the answers of a conversation cannot be told; FileNotFoundError, OSError.
    """
    end = end_token_id(tokenizer)
    documents: list[Document] = []
    skipped: dict[str, int] = dict.fromkeys(REASONS, 0)
    for place, content in _records(source):
        try:
            tokens, loss_mask, category = _encode(content, source, tokenizer)
            tokens = _checked(tokens, vocab_size, end if loss_mask is None else None)
            documents.append(Document(place, tokens, loss_mask, category))
        except _UnusableError as problem:
            skipped[problem.reason] += 1
            if sum(skipped.values()) > source.most_skipped:
                counts = ", ".join(f"{count} {reason}" for reason, count in skipped.items() if count)
                raise ValueError(
                    f"{source.path or 'the standard library'} has over {source.most_skipped} documents of no use"
                    f" ({counts}); the last: {place} {problem}"
                ) from problem
        except TokenizerError as error:
            raise TokenizerError(f"{place}: {error}") from error
    return Reading(documents, skipped)


def fingerprint(sources: Sequence[Source], tokenizer: Tokenizer, *, vocab_size: int) -> str:
    """Hexadecimal sha256 of the data that a run reads, for a run that goes on to compare.

    That is the sources in order, each with kind, field, weight and its files (names below `path`, sizes, contents); the
    tokenizer; and the size of the vocabulary, which decides what is skipped. Where the files lie changes nothing.
    Raises FileNotFoundError, OSError.
    """
    parts = []
    for source in sources:
        files = find_files(source)
        root = os.path.commonpath([path.parent for path in files])
        contents = [(os.path.relpath(path, root), path.stat().st_size, _file_digest(path)) for path in files]
        parts.append({"kind": source.kind, "field": source.field, "weight": source.weight, "files": contents})
    whole = {"sources": parts, "tokenizer": tokenizer.digest, "vocab_size": vocab_size}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _records(source: Source) -> Iterator[tuple[str, bytes]]:
    """Whole files of text, or lines that are not blank, each with its place: the file, or "FILE line N"."""
    for path in find_files(source):
        if source.kind == "text":
            yield str(path), path.read_bytes()
            continue
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield f"{path} line {number}", line


def _encode(content: bytes, source: Source, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray | None, str]:
    """Tokens `[n]`, of a conversation the loss mask `[n + 1]`, and the category that a record names, else "".

    Raises `_UnusableError`, TokenizerError.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _UnusableError("corrupt", "is no UTF-8") from error
    if source.kind == "text":
        return _encode_text(text, tokenizer), None, ""
    record = _object(text)
    value, category = record.get(source.field), record.get("category")
    category = category if isinstance(category, str) else ""
    if source.kind == "chat":
        return *_encode_messages(value, record, source.field, tokenizer), category
    if not isinstance(value, str):
        raise _UnusableError("corrupt", f"has no text '{source.field}'")
    return _encode_text(value, tokenizer), None, category


def _encode_text(text: str, tokenizer: Tokenizer) -> np.ndarray:
    if not text:
        raise _UnusableError("empty", "is empty")
    if isinstance(tokenizer, ByteTokenizer):
        return np.frombuffer(text.encode(), np.uint8)  # a list of so many would take far longer
    try:
        tokens = tokenizer.encode(text)
    except ValueError as error:
        raise _UnusableError("corrupt", str(error)) from error
    if tokens and tokens[-1] == end_token_id(tokenizer):
        tokens = tokens[:-1]  # some tokenizers end each text; packing does
    return np.array(tokens, np.int64)


def _encode_messages(
    messages: Any, record: dict[str, Any], field: str, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    is_list = isinstance(messages, list) and len(messages) > 0
    if not is_list or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages):
        raise _UnusableError("corrupt", f"has no '{field}', a list of objects with a role each")
    choices = {"tools": record["tools"]} if "tools" in record else {}
    try:
        tokens, is_target = encode_chat(messages, tokenizer, **choices)
    except ConversationError as error:
        raise _UnusableError("corrupt", str(error)) from error
    if not is_target.any():
        raise _UnusableError("empty", "holds no answer")
    return np.array(tokens, np.int64), is_target


def _checked(tokens: np.ndarray, vocab_size: int, end: int | None) -> np.ndarray:
    """The tokens as a document holds them. Raises `_UnusableError`, also where `end` is among them."""
    if not len(tokens):
        raise _UnusableError("empty", "has no tokens")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise _UnusableError("vocabulary", f"has an id outside of the {vocab_size} of the vocabulary")
    if end is not None and (tokens == end).any():
        raise _UnusableError("corrupt", f"holds the end token {end}")
    return tokens if tokens.dtype == np.uint8 else tokens.astype(np.int32)


def _object(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode()  # lone surrogates have no UTF-8, and no tokens
    except (ValueError, RecursionError) as error:
        raise _UnusableError("corrupt", f"is no JSON: {str(error)[:100]}") from error
    if not isinstance(record, dict):
        raise _UnusableError("corrupt", "is no JSON object")
    return record


def _file_digest(path: pathlib.Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
