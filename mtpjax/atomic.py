"""Files and folders that appear complete or not at all."""

import contextlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def new_folder(path: pathlib.Path, may_replace: Callable[[pathlib.Path], bool] | None = None) -> Iterator[pathlib.Path]:
    """Yields a hidden sibling of `path` to write into, and renames it to `path` once the block has ended.

    An exception leaves what was at `path` as it was. A process killed between the two renames leaves both folders
    complete under their hidden names. Raises `FileExistsError` where `path` is neither empty nor what `may_replace`
    says yes to.
    """
    is_empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not is_empty and not (may_replace is not None and may_replace(path)):
        raise FileExistsError(f"{path} exists and is not replaced: remove it, or write elsewhere")
    path.parent.mkdir(parents=True, exist_ok=True)
    unique = f"{path.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    aside, old = path.with_name(f".tmp-{unique}"), path.with_name(f".old-{unique}")
    try:
        aside.mkdir()
        yield aside
        if path.exists():
            path.rename(old)
        try:
            aside.rename(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # gone already unless something failed


@contextlib.contextmanager
def new_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a hidden sibling of `path` to write to, and renames it to `path` once the block has ended."""
    aside = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path, content: str) -> None:
    """Writes a file that appears complete; missing folders are made."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as aside:
        aside.write_text(content)
