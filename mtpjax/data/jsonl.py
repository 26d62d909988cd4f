"""Files as records: whole texts, or lines of JSONL."""

import codecs
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

File = tuple[str, int, str]  # name below the folder that all files share, bytes, hexadecimal sha256


class UnusableError(ValueError):
    """A record that is skipped: the reason that it is counted under, and a message to be read behind its place."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def read_parts(
    paths: Sequence[pathlib.Path], *, by_line: bool, files: list[File] | None = None
) -> Iterator[tuple[str, bytes]]:
    """Whole files, or their lines that are not blank, each with its place: the file, or "FILE line N".

    A file that has been read to its end is added to `files`. Raises OSError.
    """
    root = os.path.commonpath([path.parent for path in paths])
    for path in paths:
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
    """Raises `UnusableError`, as "corrupt"."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnusableError("corrupt", "is no UTF-8") from error


def parse_object(content: bytes) -> dict[str, Any]:
    """A line of JSONL. Raises `UnusableError`, as "corrupt", for what is none or has no UTF-8."""
    text = parse_text(content)
    try:
        record = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode()  # lone surrogates have no UTF-8, and no tokens
    except (ValueError, RecursionError) as error:
        raise UnusableError("corrupt", f"is no JSON: {str(error)[:100]}") from error
    if not isinstance(record, dict):
        raise UnusableError("corrupt", "is no JSON object")
    return record
