"""Exports MTP modules from a Hugging Face directory, an mtpjax checkpoint, or a run folder."""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from conversion import export_mtp as exports
from mtpjax.io.checkpoint_format import find_checkpoint, is_checkpoint
from mtpjax.io.convert import to_hugging_face


def export_mtp(source, target, *, model_type: str | None = None, progress: Callable[[int], Any] | None = None) -> int:
    """Writes the MTP modules of a checkpoint as a separate checkpoint.

    An mtpjax checkpoint is first written as a Hugging Face directory beside the target, which needs as much space on
    disk as the whole model; the directory is removed at the end.

    Args:
        source: a full Hugging Face checkpoint, an mtpjax checkpoint, or a run folder that holds one.
        target: the folder to write. It appears only when it is complete; an older export is replaced.
        model_type: the family to use instead of the one that the checkpoint names.

    Raises:
        FileExistsError: `target` is neither empty nor an export.
    """
    path, target = find_checkpoint(source), pathlib.Path(target).resolve()
    if not is_checkpoint(path):
        return exports.export_mtp(source, target, model_type=model_type, progress=progress)
    # Name the tensors as the family does, then extract the modules.
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tmp-") as folder:
        to_hugging_face(path, pathlib.Path(folder) / "full", model_type=model_type, progress=progress)
        return exports.export_mtp(pathlib.Path(folder) / "full", target, progress=progress)
