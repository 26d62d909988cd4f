"""Reads files as records: whole texts, or lines of JSONL."""

import codecs
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

File = tuple[str, int, str]  # path relative to the files' common folder, size in bytes, hexadecimal sha256


class UnusableError(ValueError):
    """A record that is skipped.

    Attributes:
        reason: the reason that it is counted under. The message follows the record's place in a sentence.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def read_parts(
    paths: Sequence[pathlib.Path], *, by_line: bool, files: list[File] | None = None
) -> Iterator[tuple[str, bytes]]:
    """Reads whole files, or their lines that are not blank.

    Args:
        paths: the files.
        by_line: yield lines.
        files: receives name, size and digest of each file once it is read to its end.

    Yields:
        The place, "FILE" or "FILE line N", and the bytes.

    Raises:
        OSError: a file cannot be read.
    """
    root = os.path.commonpath([path.parent for path in paths])
    for path in paths:
        # The digest covers the bytes that the caller reads, so it needs no second pass over the file.
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as stream:
            for number, part in enumerate(stream if by_line else [stream.read()], start=1):
                digest.update(part)
                size += len(part)
                if not by_line:
                    yield str(path), part
                elif (line := part.removeprefix(codecs.BOM_UTF8) if number == 1 else part).strip():
                    yield f"{path} line {number}", line
        if files is not None:
            files.append((os.path.relpath(path, root), size, digest.hexdigest()))


def parse_text(content: bytes) -> str:
    """Decodes UTF-8. Raises `UnusableError`, as "corrupt"."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnusableError("corrupt", "is not UTF-8") from error


def parse_object(content: bytes) -> dict[str, Any]:
    """Parses a line of JSONL.

    Args:
        content: the line.

    Returns:
        The object.

    Raises:
        UnusableError: as "corrupt", if the line is not a JSON object or contains lone surrogates.
    """
    text = parse_text(content)
    try:
        record = json.loads(text)
        # JSON can escape lone surrogates, which have no UTF-8 encoding and therefore no tokens.
        json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UnusableError("corrupt", f"is not JSON: {str(error)[:100]}") from error
    if not isinstance(record, dict):
        raise UnusableError("corrupt", "is not a JSON object")
    return record
