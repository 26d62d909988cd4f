"""Appends to JSONL files that a later run can continue. `regenerate`, `ablate` and `train` use this writer.

A process can be killed at any byte. A record counts only once its line ends in a newline, so readers stop before an
incomplete last line, and `JsonlWriter` cuts it off before it appends.
"""

import fcntl
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from mtpjax.data.jsonl import SkippedRecordError, parse_json_object
from mtpjax.safe_open import open_regular


def read_resumable_records(
    path, *, required: Collection[str] = (), skip_damaged: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reads the records of a JSONL file that a process may still be appending to.

    Args:
        path: the file; a missing file has no records.
        skip_damaged: skip damaged lines instead of raising an error.

    Yields:
        `(end, record)`: the byte offset after the record's line, and the record. An incomplete last line is skipped.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        end = 0
        for number, line in enumerate(file, start=1):
            # Only the last line can lack a newline, if its process was killed or is still writing it.
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                record = parse_json_object(line)
                if not record.keys() >= set(required):
                    raise SkippedRecordError("corrupt", f"is not an object with the keys {sorted(required)}")
            except SkippedRecordError as error:
                if skip_damaged:
                    continue
                raise ValueError(f"{path} line {number} is damaged: remove that line to continue") from error
            yield end, record


class JsonlWriter:
    """Appends records to a JSONL file, which it locks while it is open. Use it as a context manager.

    Attributes:
        path: the file.
        size: its length in bytes.
    """

    def __init__(self, path, *, sync: bool = True, allow_nan: bool = True):
        """Opens the file at its end, or creates it if it is missing.

        Args:
            path: the file; its folder must exist.
        """
        self.path, self._sync, self._allow_nan = pathlib.Path(path), sync, allow_nan
        # Opening a named pipe would block until another process reads it.
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"{self.path} is not a regular file: not written")
        self._file = self.path.open("ab")
        # The system releases the lock, no matter how the process ends.
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ValueError(f"{self.path} is being written to by another process") from None
        self.size = self._file.tell()

    def __enter__(self) -> "JsonlWriter":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def resume(
        self,
        is_kept: Callable[[dict[str, Any]], bool] = lambda record: True,
        *,
        required: Collection[str] = (),
        skip_damaged: bool = False,
    ) -> list[dict[str, Any]]:
        """Reads the records of earlier processes, and cuts off an incomplete last line. Call it before `append`.

        Args:
            is_kept: function of a record; the file is cut off before the first record for which it returns False. By
                default, all records are kept.
            skip_damaged: skip damaged lines instead of raising an error.
        """
        records, size = [], 0
        for end, record in read_resumable_records(self.path, required=required, skip_damaged=skip_damaged):
            if not is_kept(record):
                break
            records.append(record)
            size = end
        self.truncate(size)
        return records

    def truncate(self, size: int) -> None:
        """Cuts off everything after the first `size` bytes."""
        # The file is open for appending, so the next write starts at the new end.
        self._file.truncate(size)
        self.size = size

    def append(self, records: Iterable[Mapping[str, Any]]) -> bytes:
        """Appends records, one per line."""
        # Encode every record first, so that one that cannot be encoded leaves the file unchanged.
        lines = [json.dumps(record, ensure_ascii=False, allow_nan=self._allow_nan) + "\n" for record in records]
        content = "".join(lines).encode()
        self._file.write(content)
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())
        self.size += len(content)
        return content
