"""Plans the loading of a checkpoint directory: from its configuration and headers to the tensors of every parameter.

`inspect_files` lists all problems; `make_plan` raises the first. Every command plans with one of the two.
"""

import dataclasses
import logging
from typing import Any

import numpy as np

from conversion import hf_config
from conversion.families import Layout
from conversion.files import CheckpointFiles, TensorSource
from conversion.names import param_specs, stored_layout, tied_copies
from conversion.norm_storage import with_norm_storage
from conversion.quantized_formats import DESCRIPTIONS, SCALE_ENDS, described_quantization, find_packed_format
from conversion.read_params import MakeArray, ScaleMap, read_as, read_scales, read_values, scale_spec
from conversion.safetensors_header import E4M3, FLOAT32
from conversion.stored_modules import (
    count_stored_modules,
    read_module_files,
    with_own_copies,
    with_own_head,
    with_stored_modules,
)
from conversion.tensor_slice import ParamSpec
from conversion.tensor_types import SUPPORTED, describe_mixed, find_scales, param_dtype
from mtpjax.errors import CheckpointFileError, ConfigError
from mtpjax.messages import count_of
from mtpjax.models.config import ModelConfig
from mtpjax.models.quantized import BlockScaled

log = logging.getLogger("mtpjax.conversion")

# Ends of tensors that weights do not depend on: tables of rotary embeddings, and scales of activations and KV caches in
# quantized checkpoints. mtpjax computes neither activations nor caches in 8 bits.
IGNORED_SUFFIXES = (
    *("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"),
    *(".input_scale", ".k_scale", ".v_scale", ".q_scale"),
)
# Prefixes of tensors of multimodal checkpoints that are not part of the language model.
OTHER_PARTS = (
    *("model.visual.", "visual.", "vision_tower.", "model.vision_tower.", "mm_projector."),
    *("vision_model.", "vit_large_projector."),
)


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """A checkpoint directory in terms of the model: its configuration, and the source of each parameter."""

    model_type: str
    config: ModelConfig
    layout: Layout
    specs: dict[str, ParamSpec]  # by flat parameter name
    scales: ScaleMap
    tied: dict[str, str]  # copies that the files contain -> the tensor that they repeat
    other: tuple[str, ...]  # tensors outside the language model; export writes them back
    missing: tuple[str, ...]
    extra: tuple[str, ...]  # unknown tensors
    dtypes: dict[str, np.dtype]  # of each parameter; float32 for one that cannot be read
    mixed: str  # names parameters that are assembled from tensors of several dtypes; empty: none
    problems: tuple[str, ...]  # why the checkpoint cannot be loaded

    def make_param(self, files: CheckpointFiles, path: str, make: MakeArray) -> Any:
        """Makes a parameter with `make(path, spec, dtype, read)`; of fp8 a `BlockScaled`, with two such arrays."""
        dtype, spec, scales = self.dtypes[path], self.specs[path], self.scales
        if dtype != E4M3:
            return make(path, spec, dtype, lambda index: read_as(files, scales, spec, index, dtype))
        parts = {
            "values": make(f"{path}/values", spec, dtype, lambda index: read_values(files, spec, index)),
            "scales": make(
                *(f"{path}/scales", scale_spec(spec, scales), FLOAT32),
                lambda index: read_scales(files, scales, spec, index),
            ),
        }
        return BlockScaled(**parts, axis=spec.in_axis, block=scales.columns)


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
        dtype: dtype of all parameters; `None` keeps those of the files.
        model_type: the family to use instead of the one that `config.json` names.
        allow_extra: accept unknown tensors outside the language model. They are not loaded; conversion keeps them.
        is_copied: the tensors are only copied, so unknown ones are harmless.

    Raises:
        CheckpointFileError: tensors are missing, unknown, or of the wrong shape or dtype.
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

    Only headers are read, and the few tensors that decide something: copies of embedding and head, and norms.

    Returns:
        The plan; `problems` holds what `make_plan` raises.

    Raises:
        CheckpointFileError: modules are stored in ways that cannot be described together.
        ConfigError: `config.json` is damaged or not supported.
    """
    values = files.json("config.json")
    # The format of quantized weights comes first: it explains names and shapes that would look wrong.
    packed = find_packing(files, values)
    try:
        parsed = hf_config.parse_config(values, model_type)
    except ConfigError as error:
        if packed:
            raise CheckpointFileError(packed) from error
        raise
    if "auto_map" in values:
        log.warning("config.json has auto_map: remote code is not run")
    if parsed.unknown:
        log.warning("config.json has unknown keys, which are ignored: %s", ", ".join(parsed.unknown))
    for note in parsed.notes:
        log.warning("config.json: %s", note)
    # The configuration does not say everything: the files decide how many modules there are, whether these have a
    # separate embedding and head, and how norms are stored.
    read_module_files(files, parsed)
    layout = stored_layout(parsed.layout, parsed.model, files.tensors.__contains__)
    config = with_stored_modules(parsed, layout, files)
    config = with_own_copies(with_own_head(config, layout, files), layout, files)
    specs = param_specs(config, layout, files.tensors.__contains__)
    # The norms can only be read once the names of their tensors are known.
    config = with_norm_storage(config, specs, files)
    tied = {copy: original for copy, original in tied_copies(config, layout) if copy in files.tensors}
    wanted = {piece.name: piece.shape for spec in specs.values() for piece in spec.slices}
    said = described_quantization(values, read_descriptions(files))
    scale_names, scale_problems = find_scales(files.tensors, wanted, parsed.block, said)
    scales = ScaleMap(scale_names, parsed.block)
    if said and not (packed or scale_names or scale_problems):
        log.warning("%s says that weights are quantized, but the tensors are not: they are read as they are", said)
    # Sort the remaining tensors: other parts of a multimodal model, tensors without effect, and unknown ones.
    known = wanted.keys() | tied.keys() | set(scale_names.values())
    known |= {f"{name}{end}" for name in tied for end in SCALE_ENDS if files.tensors[name].dtype == E4M3}
    other, extra = [], []
    for name in sorted(files.tensors.keys() - known):
        if name.endswith(IGNORED_SUFFIXES):
            log.info("ignored: %s", name)
        (other if name.startswith(OTHER_PARTS) or name.endswith(IGNORED_SUFFIXES) else extra).append(name)
    plan = LoadPlan(
        model_type=parsed.model_type,
        config=config,
        layout=layout,
        specs=specs,
        scales=scales,
        tied=tied,
        other=tuple(other),
        missing=tuple(sorted(wanted.keys() - files.tensors.keys())),
        extra=tuple(extra),
        dtypes=dict.fromkeys(specs, FLOAT32),
        mixed="",
        problems=(packed,) if packed else (),
    )
    if packed:
        return dataclasses.replace(plan, missing=(), extra=())
    problems = [*_find_shape_problems(plan, files, wanted), *scale_problems]
    return _with_dtypes(plan, files, dtype, problems, _find_extra_problems(plan, files, allow_extra, is_copied))


def find_packing(files: TensorSource, values: Any) -> str | None:
    """Finds out whether the weights are packed in an unsupported format.

    Returns:
        One sentence that names the format and what to do; None for other checkpoints.
    """
    tensors = {name: tensor for name, tensor in files.tensors.items() if not name.startswith(OTHER_PARTS)}
    found = find_packed_format(tensors, values, read_descriptions(files), SUPPORTED)
    return found and f"{files.path}: {found}"


def read_descriptions(files: TensorSource) -> dict[str, Any]:
    """Reads the files in which other programs describe their quantization."""
    if not isinstance(files, CheckpointFiles):
        return {}
    return {name: files.json(name) for name in DESCRIPTIONS if (files.path / name).is_file()}


def _find_shape_problems(plan: LoadPlan, files: CheckpointFiles, wanted: dict[str, tuple[int, ...]]) -> list[str]:
    """Lists missing tensors, and those whose shape is not the one that the configuration implies."""
    problems = []
    if plan.missing:
        found, named = count_stored_modules(plan.config, plan.layout, files), plan.config.num_mtp_modules
        modules = f"; config.json names {named} MTP modules, the files hold {found}" if found < named else ""
        problems.append(
            f"{files.path} lacks {count_of(len(plan.missing), 'tensor')}{modules}; missing: "
            f"{', '.join(plan.missing[:5])}"
        )
    for name, shape in wanted.items():
        if name in files.tensors and files.tensors[name].shape != shape:
            problems.append(f"tensor {name} has shape {files.tensors[name].shape}; config.json implies {shape}")
    return problems


def _find_extra_problems(plan: LoadPlan, files: CheckpointFiles, allow_extra: bool, is_copied: bool) -> list[str]:
    """Lists unknown tensors: those inside the language model change what it computes, so they are never ignored."""
    if is_copied or not plan.extra:
        return []
    inside = [name for name in plan.extra if _is_inside(name, plan.layout)]
    if inside:
        return [
            f"{files.path} has {count_of(len(inside), 'tensor')} that the model of config.json does not compute: "
            f"{', '.join(inside[:5])}; without them its results would be wrong"
        ]
    if allow_extra:
        return []
    return [
        f"{files.path} has {len(plan.extra)} unknown tensors: {', '.join(plan.extra[:5])}; "
        "allow_extra (--allow-extra) skips them"
    ]


def _is_inside(name: str, layout: Layout) -> bool:
    """Returns whether a tensor belongs to the language model: trunk, head or MTP modules."""
    parts = [f"{layout.trunk}{part}" for part in ("layers.", "norm.", "embed_tokens")]
    modules = layout.modules if layout.is_under_mtp else f"{layout.modules}mtp"
    return name.startswith((*parts, modules, layout.head.removesuffix("weight")))


def _with_dtypes(plan: LoadPlan, files: CheckpointFiles, dtype, problems: list[str], last: list[str]) -> LoadPlan:
    """Adds the dtypes of the parameters, and the problems in the order in which loading raises them."""
    dtypes = dict(plan.dtypes)
    missing = set(plan.missing)
    for path, spec in plan.specs.items():
        names = {piece.name for piece in spec.slices}
        if names & missing:
            continue
        try:
            dtypes[path] = param_dtype(path, spec, files, plan.scales, dtype)
        except CheckpointFileError as error:
            problems.append(str(error))
    mixed = describe_mixed(plan.specs, files)
    return dataclasses.replace(plan, dtypes=dtypes, mixed=mixed, problems=(*problems, *last))
