"""Writes files and folders atomically, so that they appear only when they are complete."""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator

REMOVAL_ATTEMPTS = 50  # 0.1 s apart
STABLE_CHECKS = 3  # consecutive attempts that must find no folder


@contextlib.contextmanager
def atomic_folder(
    path: pathlib.Path, may_replace: Callable[[pathlib.Path], bool] | None = None
) -> Iterator[pathlib.Path]:
    """Yields an empty folder to write into, and renames it to `path` at the end of the block.

    An exception in the block leaves `path` unchanged. A killed process leaves a hidden folder next to `path`, which the
    next call for the same `path` removes. If the process was killed between the two renames, the next call first
    restores the old folder.

    Args:
        path: the folder to create; missing parents are created too.
        may_replace: returns whether an existing folder at `path` may be replaced; by default, only if it is empty.

    Yields:
        A hidden folder next to `path`, so that the rename stays on one file system.

    Raises:
        FileExistsError: `path` exists, is not empty and may not be replaced.
    """
    _clear_leftovers(path)
    # Refuse before anything is written, not after hours of work in the block.
    is_empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not is_empty and not (may_replace is not None and may_replace(path)):
        raise FileExistsError(f"{path} already exists and is not overwritten: remove it, or choose a different path")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may write at the same time, so names are unique to this process and call.
    unique = f"{path.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    unfinished, old = path.with_name(f".tmp-{unique}"), path.with_name(f".old-{unique}")
    with contextlib.ExitStack() as locks:
        try:
            unfinished.mkdir()
            locks.enter_context(_lock(unfinished))
            yield unfinished
            # A folder cannot be renamed onto a folder that contains files, so the old folder is moved away first.
            if path.exists():
                locks.enter_context(_lock(path))
                path.rename(old)
            try:
                unfinished.rename(path)
            # If the rename fails, restore the old folder, even after Ctrl-C.
            except BaseException:
                if old.exists():
                    old.rename(path)
                raise
            shutil.rmtree(old, ignore_errors=True)
        finally:
            # After success the folder no longer exists.
            _remove(unfinished)


@contextlib.contextmanager
def _lock(folder: pathlib.Path) -> Iterator[bool]:
    """Locks a folder, and yields whether that succeeded. The system releases the lock when the process exits."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = True
    except OSError:  # another process has the lock, or the file system cannot lock folders
        is_locked = False
    try:
        yield is_locked
    finally:
        os.close(descriptor)


def _clear_leftovers(path: pathlib.Path) -> None:
    """Removes leftovers of killed processes next to `path`, and restores an old folder that was not replaced."""
    name = re.compile(rf"\.(tmp|old)-{re.escape(path.name)}-\d+-[0-9a-f]{{8}}")
    found = [each for each in path.parent.glob(".*") if name.fullmatch(each.name)] if path.parent.is_dir() else []
    # A running process keeps its folder locked, so a folder that can be locked is a leftover.
    for folder in sorted(found):
        with contextlib.suppress(OSError), _lock(folder) as is_dead:
            if is_dead and folder.name.startswith(".old-") and not path.exists():
                folder.rename(path)
            elif is_dead:
                shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: pathlib.Path) -> None:
    """Removes an unfinished folder. When the disk is full, Orbax's threads may keep writing into it for a moment."""
    if not folder.exists():
        return
    # A thread can recreate the folder after it was removed, so stop only after several checks in a row find no folder.
    absent = 0
    for _ in range(REMOVAL_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        absent = 0 if folder.exists() else absent + 1
        if absent == STABLE_CHECKS:
            return
        time.sleep(0.1)


@contextlib.contextmanager
def atomic_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path to write to, and renames the file there to `path` at the end of the block.

    Args:
        path: the file to create or replace; its folder must exist.

    Yields:
        A hidden path next to `path`. After an exception, the file there is removed and `path` is unchanged.
    """
    # Write next to the target, because `os.replace` is atomic only within one file system.
    unfinished = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_output_file(path) -> None:
    """Checks that a file can be written. Call it before the work that produces the content.

    Args:
        path: the file; it and its folder need not exist.

    Raises:
        ValueError: `path` is a folder, or its parent folder cannot be created or written to.
    """
    path = pathlib.Path(path)
    # Use `os.path`, because `pathlib` raises an error in a folder without search permission.
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder, not a file to write")
    # Missing folders would be created in the nearest existing folder.
    folder = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    if not os.path.isdir(folder):
        raise ValueError(f"{path} cannot be written: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{path} cannot be written: no permission to write in {folder}")


def write_text(path, content: str) -> None:
    """Writes a text file atomically.

    Args:
        path: the file to create or replace; missing folders are created.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as unfinished:
        unfinished.write_text(content)
