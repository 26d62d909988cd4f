"""Reads a published drafter into a configuration and parameters."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from conversion.drafters.dflash_config import DEEPSPEC_CLASS, ZLAB_CLASS, is_dflash, parse_dflash
from conversion.drafters.dflash_names import dflash_specs
from conversion.drafters.eagle3_config import SPECFORGE_CLASS, AuxLayers, TrunkSizes, parse_eagle3
from conversion.drafters.eagle3_names import IS_DRAFTED, OFFSETS, eagle3_specs, read_draft_ids
from conversion.drafters.medusa import TOKEN_MAP, is_medusa, medusa_specs, parse_medusa
from conversion.drafters.torch_file import TorchFile
from conversion.files import CheckpointFiles
from conversion.load_plan import IGNORED_SUFFIXES, find_packing
from conversion.read_params import ScaleMap, read_as
from conversion.safetensors_header import MAX_HEADER_BYTES, parse_json
from conversion.tensor_slice import ParamSpec
from conversion.tensor_types import param_dtype
from conversion.weight_files import INDEX, SINGLE
from mtpjax.errors import CheckpointFileError, ConfigError
from mtpjax.models.dflash import DFlashConfig
from mtpjax.models.eagle3 import Eagle3Config
from mtpjax.models.medusa import MedusaConfig
from mtpjax.safe_open import read_inside

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
    specs: dict[str, ParamSpec]
    form: str  # of the files


def read_drafter(
    path,
    trunk: TrunkSizes,
    *,
    dtype=None,
    aux_layers: AuxLayers | None = None,
    norm_before_residual: bool | None = None,
    sample_from_anchor: bool | None = None,
) -> StoredDrafter:
    """Reads a drafter.

    Args:
        path: a directory with `config.json` and safetensors files, or Medusa's `.pt` file.
        trunk: sizes of the trunk.
        dtype: dtype to cast the parameters to. None keeps those of the files.
        aux_layers: as in `parse_eagle3`.
        norm_before_residual: as in `parse_eagle3`.
        sample_from_anchor: as in `parse_dflash`.

    Returns:
        The drafter.

    Raises:
        CheckpointFileError: the files are damaged, incomplete or not supported.
        ConfigError: `config.json` is damaged, not supported, or has two readings.
    """
    path = pathlib.Path(path)
    with open_drafter(path) as files:
        plan = make_drafter_plan(path, files, trunk, aux_layers, norm_before_residual, sample_from_anchor)
        params = {}
        for name, spec in plan.specs.items():
            kind = param_dtype(name, spec, files, NO_SCALES, dtype)
            index = tuple((0, size) for size in spec.shape)
            params[tuple(name.split("/"))] = jax.device_put(read_as(files, NO_SCALES, spec, index, kind))
        if isinstance(plan.config, MedusaConfig):
            draft_ids = _read_token_map(files, plan.config)
        else:
            draft_ids = read_draft_ids(files, plan.config)
        if isinstance(files, CheckpointFiles):
            files.report()
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
    path: pathlib.Path,
    files: CheckpointFiles | TorchFile,
    trunk: TrunkSizes,
    aux_layers: AuxLayers | None,
    norm_before_residual: bool | None,
    sample_from_anchor: bool | None,
) -> DrafterPlan:
    """Parses the configuration, and checks that the files hold its tensors and no others."""
    values = parse_json(config_bytes(path), path / CONFIG)
    if not isinstance(values, dict):
        raise ConfigError(f"{CONFIG} contains a {type(values).__name__}, not an object")
    has = files.tensors.__contains__
    if is_medusa(values):
        config, form = parse_medusa(values, files.tensors, trunk)
        specs, known = medusa_specs(config, form, has), {TOKEN_MAP}
    elif is_dflash(values):
        has_own = {"has_embedding": has("embed_tokens.weight"), "has_head": has("lm_head.weight")}
        config, form = parse_dflash(values, trunk, **has_own, sample_from_anchor=sample_from_anchor)
        specs, known = dflash_specs(config, has), {OFFSETS, IS_DRAFTED}
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
            f"{SPECFORGE_CLASS}, {ZLAB_CLASS}, {DEEPSPEC_CLASS}, speculators_model_type 'eagle3', 'dflash' or "
            "'dspark', medusa_num_heads, model_type 'medusa'"
        )
    wanted = {piece.name: piece.shape for spec in specs.values() for piece in spec.slices}
    if packed := find_packing(files, values):
        raise CheckpointFileError(packed)
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
    return DrafterPlan(config, specs, form)


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
