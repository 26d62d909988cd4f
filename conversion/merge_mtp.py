"""MTP modules back into a full Hugging Face checkpoint: the inverse of `export_mtp`.

What the modules have not changed keeps its bytes. A changed tensor takes the dtype of the one that it replaces: cast,
or quantised to fp8 by blocks as DeepSeek-V3 does (scale = largest magnitude of the block / 448).
"""

import dataclasses
import json
import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conversion import hf_config, load
from conversion.export_mtp import WEIGHTS, dequantised_blocks, original_name, shared_tensors
from conversion.files import INDEX, CheckpointFileError, Files, parse_header, same_content
from conversion.names import mtp_names, table
from conversion.shards import Entry, Shard, copy_files, entry_of, shard, write_index, write_shards
from mtpjax.atomic import new_folder
from mtpjax.models.config import ModelConfig

log = logging.getLogger("mtpjax.conversion")

ADDED = "model-mtp.safetensors"  # the file of modules that the base had not
FP8_MAX = 448.0  # the largest finite float8_e4m3fn


@dataclasses.dataclass
class Report:
    """How many tensors of modules were `equal` to those of the checkpoint, `replaced`, or `added`."""

    equal: int = 0
    replaced: int = 0
    added: int = 0


@dataclasses.dataclass
class Modules:
    """Tensors of MTP modules, under the names of a full checkpoint."""

    count: int
    entries: dict[str, Entry]
    blocks: Callable[[str], Iterator[np.ndarray]]


def merge_export(base, modules, target, *, progress: Callable[[int], Any] | None = None) -> Report:
    """Writes the checkpoint `base` with the MTP modules of the export `modules` to `target`.

    Args:
      base: a full Hugging Face checkpoint, with or without MTP modules. Modules that it lacks go into a new file.
      modules: a folder that `export_mtp` wrote.
      target: the folder to write. It appears complete or not at all.
      progress: called with the number of bytes of each block that is written.

    Returns:
      How many tensors were equal, replaced and added.

    Raises:
      CheckpointFileError: one of the checkpoints is damaged, or the two do not fit.
    """
    with Files(base) as files:
        made = load.plan(files, allow_extra=True)
        if not (pathlib.Path(modules) / WEIGHTS).is_file():
            raise CheckpointFileError(f"{modules} is neither an export of MTP modules nor an mtpjax checkpoint")
        with Files(modules) as exported:
            return merge_tensors(files, made, _from_export(exported, files, made), target, progress=progress)


def merge_tensors(
    files: Files, made: load.Plan, modules: Modules, target, *, progress: Callable[[int], Any] | None = None
) -> Report:
    """Writes the checkpoint of `files` with the tensors of `modules` to `target`."""
    report = Report()
    changed = set()
    for name, entry in modules.entries.items():
        if name not in files.tensors:
            report.added += 1
        elif files.tensors[name].shape != entry.shape:
            raise CheckpointFileError(f"tensor {name} has shape {entry.shape}, not {files.tensors[name].shape}")
        elif _is_equal(files, made, modules, name):
            report.equal += 1
        else:
            report.replaced += 1
            changed.add(name)
    scale_of = {made.scales[name]: name for name in changed if name in made.scales}
    shards = []
    for file, header in files.headers.items():
        tensors, _ = parse_header(header, file, files.path)
        shards.append(Shard(file, header, tuple(map(entry_of, tensors))))
    added = [entry for name, entry in modules.entries.items() if name not in files.tensors]
    if added:
        shards.append(shard(ADDED, added, {"format": "pt"}))

    def blocks(entry: Entry) -> Iterator[np.ndarray]:
        name = scale_of.get(entry.name, entry.name)
        if name in files.tensors and name not in changed:
            yield from files.blocks(name)
        elif name in made.scales:
            for values, scales in _quantised(modules.blocks(name), made.block):
                yield values if entry.name == name else scales.astype(entry.dtype)
        else:
            for part in modules.blocks(name):
                yield part.astype(entry.dtype, copy=False)

    with new_folder(pathlib.Path(target).resolve()) as folder:
        write_shards(folder, shards, blocks, progress)
        rewritten = {"config.json", INDEX} if added else set()
        copy_files(folder, files.bytes_of, [name for name in files.others() if name not in rewritten])
        if added:
            content = hf_config.edited(files.json("config.json"), made.layout, num_mtp_modules=modules.count)
            (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
            write_index(folder, shards)
    return report


def _from_export(exported: Files, files: Files, made: load.Plan) -> Modules:
    """The tensors of an export, without those that it shares with the trunk."""
    values = exported.json("config.json")
    count = values.get("num_nextn_predict_layers") if isinstance(values, dict) else None
    if not isinstance(count, int) or count < 1 or made.config.num_mtp_modules not in (0, count):
        raise CheckpointFileError(
            f"{exported.path} has {count!r} MTP modules; {files.path} {made.config.num_mtp_modules}"
        )
    config = dataclasses.replace(made.config, num_mtp_modules=count)
    names = {original_name(name, config, made.layout): name for name in exported.tensors}
    for name in shared_tensors(config, made.layout):
        if name in names and not same_content(files.blocks(name), exported.blocks(names.pop(name))):
            log.warning("%s of the export differs from the checkpoint's, which is kept", name)
    _check_names(names.keys(), config, made)
    entries = {name: entry_of(exported.tensors[old])._replace(name=name) for name, old in names.items()}
    return Modules(count, entries, lambda name: exported.blocks(names[name]))


def _check_names(names, config: ModelConfig, made: load.Plan) -> None:
    """The names of an export are those of the modules, all of them; copies of embedding and head may be there."""
    leaves = table(config, made.layout, names.__contains__)
    wanted = {piece.name for path, leaf in leaves.items() if path.startswith("mtp_") for piece in leaf.pieces}
    copies = set()
    for number in range(config.num_mtp_modules):
        _, around = mtp_names(config, made.layout, number)
        copies |= {around[name] for name in ("embedding", "head") if name in around}
    for problem, found in (("lacks", wanted - names), ("holds unknown", names - wanted - copies - {"rot.weight"})):
        if found:
            raise CheckpointFileError(f"the export {problem} {len(found)} tensors: {', '.join(sorted(found)[:5])}")


def _is_equal(files: Files, made: load.Plan, modules: Modules, name: str) -> bool:
    """Whether a module's tensor is what exporting the checkpoint's would give, in the module's own dtype."""
    dtype = modules.entries[name].dtype
    return same_content(
        (block.astype(dtype) for block in dequantised_blocks(files, made, name, dtype)), modules.blocks(name)
    )


def _quantised(blocks: Iterator[np.ndarray], block: tuple[int, int] | None):
    """Rows -> fp8 values and their scales, a row of blocks at a time at least."""
    assert block is not None
    rows, columns = block
    rest: np.ndarray | None = None
    for part in blocks:
        part = part.astype(np.float32)
        rest = part if rest is None else np.concatenate([rest, part])
        whole = len(rest) // rows * rows
        if whole:
            yield _quantise(rest[:whole], rows, columns)
            rest = rest[whole:]
    if rest is not None and len(rest):
        yield _quantise(rest, rows, columns)


def _quantise(values: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    height, width = values.shape
    grid = -(-height // rows), -(-width // columns)
    padded = np.zeros((grid[0] * rows, grid[1] * columns), np.float32)
    padded[:height, :width] = np.abs(values)
    largest = padded.reshape(grid[0], rows, grid[1], columns).max(axis=(1, 3))
    scales = np.where(largest > 0, largest / FP8_MAX, 1.0).astype(np.float32)
    spread = np.repeat(np.repeat(scales, rows, axis=0), columns, axis=1)[:height, :width]
    return (values / spread).astype(load.E4M3), scales
