"""Converts checkpoints between Hugging Face's format and mtpjax's, with only a few blocks in memory at once.

Converting a Hugging Face directory and back gives the same bytes in every file, because the mtpjax checkpoint keeps the
small files, the headers of the safetensors files, and the tensors that are not parameters.
"""

import contextlib
import functools
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conversion import export_mtp as hugging_face_export
from conversion.export import TensorAssembler
from conversion.families import Layout
from conversion.files import CheckpointFiles
from conversion.gguf_files import open_checkpoint
from conversion.hf_config import parse_config
from conversion.hf_config_write import edit_config
from conversion.load_plan import make_plan
from conversion.names import param_specs, stored_layout, tied_copies
from conversion.quantized_formats import SCALE_ENDS
from conversion.read_params import ReadPart, ScaleMap
from conversion.safetensors_header import E4M3, TensorInfo, parse_header
from conversion.shards import (
    Shard,
    TensorEntry,
    copy_files,
    entry_of,
    make_shard,
    split_into_shards,
    write_index,
    write_shards,
)
from conversion.tensor_slice import ParamSpec
from conversion.weight_files import INDEX
from mtpjax.atomic import atomic_folder
from mtpjax.errors import CheckpointFileError, ConfigError
from mtpjax.io import checkpoint, new_directory
from mtpjax.io.array_files import StreamedArray, nest
from mtpjax.io.checkpoint_format import find_checkpoint, is_checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.io.huggingface_files import HEADERS_FILE, HUGGINGFACE_FOLDER, OTHER_TENSORS_FILE, SELF_CHECK_FILE

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
    """Converts a Hugging Face directory to an mtpjax checkpoint, which also keeps the directory's other contents.

    Args:
        source: the Hugging Face directory.
        target: the checkpoint folder to write. It appears only when it is complete; an older checkpoint is replaced.
        dtype: dtype to cast the parameters to. None keeps the files' dtypes; block-quantized fp8 stays fp8.
        model_type: the family to use instead of the one in `config.json`.
        allow_extra: whether to keep, rather than reject, unknown tensors that do not belong to the language model.
        strict: whether to raise an error for infinite or NaN weights instead of warning.
        progress: called with the size in bytes of each converted chunk.

    Raises:
        CheckpointFileError: the directory is damaged, incomplete or not supported.
        ConfigError: its configuration is damaged or not supported.
        FileExistsError: `target` is neither empty nor a checkpoint.
    """
    with open_checkpoint(source, strict=strict) as files:
        # This reads only headers. Weights are read chunk by chunk while the checkpoint is saved.
        plan = make_plan(files, dtype=dtype, model_type=model_type, allow_extra=allow_extra)

        def stream(path: str, spec: ParamSpec, dtype: np.dtype, read: ReadPart) -> StreamedArray:
            def part(index: tuple[slice, ...]) -> np.ndarray:
                array = read(tuple((cut.start, cut.stop) for cut in index))
                if progress:
                    progress(array.nbytes)
                return array

            return StreamedArray(spec.shape, dtype, spec.chunks(dtype.itemsize), part)

        params = nest({path: plan.make_param(files, path, stream) for path in plan.specs})

        def write_rest(folder: pathlib.Path) -> None:
            # Keep the small files, headers and other tensors, so that an export can reproduce the same bytes.
            (folder / HUGGINGFACE_FOLDER).mkdir()
            copy_files(folder / HUGGINGFACE_FOLDER, files.bytes_of, files.other_files())
            headers = {file: header[8:].decode() for file, header in files.headers.items()}
            described = {"model_type": plan.model_type, "headers": headers, "keeps_dtypes": dtype is None}
            (folder / HEADERS_FILE).write_text(json.dumps(described))
            if plan.other:
                entries = [entry_of(files.tensors[name]) for name in plan.other]
                shards = [make_shard(OTHER_TENSORS_FILE, entries, None)]
                write_shards(folder, shards, lambda entry: files.blocks(entry.name), progress)

        checkpoint.save(target, plan.config.to_dict(), params, write_extra_files=write_rest)
        files.report()


def to_hugging_face(
    source, target, *, dtype=None, model_type: str | None = None, progress: Progress | None = None
) -> None:
    """Converts an mtpjax checkpoint to a Hugging Face directory.

    A checkpoint that was converted from such a directory is written with the same files, tensor names and order, and
    with the same bytes unless `dtype` casts the weights. Other models are written as the first family that fits.

    Args:
        source: the checkpoint, or a run folder.
        target: the folder to write, which must be empty or missing. It appears only when it is complete.
        dtype: dtype to cast the weights to. `None` keeps the checkpoint's dtypes.
        model_type: the family to write, for a model that was not converted from a Hugging Face directory. None means
            the family of the checkpoint that training started from, or else the first that can describe the model.
        progress: called with the size in bytes of each written block.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfigError: no supported family can describe the model, or `model_type` differs from the original's.
        FileExistsError: `target` is not empty.
    """
    # Read the metadata of the checkpoint and of the directory from which it was converted.
    reader = CheckpointReader(find_checkpoint(source))
    config, converted = reader.model_config(), new_directory.read_original(reader)
    if converted is not None and model_type not in (None, converted.model_type):
        raise ConfigError(f"{reader.path} was converted from model_type {converted.model_type!r}, not {model_type!r}")
    original = converted or new_directory.describe_directory(reader, config, model_type)
    # Name the tensors as in the original, with its layout, stacked or separate experts, and copies of embedding and
    # head.
    parsed = {file: parse_header(header, file, source) for file, header in original.headers.items()}
    before = {tensor.name: tensor for found, _ in parsed.values() for tensor in found}
    # New files use the family's names, and stack experts where transformers expects stacked experts.
    if converted is not None:
        layout, has = stored_layout(original.layout, config, before.__contains__), before.__contains__
    else:
        layout = new_directory.module_layout(original.layout, config)
        has = functools.partial(_is_stacked, original.layout)
    specs = param_specs(config, layout, has)
    tied = {copy: name for copy, name in tied_copies(config, layout) if copy in before}
    entries = _tensor_entries(reader, specs, dtype, before if original.keeps_dtypes else {})
    entries |= {copy: entries[name]._replace(name=copy) for copy, name in tied.items()}
    scale_names = {name: f"{name}{end}" for name in entries for end in SCALE_ENDS if f"{name}{end}" in before}
    scales = ScaleMap(scale_names, parse_config(original.content, original.model_type).block or (0, 0))
    # Tensors that are cast from fp8 lose their scales.
    dropped = {scale for name, scale in scales.names.items() if entries[name].dtype != E4M3}
    # Reproduce the original files, with the same headers unless a tensor has changed, or make new files. Tensors that
    # are not parameters have no entry and do not change.
    shards = [] if converted else split_into_shards(entries.values())
    for file, (found, metadata) in parsed.items():
        wanted = tuple(entries.get(tensor.name, entry_of(tensor)) for tensor in found if tensor.name not in dropped)
        is_same = wanted == tuple(map(entry_of, found))
        shards.append(Shard(file, original.headers[file], wanted) if is_same else make_shard(file, wanted, metadata))
    assembler = TensorAssembler(specs, reader.read, scaled=reader.scaled, scales=scales, tied=tied)
    with atomic_folder(pathlib.Path(target).resolve()) as folder:
        # The original's tensors that are not parameters were kept in a separate file.
        has_others = OTHER_TENSORS_FILE in reader.files
        kept = CheckpointFiles(reader.path, only=OTHER_TENSORS_FILE) if has_others else contextlib.nullcontext()
        with kept as other:

            def blocks(entry: TensorEntry) -> Iterator[np.ndarray]:
                if other is not None and entry.name in other.tensors:
                    return other.blocks(entry.name)
                return assembler.blocks(entry)

            write_shards(folder, shards, blocks, progress)
        # Copy the small files. If a header has changed, rewrite the configuration and the index.
        content = None
        if [shard.header for shard in shards] != list(original.headers.values()):
            dtypes = {str(entry.dtype) for entry in entries.values()}
            is_dropped = bool(dropped) and all(entries[name].dtype != E4M3 for name in scales.names)
            content = edit_config(original.content, layout, dtypes=dtypes, drop_quantization=is_dropped)
        new_directory.copy_kept_files(reader, folder, {"config.json", INDEX} if content else set())
        if content:
            (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
            write_index(folder, shards)
            if converted is None:
                new_directory.write_generation_config(folder, content)
        # Include the acceptance measured in training, for `check_acceptance` on the export.
        if (record := reader.metadata.get("self_check")) is not None:
            (folder / SELF_CHECK_FILE).write_text(json.dumps(record) + "\n")


def export_mtp(source, target, *, model_type: str | None = None, progress: Progress | None = None) -> int:
    """Writes the MTP modules of a checkpoint as a separate checkpoint.

    An mtpjax checkpoint is first written as a temporary Hugging Face directory next to the target. This needs as much
    disk space as the whole model.

    Args:
        source: a full Hugging Face checkpoint, an mtpjax checkpoint, or a run folder.
        target: the folder to write. It appears only when it is complete; an older export is replaced.
        model_type: the family to use instead of the checkpoint's.

    Raises:
        FileExistsError: `target` is neither empty nor an export.
    """
    path, target = find_checkpoint(source), pathlib.Path(target).resolve()
    if not is_checkpoint(path):
        return hugging_face_export.export_mtp(source, target, model_type=model_type, progress=progress)
    # Name the tensors as the family does, then extract the modules.
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tmp-") as folder:
        to_hugging_face(path, pathlib.Path(folder) / "full", model_type=model_type, progress=progress)
        return hugging_face_export.export_mtp(pathlib.Path(folder) / "full", target, progress=progress)


def _is_stacked(layout: Layout, name: str) -> bool:
    """Returns whether new files contain this tensor with stacked experts, as Qwen3.5's trunk does."""
    return layout.fused_experts and name.startswith(f"{layout.trunk}layers.") and name.endswith("experts.gate_up_proj")


def _tensor_entries(
    reader: CheckpointReader, specs: dict[str, ParamSpec], dtype, before: dict[str, TensorInfo]
) -> dict[str, TensorEntry]:
    """Lists all parameters' tensors in `dtype` or, if it is None, in the dtypes of the original or stored tensors."""
    entries = {}
    for path, spec in specs.items():
        # A quantized parameter is stored as two arrays; the values have its shape.
        record = reader.records.get(f"{path}/values" if path in reader.scaled else path)
        if record is None or tuple(record["shape"]) != spec.shape:
            raise CheckpointFileError(f"{reader.path} has no array {path} of shape {spec.shape}")
        kind = np.dtype(record["dtype"] if dtype is None else dtype)
        entries |= {piece.name: TensorEntry(piece.name, kind, piece.shape) for piece in spec.slices}
    # Tensors with different dtypes were joined into one float32 parameter. Restore each tensor's dtype, but fp8 only
    # if the checkpoint keeps its scales.
    if dtype is None:
        kept = {piece.name for path in reader.scaled for piece in specs[path].slices}
        names = [name for name in entries if name in before and (before[name].dtype != E4M3 or name in kept)]
        entries |= {name: entries[name]._replace(dtype=before[name].dtype) for name in names}
    return entries
