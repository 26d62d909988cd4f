"""Reads sources into documents (text files, JSONL records, conversations), and fingerprints what was read."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtpjax.data.chat import encode_answers, encode_formatted
from mtpjax.data.config import Source
from mtpjax.data.data_files import list_data_files
from mtpjax.data.jsonl import SkippedRecordError, decode_utf8
from mtpjax.data.packing import Document
from mtpjax.data.python_sources import list_python_sources
from mtpjax.data.record_files import FileDigest, as_object, is_record_file, read_file_records
from mtpjax.data.record_forms import find_messages, has_conversation
from mtpjax.data.tokenizer import ByteTokenizer, ConversationError, Tokenizer, TokenizerError
from mtpjax.errors import AnswerLocationError

SKIP_REASONS = ("corrupt", "empty", "vocabulary")  # reasons to skip a document

Encoded = tuple[np.ndarray, np.ndarray | None]  # tokens `[n]`, and the loss mask `[n + 1]` of a conversation


@dataclasses.dataclass
class SourceContents:
    """The documents and files of a source, and the counts of skipped documents.

    Attributes:
        documents: the documents.
        skipped: number of skipped documents by reason.
        files: the files that were read.
        last_skipped: location and problem of the last skipped document, or "".
        lost_answers: number of answers that could not be located, in conversations with at least one located answer.
        last_lost: location and problem of the last such answer, or "".
        left_out: description of the files in the folder that were not read, or "".
    """

    documents: list[Document] = dataclasses.field(default_factory=list)
    skipped: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SKIP_REASONS, 0))
    files: list[FileDigest] = dataclasses.field(default_factory=list)
    last_skipped: str = ""
    lost_answers: int = 0
    last_lost: str = ""
    left_out: str = ""


def end_token_id(tokenizer: Tokenizer) -> int:
    """Returns the token that ends a document, which is the tokenizer's first end token."""
    if not tokenizer.eos_token_ids:
        raise TokenizerError("the tokenizer has no end token, which must separate documents")
    return tokenizer.eos_token_ids[0]


def read_source(source: Source, tokenizer: Tokenizer, *, vocab_size: int, output: str | None = None) -> SourceContents:
    """Reads a source into documents, in the order of its files and lines.

    Leaves out and counts files in a folder as `list_data_files` does. Skips and counts three kinds of documents:
    `corrupt` (not UTF-8 or with NUL, not JSON, a missing field, a conversation that the chat template rejects or in
    which no answer can be located, text that contains the end token), `empty` (including conversations without an
    answer), and `vocabulary` (ids outside the vocabulary). Ignores blank lines in JSONL. A conversation may become
    several documents (`encode_answers`); answers that cannot be located are counted.
    """
    end, contents = end_token_id(tokenizer), SourceContents()
    # A text's location is its file name; records add line, item or row.
    is_text = lambda place: source.kind == "text" or (source.kind == "auto" and place in texts)
    by_line = {"auto": None, "text": False}.get(source.kind, True)
    name = source.path or "the standard library"
    if source.path is None:
        paths = list_python_sources()
    else:
        listed = list_data_files(source.path, source.pattern, output=output)
        paths, contents.left_out = listed.paths, listed.describe_left_out()
    if source.kind == "auto" and source.field and not any(map(is_record_file, paths)):
        raise ValueError(f"field '{source.field}' is unused: {name} has only texts, no records")
    texts = {str(path) for path in paths if not is_record_file(path)}
    for place, content in read_file_records(paths, by_line=by_line, files=contents.files):
        try:
            encoded, category, problems = _encode_record(content, source, tokenizer, is_text=is_text(place))
            # Conversations contain end tokens after each answer, so only other documents are checked for them.
            parts = [(_check_tokens(each, vocab_size, end if mask is None else None), mask) for each, mask in encoded]
            joined = b"".join(each.tobytes() for each, _ in parts)
            origin = hashlib.sha256(joined).hexdigest() if parts[1:] else ""
            contents.documents += [Document(place, each, mask, category, origin) for each, mask in parts]
            contents.lost_answers += len(problems)
            contents.last_lost = f"{place}: {problems[-1]}" if problems else contents.last_lost
        except SkippedRecordError as error:
            # A few bad records are normal in large data; many mean a wrong field or tokenizer.
            contents.skipped[error.reason] += 1
            contents.last_skipped = f"{place} {error}"
            if sum(contents.skipped.values()) > source.max_skipped:
                counts = ", ".join(f"{count} {reason}" for reason, count in contents.skipped.items() if count)
                raise ValueError(
                    f"{name} has over {source.max_skipped} unusable documents ({counts}); the last: "
                    f"{contents.last_skipped}; select files with the source's `pattern`, or raise its `max_skipped`"
                ) from error
        except TokenizerError as error:
            raise TokenizerError(f"{place}: {error}") from error
    return contents


def fingerprint(
    sources: Sequence[Source], contents: Sequence[SourceContents], tokenizer: Tokenizer, *, vocab_size: int
) -> str:
    """Computes a digest of a run's data, with which a resumed run checks that its data is the same.

    It covers the kind, field, weight and files (relative paths, sizes, contents) of each source in order, the
    tokenizer, and the vocabulary size, which decides which documents are skipped. The folder's location has no effect.
    """
    # The files' digests were computed while reading and are in `content.files`, so hash only their combination.
    parts = [
        {**_kind_and_field(source, content), "weight": source.weight, "files": content.files}
        for source, content in zip(sources, contents, strict=True)
    ]
    whole = {"sources": parts, "tokenizer": tokenizer.digest, "vocab_size": vocab_size}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _kind_and_field(source: Source, content: SourceContents) -> dict[str, str]:
    """Returns the kind and field for the fingerprint. If all files are texts, "auto" and "text" are equivalent."""
    if source.kind == "auto" and not any(is_record_file(name) for name, _, _ in content.files):
        return {"kind": "text", "field": "text"}
    return {"kind": source.kind, "field": source.field}


def _encode_record(
    content: bytes | dict[str, Any], source: Source, tokenizer: Tokenizer, *, is_text: bool
) -> tuple[list[Encoded], str, list[str]]:
    """Returns a record's documents, its category or "", and an error message for each answer that cannot be located.

    Raises `SkippedRecordError` or `TokenizerError`.
    """
    if is_text and isinstance(content, bytes):
        text = decode_utf8(content).removeprefix("\ufeff")
        if "\0" in text:
            raise SkippedRecordError("corrupt", "contains NUL: it is not text")
        return [(_encode_text(text, tokenizer), None)], "", []
    # In a record, the source's field contains the text or the conversation. The category is optional.
    record = as_object(content)
    category = record.get("category")
    category = category if isinstance(category, str) else ""
    # With kind "auto", a list is a conversation, and so are the fields of the known formats.
    is_chat = source.kind == "chat"
    if source.kind == "auto":
        is_chat = isinstance(record.get(source.field), list) if source.field else has_conversation(record)
    if is_chat:
        messages = find_messages(record, source.field or "messages")
        try:
            documents, problems = encode_answers(messages, tokenizer, tools=record.get("tools"))
        except (AnswerLocationError, ConversationError) as error:
            raise SkippedRecordError("corrupt", f"is skipped: {error}") from error
        return [_with_answers(*document) for document in documents], category, problems
    field = source.field or "text"
    text = record.get(field)
    if not isinstance(text, str):
        other = "" if source.field else ", and no 'messages', 'conversations' or 'instruction'"
        raise SkippedRecordError("corrupt", f"has no text in field '{field}'{other}")
    if source.kind == "formatted":
        return [_with_answers(*encode_formatted(text, tokenizer))], category, []
    return [(_encode_text(text, tokenizer), None)], category, []


def _encode_text(text: str, tokenizer: Tokenizer) -> np.ndarray:
    if not text:
        raise SkippedRecordError("empty", "is empty")
    if isinstance(tokenizer, ByteTokenizer):
        return np.frombuffer(text.encode(), np.uint8)  # much faster than a list of ints
    try:
        tokens = tokenizer.encode(text)
    except ValueError as error:
        raise SkippedRecordError("corrupt", str(error)) from error
    if tokens and tokens[-1] == end_token_id(tokenizer):
        # Some tokenizers append an end token to each text. Drop it, because packing adds one.
        tokens = tokens[:-1]
    return np.array(tokens, np.int64)


def _with_answers(tokens: list[int], is_target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not is_target.any():
        raise SkippedRecordError("empty", "contains no answer")
    return np.array(tokens, np.int64), is_target


def _check_tokens(tokens: np.ndarray, vocab_size: int, end: int | None) -> np.ndarray:
    """Returns the tokens in a document's dtype. Raises `SkippedRecordError` for invalid tokens, including `end`."""
    if not len(tokens):
        raise SkippedRecordError("empty", "has no tokens")
    # With an id outside the vocabulary, the embedding lookup would be out of range but raise no error.
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise SkippedRecordError("vocabulary", f"has a token id outside the vocabulary of {vocab_size}")
    if end is not None and (tokens == end).any():
        raise SkippedRecordError("corrupt", f"contains the end token {end}")
    return tokens if tokens.dtype == np.uint8 else tokens.astype(np.int32)
