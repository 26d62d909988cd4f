"""Sources -> documents: files of text, records of JSONL, conversations; and the fingerprint of what a run reads."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtpjax.data.chat import encode_chat, is_conversation
from mtpjax.data.config import Source
from mtpjax.data.jsonl import File, UnusableError, parse_object, parse_text, read_parts
from mtpjax.data.packing import Document, python_sources
from mtpjax.data.tokenizer import ByteTokenizer, ConversationError, Tokenizer, TokenizerError

REASONS = ("corrupt", "empty", "vocabulary")  # why a document is skipped


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a source gave, how many documents it would have given besides, by reason, and the files it was read from."""

    documents: list[Document]
    skipped: dict[str, int]
    files: list[File]


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
    files: list[File] = []
    for place, content in read_parts(find_files(source), by_line=source.kind != "text", files=files):
        try:
            tokens, loss_mask, category = _encode(content, source, tokenizer)
            tokens = _checked(tokens, vocab_size, end if loss_mask is None else None)
            documents.append(Document(place, tokens, loss_mask, category))
        except UnusableError as problem:
            skipped[problem.reason] += 1
            if sum(skipped.values()) > source.most_skipped:
                counts = ", ".join(f"{count} {reason}" for reason, count in skipped.items() if count)
                raise ValueError(
                    f"{source.path or 'the standard library'} has over {source.most_skipped} documents of no use"
                    f" ({counts}); the last: {place} {problem}"
                ) from problem
        except TokenizerError as error:
            raise TokenizerError(f"{place}: {error}") from error
    return Reading(documents, skipped, files)


def fingerprint(
    sources: Sequence[Source], readings: Sequence[Reading], tokenizer: Tokenizer, *, vocab_size: int
) -> str:
    """Hexadecimal sha256 of the data that a run has read, for a run that goes on to compare.

    That is the sources in order, each with kind, field, weight and its files (names below the folder that they share,
    sizes, contents); the tokenizer; and the size of the vocabulary, which decides what is skipped. Where the files lie
    changes nothing.
    """
    parts = [
        {"kind": source.kind, "field": source.field, "weight": source.weight, "files": reading.files}
        for source, reading in zip(sources, readings, strict=True)
    ]
    whole = {"sources": parts, "tokenizer": tokenizer.digest, "vocab_size": vocab_size}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _encode(content: bytes, source: Source, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray | None, str]:
    """Tokens `[n]`, of a conversation the loss mask `[n + 1]`, and the category that a record names, else "".

    Raises `UnusableError`, TokenizerError.
    """
    if source.kind == "text":
        return _encode_text(parse_text(content), tokenizer), None, ""
    record = parse_object(content)
    value, category = record.get(source.field), record.get("category")
    category = category if isinstance(category, str) else ""
    if source.kind == "chat":
        return *_encode_messages(value, record, source.field, tokenizer), category
    if not isinstance(value, str):
        raise UnusableError("corrupt", f"has no text '{source.field}'")
    return _encode_text(value, tokenizer), None, category


def _encode_text(text: str, tokenizer: Tokenizer) -> np.ndarray:
    if not text:
        raise UnusableError("empty", "is empty")
    if isinstance(tokenizer, ByteTokenizer):
        return np.frombuffer(text.encode(), np.uint8)  # a list of so many would take far longer
    try:
        tokens = tokenizer.encode(text)
    except ValueError as error:
        raise UnusableError("corrupt", str(error)) from error
    if tokens and tokens[-1] == end_token_id(tokenizer):
        tokens = tokens[:-1]  # some tokenizers end each text; packing does
    return np.array(tokens, np.int64)


def _encode_messages(
    messages: Any, record: dict[str, Any], field: str, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    if not is_conversation(messages):
        raise UnusableError("corrupt", f"has no '{field}', a list of objects with a role each")
    choices = {"tools": record["tools"]} if "tools" in record else {}
    try:
        tokens, is_target = encode_chat(messages, tokenizer, **choices)
    except ConversationError as error:
        raise UnusableError("corrupt", str(error)) from error
    if not is_target.any():
        raise UnusableError("empty", "holds no answer")
    return np.array(tokens, np.int64), is_target


def _checked(tokens: np.ndarray, vocab_size: int, end: int | None) -> np.ndarray:
    """The tokens as a document holds them. Raises `UnusableError`, also where `end` is among them."""
    if not len(tokens):
        raise UnusableError("empty", "has no tokens")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UnusableError("vocabulary", f"has an id outside of the {vocab_size} of the vocabulary")
    if end is not None and (tokens == end).any():
        raise UnusableError("corrupt", f"holds the end token {end}")
    return tokens if tokens.dtype == np.uint8 else tokens.astype(np.int32)
