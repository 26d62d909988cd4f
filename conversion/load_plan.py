"""Plans how to load a checkpoint directory by deriving each parameter's tensors from the configuration and headers.

`inspect_files` lists all problems; `make_plan` raises the first one.
"""

import dataclasses
import logging
from typing import Any

import numpy as np

from conversion import hf_config, stored_modules
from conversion.families import Layout
from conversion.files import CheckpointFiles, TensorSource
from conversion.names import param_specs, stored_layout, tied_copies
from conversion.norm_storage import with_norm_storage
from conversion.quantized_formats import DESCRIPTIONS, SCALE_ENDS, described_quantization, find_packed_format
from conversion.read_params import MakeArray, ScaleMap, read_as, read_scales, read_values, scale_spec
from conversion.safetensors_header import E4M3, FLOAT32
from conversion.tensor_slice import ParamSpec
from conversion.tensor_types import SUPPORTED, describe_mixed, find_scales, param_dtype
from mtpjax.errors import CheckpointFileError, ConfigError
from mtpjax.messages import count_of
from mtpjax.models.config import ModelConfig
from mtpjax.models.quantized import BlockScaled

log = logging.getLogger("mtpjax.conversion")

# Suffixes of tensors that are not needed, which are rotary embedding tables, and quantized checkpoints' scales for
# activations and KV caches. mtpjax does not compute activations or caches in 8 bits.
IGNORED_SUFFIXES = (
    *("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"),
    *(".input_scale", ".k_scale", ".v_scale", ".q_scale"),
)
# Prefixes of tensors in a multimodal checkpoint that do not belong to the language model.
OTHER_PARTS = (
    *("model.visual.", "visual.", "vision_tower.", "model.vision_tower.", "mm_projector."),
    *("vision_model.", "vit_large_projector."),
)


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """A plan for loading a checkpoint directory, with the model's configuration and the source of each parameter."""

    model_type: str
    config: ModelConfig
    layout: Layout
    specs: dict[str, ParamSpec]  # by flat parameter name
    scales: ScaleMap
    tied: dict[str, str]  # copy in the files -> the tensor that it duplicates
    other: tuple[str, ...]  # tensors outside the language model; exports write them back
    missing: tuple[str, ...]
    extra: tuple[str, ...]  # unknown tensors
    dtypes: dict[str, np.dtype]  # by parameter name; float32 for parameters that cannot be read
    mixed: str  # describes the parameters that are assembled from tensors with different dtypes, or ""
    problems: tuple[str, ...]  # why the checkpoint cannot be loaded

    def make_param(self, files: CheckpointFiles, path: str, make: MakeArray) -> Any:
        """Makes a parameter with `make(path, spec, dtype, read)`. For fp8, it is a `BlockScaled` of two such arrays."""
        dtype, spec, scales = self.dtypes[path], self.specs[path], self.scales
        if dtype != E4M3:
            return make(path, spec, dtype, lambda index: read_as(files, scales, spec, index, dtype))
        values = make(f"{path}/values", spec, dtype, lambda index: read_values(files, spec, index))
        read = lambda index: read_scales(files, scales, spec, index)
        stored = make(f"{path}/scales", scale_spec(spec, scales), FLOAT32, read)
        return BlockScaled(values, stored, axis=spec.in_axis, block=scales.block[1])


def make_plan(
    files: CheckpointFiles,
    *,
    dtype=None,
    model_type: str | None = None,
    allow_extra: bool = False,
    is_copied: bool = False,
) -> LoadPlan:
    """Plans loading, and rejects a checkpoint that cannot be loaded completely.

    Args:
        dtype: dtype of all parameters; None keeps the files' dtypes.
        model_type: the family to use instead of the one in `config.json`.
        allow_extra: accept unknown tensors that do not belong to the language model. Loading ignores these tensors, and
            conversion keeps them.
        is_copied: whether the tensors will only be copied, so that unknown tensors are accepted.

    Raises:
        CheckpointFileError: tensors are missing or unknown, or have the wrong shape or dtype.
        ConfigError: `config.json` is damaged or not supported.
    """
    plan = inspect_files(files, dtype=dtype, model_type=model_type, allow_extra=allow_extra, is_copied=is_copied)
    if plan.problems:
        raise CheckpointFileError(plan.problems[0])
    if plan.mixed and dtype is None:
        log.warning("%s", plan.mixed)
    return dataclasses.replace(plan, other=(*plan.other, *plan.extra))


def inspect_files(
    files: CheckpointFiles,
    *,
    dtype=None,
    model_type: str | None = None,
    allow_extra: bool = False,
    is_copied: bool = False,
) -> LoadPlan:
    """Plans loading, and lists problems instead of raising them.

    It reads only headers and the few tensors on which the plan depends (norms, and copies of embedding and head).

    Returns:
        The plan, whose `problems` are the messages of the errors that `make_plan` would raise.

    Raises:
        CheckpointFileError: MTP modules are stored in different ways.
        ConfigError: `config.json` is damaged or not supported.
    """
    values = files.json("config.json")
    # Check for quantized formats first, because they explain names and shapes that would otherwise look wrong.
    packed = find_packing(files, values)
    parsed = _parse_config(values, model_type, packed)
    # Only the files determine the number of modules, whether the modules have a separate embedding and head, and how
    # norms are stored.
    stored_modules.read_module_files(files, parsed)
    layout = stored_layout(parsed.layout, parsed.model, files.tensors.__contains__)
    config = stored_modules.with_own_head(stored_modules.with_stored_modules(parsed, layout, files), layout, files)
    config = stored_modules.with_own_copies(config, layout, files)
    specs = param_specs(config, layout, files.tensors.__contains__)
    # This reads the norms, so it needs their tensor names.
    config = with_norm_storage(config, specs, files)
    tied = {copy: original for copy, original in tied_copies(config, layout) if copy in files.tensors}
    wanted = {piece.name: piece.shape for spec in specs.values() for piece in spec.slices}
    said = described_quantization(values, read_descriptions(files))
    scale_names, scale_problems = find_scales(files.tensors, wanted, parsed.block, said)
    scales = ScaleMap(scale_names, parsed.block or (0, 0))
    if said and not (packed or scale_names or scale_problems):
        log.warning(
            "%s says that weights are quantized, but the tensors are not: they are read without dequantization", said
        )
    # The remaining tensors are other parts of a multimodal model, not needed, or unknown.
    known = wanted.keys() | tied.keys() | set(scale_names.values())
    known |= {f"{name}{end}" for name in tied for end in SCALE_ENDS if files.tensors[name].dtype == E4M3}
    other, extra = [], []
    for name in sorted(files.tensors.keys() - known):
        if name.endswith(IGNORED_SUFFIXES):
            log.info("ignored: %s", name)
        (other if name.startswith(OTHER_PARTS) or name.endswith(IGNORED_SUFFIXES) else extra).append(name)
    missing, mixed = wanted.keys() - files.tensors.keys(), ""
    dtypes: dict[str, np.dtype] = {path: FLOAT32 for path in specs}
    # List the problems in the order in which loading raises them.
    problems = [packed] if packed else [*_find_shape_problems(config, layout, files, wanted), *scale_problems]
    if packed:
        missing, extra = set(), []
    else:
        for path in [path for path, spec in specs.items() if not any(each.name in missing for each in spec.slices)]:
            try:
                dtypes[path] = param_dtype(path, specs[path], files, scales, dtype)
            except CheckpointFileError as error:
                problems.append(str(error))
        mixed = describe_mixed(specs, files)
        problems += [] if is_copied else _find_extra_problems(extra, layout, files, allow_extra)
    return LoadPlan(
        model_type=parsed.model_type,
        config=config,
        layout=layout,
        specs=specs,
        scales=scales,
        tied=tied,
        other=tuple(other),
        missing=tuple(sorted(missing)),
        extra=tuple(extra),
        dtypes=dtypes,
        mixed=mixed,
        problems=tuple(problems),
    )


def _parse_config(values: Any, model_type: str | None, packed: str | None) -> hf_config.ParsedConfig:
    """Parses `config.json` and logs warnings. If parsing fails and the weights are packed, raises `packed` instead."""
    try:
        parsed = hf_config.parse_config(values, model_type)
    except ConfigError as error:
        if packed:
            raise CheckpointFileError(packed) from error
        raise
    if "auto_map" in values:
        log.warning("config.json has auto_map; remote code is not run")
    if parsed.unknown:
        log.warning("unknown keys of config.json are ignored: %s", ", ".join(parsed.unknown))
    for note in parsed.notes:
        log.warning("config.json: %s", note)
    return parsed


def find_packing(files: TensorSource, values: Any) -> str | None:
    """Returns a message about the unsupported format of packed weights and what to do, or None for other weights."""
    tensors = {name: tensor for name, tensor in files.tensors.items() if not name.startswith(OTHER_PARTS)}
    found = find_packed_format(tensors, values, read_descriptions(files), SUPPORTED)
    return found and f"{files.path}: {found}"


def read_descriptions(files: TensorSource) -> dict[str, Any]:
    """Reads the files in which other programs describe their quantization."""
    if not isinstance(files, CheckpointFiles):
        return {}
    return {name: files.json(name) for name in DESCRIPTIONS if (files.path / name).is_file()}


def _find_shape_problems(
    config: ModelConfig, layout: Layout, files: CheckpointFiles, wanted: dict[str, tuple[int, ...]]
) -> list[str]:
    """Describes missing tensors, and tensors whose shapes do not match the configuration."""
    problems = []
    if missing := sorted(wanted.keys() - files.tensors.keys()):
        found, named = stored_modules.count_stored_modules(config, layout, files), config.num_mtp_modules
        modules = f"; MTP modules: {named} in config.json, {found} in the files" if found < named else ""
        problems.append(
            f"{files.path} lacks {count_of(len(missing), 'tensor')}{modules}; missing: {', '.join(missing[:5])}"
        )
    for name, shape in wanted.items():
        if name in files.tensors and files.tensors[name].shape != shape:
            problems.append(f"tensor {name} has shape {files.tensors[name].shape}; config.json implies {shape}")
    return problems


def _find_extra_problems(extra: list[str], layout: Layout, files: CheckpointFiles, allow_extra: bool) -> list[str]:
    """Describes unknown tensors. Tensors in the language model would change its output, so they are never ignored."""
    # The language model consists of trunk, head and MTP modules.
    parts = [f"{layout.trunk}{part}" for part in ("layers.", "norm.", "embed_tokens")]
    modules = layout.modules if layout.is_under_mtp else f"{layout.modules}mtp"
    prefixes = (*parts, modules, layout.head.removesuffix("weight"))
    inside = [name for name in extra if name.startswith(prefixes)]
    if inside:
        return [
            f"{files.path} has {count_of(len(inside), 'tensor')} that the model of config.json does not use: "
            f"{', '.join(inside[:5])}; without them its output would be wrong"
        ]
    if allow_extra or not extra:
        return []
    return [
        f"{files.path} has {len(extra)} unknown tensors: {', '.join(extra[:5])}; "
        "allow_extra (--allow-extra) ignores them"
    ]
