"""The layout of mtpjax's checkpoint folders. Imports no JAX, because commands inspect checkpoints before JAX starts.

    config.json    format name and version, the model configuration, metadata
    digests.json   the sha256 of every other file; for each array its shape, dtype and the sha256 of its elements
    params/        the arrays, written by Orbax, one folder each
    huggingface*   the rest of the Hugging Face directory that the checkpoint was converted from (`huggingface_files`)

zarr reads arrays with flipped bits without an error, so every checkpoint has digests. File digests are checked first,
so that parsers never read damaged data. Array digests then prove that the arrays in memory equal the saved ones.
"""

import hashlib
import json
import pathlib
from typing import Any

from mtpjax.errors import CheckpointError, UnsafeFileError, one_line
from mtpjax.folder_kinds import reject_other_folder
from mtpjax.hub import resolve
from mtpjax.safe_open import allowed_root, open_inside, parse_json, read_inside

FORMAT = "mtpjax-checkpoint"
VERSION = 1
GGUF_DIGEST_BYTES = 16 << 20  # bytes at the start of a GGUF file that identify it
CONFIG_FILE, DIGESTS_FILE, ARRAYS_FOLDER = "config.json", "digests.json", "params"
MAX_JSON_BYTES = 512 << 20  # maximum size of a JSON file; the largest models' files have about 20 MB


def is_checkpoint(path) -> bool:
    """Returns whether `path` is a checkpoint folder in this format, of any version. Never raises."""
    return read_config(pathlib.Path(path)) is not None


def find_checkpoint(path, *, is_model: bool = True) -> pathlib.Path:
    """Resolves the path or repository name that a user passes for a checkpoint.

    Args:
        path: a run folder of `mtpjax train`, a checkpoint, a Hugging Face directory, a GGUF file, or a Hugging Face Hub
            repository (`mtpjax.hub`), which is downloaded.
        is_model: whether to reject folders that are not models, such as adapters.

    Returns:
        The `checkpoint/` folder of a run folder, the downloaded snapshot of a repository, or otherwise `path`.
    """
    path = checkpoint_of_run(resolve(path))
    if is_model and not is_checkpoint(path):
        reject_other_folder(path)
    return path


def checkpoint_of_run(path: pathlib.Path) -> pathlib.Path:
    """Returns the `checkpoint/` folder if the path is a run folder of `mtpjax train`, and other paths unchanged."""
    return path / "checkpoint" if is_checkpoint(path / "checkpoint") else path


def checkpoint_bytes(path) -> int:
    """Returns the total size of a checkpoint's files."""
    found = find_checkpoint(path)
    # For a GGUF file, `rglob` yields nothing.
    return sum(file.stat().st_size for file in (found, *found.rglob("*")) if file.is_file())


def checkpoint_digest(path: pathlib.Path) -> str:
    """Identifies a checkpoint without reading its weights.

    Returns a hexadecimal sha256. It covers the digests of an mtpjax checkpoint; the configuration, index and file sizes
    of a Hugging Face directory; or the start and the size of a GGUF file.
    """
    described = [path / name for name in (DIGESTS_FILE, CONFIG_FILE, "model.safetensors.index.json")]
    whole = hashlib.sha256(b"".join(file.read_bytes() for file in described if file.is_file()))
    # A GGUF file starts with its metadata, so hash its start and its size.
    if path.is_file():
        with open(path, "rb") as stream:
            whole.update(stream.read(GGUF_DIGEST_BYTES))
        whole.update(str(path.stat().st_size).encode())
    for file in sorted(path.glob("*.safetensors")):
        whole.update(f"{file.name} {file.stat().st_size}".encode())
    return whole.hexdigest()


def read_config(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns a checkpoint folder's `config.json`; None if it is missing, unreadable or in a different format."""
    try:
        config = parse_json(read_inside(path, CONFIG_FILE, max_bytes=MAX_JSON_BYTES) or b"null")
    except (OSError, ValueError):  # ValueError: the file is unsafe, not JSON, or not UTF-8
        return None
    # Hugging Face directories also have a `config.json`, but without a format.
    return config if isinstance(config, dict) and config.get("format") == FORMAT else None


def read_digests(path: pathlib.Path) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Reads a checkpoint folder's `digests.json`.

    Returns `(files, arrays)`, where `files` has the sha256 by relative file name and `arrays` has `{"shape", "dtype",
    "sha256"}` by array name. Arrays that were written in chunks also have "chunks".
    """
    file = path / DIGESTS_FILE
    try:
        # The file may be damaged, so check its structure before it is used.
        digests = parse_json(read_kept(path, DIGESTS_FILE))
        files, arrays = dict(digests["files"]), dict(digests["arrays"])
        is_complete = CONFIG_FILE in files and all(_is_record(record) for record in arrays.values())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is missing or damaged: {one_line(error)}") from error
    # Without the digest of `config.json`, a changed configuration would go unnoticed.
    if not is_complete:
        raise CheckpointError(f"{file} is damaged: the entry for config.json or an array is missing or malformed")
    return files, arrays


def _is_record(record: Any) -> bool:
    """Returns whether an array's entry has valid chunk sizes; other fields are compared when the array is read."""
    # An entry that is not an object counts as chunks `[0]`, which are invalid.
    chunks = record.get("chunks", [1]) if isinstance(record, dict) else [0]
    return isinstance(chunks, list) and all(isinstance(size, int) and size > 0 for size in chunks)


def read_kept(path: pathlib.Path, name: str) -> bytes:
    """Reads a small file of a checkpoint folder safely. `name` is relative to the folder."""
    content = read_inside(path, name, max_bytes=MAX_JSON_BYTES)
    if content is None:
        raise UnsafeFileError(f"{path / name} is missing")
    return content


def file_digest(file: pathlib.Path, root: pathlib.Path) -> str | None:
    """Computes the sha256 of a file.

    Args:
        root: the checkpoint folder, which must contain the file.

    Returns:
        The hexadecimal digest, or None if the file cannot be read, is not a regular file, or links out of `root`.
    """
    try:
        with open(open_inside(file, allowed_root(root)), "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except (OSError, UnsafeFileError):
        return None


def json_bytes(value: Any) -> bytes:
    """Encodes a value as JSON."""
    # NaN is not valid JSON, so other parsers would reject it.
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
