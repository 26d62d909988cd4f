"""The user's file of measured times, which `implementation="auto"` uses; `mtpjax tune` writes it.

    $XDG_CACHE_HOME/mtpjax/kernels/DEVICE-jaxVERSION-KEY.json    ~/.cache without XDG_CACHE_HOME

KEY is a digest of the kernels' source. Therefore, times for a different kind of device, JAX version or kernel version
are never used.
"""

import functools
import hashlib
import json
import os
import pathlib
import re
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

import jax


def path(device_kind: str | None = None) -> pathlib.Path:
    """Returns the file for a kind of device (JAX's `device_kind`); None: JAX's first device.

    Raises:
        RuntimeError: The user has no home folder.
    """
    device_kind = jax.devices()[0].device_kind if device_kind is None else device_kind
    configured = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = configured if configured.is_absolute() else pathlib.Path.home() / ".cache"
    device = re.sub(r"[^A-Za-z0-9.]+", "_", device_kind)
    return base / "mtpjax" / "kernels" / f"{device}-jax{jax.__version__}-{_source_digest()}.json"


def read(device_kind: str | None = None) -> dict[str, list]:
    """Reads the times measured on a kind of device.

    A damaged file is treated as empty, with a warning.

    Returns:
        Cells `{"shape": {name: size or kind}, "milliseconds": {implementation: time}}`, in a list for each op.
    """
    try:
        file = path(device_kind)
        text = file.read_text()
    # Without a home folder or a readable file, there are no measurements.
    except (OSError, RuntimeError, UnicodeDecodeError):
        return {}
    try:
        table = json.loads(text)
        if not all(_is_cell(cell) for cells in table.values() for cell in cells):
            raise ValueError
    except (ValueError, TypeError, AttributeError, RecursionError):
        warnings.warn(f"{file} is damaged and not used: remove it, or run mtpjax tune", stacklevel=2)
        return {}
    return table


def add(op: str, shape: Mapping[str, int | str], milliseconds: Mapping[str, float]) -> pathlib.Path:
    """Adds a measurement for JAX's first device, or replaces the measurement for the same shape.

    Args:
        op: Name of the op, as passed to `pallas_kernels.dispatch.choose`.
        milliseconds: Time of each implementation.

    Raises:
        OSError: The file cannot be written.
        RuntimeError: The user has no home folder.
    """
    file, table = path(), read()
    cells = [cell for cell in table.get(op, []) if cell["shape"] != dict(shape)]
    table[op] = [*cells, {"shape": dict(shape), "milliseconds": dict(milliseconds)}]
    # Replace the file atomically, so that readers see either the old file or the new one.
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".tmp-")
    try:
        with os.fdopen(descriptor, "w") as out:
            json.dump(table, out, indent=1)
        os.replace(name, file)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise
    return file


def _is_cell(cell: Any) -> bool:
    """Returns whether a value from the file has the form of a measurement."""
    shape, times = cell["shape"].values(), cell["milliseconds"].values()
    return all(isinstance(size, int | str) for size in shape) and bool(times) and all(time > 0 for time in times)


@functools.cache
def _source_digest() -> str:
    """Returns a digest of the kernels' source."""
    folder = pathlib.Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]
