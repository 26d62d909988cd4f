"""Lists the data files in a folder, and counts the files that are left out."""

import pathlib
from collections import Counter
from typing import NamedTuple

from mtpjax.data.record_files import is_record_file
from mtpjax.errors import printable
from mtpjax.safe_open import open_regular

BINARY_BYTES = 8192  # a file with a NUL in this many first bytes counts as binary, as in git


class DataFiles(NamedTuple):
    """The files of a data source.

    Attributes:
        paths: the files, sorted.
        left_out: number of files in the folder that are not read, by reason.
        last_left_out: the last such file, or None if there is none.
    """

    paths: list[pathlib.Path]
    left_out: Counter[str]
    last_left_out: pathlib.Path | None = None

    def describe_left_out(self) -> str:
        """Returns the counts and the last file, such as "2 hidden, 1 binary; the last: texts/a.png", or ""."""
        counts = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
        return f"{counts}; the last: {printable(self.last_left_out)}" if counts else ""


def list_data_files(path, pattern: str = "*", *, output=None) -> DataFiles:
    """Lists the files of a data source.

    In a folder, four kinds of files are left out and counted: "hidden" (the name of the file or of a subfolder starts
    with a dot, unless a part of the pattern also does), "binary" (the file contains NUL), "not a file" (links to
    folders, broken links, devices), and "of the run" (the file is in the folder that the run itself writes).

    Args:
        path: a file, or a folder with its subfolders.
        output: folder that the run writes, if any.
    """
    root = pathlib.Path(path)
    if not root.exists():
        raise FileNotFoundError(f"{root} does not exist")
    if not root.is_file() and not root.is_dir():
        raise ValueError(f"{root} is neither a regular file nor a folder")
    if root.is_file():
        if pattern != "*":
            raise ValueError(f"pattern {pattern!r} selects files in a folder, but {root} is a file")
        return DataFiles([root], Counter())
    paths, left_out, last = [], Counter(), None
    matching, with_hidden = set(root.rglob(pattern)), _names_hidden(pattern)
    output = None if output is None else pathlib.Path(output).resolve()
    # Sort the files, so that the order of documents does not depend on the file system.
    for file in sorted(root.rglob("*")):
        is_folder = file.is_dir() and not file.is_symlink()
        if is_folder or (file.is_file() and file not in matching):
            continue
        if reason := _reason_to_leave_out(file, root, output, with_hidden=with_hidden):
            left_out[reason] += 1
            last = file
        else:
            paths.append(file)
    files = DataFiles(paths, left_out, last)
    if not paths:
        described = files.describe_left_out()
        raise FileNotFoundError(f"no files match {pattern} under {root}" + (described and f" (left out: {described})"))
    return files


def _reason_to_leave_out(
    file: pathlib.Path, root: pathlib.Path, output: pathlib.Path | None, *, with_hidden: bool
) -> str:
    """Returns why a file in a folder is not read, or ""."""
    if output is not None and output != root.resolve() and file.resolve().is_relative_to(output):
        return "of the run"
    if not with_hidden and _names_hidden(file.relative_to(root)):
        return "hidden"
    if not file.is_file():
        return "not a file"
    return "" if is_record_file(file) or not _is_binary(file) else "binary"


def _names_hidden(path) -> bool:
    """Returns whether any part of a relative path or a pattern starts with a dot."""
    return any(part.startswith(".") for part in pathlib.PurePath(path).parts)


def _is_binary(file: pathlib.Path) -> bool:
    with open_regular(file) as stream:
        return b"\0" in stream.read(BINARY_BYTES)
