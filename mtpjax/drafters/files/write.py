"""Writes a drafter in a published format, either like existing files or as new files."""

import contextlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from conversion.export import TensorAssembler
from conversion.files import CheckpointFiles
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
from conversion.weight_files import SINGLE
from mtpjax.atomic import atomic_folder
from mtpjax.drafters.files.read import (
    CONFIG,
    NO_SCALES,
    DrafterPlan,
    StoredDrafter,
    config_bytes,
    make_drafter_plan,
    open_drafter,
)
from mtpjax.drafters.files.tensor_names import rename_slices
from mtpjax.drafters.files.torch_file import TorchFile
from mtpjax.drafters.method import READINGS, DraftMethod
from mtpjax.errors import CheckpointFileError, ConfigError


def write_drafter(path, drafter: StoredDrafter, *, like=None, form: str | None = None) -> None:
    """Writes a drafter as safetensors and `config.json`.

    Args:
        path: the folder to write; it appears once it is complete.
        drafter: the drafter.
        like: directory of a drafter with the same architecture. Its `config.json`, other files, and tensor names, order
            and dtypes are kept, so unchanged parameters give the same bytes.
        form: format to write without `like`, from `DrafterFiles.formats`; None means the first.

    Raises:
        CheckpointFileError: `like` has a different architecture.
        ConfigError: the format cannot express the architecture.
        FileExistsError: `path` exists and is not empty.
    """
    with contextlib.ExitStack() as stack:
        if like is None:
            files, names = None, {}
            specs, values = _describe(drafter.method, drafter.config, form)
            content = (json.dumps(values, indent=2) + "\n").encode()
        else:
            like = pathlib.Path(like)
            files = stack.enter_context(open_drafter(like))
            plan = _plan_like(like, files, drafter)
            specs, names = plan.specs, plan.names
            content = config_bytes(like)
        blocks = _tensor_blocks(specs, drafter, names)
        folder = stack.enter_context(atomic_folder(pathlib.Path(path).absolute()))
        if isinstance(files, CheckpointFiles):
            shards = [
                Shard(file, header, tuple(entry_of(each) for each in files.tensors.values() if each.file == file))
                for file, header in files.headers.items()
            ]
            write_shards(folder, shards, blocks)
            copy_files(folder, files.bytes_of, [name for name in files.other_files() if name != CONFIG])
        else:
            shards = _new_shards(specs, drafter)
            write_shards(folder, shards, blocks)
            write_index(folder, shards)
        (folder / CONFIG).write_bytes(content)


def _plan_like(path: pathlib.Path, files: CheckpointFiles | TorchFile, drafter: StoredDrafter) -> DrafterPlan:
    """Finds the reading of the files at `path` that yields the drafter's architecture."""
    for choices in itertools.product(*READINGS.values()):
        reading: Any = dict(zip(READINGS, choices, strict=True))
        try:
            plan = make_drafter_plan(path, files, drafter.config.trunk, (drafter.method,), **reading)
        except ConfigError:
            continue
        if plan.config == drafter.config:
            return plan
    raise CheckpointFileError(f"{path} holds a drafter of a different architecture: pass format instead")


def _describe(method: DraftMethod, config: Any, form: str | None) -> tuple[dict[str, ParamSpec], dict[str, Any]]:
    """Returns the tensor specs and the configuration for new files."""
    files = method.require_files()
    if form not in (None, *files.formats):
        raise ConfigError(f"format of {method.title} must be {' or '.join(map(repr, files.formats))}, got {form!r}")
    form = form or files.formats[0]
    specs = files.specs(config, form)
    names = {part.name: files.rename(part.name, form) for spec in specs.values() for part in spec.slices}
    return rename_slices(specs, names), files.describe(config, form)


def find_form(method: DraftMethod, config: Any, *, has_draft_ids: bool) -> str:
    """Finds a format that can express a drafter. Tries the default first, or `format_with_ids` if it has draft ids.

    Raises:
        ConfigError: no format can express it.
    """
    files, reasons = method.require_files(), []
    preferred = files.format_with_ids if has_draft_ids else None
    for form in sorted(files.formats, key=lambda form: form != preferred):
        try:
            _describe(method, config, form)
            return form
        except ConfigError as error:
            reasons.append(f"{form}: {error}")
    raise ConfigError(f"no format can express this drafter ({'; '.join(reasons)})")


def _ids_tensors(drafter: StoredDrafter) -> dict[str, np.ndarray]:
    """Returns the tensors of the draft vocabulary by name."""
    if drafter.draft_ids is None:
        return {}
    ids = np.asarray(drafter.draft_ids).astype(np.int64)
    return drafter.method.require_files().ids.write(ids, drafter.config.trunk.vocab_size)


def _flat(drafter: StoredDrafter) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in flatten_dict(drafter.params, sep="/").items()}


def _tensor_blocks(
    specs: dict[str, ParamSpec], drafter: StoredDrafter, names: Mapping[str, str]
) -> Callable[[TensorEntry], Iterator[np.ndarray]]:
    """Returns a function that yields a tensor's rows block by block."""
    flat = _flat(drafter)
    ids = {names.get(plain, plain): array for plain, array in _ids_tensors(drafter).items()}
    different = sorted(flat.keys() ^ specs.keys())
    if different:
        raise CheckpointFileError(f"the parameters do not match the drafter's architecture: {', '.join(different[:5])}")
    for name, spec in specs.items():
        if flat[name].shape != spec.shape:
            raise CheckpointFileError(f"parameter {name} has shape {flat[name].shape}, not {spec.shape}")
    assembler = TensorAssembler(specs, lambda name, index: flat[name][index], scaled={}, scales=NO_SCALES, tied={})

    def blocks(entry: TensorEntry) -> Iterator[np.ndarray]:
        if entry.name in ids:
            return iter([ids[entry.name].astype(entry.dtype)])
        return assembler.blocks(entry)

    return blocks


def _new_shards(specs: dict[str, ParamSpec], drafter: StoredDrafter) -> list[Shard]:
    """Orders the tensors as the safetensors package does, first by decreasing element size and then by name."""
    flat, ids = _flat(drafter), _ids_tensors(drafter)
    entries = {
        piece.name: TensorEntry(piece.name, flat[path].dtype, piece.shape)
        for path, spec in specs.items()
        for piece in spec.slices
    }
    entries |= {name: TensorEntry(name, array.dtype, array.shape) for name, array in ids.items()}
    ordered = sorted(entries.values(), key=lambda entry: (-entry.dtype.itemsize, entry.name))
    shards = split_into_shards(ordered)
    return shards if len(shards) > 1 else [make_shard(SINGLE, ordered, {"format": "pt"})]
