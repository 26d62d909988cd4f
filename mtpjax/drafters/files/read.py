"""Reads a published drafter into a configuration and parameters."""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Iterator
from typing import Any, TypedDict, Unpack

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from conversion.files import CheckpointFiles
from conversion.load_plan import find_packing
from conversion.read_params import ScaleMap, read_as
from conversion.safetensors_header import MAX_HEADER_BYTES, parse_json
from conversion.tensor_slice import ParamSpec
from conversion.tensor_types import describe_mixed, param_dtype
from conversion.weight_files import INDEX, SINGLE
from mtpjax.drafters.dflash.hf_config import parse_dflash
from mtpjax.drafters.dflash.network import DFlashConfig
from mtpjax.drafters.dflash.tensor_names import dflash_specs
from mtpjax.drafters.eagle3.hf_config import AuxLayers, TrunkSizes, parse_eagle3
from mtpjax.drafters.eagle3.network import Eagle3Config
from mtpjax.drafters.eagle3.tensor_names import IS_DRAFTED, OFFSETS, eagle3_specs, read_draft_ids
from mtpjax.drafters.files.method import find_method
from mtpjax.drafters.files.tensor_names import names_in_files, rename_slices
from mtpjax.drafters.files.torch_file import TorchFile
from mtpjax.drafters.files.trunk_layers import LastLayerState
from mtpjax.drafters.medusa.hf_files import TOKEN_MAP, medusa_specs, parse_medusa
from mtpjax.drafters.medusa.network import MedusaConfig
from mtpjax.errors import CheckpointFileError, ConfigError
from mtpjax.messages import count_of
from mtpjax.safe_open import read_inside

log = logging.getLogger("mtpjax.conversion")

CONFIG = "config.json"
MEDUSA_SAFETENSORS, MEDUSA_TORCH = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
NO_SCALES = ScaleMap({}, None)
Config = Eagle3Config | MedusaConfig | DFlashConfig


@dataclasses.dataclass(frozen=True)
class StoredDrafter:
    """A drafter as files hold it."""

    config: Config
    params: dict[str, Any]  # of the network, nested by name
    draft_ids: Any  # [R] int32 token of each column of the head; None: column j is token j


@dataclasses.dataclass(frozen=True)
class DrafterPlan:
    """A drafter's configuration, and the tensors of its parameters."""

    config: Config
    specs: dict[str, ParamSpec]  # by the names in the files
    names: dict[str, str]  # of the tensors in the files, by plain name


class Reading(TypedDict, total=False):
    """How to read files that do not say it, by the argument of `mtpjax.load_drafter`."""

    aux_layers: AuxLayers | None  # as in `parse_eagle3`
    norm_before_residual: bool | None  # as in `parse_eagle3`
    sample_from_anchor: bool | None  # as in `parse_dflash`
    last_layer_state: LastLayerState | None  # as in both


def read_drafter(path, trunk: TrunkSizes, *, dtype=None, **reading: Unpack[Reading]) -> StoredDrafter:
    """Reads a drafter.

    Args:
        path: a directory with `config.json` and safetensors files, or Medusa's `.pt` file.
        trunk: sizes of the trunk.
        dtype: dtype to cast the parameters to. None keeps those of the files.
        **reading: how to read what the files do not say.

    Returns:
        The drafter.

    Raises:
        CheckpointFileError: the files are damaged, incomplete or not supported.
        ConfigError: `config.json` is damaged, not supported, or has two readings.
    """
    path = pathlib.Path(path)
    with open_drafter(path) as files:
        plan = make_drafter_plan(path, files, trunk, **reading)
        if dtype is None and (mixed := describe_mixed(plan.specs, files)):
            log.warning("%s: %s", path, mixed)
        params = {}
        for name, spec in plan.specs.items():
            kind = param_dtype(name, spec, files, NO_SCALES, dtype)
            index = tuple((0, size) for size in spec.shape)
            params[tuple(name.split("/"))] = jax.device_put(read_as(files, NO_SCALES, spec, index, kind))
        if isinstance(plan.config, MedusaConfig):
            draft_ids = _read_token_map(files, plan.names, plan.config)
        else:
            draft_ids = read_draft_ids(files, plan.names, plan.config)
        if isinstance(files, CheckpointFiles):
            files.report()
            # Without a head or an embedding of its own, a drafter uses those of the trunk: the missing one may be here.
            if files.unread:
                log.warning("%s has safetensors files that are not read: %s", path, ", ".join(files.unread))
    return StoredDrafter(plan.config, unflatten_dict(params), draft_ids)


@contextlib.contextmanager
def open_drafter(path: pathlib.Path) -> Iterator[CheckpointFiles | TorchFile]:
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


def config_bytes(path: pathlib.Path) -> bytes:
    """Reads `config.json`. Raises `CheckpointFileError` if it is missing."""
    content = read_inside(path, CONFIG, max_bytes=MAX_HEADER_BYTES)
    if content is None:
        raise CheckpointFileError(f"{path} has no {CONFIG}")
    return content


def make_drafter_plan(
    path: pathlib.Path, files: CheckpointFiles | TorchFile, trunk: TrunkSizes, **reading: Unpack[Reading]
) -> DrafterPlan:
    """Parses the configuration, and checks that the files hold its tensors and no others."""
    values = parse_json(config_bytes(path), path / CONFIG)
    if not isinstance(values, dict):
        raise ConfigError(f"{CONFIG} contains a {type(values).__name__}, not an object")
    if packed := find_packing(files, values):
        raise CheckpointFileError(packed)
    names = names_in_files(files.tensors, path)
    shapes = {plain: files.tensors[name].shape for plain, name in names.items()}
    # 1. The architecture, and the tensors that it has.
    try:
        config, specs, others = _parse(values, shapes, trunk, reading)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    # 2. Each tensor once, of the shape that the configuration implies.
    wanted = {piece.name: piece.shape for spec in specs.values() for piece in spec.slices}
    missing, extra = sorted(wanted.keys() - shapes.keys()), sorted(shapes.keys() - wanted.keys() - others)
    quantization = values.get("quantization_config") or {}
    quantized = f" Packed or scaled weights ({quantization}) of drafters are not supported." if quantization else ""
    if missing:
        raise CheckpointFileError(
            f"{path} lacks {count_of(len(missing), 'tensor')}: {', '.join(missing[:5])}; it holds {len(names)}: "
            f"{_names_of(names, sorted(extra) or sorted(names))}.{quantized}"
        )
    # A tensor that nothing reads would change what the drafter computes.
    if extra:
        raise CheckpointFileError(f"{path} has {len(extra)} unknown tensors: {_names_of(names, extra)}.{quantized}")
    for plain, shape in wanted.items():
        if shapes[plain] != shape:
            raise CheckpointFileError(
                f"tensor {names[plain]} has shape {shapes[plain]}; {CONFIG} implies {shape}.{quantized}"
            )
    return DrafterPlan(config, rename_slices(specs, names), names)


def _parse(
    values: dict[str, Any], shapes: dict[str, tuple[int, ...]], trunk: TrunkSizes, reading: Reading
) -> tuple[Config, dict[str, ParamSpec], set[str]]:
    """Returns the architecture, the specs of its parameters, and tensors that are none of them; all by plain names."""
    method = find_method(values, shapes)
    if method == "medusa":
        config, form = parse_medusa(values, shapes, trunk)
        return config, medusa_specs(config, form), {TOKEN_MAP}
    common: Any = {
        "has_embedding": "embed_tokens.weight" in shapes,
        "has_head": "lm_head.weight" in shapes,
        "last_layer_state": reading.get("last_layer_state"),
    }
    if method == "eagle3":
        common |= {name: reading.get(name) for name in ("aux_layers", "norm_before_residual")}
        eagle3, _ = parse_eagle3(values, trunk, names=shapes, **common)
        return eagle3, eagle3_specs(eagle3), {OFFSETS, IS_DRAFTED}
    common["sample_from_anchor"] = reading.get("sample_from_anchor")
    block, _ = parse_dflash(values, trunk, shapes=shapes, **common)
    return block, dflash_specs(block), {OFFSETS, IS_DRAFTED}


def _names_of(names: dict[str, str], plain: list[str]) -> str:
    """Lists the names in the files of some tensors, at most five."""
    return ", ".join(names[each] for each in plain[:5]) or "none"


def _read_token_map(files: Any, names: dict[str, str], config: MedusaConfig) -> np.ndarray | None:
    """Reads vLLM's draft vocabulary of Medusa: column j of a head is token `token_map[j]`."""
    if config.draft_vocab_size == config.vocab_size and TOKEN_MAP not in names:
        return None
    if TOKEN_MAP not in names:
        raise CheckpointFileError(f"{files.path} lacks {TOKEN_MAP}")
    ids = files.read(names[TOKEN_MAP])
    is_valid = ids.shape == (config.draft_vocab_size,) and ids.dtype.kind == "i" and len(np.unique(ids)) == len(ids)
    if not is_valid or ids.min() < 0 or ids.max() >= config.vocab_size:
        raise CheckpointFileError(f"{files.path}: {TOKEN_MAP} does not name {config.draft_vocab_size} different tokens")
    return ids.astype(np.int32)
