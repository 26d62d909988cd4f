"""Merges MTP modules back into a full Hugging Face checkpoint: the inverse of `export_mtp`.

Tensors that have not changed keep their bytes. A changed tensor takes the dtype of the one that it replaces: it is
cast, or quantized to block-scaled fp8.
"""

import dataclasses
import json
import logging
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from conversion.array_checks import streams_equal
from conversion.export_mtp import WEIGHTS, original_name, shared_tensors
from conversion.files import INDEX, CheckpointFiles
from conversion.fp8_blocks import dequantized_blocks, quantized_blocks
from conversion.hf_config_write import edit_config
from conversion.load_plan import LoadPlan, make_plan
from conversion.names import mtp_names, param_specs
from conversion.safetensors_header import parse_header
from conversion.shards import Shard, TensorEntry, copy_files, entry_of, make_shard, write_index, write_shards
from mtpjax.atomic import atomic_folder
from mtpjax.errors import CheckpointFileError
from mtpjax.models.config import ModelConfig

log = logging.getLogger("mtpjax.conversion")

ADDED = "model-mtp.safetensors"  # the file of modules that the base does not have


@dataclasses.dataclass
class MergeReport:
    """Counts of the modules' tensors: `equal` to the base's, `replaced` there, or `added`."""

    equal: int = 0
    replaced: int = 0
    added: int = 0


@dataclasses.dataclass
class ModuleTensors:
    """Tensors of MTP modules, under the names of a full checkpoint."""

    count: int  # of modules
    entries: dict[str, TensorEntry]
    blocks: Callable[[str], Iterator[np.ndarray]]  # name -> the rows of the tensor, block after block


def merge_export(base, modules, target, *, progress: Callable[[int], Any] | None = None) -> MergeReport:
    """Writes the checkpoint `base` with the MTP modules of an export.

    Args:
        base: a full Hugging Face checkpoint, with or without MTP modules. Modules that it lacks go into a new file.
        modules: a folder that `export_mtp` wrote.
        target: the folder to write. It appears only when it is complete.
        progress: called with the number of bytes of each block that is written.

    Returns:
        How many tensors were equal, replaced and added.

    Raises:
        CheckpointFileError: one of the checkpoints is damaged, or the two do not fit.
    """
    with CheckpointFiles(base) as files:
        plan = make_plan(files, allow_extra=True)
        if not (pathlib.Path(modules) / WEIGHTS).is_file():
            raise CheckpointFileError(f"{modules} is neither an export of MTP modules nor an mtpjax checkpoint")
        with CheckpointFiles(modules) as exported:
            return merge_tensors(files, plan, _from_export(exported, files, plan), target, progress=progress)


def merge_tensors(
    files: CheckpointFiles,
    plan: LoadPlan,
    modules: ModuleTensors,
    target,
    *,
    progress: Callable[[int], Any] | None = None,
) -> MergeReport:
    """Writes a checkpoint with other MTP modules.

    Args:
        files: the base checkpoint.
        plan: its plan.
        modules: the modules to put in.
        target: the folder to write. It appears only when it is complete.
        progress: called with the number of bytes of each block that is written.

    Returns:
        How many tensors were equal, replaced and added.

    Raises:
        CheckpointFileError: a tensor has another shape than the one that it replaces.
    """
    report, changed = _compare(files, plan, modules)
    # A changed fp8 tensor gets new scales, so the tensor of its scales changes with it.
    scaled_tensor = {plan.scales.names[name]: name for name in changed if name in plan.scales.names}
    # The base's files keep their headers, since names, dtypes and shapes stay. New modules get a file of their own.
    shards = []
    for file, header in files.headers.items():
        tensors, _ = parse_header(header, file, files.path)
        shards.append(Shard(file, header, tuple(map(entry_of, tensors))))
    added = [entry for name, entry in modules.entries.items() if name not in files.tensors]
    if added:
        shards.append(make_shard(ADDED, added, {"format": "pt"}))

    def blocks(entry: TensorEntry) -> Iterator[np.ndarray]:
        name = scaled_tensor.get(entry.name, entry.name)
        # Unchanged: copy the bytes.
        if name in files.tensors and name not in changed:
            yield from files.blocks(name)
        # Changed, and fp8 in the base: quantize, and yield the values or the scales, whichever the entry is.
        elif name in plan.scales.names:
            for values, scales in quantized_blocks(modules.blocks(name), (plan.scales.rows, plan.scales.columns)):
                yield values if entry.name == name else scales.astype(entry.dtype)
        # Changed or added: cast.
        else:
            for part in modules.blocks(name):
                yield part.astype(entry.dtype, copy=False)

    with atomic_folder(pathlib.Path(target).resolve()) as folder:
        write_shards(folder, shards, blocks, progress)
        # Added modules change the configuration and the index; everything else is copied.
        rewritten = {"config.json", INDEX} if added else set()
        copy_files(folder, files.bytes_of, [name for name in files.other_files() if name not in rewritten])
        if added:
            content = edit_config(files.json("config.json"), plan.layout, num_mtp_modules=modules.count)
            (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
            write_index(folder, shards)
    return report


def _compare(files: CheckpointFiles, plan: LoadPlan, modules: ModuleTensors) -> tuple[MergeReport, set[str]]:
    """Compares the modules' tensors with the base's; returns the counts, and the names of those that changed."""
    report, changed = MergeReport(), set()
    for name, entry in modules.entries.items():
        if name not in files.tensors:
            report.added += 1
        elif files.tensors[name].shape != entry.shape:
            raise CheckpointFileError(f"tensor {name} has shape {entry.shape}, not {files.tensors[name].shape}")
        elif _is_equal(files, plan, modules, name):
            report.equal += 1
        else:
            report.replaced += 1
            changed.add(name)
    return report, changed


def _is_equal(files: CheckpointFiles, plan: LoadPlan, modules: ModuleTensors, name: str) -> bool:
    """Returns whether exporting the base's tensor would give the module's, in the module's own dtype."""
    # An export of an fp8 checkpoint holds bfloat16: dequantize the base in the same way before comparing.
    dtype = modules.entries[name].dtype
    ours = (block.astype(dtype) for block in dequantized_blocks(files, plan.scales, name, dtype))
    return streams_equal(ours, modules.blocks(name))


def _from_export(exported: CheckpointFiles, files: CheckpointFiles, plan: LoadPlan) -> ModuleTensors:
    """Lists the tensors of an export, without those that it shares with the trunk."""
    # The export's configuration counts the modules; a base that has modules must have as many.
    values = exported.json("config.json")
    count = values.get("num_nextn_predict_layers") if isinstance(values, dict) else None
    if not isinstance(count, int) or count < 1 or plan.config.num_mtp_modules not in (0, count):
        raise CheckpointFileError(
            f"{exported.path} has {count!r} MTP modules, but {files.path} has {plan.config.num_mtp_modules}"
        )
    config = dataclasses.replace(plan.config, num_mtp_modules=count)
    # From here on tensors have the names of the full checkpoint.
    names = {original_name(name, config, plan.layout): name for name in exported.tensors}
    # Embedding and head belong to the trunk, which a merge does not change.
    for name in shared_tensors(config, plan.layout):
        if name in names and not streams_equal(files.blocks(name), exported.blocks(names.pop(name))):
            log.warning("%s of the export differs from the checkpoint's, which is kept", name)
    _check_names(names.keys(), config, plan)
    entries = {name: entry_of(exported.tensors[old])._replace(name=name) for name, old in names.items()}
    return ModuleTensors(count, entries, lambda name: exported.blocks(names[name]))


def _check_names(names: Iterable[str], config: ModelConfig, plan: LoadPlan) -> None:
    """Checks that an export has all tensors of the modules and no others; copies of embedding and head are optional."""
    names = set(names)
    # The tensors that modules of this configuration must have.
    specs = param_specs(config, plan.layout, names.__contains__)
    wanted = {piece.name for path, spec in specs.items() if path.startswith("mtp_") for piece in spec.slices}
    # Copies of the trunk's embedding and head, which some families put into each module.
    copies = set()
    for number in range(config.num_mtp_modules):
        _, around = mtp_names(config, plan.layout, number)
        copies |= {around[name] for name in ("embedding", "head") if name in around}
    for problem, found in (("lacks", wanted - names), ("has unknown", names - wanted - copies - {"rot.weight"})):
        if found:
            raise CheckpointFileError(f"the export {problem} {len(found)} tensors: {', '.join(sorted(found)[:5])}")
