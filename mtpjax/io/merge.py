"""Merges MTP modules, from an export or from a checkpoint of ours, into a full Hugging Face checkpoint."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from conversion import load
from conversion.export import Assembly
from conversion.files import CheckpointFileError, Files
from conversion.merge_mtp import Modules, Report, merge_export, merge_tensors
from conversion.names import table
from conversion.shards import Entry
from mtpjax.io.checkpoint_format import find_checkpoint, is_checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader


def merge_mtp(base, modules, target, *, progress: Callable[[int], Any] | None = None) -> Report:
    """Writes the Hugging Face checkpoint `base` with the MTP modules of `modules` to `target`.

    Args:
      base: a full Hugging Face checkpoint, with or without MTP modules. Modules that it lacks go into a new file.
      modules: a folder that `mtpjax export-mtp` wrote, a checkpoint of ours, or a run folder that holds one.
      target: the folder to write. It appears complete or not at all.
      progress: called with the number of bytes of each block that is written.

    Returns:
      How many tensors of the modules equal those of `base`, replaced one, or were added.

    Raises:
      CheckpointError: a checkpoint is damaged, or the two do not fit.
    """
    path = find_checkpoint(modules)
    if not is_checkpoint(path):
        return merge_export(base, modules, target, progress=progress)
    with Files(base) as files:
        made = load.plan(files, allow_extra=True)
        return merge_tensors(files, made, _module_tensors(CheckpointReader(path), made), target, progress=progress)


def _module_tensors(stored: CheckpointReader, made: load.Plan) -> Modules:
    """Lists the tensors of a checkpoint's MTP modules under their Hugging Face names."""
    config = stored.model_config()
    if not config.num_mtp_modules:
        raise CheckpointFileError(f"{stored.path} has no MTP modules")
    # The trunk must be the base's. What modules may change, and what the tokenizer sets, is left out of the comparison.
    own = ("num_mtp_modules", "mtp_own_embedding", "mtp_own_head", "num_tokens")
    expected = dataclasses.replace(made.config, **{name: getattr(config, name) for name in own})
    differing = [key for key, value in expected.to_dict().items() if config.to_dict()[key] != value]
    if differing:
        raise CheckpointFileError(f"{stored.path} is another model: it differs in {', '.join(differing)}")
    # Name the tensors as the base names its own: its layout, and its experts stacked or apart.
    held = {piece.name for leaf in made.leaves.values() for piece in leaf.pieces}
    leaves = {
        path: leaf for path, leaf in table(config, made.layout, held.__contains__).items() if path.startswith("mtp_")
    }
    names = {piece.name: (path, piece.shape) for path, leaf in leaves.items() for piece in leaf.pieces}
    assembly = Assembly(leaves, stored.read, scaled=stored.scaled, scales={}, tied={}, block=made.block)

    def entry(name: str) -> Entry:
        # fp8 modules are compared and written as bfloat16; the merge quantises them again where the base is fp8.
        path, shape = names[name]
        dtype = load.BF16 if path in stored.scaled else np.dtype(stored.records[path]["dtype"])
        return Entry(name, dtype, shape)

    entries = {name: entry(name) for name in names}
    return Modules(config.num_mtp_modules, entries, lambda name: assembly.blocks(entry(name)))
