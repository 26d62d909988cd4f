"""Merges MTP modules back into a full Hugging Face checkpoint, which is the inverse of `export_mtp`.

Unchanged tensors keep their bytes. A changed tensor is cast to the dtype of the tensor that it replaces, or quantized
to block-scaled fp8.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conversion.array_checks import streams_equal
from conversion.files import CheckpointFiles
from conversion.fp8_blocks import dequantized_blocks, quantized_blocks
from conversion.hf_config_write import edit_config
from conversion.load_plan import LoadPlan
from conversion.merge_sources import ModuleTensors
from conversion.safetensors_header import parse_header
from conversion.shards import Shard, TensorEntry, copy_files, entry_of, make_shard, write_index, write_shards
from conversion.weight_files import INDEX
from mtpjax.atomic import atomic_folder
from mtpjax.errors import CheckpointFileError

ADDED = "model-mtp.safetensors"  # the file for modules that the base lacks


@dataclasses.dataclass
class MergeReport:
    """The numbers of module tensors that are `equal` to the base's, `replaced` in the base, or `added` to it."""

    equal: int = 0
    replaced: int = 0
    added: int = 0


def merge_tensors(
    files: CheckpointFiles,
    plan: LoadPlan,
    modules: ModuleTensors,
    target,
    *,
    progress: Callable[[int], Any] | None = None,
) -> MergeReport:
    """Writes the base checkpoint with new MTP modules.

    Args:
        target: the folder to write, which appears only when it is complete.

    Raises:
        CheckpointFileError: a tensor's shape differs from the shape of the tensor that it replaces.
    """
    report, changed = _compare(files, plan, modules)
    # A changed fp8 tensor gets new scales, so its scale tensor changes too.
    scaled_tensor = {plan.scales.names[name]: name for name in changed if name in plan.scales.names}
    # The base's files keep their headers, since names, dtypes and shapes are the same. New modules get a separate file.
    shards = []
    for file, header in files.headers.items():
        tensors, _ = parse_header(header, file, files.path)
        shards.append(Shard(file, header, tuple(map(entry_of, tensors))))
    added = [entry for name, entry in modules.entries.items() if name not in files.tensors]
    if added:
        shards.append(make_shard(ADDED, added, {"format": "pt"}))

    def blocks(entry: TensorEntry) -> Iterator[np.ndarray]:
        name = scaled_tensor.get(entry.name, entry.name)
        # Copy the bytes of an unchanged tensor.
        if name in files.tensors and name not in changed:
            yield from files.blocks(name)
        # Quantize a changed tensor that is fp8 in the base, and yield the values or the scales, whichever the entry is.
        elif name in plan.scales.names:
            kind = files.tensors[plan.scales.names[name]].dtype
            for values, scales in quantized_blocks(modules.blocks(name), plan.scales.block, kind):
                yield values if entry.name == name else scales
        # Cast any other tensor that is changed or added.
        else:
            for part in modules.blocks(name):
                yield part.astype(entry.dtype, copy=False)

    with atomic_folder(pathlib.Path(target).resolve()) as folder:
        write_shards(folder, shards, blocks, progress)
        # Added modules change the configuration and the index. All other files are copied.
        rewritten = {"config.json", INDEX} if added else set()
        copy_files(folder, files.bytes_of, [name for name in files.other_files() if name not in rewritten])
        if added:
            content = edit_config(
                files.json("config.json"),
                modules.plan.layout,
                num_mtp_modules=modules.count,
                own_embedding=modules.own_embedding,
            )
            (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
            write_index(folder, shards)
    return report


def _compare(files: CheckpointFiles, plan: LoadPlan, modules: ModuleTensors) -> tuple[MergeReport, set[str]]:
    """Compares the modules' tensors with the base's. Returns the counts, and the names of changed tensors."""
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
    """Returns whether an export of the base would contain the same tensor as the modules."""
    # An export of an fp8 checkpoint contains bfloat16, so dequantize the base in the same way before comparing.
    dtype = modules.entries[name].dtype
    ours = (block.astype(dtype) for block in dequantized_blocks(files, plan.scales, name, dtype))
    return streams_equal(ours, modules.blocks(name))
