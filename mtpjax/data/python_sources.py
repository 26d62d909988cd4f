"""Lists the default corpus, which is the running Python's standard library, so that a first run downloads nothing."""

import os
import pathlib
import site
import sysconfig

_MIN_STDLIB_FILES = 100  # a complete standard library has over a thousand; a zipped or stripped one has a few


def list_python_sources() -> list[pathlib.Path]:
    """Lists the .py files of the standard library, and of installed packages if the library is zipped or stripped.

    Skips links that lead out of their folder or to a file that is already listed, and files that are empty, unreadable
    or not UTF-8, or that contain NUL.
    """
    roots = [sysconfig.get_path("stdlib")]
    files = _list_sources_under(roots[0])
    # Embedded interpreters may ship almost no sources, so fall back to the installed packages.
    if len(files) < _MIN_STDLIB_FILES:
        roots += dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()])
        files = list(dict.fromkeys(file for folder in roots for file in _list_sources_under(folder)))
    if not files:
        raise FileNotFoundError(f"no Python sources under {', '.join(map(str, roots))}: name a folder of .py files")
    return files


def _list_sources_under(root) -> list[pathlib.Path]:
    """Lists the .py text files under a folder, except installed packages, links to the outside, and repeated files."""
    root = pathlib.Path(root)
    inside = root.resolve()
    files = {}  # resolved path -> path
    # `os.walk` does not follow links to folders; links to files count once, and only inside the folder.
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - {"site-packages", "dist-packages"})
        for name in sorted(names):
            path = pathlib.Path(folder, name)
            target = path.resolve()
            if path.suffix == ".py" and target.is_relative_to(inside) and target not in files and _is_source_file(path):
                files[target] = path
    return sorted(files.values())


def _is_source_file(path) -> bool:
    try:
        content = path.read_bytes() if path.is_file() else b""
        content.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return bool(content) and b"\0" not in content
