"""Writes files and folders atomically: they appear only when they are complete."""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator

REMOVAL_ATTEMPTS = 50  # with 0.1 s between two
STABLE_CHECKS = 3  # consecutive attempts that must find nothing


@contextlib.contextmanager
def atomic_folder(
    path: pathlib.Path, may_replace: Callable[[pathlib.Path], bool] | None = None
) -> Iterator[pathlib.Path]:
    """Yields an empty folder to write into, and renames it to `path` at the end of the block.

    An exception in the block leaves `path` unchanged. A killed process leaves its folder under a hidden name beside
    `path`; the next call for the same `path` removes it. If the process was killed between the two renames, the next
    call first puts the old folder back.

    Args:
        path: the folder to make; missing parents are made.
        may_replace: returns whether an existing folder at `path` may be replaced. Empty folders always may; None allows
            no others.

    Yields:
        A hidden folder beside `path`, so that the rename stays on one file system.

    Raises:
        FileExistsError: `path` exists, is not empty and may not be replaced.
    """
    _clear_leftovers(path)
    # Refuse before anything is written, not after hours of work in the block.
    is_empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not is_empty and not (may_replace is not None and may_replace(path)):
        raise FileExistsError(f"{path} exists and is not replaced: remove it, or write elsewhere")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Names unique to this process and call: several processes may write at the same time.
    unique = f"{path.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    unfinished, old = path.with_name(f".tmp-{unique}"), path.with_name(f".old-{unique}")
    with contextlib.ExitStack() as locks:
        try:
            unfinished.mkdir()
            locks.enter_context(_lock(unfinished))
            yield unfinished
            # A folder cannot be renamed onto another that has files, so the old one is moved away first.
            if path.exists():
                locks.enter_context(_lock(path))
                path.rename(old)
            try:
                unfinished.rename(path)
            # The new folder could not take its place: put the old one back, even after Ctrl-C.
            except BaseException:
                if old.exists():
                    old.rename(path)
                raise
            shutil.rmtree(old, ignore_errors=True)
        finally:
            # Only a failure leaves something here.
            _remove(unfinished)


@contextlib.contextmanager
def _lock(folder: pathlib.Path) -> Iterator[bool]:
    """Locks a folder, and yields whether it worked. The system releases the lock when the process ends."""
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
    """Removes leftovers of killed processes beside `path`, and puts back an old folder that has no successor."""
    name = re.compile(rf"\.(tmp|old)-{re.escape(path.name)}-\d+-[0-9a-f]{{8}}")
    found = [each for each in path.parent.glob(".*") if name.fullmatch(each.name)] if path.parent.is_dir() else []
    # A process that lives has its folder locked.
    for folder in sorted(found):
        with contextlib.suppress(OSError), _lock(folder) as is_dead:
            if is_dead and folder.name.startswith(".old-") and not path.exists():
                folder.rename(path)
            elif is_dead:
                shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: pathlib.Path) -> None:
    """Removes an unfinished folder. After a full disk, Orbax's threads may continue writing into it for a moment."""
    if not folder.exists():
        return
    # A thread can make the folder again after it was removed, so it must stay away for a moment.
    absent = 0
    for _ in range(REMOVAL_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        absent = 0 if folder.exists() else absent + 1
        if absent == STABLE_CHECKS:
            return
        time.sleep(0.1)


@contextlib.contextmanager
def atomic_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path to write a file at, and renames it to `path` at the end of the block.

    Args:
        path: the file to make or replace; its folder exists.

    Yields:
        A hidden path beside `path`, where no file is yet. An exception removes it and leaves `path` unchanged.
    """
    # Beside the target: `os.replace` is atomic only within one file system.
    unfinished = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_output_file(path) -> None:
    """Checks that a file can be written, before the work whose result it gets.

    Args:
        path: the file; it and its folder need not exist.

    Raises:
        ValueError: it is a folder, or its folder cannot be made or written.
    """
    path = pathlib.Path(path)
    # `os.path` answers False where a folder may not be searched; `pathlib` raises.
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder: name the file to write")
    # Missing folders are made in the nearest one that exists.
    folder = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    if not os.path.isdir(folder):
        raise ValueError(f"{path} cannot be written: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{path} cannot be written: no permission to write in {folder}")


def write_text(path, content: str) -> None:
    """Writes a text file atomically.

    Args:
        path: the file to make or replace; missing folders are made.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as unfinished:
        unfinished.write_text(content)
