"""Opens files of a checkpoint safely.

Checkpoints are downloaded, so their file names and symlinks are untrusted. A file is opened only if it is a regular
file that lies inside the checkpoint directory once symlinks are resolved. The Hugging Face cache keeps the files of a
snapshot as symlinks to a sibling folder of blobs; those are accepted.
"""

import os
import pathlib
import stat

from mtpjax.errors import UnsafeFileError


def is_gguf(path) -> bool:
    """Returns whether a path names a GGUF file by its suffix.

    Args:
        path: a path, which need not exist.

    Returns:
        True for a name that ends in .gguf and is not a directory.
    """
    path = pathlib.Path(path)
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def allowed_root(path: pathlib.Path) -> pathlib.Path:
    """Finds the folder that the symlinks of a checkpoint directory may point into.

    Args:
        path: a checkpoint directory.

    Returns:
        The resolved directory, or for a snapshot of the Hugging Face cache the repository folder around it.
    """
    # `.../models--ORG--NAME/snapshots/REVISION` links to `.../models--ORG--NAME/blobs`.
    real = path.resolve()
    if real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--"):
        return real.parent.parent
    return real


def open_inside(path: pathlib.Path, root: pathlib.Path) -> int:
    """Opens a regular file that lies under `root` once symlinks are resolved.

    Args:
        path: the file.
        root: the folder that it must lie in, as `allowed_root` returns it.

    Returns:
        A file descriptor, open for reading. The caller closes it.

    Raises:
        UnsafeFileError: the file is missing, unreadable, not a regular file, or outside of `root`.
    """
    # Resolve symlinks first: the checks below hold for the file that is opened, not for the name that was given.
    try:
        real = path.resolve(strict=True)
        kind = os.lstat(real).st_mode
    except (OSError, RuntimeError) as error:
        raise UnsafeFileError(f"{path} is missing or cannot be read: {type(error).__name__}") from error
    if not real.is_relative_to(root):
        raise UnsafeFileError(f"{path} is a symlink that leads out of {root}: not opened")
    if not stat.S_ISREG(kind):
        raise UnsafeFileError(f"{path} is not a regular file: not opened")
    # O_NOFOLLOW: the file may have been replaced by a symlink since. O_NONBLOCK: a named pipe must not block.
    try:
        return os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UnsafeFileError(f"{path} cannot be opened: {error.strerror}") from error


def read_inside(folder: pathlib.Path, name: str, *, max_bytes: int) -> bytes | None:
    """Reads a small file of a checkpoint directory.

    Args:
        folder: the directory.
        name: the file's name.
        max_bytes: the largest size in bytes that is accepted.

    Returns:
        The content, or `None` if the directory has no such file.

    Raises:
        UnsafeFileError: `open_inside` rejects the file, or it is larger than `max_bytes`.
    """
    path = folder / name
    # `lexists` is true for a broken symlink, which `open_inside` then reports.
    if not os.path.lexists(path):
        return None
    # Read one byte more than allowed: the size that the file system reports can change while the file is read.
    with open(open_inside(path, allowed_root(folder)), "rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UnsafeFileError(f"{path} is larger than {max_bytes} bytes")
    return content
