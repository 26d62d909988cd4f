"""Reads a published drafter into a configuration and parameters, and writes it with the same bytes."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from conversion.drafters.eagle3_config import SPECFORGE_CLASS, AuxLayers, TrunkSizes, describe_eagle3, parse_eagle3
from conversion.drafters.eagle3_names import IS_DRAFTED, OFFSETS, eagle3_specs, is_drafted, read_draft_ids
from conversion.drafters.medusa import TOKEN_MAP, describe_medusa, is_medusa, medusa_specs, parse_medusa
from conversion.drafters.torch_file import TorchFile
from conversion.export import TensorAssembler
from conversion.files import INDEX, SINGLE, CheckpointFiles
from conversion.load_plan import IGNORED_SUFFIXES, param_dtype
from conversion.read_params import ScaleMap, read_as
from conversion.safetensors_header import MAX_HEADER_BYTES, parse_json
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
from mtpjax.atomic import atomic_folder
from mtpjax.errors import CheckpointFileError, ConfigError
from mtpjax.models.eagle3 import Eagle3Config
from mtpjax.models.medusa import MedusaConfig
from mtpjax.safe_open import read_inside

CONFIG = "config.json"
MEDUSA_SAFETENSORS, MEDUSA_TORCH = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
NO_SCALES = ScaleMap({}, None)


@dataclasses.dataclass(frozen=True)
class StoredDrafter:
    """A drafter as files hold it."""

    config: Eagle3Config | MedusaConfig
    params: dict[str, Any]  # of the network, nested by name
    draft_ids: Any  # [R] int32 token of each column of the head; None: column j is token j


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A drafter's configuration, and the tensors of its parameters."""

    config: Eagle3Config | MedusaConfig
    specs: dict[str, ParamSpec]
    form: str  # of the files


def read_drafter(
    path,
    trunk: TrunkSizes,
    *,
    dtype=None,
    aux_layers: AuxLayers | None = None,
    norm_before_residual: bool | None = None,
) -> StoredDrafter:
    """Reads a drafter.

    Args:
        path: a directory with `config.json` and safetensors files, or Medusa's `.pt` file.
        trunk: sizes of the trunk.
        dtype: dtype to cast the parameters to. None keeps those of the files.
        aux_layers: as in `parse_eagle3`.
        norm_before_residual: as in `parse_eagle3`.

    Returns:
        The drafter.

    Raises:
        CheckpointFileError: the files are damaged, incomplete or not supported.
        ConfigError: `config.json` is damaged, not supported, or has two readings.
    """
    path = pathlib.Path(path)
    with _open(path) as files:
        plan = _plan(path, files, trunk, aux_layers, norm_before_residual)
        params = {}
        for name, spec in plan.specs.items():
            kind = param_dtype(name, spec, files, NO_SCALES, dtype)
            index = tuple((0, size) for size in spec.shape)
            params[tuple(name.split("/"))] = jax.device_put(read_as(files, NO_SCALES, spec, index, kind))
        if isinstance(plan.config, Eagle3Config):
            draft_ids = read_draft_ids(files, plan.config)
        else:
            draft_ids = _read_token_map(files, plan.config)
        if isinstance(files, CheckpointFiles):
            files.report()
    return StoredDrafter(plan.config, unflatten_dict(params), draft_ids)


def write_drafter(path, drafter: StoredDrafter, *, like=None, form: str | None = None) -> None:
    """Writes a drafter as safetensors and `config.json`.

    Args:
        path: the folder to write; it appears once it is complete.
        drafter: the drafter.
        like: a directory of the same architecture, whose names, order, dtypes, `config.json` and other files are kept.
            Unchanged parameters then give the same bytes in every safetensors file.
        form: without `like`, the format: "specforge" or "speculators", "medusa" or "vllm". None: "speculators" for
            EAGLE-3, "medusa" for Medusa.

    Raises:
        CheckpointFileError: `like` is another architecture.
        ConfigError: the format cannot express the architecture.
        FileExistsError: `path` exists and is not empty.
    """
    with contextlib.ExitStack() as stack:
        if like is None:
            files, small_files = None, ()
            specs, values = _describe(drafter.config, form)
            content = (json.dumps(values, indent=2) + "\n").encode()
        else:
            like = pathlib.Path(like)
            files = stack.enter_context(_open(like))
            specs = _plan_like(like, files, drafter.config).specs
            content = _config_bytes(like)
            small_files = files.other_files() if isinstance(files, CheckpointFiles) else ()
        blocks = _tensor_blocks(specs, drafter)
        if isinstance(files, CheckpointFiles):
            groups = {
                file: [entry_of(each) for each in files.tensors.values() if each.file == file] for file in files.headers
            }
            shards = [Shard(file, files.headers[file], tuple(entries)) for file, entries in groups.items()]
        else:
            shards = _new_shards(specs, drafter)
        folder = stack.enter_context(atomic_folder(pathlib.Path(path).absolute()))
        write_shards(folder, shards, blocks)
        if files is None or isinstance(files, TorchFile):
            write_index(folder, shards)
        else:
            copy_files(folder, files.bytes_of, [name for name in small_files if name != CONFIG])
        (folder / CONFIG).write_bytes(content)


@contextlib.contextmanager
def _open(path: pathlib.Path) -> Iterator[CheckpointFiles | TorchFile]:
    """Opens the weights of a drafter: safetensors where there are any, else Medusa's `.pt` file."""
    has_safetensors = not path.is_dir() or any((path / name).exists() for name in (SINGLE, INDEX))
    if not has_safetensors and (path / MEDUSA_SAFETENSORS).exists():
        files: CheckpointFiles | TorchFile = CheckpointFiles(path, only=MEDUSA_SAFETENSORS)
    elif not has_safetensors and (path / MEDUSA_TORCH).exists():
        files = TorchFile(path / MEDUSA_TORCH)
    else:
        files = CheckpointFiles(path)
    with files:
        yield files


def _config_bytes(path: pathlib.Path) -> bytes:
    content = read_inside(path, CONFIG, max_bytes=MAX_HEADER_BYTES)
    if content is None:
        raise CheckpointFileError(f"{path} has no {CONFIG}")
    return content


def _plan(
    path: pathlib.Path,
    files: CheckpointFiles | TorchFile,
    trunk: TrunkSizes,
    aux_layers: AuxLayers | None,
    norm_before_residual: bool | None,
) -> _Plan:
    """Parses the configuration, and checks that the files hold its tensors and no others."""
    values = parse_json(_config_bytes(path), path / CONFIG)
    if not isinstance(values, dict):
        raise ConfigError(f"{CONFIG} contains a {type(values).__name__}, not an object")
    has = files.tensors.__contains__
    if is_medusa(values):
        config, form = parse_medusa(values, files.tensors, trunk)
        specs, known = medusa_specs(config, form, has), {TOKEN_MAP}
    elif values.get("speculators_model_type") is not None or SPECFORGE_CLASS in (values.get("architectures") or ()):
        config, form = parse_eagle3(
            values,
            trunk,
            has_embedding=has("embed_tokens.weight"),
            has_head=has("lm_head.weight"),
            aux_layers=aux_layers,
            norm_before_residual=norm_before_residual,
        )
        specs, known = eagle3_specs(config, form, has), {OFFSETS, IS_DRAFTED}
    else:
        raise ConfigError(
            f"{path} is no drafter that is supported: architectures {values.get('architectures')}; supported: "
            f"{SPECFORGE_CLASS}, speculators_model_type 'eagle3', medusa_num_heads, model_type 'medusa'"
        )
    wanted = {piece.name: piece.shape for spec in specs.values() for piece in spec.slices}
    missing = sorted(wanted.keys() - files.tensors.keys())
    if missing:
        raise CheckpointFileError(f"{path} lacks {len(missing)} tensors: {', '.join(missing[:5])}")
    # A tensor that nothing reads would change what the drafter computes.
    extra = [name for name in files.tensors.keys() - wanted.keys() - known if not name.endswith(IGNORED_SUFFIXES)]
    if extra:
        raise CheckpointFileError(f"{path} has {len(extra)} unknown tensors: {', '.join(sorted(extra)[:5])}")
    for name, shape in wanted.items():
        if files.tensors[name].shape != shape:
            raise CheckpointFileError(f"tensor {name} has shape {files.tensors[name].shape}; {CONFIG} implies {shape}")
    return _Plan(config, specs, form)


def _plan_like(path: pathlib.Path, files: CheckpointFiles | TorchFile, config: Eagle3Config | MedusaConfig) -> _Plan:
    """Plans writing `config` like the files at `path`, in whichever reading of them it is."""
    if isinstance(config, Eagle3Config):
        trunk = TrunkSizes(config.block.vocab_size, config.target_hidden_size, config.num_target_layers)
    else:
        trunk = TrunkSizes(config.vocab_size, config.hidden_size, 0)
    readings: tuple[AuxLayers, ...] = ("entered", "output")
    for aux_layers in readings:
        for residual in (False, True):
            try:
                plan = _plan(path, files, trunk, aux_layers, residual)
            except ConfigError:
                continue
            if plan.config == config:
                return plan
    raise CheckpointFileError(f"{path} is a drafter of another architecture: name a format in its place")


def _describe(config: Eagle3Config | MedusaConfig, form: Any) -> tuple[dict[str, ParamSpec], dict[str, Any]]:
    """Returns the tensors and the configuration of a new file."""
    has: Callable[[str], bool] = lambda name: False
    if isinstance(config, Eagle3Config):
        form = form or "speculators"
        if form not in ("specforge", "speculators"):
            raise ConfigError(f"EAGLE-3 is written as 'specforge' or 'speculators', not {form!r}")
        return eagle3_specs(config, form, has), describe_eagle3(config, form)
    form = form or "medusa"
    if form not in ("medusa", "vllm"):
        raise ConfigError(f"Medusa is written as 'medusa' or 'vllm', not {form!r}")
    return medusa_specs(config, form, has), describe_medusa(config, form)


def _read_token_map(files: Any, config: MedusaConfig) -> np.ndarray | None:
    """Reads vLLM's draft vocabulary of Medusa: column j of a head is token `token_map[j]`."""
    if config.draft_vocab_size == config.vocab_size and TOKEN_MAP not in files.tensors:
        return None
    if TOKEN_MAP not in files.tensors:
        raise CheckpointFileError(f"{files.path} lacks {TOKEN_MAP}")
    ids = files.read(TOKEN_MAP)
    is_valid = ids.shape == (config.draft_vocab_size,) and ids.dtype.kind == "i" and len(np.unique(ids)) == len(ids)
    if not is_valid or ids.min() < 0 or ids.max() >= config.vocab_size:
        raise CheckpointFileError(f"{files.path}: {TOKEN_MAP} does not name {config.draft_vocab_size} different tokens")
    return ids.astype(np.int32)


def _ids_tensors(drafter: StoredDrafter) -> dict[str, np.ndarray]:
    """Returns the tensors of the draft vocabulary by name."""
    if drafter.draft_ids is None:
        return {}
    ids = np.asarray(drafter.draft_ids).astype(np.int64)
    if isinstance(drafter.config, MedusaConfig):
        return {TOKEN_MAP: ids}
    return {OFFSETS: ids - np.arange(len(ids)), IS_DRAFTED: is_drafted(ids, drafter.config.block.vocab_size)}


def _flat(drafter: StoredDrafter) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in flatten_dict(drafter.params, sep="/").items()}


def _tensor_blocks(
    specs: dict[str, ParamSpec], drafter: StoredDrafter
) -> Callable[[TensorEntry], Iterator[np.ndarray]]:
    """Returns the function that makes the rows of a tensor, block after block."""
    flat, ids = _flat(drafter), _ids_tensors(drafter)
    different = sorted(flat.keys() ^ specs.keys())
    if different:
        raise CheckpointFileError(f"the parameters are not the drafter's: {', '.join(different[:5])}")
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
    """Lays the tensors out as the safetensors package does: by falling size of an element, then by name."""
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
