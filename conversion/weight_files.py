"""Chooses the safetensors files of a checkpoint directory, which are the files in its index, or the single file."""

import logging
import os
import pathlib
import re
from typing import Any

from mtpjax.errors import CheckpointFileError

log = logging.getLogger("mtpjax.conversion")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".gguf")
_SHARD = re.compile(r".*-\d+-of-\d+\.safetensors")


def choose_weight_files(folder: pathlib.Path, index: Any) -> tuple[list[str], dict[str, Any] | None]:
    """Chooses the files to read.

    Args:
        index: the directory's parsed index, or None if there is no index file.

    Returns:
        `(files, index)`: the names of the files to read, and their index or None.

    Raises:
        CheckpointFileError: files are missing, the index is damaged, or it is not clear which files are the checkpoint.
    """
    has_single = os.path.lexists(folder / SINGLE)
    if index is not None:
        shards = _indexed_files(folder, index)
        missing = [file for file in shards if not os.path.lexists(folder / file)]
        if has_single and SINGLE not in shards:
            return _choose_single(folder, shards, missing), None
        # List all missing shards at once, because an interrupted download usually lacks several.
        if missing:
            raise CheckpointFileError(
                f"{folder} is incomplete: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}"
            )
        return shards, index
    if has_single:
        return [SINGLE], None
    # A single file with any name is the checkpoint, unless its name marks it as one of several shards.
    found = safetensors_files(folder)
    if len(found) == 1 and not _SHARD.fullmatch(found[0]):
        log.warning("%s has no %s: %s is read", folder, SINGLE, found[0])
        return found, None
    # Explain why nothing can be read. Either an index is missing, or the weights have a different format.
    if found:
        raise CheckpointFileError(
            f"{folder} has {len(found)} safetensors shards but no {INDEX}: {', '.join(found[:5])}"
        )
    other = sorted(file.name for file in folder.iterdir() if file.name.endswith(PICKLE_SUFFIXES))
    if other:
        raise CheckpointFileError(
            f"{folder} contains {other[0]}, an unsupported weight format; supported: safetensors. Convert it with the "
            "tools of that format first"
        )
    raise CheckpointFileError(f"{folder} contains no safetensors files")


def safetensors_files(folder: pathlib.Path) -> list[str]:
    """Lists the safetensors files of a directory."""
    return sorted(file.name for file in folder.iterdir() if file.name.endswith(".safetensors"))


def _indexed_files(folder: pathlib.Path, index: Any) -> list[str]:
    """Lists the files in an index, and checks that they are in this directory."""
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointFileError(f"{folder / INDEX} has no weight_map")
    # A name such as "../other.safetensors" would lead out of the directory.
    for file in weight_map.values():
        if not isinstance(file, str) or file != os.path.basename(file) or not file or "\0" in file:
            raise CheckpointFileError(
                f"{folder / INDEX} lists {file!r}, which is not the name of a file in the directory"
            )
    return sorted(set(weight_map.values()))


def _choose_single(folder: pathlib.Path, shards: list[str], missing: list[str]) -> list[str]:
    """Decides between `model.safetensors` and an index that does not list this file.

    One of the two is left over from a different checkpoint. Programs differ in which of the two they read. For example,
    transformers reads the single file, and vLLM reads the index.
    """
    if len(missing) == len(shards):
        log.warning(
            "%s: %s lists %d shards, none of which exists: the index is ignored, and %s is read",
            *(folder, INDEX, len(shards), SINGLE),
        )
        return [SINGLE]
    raise CheckpointFileError(
        f"{folder} has {SINGLE} and also {INDEX}, which lists {len(shards)} other files ({shards[0]}"
        f"{f', {len(missing)} of them missing' if missing else ''}): only one of the two is the checkpoint. Delete "
        f"{INDEX} and its files to read {SINGLE}, or delete {SINGLE} to read the files of the index"
    )
