"""Reports a full or failing disk as a single `OSError`, if possible before arrays are written."""

import contextlib
import errno
import gc
import logging
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mtpjax.errors import CheckpointError, one_line

QUIET_ATTEMPTS = 25  # 0.2 s apart


def check_space(folder: pathlib.Path, arrays: Mapping[str, Any]) -> None:
    """Checks that arrays fit on the disk."""
    space = os.statvfs(folder)
    blocks = 0
    for array in arrays.values():
        # There is one file per chunk and one for the metadata, and each file occupies whole blocks.
        chunks = getattr(array, "chunks", None) or array.shape
        count = math.prod(-(-size // step) for size, step in zip(array.shape, chunks, strict=True))
        blocks += count * -(-math.prod(chunks) * array.dtype.itemsize // space.f_frsize) + 1
    if blocks > space.f_bavail:
        sizes = f"{blocks * space.f_frsize:,} bytes are needed, {space.f_bavail * space.f_frsize:,} are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {sizes}", str(folder.parent))


@contextlib.contextmanager
def one_line_failures(folder: pathlib.Path) -> Iterator[None]:
    """Converts write failures of Orbax and TensorStore to a single `OSError`.

    Suppresses the tracebacks that both print to stderr until their threads and event loops have ended.
    """
    log, hook = logging.getLogger("absl"), sys.unraisablehook
    level = log.level
    try:
        log.setLevel(logging.CRITICAL + 1)
        sys.unraisablehook = lambda unraisable: None
        yield
    # TensorStore raises ValueErrors. Errors in the files from which arrays are streamed are also ValueErrors.
    except (OSError, ValueError) as error:
        _wait_until_quiet(folder)
        if isinstance(error, (OSError, CheckpointError)):
            raise
        raise OSError(f"{folder.parent.parent} cannot be written: {one_line(error)}") from error
    finally:
        log.setLevel(level)
        sys.unraisablehook = hook


def _wait_until_quiet(folder: pathlib.Path) -> None:
    """Waits until running writes have ended, which is when two checks in a row find the same files."""
    before: set[pathlib.Path] | None = None
    for _ in range(QUIET_ATTEMPTS):
        found = set(folder.parent.rglob("*"))
        if found == before:
            break
        before = found
        time.sleep(0.2)
    gc.collect()  # tasks and futures report unretrieved exceptions when they are collected
