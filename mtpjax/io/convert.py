"""Whole checkpoints: Hugging Face's layout -> ours, and back. No more than a few blocks are in memory at once."""

import contextlib
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conversion import hf_config, load
from conversion.export import Assembly
from conversion.files import INDEX, CheckpointFileError, Files, parse_header
from conversion.names import Leaf, table, tied_copies
from conversion.shards import Entry, Shard, copy_files, entry_of, new_shards, shard, write_index, write_shards
from mtpjax.atomic import new_folder
from mtpjax.io import checkpoint, huggingface_files
from mtpjax.io.array_files import StreamedArray
from mtpjax.io.checkpoint_format import find_checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.io.huggingface_files import FOLDER, HEADERS, OTHER_TENSORS
from mtpjax.io.param_tree import unflatten
from mtpjax.models.quantized import BlockScaled

Progress = Callable[[int], Any]


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
    that `config.json` names. Raises `CheckpointFileError`, `hf_config.ConfigError`, or `FileExistsError` where `target`
    is something else.
    """
    with Files(source, strict=strict) as files:
        made = load.plan(files, dtype=dtype, model_type=model_type, allow_extra=allow_extra)
        params = unflatten({path: _streams(files, made, path, leaf, progress) for path, leaf in made.leaves.items()})

        def write_more(folder: pathlib.Path) -> None:
            (folder / FOLDER).mkdir()
            copy_files(folder / FOLDER, files.bytes_of, files.others())
            headers = {file: header[8:].decode() for file, header in files.headers.items()}
            (folder / HEADERS).write_text(json.dumps({"model_type": made.model_type, "headers": headers}))
            if made.other:
                entries = [entry_of(files.tensors[name]) for name in made.other]
                write_shards(
                    folder, [shard(OTHER_TENSORS, entries, None)], lambda entry: files.blocks(entry.name), progress
                )

        checkpoint.save(target, made.config.to_dict(), params, write_more=write_more)
        files.report()


def to_hugging_face(source, target, *, dtype=None, model_type: str | None = None, progress: Progress | None = None):
    """Writes our checkpoint `source` as a Hugging Face directory `target`.

    What came from such a directory gets its files, names and order back, and its bytes unless `dtype` casts the
    weights. Another model is written as the family that describes it, or as `model_type`. Raises `CheckpointError`, or
    `hf_config.ConfigError` if no family does.
    """
    stored = CheckpointReader(find_checkpoint(source))
    config = stored.model_config()
    kept = _read_kept(stored)
    if kept is None:
        model_type, content = hf_config.describe(config, model_type)
        headers: dict[str, bytes] = {}
    else:
        model_type, headers, content = kept
    layout = hf_config.FAMILIES[model_type].layout
    parsed = {file: parse_header(header, file, source) for file, header in headers.items()}
    tensors = {tensor.name: tensor for found, _ in parsed.values() for tensor in found}
    leaves = table(config, layout, tensors.__contains__)
    tied = {copy: original for copy, original in tied_copies(config, layout) if copy in tensors}
    wanted = _entries(stored, leaves, dtype)
    wanted |= {copy: wanted[original]._replace(name=copy) for copy, original in tied.items()}
    scales = {name: f"{name}{end}" for name in wanted for end in ("_scale_inv", "_scale") if f"{name}{end}" in tensors}
    dropped = {scale for name, scale in scales.items() if wanted[name].dtype != load.E4M3}
    shards = []
    for file, (found, metadata) in parsed.items():
        entries = [wanted.get(tensor.name, entry_of(tensor)) for tensor in found if tensor.name not in dropped]
        is_same = entries == [entry_of(tensor) for tensor in found]
        shards.append(Shard(file, headers[file], tuple(entries)) if is_same else shard(file, entries, metadata))
    if kept is None:
        shards = new_shards(wanted.values())
    block = hf_config.parse(content, model_type).block
    assembly = Assembly(leaves, stored.read, scaled=stored.scaled, scales=scales, tied=tied, block=block)
    with new_folder(pathlib.Path(target).resolve()) as folder:
        with _other_tensors(stored) as other:

            def blocks(entry: Entry) -> Iterator[np.ndarray]:
                if other is not None and entry.name in other.tensors:
                    return other.blocks(entry.name)
                return assembly.blocks(entry)

            write_shards(folder, shards, blocks, progress)
        is_changed = [shard.header for shard in shards] != list(headers.values())
        rewritten = {"config.json", INDEX} if is_changed else set()
        if kept is not None:
            for file in (stored.path / FOLDER).iterdir():
                if file.name not in rewritten:
                    shutil.copyfile(file, folder / file.name)
        if is_changed:
            found = {str(entry.dtype) for entry in wanted.values()}
            content = hf_config.edited(content, layout, dtypes=found, drop_quantization=bool(dropped))
            (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
            write_index(folder, shards)
        if (record := stored.metadata.get("self_check")) is not None:
            (folder / huggingface_files.SELF_CHECK).write_text(json.dumps(record) + "\n")


def _streams(files: Files, made: load.Plan, path: str, leaf: Leaf, progress: Progress | None):
    dtype = made.dtypes[path]

    def stream(leaf: Leaf, dtype: np.dtype, read: Callable[[load.Index], np.ndarray]) -> StreamedArray:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            array = read(tuple((cut.start, cut.stop) for cut in index))
            if progress:
                progress(array.nbytes)
            return array

        return StreamedArray(leaf.shape, dtype, leaf.chunks(dtype.itemsize), part)

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


def _read_kept(stored: CheckpointReader) -> tuple[str, dict[str, bytes], dict[str, Any]] | None:
    """Model type, file headers and `config.json` of the Hugging Face directory that `stored` was converted from."""
    if HEADERS not in stored.files:
        return None
    kept = json.loads((stored.path / HEADERS).read_bytes())
    headers = {file: text.encode() for file, text in kept["headers"].items()}
    headers = {file: len(text).to_bytes(8, "little") + text for file, text in headers.items()}
    return kept["model_type"], headers, json.loads((stored.path / FOLDER / "config.json").read_bytes())


@contextlib.contextmanager
def _other_tensors(stored: CheckpointReader) -> Iterator[Files | None]:
    """The tensors of the original that are no parameters of ours, if it had any."""
    if OTHER_TENSORS not in stored.files:
        yield None
        return
    with Files(stored.path, only=OTHER_TENSORS) as files:
        yield files


def _entries(stored: CheckpointReader, leaves: dict[str, Leaf], dtype) -> dict[str, Entry]:
    """The tensors of all parameters, in the dtype that they are stored in, or `dtype`."""
    entries = {}
    for path, leaf in leaves.items():
        record = stored.records.get(f"{path}/values" if path in stored.scaled else path)
        if record is None or tuple(record["shape"]) != leaf.shape:
            raise CheckpointFileError(f"{stored.path} holds no array {path} of shape {leaf.shape}")
        kind = np.dtype(record["dtype"] if dtype is None else dtype)
        entries |= {piece.name: Entry(piece.name, kind, piece.shape) for piece in leaf.pieces}
    return entries
