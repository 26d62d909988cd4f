"""Files of a directory, and of nowhere else: what a link leads out of it, or is no regular file, is not opened."""

import os
import pathlib
import stat


class OutsideError(ValueError):
    """A file that is missing, no regular file, or outside of its directory. One line, with the name."""


def root_of(path: pathlib.Path) -> pathlib.Path:
    """What links may lead to: the directory itself, or the repository folder of a Hugging Face cache around it."""
    real = path.resolve()
    if real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--"):
        return real.parent.parent
    return real


def open_inside(path: pathlib.Path, root: pathlib.Path) -> int:
    """A descriptor of the regular file `path`, which lies under `root` once links are followed.

    Raises `OutsideError`.
    """
    try:
        real = path.resolve(strict=True)
        kind = os.lstat(real).st_mode
    except (OSError, RuntimeError) as error:
        raise OutsideError(f"{path} is missing or cannot be read: {type(error).__name__}") from error
    if not real.is_relative_to(root):
        raise OutsideError(f"{path} leads out of {root}: not opened")
    if not stat.S_ISREG(kind):
        raise OutsideError(f"{path} is no regular file: not opened")
    try:
        return os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise OutsideError(f"{path} cannot be opened: {error.strerror}") from error


def read_inside(folder: pathlib.Path, name: str, *, most: int) -> bytes | None:
    """The content of a file of `folder`; None where there is none. Raises `OutsideError`, also beyond `most` bytes."""
    path = folder / name
    if not os.path.lexists(path):
        return None
    with open(open_inside(path, root_of(folder)), "rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise OutsideError(f"{path} has over {most} bytes")
    return content
