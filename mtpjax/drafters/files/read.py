"""Reads a published drafter into a configuration and parameters."""

import dataclasses
import logging
import pathlib
from collections.abc import Sequence
from typing import Any, Unpack

import jax
from flax.traverse_util import unflatten_dict

from conversion.files import CheckpointFiles
from conversion.load_plan import find_packing
from conversion.read_params import ScaleMap, read_as
from conversion.safetensors_header import MAX_HEADER_BYTES, parse_json
from conversion.tensor_slice import ParamSpec
from conversion.tensor_types import describe_mixed, param_dtype
from conversion.weight_files import INDEX, SINGLE
from mtpjax.drafters.architecture import DraftArchitecture, TrunkSizes
from mtpjax.drafters.files.detect import detect_method
from mtpjax.drafters.files.tensor_names import names_in_files, rename_slices
from mtpjax.drafters.files.torch_file import TorchFile
from mtpjax.drafters.method import DraftMethod, Reading
from mtpjax.errors import CheckpointFileError, ConfigError
from mtpjax.messages import count_of
from mtpjax.safe_open import read_inside

log = logging.getLogger("mtpjax.conversion")

CONFIG = "config.json"
# Weight file names that only Medusa's authors use.
MEDUSA_SAFETENSORS, MEDUSA_TORCH = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
NO_SCALES = ScaleMap({})


@dataclasses.dataclass(frozen=True)
class StoredDrafter:
    """A drafter with its parameters, as read from files."""

    method: DraftMethod
    config: DraftArchitecture
    params: dict[str, Any]  # the network's parameters, nested by name
    draft_ids: Any  # [R] int32 token id of each head column; None if column j is token j


@dataclasses.dataclass(frozen=True)
class DrafterPlan:
    """A drafter's configuration, and the tensors of its parameters."""

    method: DraftMethod
    config: Any
    specs: dict[str, ParamSpec]  # with tensor names as in the files
    names: dict[str, str]  # plain name -> tensor name in the files


def read_drafter(
    path, trunk: TrunkSizes, *, methods: Sequence[DraftMethod], dtype=None, **reading: Unpack[Reading]
) -> StoredDrafter:
    """Reads a drafter.

    Args:
        path: a directory with `config.json` and safetensors files, or Medusa's `.pt` file.
        trunk: sizes of the trunk.
        methods: candidate methods. If there are several, the method is detected from the files.
        dtype: dtype to cast the parameters to; None keeps the dtypes in the files.
        **reading: settings that the files may lack.

    Returns:
        The drafter.

    Raises:
        CheckpointFileError: the files are damaged, incomplete or not supported.
        ConfigError: `config.json` is damaged, not supported or ambiguous.
    """
    path = pathlib.Path(path)
    with open_drafter(path) as files:
        plan = make_drafter_plan(path, files, trunk, methods, **reading)
        if dtype is None and (mixed := describe_mixed(plan.specs, files)):
            log.warning("%s: %s", path, mixed)
        params = {}
        for name, spec in plan.specs.items():
            kind = param_dtype(name, spec, files, NO_SCALES, dtype)
            index = tuple((0, size) for size in spec.shape)
            params[tuple(name.split("/"))] = jax.device_put(read_as(files, NO_SCALES, spec, index, kind))
        config = plan.config
        ids = plan.method.require_files().ids.read(files, plan.names, config.draft_vocab_size, config.trunk.vocab_size)
        if isinstance(files, CheckpointFiles):
            files.report()
            # A drafter without its own head or embedding uses the trunk's, so a missing head or embedding may be
            # intended.
            if files.unread:
                log.warning("%s has safetensors files that are not read: %s", path, ", ".join(files.unread))
    return StoredDrafter(plan.method, config, unflatten_dict(params), ids)


def open_drafter(path: pathlib.Path) -> CheckpointFiles | TorchFile:
    """Opens a drafter's safetensors files if they have the usual names, or else the files of Medusa's authors."""
    has_usual = not path.is_dir() or any((path / name).exists() for name in (SINGLE, INDEX))
    if not has_usual and (path / MEDUSA_SAFETENSORS).exists():
        return CheckpointFiles(path, only=MEDUSA_SAFETENSORS)
    if not has_usual and (path / MEDUSA_TORCH).exists():
        return TorchFile(path / MEDUSA_TORCH)
    return CheckpointFiles(path)


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
    methods: Sequence[DraftMethod],
    **reading: Unpack[Reading],
) -> DrafterPlan:
    """Parses the configuration, and checks that the files contain exactly the tensors that it implies."""
    values = parse_json(config_bytes(path), path / CONFIG)
    if not isinstance(values, dict):
        raise ConfigError(f"{CONFIG} contains a {type(values).__name__}, not an object")
    if packed := find_packing(files, values):
        raise CheckpointFileError(packed)
    names = names_in_files(files.tensors, path, methods)
    shapes = {plain: files.tensors[name].shape for plain, name in names.items()}
    # 1. Determine the architecture and its tensors.
    try:
        method = methods[0] if len(methods) == 1 else detect_method(values, shapes, methods)
        own = method.require_files()
        config, format = own.parse(values, shapes, trunk, reading)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    specs = own.specs(config, format)
    # 2. Check that every tensor exists exactly once, with the shape that the configuration implies.
    wanted = {piece.name: piece.shape for spec in specs.values() for piece in spec.slices}
    missing = sorted(wanted.keys() - shapes.keys())
    extra = sorted(shapes.keys() - wanted.keys() - {*own.ids.names})
    quantization = values.get("quantization_config") or {}
    quantized = f" Drafters with packed or scaled weights ({quantization}) are not supported." if quantization else ""
    if missing:
        raise CheckpointFileError(
            f"{path} lacks {count_of(len(missing), 'tensor')}: {', '.join(missing[:5])}; it holds "
            f"{count_of(len(names), 'tensor')}: {_names_of(names, sorted(extra) or sorted(names))}.{quantized}"
        )
    # Reject unknown tensors, because ignoring one would change what the drafter computes.
    if extra:
        raise CheckpointFileError(f"{path} has {len(extra)} unknown tensors: {_names_of(names, extra)}.{quantized}")
    for plain, shape in wanted.items():
        if shapes[plain] != shape:
            raise CheckpointFileError(
                f"tensor {names[plain]} has shape {shapes[plain]}; {CONFIG} implies {shape}.{quantized}"
            )
    return DrafterPlan(method, config, rename_slices(specs, names), names)


def _names_of(names: dict[str, str], plain: list[str]) -> str:
    """Joins up to five tensor names as they appear in the files."""
    return ", ".join(names[each] for each in plain[:5]) or "none"
