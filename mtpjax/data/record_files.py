"""Reads the records in data files, by file suffix: JSONL, compressed JSONL, JSON lists, Parquet, whole texts."""

import gzip
import hashlib
import json
import os
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from mtpjax.data.jsonl import parse_json_object, read_raw_records
from mtpjax.errors import UsageError, install_extra, printable
from mtpjax.safe_open import open_regular, parse_json

FileDigest = tuple[str, int, str]  # path relative to the files' common folder, size in bytes, hexadecimal sha256
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
MAX_LINE_BYTES = 64 << 20  # limit for compressed files, whose lines can be far longer than the file
MAX_JSON_BYTES = 1 << 30  # limit for a `.json` list, which is parsed as a whole


def is_record_file(path: str | os.PathLike) -> bool:
    """Returns whether a file contains records, by its suffix. Other files are texts."""
    return str(path).lower().endswith(RECORD_SUFFIXES)


def read_file_records(
    paths: Sequence[pathlib.Path], *, by_line: bool | None = None, files: list[FileDigest] | None = None
) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    """Reads the records in files.

    Args:
        by_line: with None, the suffix decides, and files with other suffixes are whole texts. With True, files with
            other suffixes are JSONL. With False, all files are whole texts, even record files.

    Yields:
        The location, such as "FILE line N", and a record: the bytes of a line or a text, or an object.
    """
    root = os.path.commonpath([path.parent for path in paths])
    for path in paths:
        name = path.name.lower()
        if by_line is False or not is_record_file(path) or name.endswith(".jsonl"):
            lines = name.endswith(".jsonl") if by_line is None else by_line
            size, digest = yield from read_raw_records(path, by_line=lines)
        else:
            reader = _read_gzip if name.endswith(".gz") else _read_parquet if name.endswith(".parquet") else _read_json
            yield from reader(path)
            # These readers do not read the file's bytes in order, so the digest needs a separate pass.
            with open_regular(path) as stream:
                digest, size = hashlib.file_digest(stream, "sha256").hexdigest(), stream.tell()
        if files is not None:
            files.append((os.path.relpath(path, root), size, digest))


def as_object(content: bytes | dict[str, Any]) -> dict[str, Any]:
    """Returns a record as an object.

    Raises:
        SkippedRecordError: `parse_json_object` rejects the line.
    """
    return parse_json_object(content) if isinstance(content, bytes) else content


def _read_gzip(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    try:
        with open_regular(path) as raw, gzip.open(raw) as stream:
            # Limit the length of a line, because a few compressed kilobytes can expand to a line of gigabytes.
            lines = iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b"")
            for number, line in enumerate(lines, start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(f"{path} line {number} is longer than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    yield f"{path} line {number}", line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {printable(error, 100)}") from error


def _read_json(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Yields the items of a JSON list as records, or the whole value of a file that contains no list."""
    with open_regular(path) as stream:
        content = stream.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"{path} is larger than {MAX_JSON_BYTES} bytes: use .jsonl, which is read line by line")
    try:
        values = parse_json(content)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; if it has one object per line, rename it to .jsonl") from error
    for number, value in enumerate(values if isinstance(values, list) else [values], start=1):
        yield f"{path} item {number}", json.dumps(value).encode()


def _read_parquet(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(f"{path}: pyarrow, which reads Parquet, is missing: {install_extra('parquet')}") from error
    try:
        with open_regular(path) as raw, pyarrow.parquet.ParquetFile(raw) as file:
            # Read small batches, so that memory does not grow with the size of the row groups' texts.
            records = (record for batch in file.iter_batches(batch_size=256) for record in batch.to_pylist())
            for number, record in enumerate(records, start=1):
                # Every row has all columns of the file, so a null value means that the field is missing.
                yield f"{path} row {number}", {name: v for name, v in record.items() if v is not None}
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a complete Parquet file: {printable(error, 200)}") from error
