"""Whole checkpoints: Hugging Face's layout -> ours, and back. No more than a few blocks are in memory at once."""

import json
import logging
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from conversion import hf_config, load
from conversion.export import Assembly
from conversion.files import BLOCK, INDEX, CheckpointFileError, Files, Tensor, parse_header
from conversion.names import Leaf, table, tied_copies
from conversion.shards import Entry, Shard, copy_files, new_shards, shard, write_index, write_shards
from mtpjax import checkpoint
from mtpjax.atomic import new_folder
from mtpjax.quantized import BlockScaled

log = logging.getLogger("mtpjax.conversion")

Progress = Callable[[int], Any]
KEPT, SHARDS, OTHER = "huggingface", "shards.json", "other.safetensors"  # in our checkpoint: what is not ours
MODULES = "model-mtp.safetensors"  # the shard of MTP modules that the source had not


def to_mtpjax(
    source,
    target,
    *,
    dtype=None,
    model_type: str | None = None,
    allow_extra: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes the Hugging Face directory `source` as our checkpoint `target`, and keeps there all else that it holds.

    `dtype=None` keeps the dtypes of the files, fp8 with its scales included. `model_type` is taken instead of the one
    that `config.json` names. Raises `CheckpointFileError`,
    `hf_config.ConfigError`, or `FileExistsError` where `target` is something else.
    """
    with Files(source, strict=strict) as files:
        made = load.plan(files, dtype=dtype, model_type=model_type, allow_extra=allow_extra)
        params: dict = {}
        for path, leaf in made.leaves.items():
            *folders, last = path.split("/")
            node = params
            for folder in folders:
                node = node.setdefault(folder, {})
            node[last] = _streams(files, made, path, leaf, progress)

        def write_more(folder: pathlib.Path) -> None:
            folder = folder / KEPT
            folder.mkdir()
            copy_files(folder, files.bytes_of, files.others())
            headers = {file: header[8:].decode() for file, header in files.headers.items()}
            (folder / SHARDS).write_text(json.dumps({"model_type": made.model_type, "headers": headers}))
            if made.other:
                entries = [_entry(files.tensors[name]) for name in made.other]
                write_shards(folder, [shard(OTHER, entries, None)], lambda entry: files.blocks(entry.name), progress)

        checkpoint.save(target, made.config.to_dict(), params, write_more=write_more)
        files.report()


def to_hugging_face(source, target, *, dtype=None, model_type: str | None = None, progress: Progress | None = None):
    """Writes our checkpoint `source` as a Hugging Face directory `target`.

    What came from such a directory gets its files, names and order back, and its bytes where nothing has changed; MTP
    modules that were added come as a file of their own. Another model is written as the family that describes it, or as
    `model_type`. `dtype` casts all weights. Raises `CheckpointError`, or `hf_config.ConfigError` if no family does.
    """
    stored = checkpoint.Stored(checkpoint.find(source))
    config = checkpoint.model_config(stored.config, source)
    kept = _read_kept(stored)
    if kept is None:
        model_type, values = hf_config.describe(config, model_type)
        content = values
        headers: dict[str, bytes] = {}
    else:
        model_type, headers = kept
        content = json.loads((stored.path / KEPT / "config.json").read_bytes())
    family = hf_config.FAMILIES[model_type]
    tensors = {}
    for file, header in headers.items():
        tensors |= {tensor.name: tensor for tensor in parse_header(header, file, source)[0]}
    leaves = table(config, family.layout, tensors.__contains__)
    tied = {copy: original for copy, original in tied_copies(config, family.layout) if copy in tensors}
    dtypes = _stored_dtypes(stored, leaves, dtype)
    wanted = {
        piece.name: Entry(piece.name, dtypes[path], piece.shape) for path in leaves for piece in leaves[path].pieces
    }
    scales = {
        name: f"{name}{end}"
        for name, tensor in tensors.items()
        for end in ("_scale_inv", "_scale")
        if f"{name}{end}" in tensors and name in wanted.keys() | tied.keys()
    }
    dropped = {scales[name] for name in scales if wanted[tied.get(name, name)].dtype != load.E4M3}
    shards = []
    for file, header in headers.items():
        found, metadata = parse_header(header, file, source)
        entries = []
        for tensor in found:
            if tensor.name in dropped:
                continue
            original = tied.get(tensor.name, tensor.name)
            as_was = _entry(tensor)
            entries.append(as_was._replace(dtype=wanted[original].dtype) if original in wanted else as_was)
        is_same = entries == [_entry(tensor) for tensor in found]
        shards.append(Shard(file, header, tuple(entries)) if is_same else shard(file, entries, metadata))
    added = [entry for name, entry in wanted.items() if name not in tensors]
    if added:
        shards += [shard(MODULES, added, {"format": "pt"})] if kept else new_shards(added)
    block = hf_config.parse(content).block
    assembly = Assembly(leaves, stored.read, scaled=stored.scaled, scales=scales, tied=tied, block=block)
    has_other = kept is not None and (stored.path / KEPT / OTHER).is_file()
    is_changed = kept is None or added or [shard.header for shard in shards] != list(headers.values())
    with new_folder(pathlib.Path(target).resolve(), is_hugging_face, "Hugging Face checkpoint") as folder:
        other = Files(stored.path / KEPT, only=OTHER) if has_other else None

        def blocks(entry: Entry):
            is_passed_on = other is not None and entry.name in other.tensors
            parts = other.blocks(entry.name) if other and is_passed_on else assembly.blocks(entry)
            for part in parts:
                yield part
                if progress:
                    progress(part.nbytes)

        write_shards(folder, shards, blocks)
        if kept is not None:
            names = {file.name for file in (stored.path / KEPT).iterdir()} - {SHARDS, OTHER}
            changed = {"config.json", INDEX} if is_changed else set()
            for name in sorted(names - changed):
                (folder / name).write_bytes((stored.path / KEPT / name).read_bytes())
        if is_changed:
            found = {str(entry.dtype) for entry in wanted.values()}
            content = hf_config.edited(content, config, dtypes=found, drop_quantization=bool(dropped))
            (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
            write_index(folder, shards)


def is_hugging_face(path: pathlib.Path) -> bool:
    """Whether `path` is a folder of a configuration and safetensors, which a later one may replace."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors")) and not checkpoint.is_checkpoint(path)


def _entry(tensor: Tensor) -> Entry:
    return Entry(tensor.name, tensor.dtype, tensor.shape)


def _streams(files: Files, made: load.Plan, path: str, leaf: Leaf, progress: Progress | None):
    dtype = made.dtypes[path]

    def stream(leaf: Leaf, dtype: np.dtype, read: Callable[[load.Index], np.ndarray]) -> checkpoint.Stream:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            array = read(tuple((cut.start, cut.stop) for cut in index))
            if progress:
                progress(array.nbytes)
            return array

        return checkpoint.Stream(leaf.shape, dtype, _chunks(leaf, dtype), part)

    if dtype != load.E4M3:
        return stream(leaf, dtype, lambda index: load.read_as(files, made, leaf, index, dtype))
    assert made.block is not None
    values = stream(leaf, dtype, lambda index: load.read_leaf(files, leaf, index))
    scales = load.scale_leaf(leaf, made.block)
    parts: dict[str, Any] = {
        "values": values,
        "scales": stream(scales, np.dtype(np.float32), lambda index: load.read_scales(files, made, leaf, index)),
    }
    return BlockScaled(**parts, axis=leaf.in_axis, block=made.block[1])


def _chunks(leaf: Leaf, dtype: np.dtype) -> tuple[int, ...]:
    """Of about `BLOCK` bytes, along the axis whose parts need parts of the files only."""
    axis = leaf.rows_axis
    if axis is None:
        return leaf.shape
    size = leaf.shape[axis]
    unit = math.prod(leaf.shape) // size * dtype.itemsize
    count = -(-size // max(1, BLOCK // unit))
    return (*leaf.shape[:axis], -(-size // count), *leaf.shape[axis + 1 :])


def _read_kept(stored: checkpoint.Stored) -> tuple[str, dict[str, bytes]] | None:
    """Model type and file headers of the Hugging Face directory that `stored` was converted from."""
    if f"{KEPT}/{SHARDS}" not in stored.files:
        return None
    kept = json.loads((stored.path / KEPT / SHARDS).read_bytes())
    headers = {file: text.encode() for file, text in kept["headers"].items()}
    return kept["model_type"], {file: len(text).to_bytes(8, "little") + text for file, text in headers.items()}


def _stored_dtypes(stored: checkpoint.Stored, leaves: dict[str, Leaf], dtype) -> dict[str, np.dtype]:
    dtypes = {}
    for path, leaf in leaves.items():
        record = stored.records.get(f"{path}/values" if path in stored.scaled else path)
        if record is None or tuple(record["shape"]) != leaf.shape:
            raise CheckpointFileError(f"{stored.path} holds no array {path} of shape {leaf.shape}")
        dtypes[path] = np.dtype(record["dtype"] if dtype is None else dtype)
    return dtypes
