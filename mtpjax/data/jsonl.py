"""Reads files as records, which are whole texts or lines of JSONL."""

import codecs
import hashlib
import json
import pathlib
from collections.abc import Generator, Iterator
from typing import Any

from mtpjax.messages import json_type_name
from mtpjax.safe_open import open_regular, parse_json


class SkippedRecordError(ValueError):
    """A record cannot be used. Data set readers skip and count such records, and prompt readers raise the error.

    The message, such as "is not UTF-8 text", continues a sentence that starts with the record's location.

    Attributes:
        reason: the category under which the record is counted.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def read_raw_records(path: pathlib.Path, *, by_line: bool) -> Generator[tuple[str, bytes], None, tuple[int, str]]:
    """Reads a whole file, or its lines that are not blank.

    Yields the location, "FILE" or "FILE line N", and the bytes. Returns the file's size in bytes and its digest.
    """
    # The digest covers the bytes that the caller reads, so it needs no second pass over the file.
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as stream:
        for number, part in enumerate(stream if by_line else [stream.read()], start=1):
            digest.update(part)
            size += len(part)
            if not by_line:
                yield str(path), part
            elif (line := part.removeprefix(codecs.BOM_UTF8) if number == 1 else part).strip():
                yield f"{path} line {number}", line
    return size, digest.hexdigest()


def decode_utf8(content: bytes) -> str:
    """Decodes UTF-8. Raises `SkippedRecordError` with reason "corrupt"."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SkippedRecordError("corrupt", "is not UTF-8 text") from error


def parse_json_object(content: bytes) -> dict[str, Any]:
    """Parses a line of JSONL.

    Raises:
        SkippedRecordError: the line is not UTF-8, contains NUL or lone surrogates, or is not a JSON object. The reason
            is "corrupt".
    """
    text = decode_utf8(content)
    if "\0" in text:
        raise SkippedRecordError("corrupt", "contains NUL: it is not text")
    try:
        record = parse_json(text)
        # JSON can escape lone surrogates, which have no UTF-8 encoding and therefore no tokens.
        json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise SkippedRecordError("corrupt", f"is not JSON: {str(error)[:100]}") from error
    if not isinstance(record, dict):
        raise SkippedRecordError("corrupt", f"is not a JSON object but {json_type_name(record)}")
    return record


def read_json_objects(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads the objects of a JSONL file in which every line must be usable.

    Yields `("FILE line N", object)` for each line that is not blank.
    """
    for place, line in read_raw_records(path, by_line=True):
        try:
            record = parse_json_object(line)
        except SkippedRecordError as error:
            raise ValueError(f"{place} {error}") from error
        yield place, record
