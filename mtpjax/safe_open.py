"""Opens checkpoint files safely, and parses untrusted JSON.

Checkpoints are downloaded, so their file names and symlinks are untrusted. A file is opened only if its path resolves
to a regular file inside the checkpoint directory. In the Hugging Face cache, the files of a snapshot are symlinks into
a sibling folder of blobs; these symlinks are accepted.
"""

import io
import json
import os
import pathlib
import re
import stat
from typing import Any

from mtpjax.errors import CheckpointFileError, UnsafeFileError, printable

BLOCK_BYTES = 4 << 20  # part of a tensor or file that is read, reordered or written at once
MAX_JSON_DEPTH = 64  # NumPy arrays have at most 64 dimensions; configurations and records nest less than ten levels
ADDITIONAL_TEMPLATES = "additional_chat_templates"  # folder of additional chat templates in a Hugging Face directory
# Matches a bracket or a whole string, so that brackets inside strings do not count.
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)


def is_gguf(path) -> bool:
    """Returns whether a path ends in .gguf and is not a directory."""
    path = pathlib.Path(path)
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def allowed_root(path: pathlib.Path) -> pathlib.Path:
    """Finds the folder that the symlinks of a checkpoint directory may point into.

    Returns:
        The resolved directory; for a snapshot in the Hugging Face cache, the repository folder that contains it.
    """
    # `.../models--ORG--NAME/snapshots/REVISION` links to `.../models--ORG--NAME/blobs`.
    real = path.resolve()
    if real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--"):
        return real.parent.parent
    return real


def open_inside(path: pathlib.Path, root: pathlib.Path) -> int:
    """Opens a regular file that is inside `root` once symlinks are resolved.

    Args:
        root: the folder that must contain the file (`allowed_root`).

    Returns:
        A file descriptor for reading, which the caller closes.

    Raises:
        UnsafeFileError: the file is missing, unreadable, not a regular file, or outside `root`.
    """
    # Resolve symlinks first, so that the checks apply to the file that is actually opened.
    try:
        real = path.resolve(strict=True)
        kind = os.lstat(real).st_mode
    except (OSError, RuntimeError) as error:
        raise UnsafeFileError(f"{path} is missing or cannot be read: {type(error).__name__}") from error
    if not real.is_relative_to(root):
        raise UnsafeFileError(f"{path} is a symlink that leads out of {root}: not opened")
    if not stat.S_ISREG(kind):
        raise UnsafeFileError(f"{path} is not a regular file: not opened")
    # Use O_NOFOLLOW, because a symlink may have replaced the file, and O_NONBLOCK, because a named pipe must not block.
    try:
        return os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UnsafeFileError(f"{path} cannot be opened: {error.strerror}") from error


def read_inside(folder: pathlib.Path, name: str, *, max_bytes: int) -> bytes | None:
    """Reads a small file in a checkpoint directory.

    Returns:
        The content, or `None` if the directory has no such file.

    Raises:
        UnsafeFileError: `open_inside` rejects the file, or it is larger than `max_bytes`.
    """
    path = folder / name
    # `lexists` is true for a broken symlink, which `open_inside` reports.
    if not os.path.lexists(path):
        return None
    with open(open_inside(path, allowed_root(folder)), "rb") as stream:
        return _read_bounded(stream, path, max_bytes)


def _read_bounded(stream: io.BufferedReader, path, max_bytes: int) -> bytes:
    # Try to read one byte more than allowed, because the file can grow after its size is checked. `read` allocates
    # memory for everything that it may return, so limit it to the file's size.
    content = stream.read(min(os.fstat(stream.fileno()).st_size, max_bytes) + 1)
    if len(content) > max_bytes:
        raise UnsafeFileError(f"{path} is larger than {max_bytes} bytes")
    return content


def pread(descriptor: int, count: int, offset: int, path) -> bytearray:
    """Reads `count` bytes at an offset of an open file. `path` only appears in the error for a truncated file."""
    content = bytearray(count)
    pread_into(descriptor, memoryview(content), offset, path)
    return content


def pread_into(descriptor: int, view: memoryview, offset: int, path) -> None:
    """Fills `view` from an offset of an open file. Reads at most 1 GiB at once, because Linux's limit is 2 GiB."""
    done = 0
    while done < len(view):
        # `preadv` reads at an offset without moving a shared position, so threads can read one file at once.
        count = os.preadv(descriptor, [view[done : done + (1 << 30)]], offset + done)
        if not count:
            raise CheckpointFileError(f"{path} is truncated: it ended at byte {offset + done} while it was read")
        done += count


def list_chat_templates(folder: pathlib.Path) -> list[str]:
    """Lists a directory's additional chat templates, such as "additional_chat_templates/tool_use.jinja"."""
    files = sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    return [f"{ADDITIONAL_TEMPLATES}/{file.name}" for file in files]


def open_regular(path: str | os.PathLike) -> io.BufferedReader:
    """Opens a user's file at any location if it is a regular file.

    Reading a named pipe could block, and a device such as `/dev/zero` never ends.

    Args:
        path: the file; symlinks are followed.

    Raises:
        OSError: the file is missing or cannot be read.
        UnsafeFileError: it is not a regular file.
    """
    # Use O_NONBLOCK, because opening a named pipe must not wait for its writer. Check the open file, because the path
    # may change.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(f"{path} is a folder, not a file")
    raise UnsafeFileError(f"{path} is not a regular file: not read")


def parse_json(content: bytes | str, *, max_depth: int = MAX_JSON_DEPTH) -> Any:
    """Parses JSON from an untrusted file.

    Raises:
        ValueError: the content is not JSON or nests too deeply. The message is one printable line without the path.
    """
    check_json_depth(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content, max_depth)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(printable(error, 100)) from error


def check_json_depth(raw: bytes, max_depth: int = MAX_JSON_DEPTH) -> None:
    """Raises `ValueError` if JSON nests deeper than `max_depth`, before it is parsed."""
    # The parser and the code that uses the value recurse. With at most `max_depth` opening brackets, a file cannot nest
    # too deeply, so most files need no scan.
    if raw.count(b"[") + raw.count(b"{") > max_depth:
        depth = 0
        for match in _BRACKETS.finditer(raw):
            depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(match.group()[:2], 0)
            if depth > max_depth:
                raise ValueError(f"lists and objects are nested more than {max_depth} deep")


def read_json_file(path: str | os.PathLike, *, max_bytes: int) -> Any:
    """Reads a JSON file of bounded size and depth.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: the file is not regular, is too large, is not JSON, or nests too deeply.
    """
    with open_regular(path) as stream:
        return parse_json(_read_bounded(stream, path, max_bytes))
