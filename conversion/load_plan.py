"""Plans the loading of a checkpoint directory: from its configuration and headers to the tensors of every parameter.

`inspect_files` reports missing and unknown tensors; `make_plan` rejects them.
"""

import dataclasses
import logging

import numpy as np

from conversion import hf_config
from conversion.array_checks import streams_equal
from conversion.families import Layout
from conversion.files import CheckpointFiles, TensorSource
from conversion.names import module_prefixes, mtp_names, param_specs, stored_layout, tied_copies
from conversion.read_params import BF16, E4M3, ScaleMap
from conversion.tensor_slice import ParamSpec
from mtpjax.errors import CheckpointFileError
from mtpjax.models.config import ModelConfig

log = logging.getLogger("mtpjax.conversion")

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BF16)
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
# Prefixes of tensors of multimodal checkpoints that are not part of the language model.
OTHER_PARTS = (
    *("model.visual.", "visual.", "vision_tower.", "model.vision_tower.", "mm_projector."),
    *("vision_model.", "vit_large_projector."),
)


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """A checkpoint directory in terms of the model: its configuration, and where each parameter comes from."""

    model_type: str
    config: ModelConfig
    layout: Layout
    specs: dict[str, ParamSpec]  # by flat parameter name
    scales: ScaleMap
    tied: dict[str, str]  # copies that the files contain -> the tensor that they repeat
    other: tuple[str, ...]  # tensors that are not the language model's; export writes them back
    missing: tuple[str, ...]
    extra: tuple[str, ...]  # unknown tensors
    dtypes: dict[str, np.dtype]  # of each parameter; empty if something is missing


def make_plan(
    files: CheckpointFiles, *, dtype=None, model_type: str | None = None, allow_extra: bool = False
) -> LoadPlan:
    """Plans loading, and rejects a checkpoint that cannot be loaded completely.

    Args:
        files: the checkpoint.
        dtype: dtype of all parameters; `None` keeps those of the files.
        model_type: the family to use instead of the one that `config.json` names.
        allow_extra: accept tensors that are unknown. They are not loaded; conversion keeps them.

    Returns:
        The plan.

    Raises:
        CheckpointFileError: tensors are missing, unknown, or of the wrong shape or dtype.
        ConfigError: `config.json` is damaged or not supported.
    """
    plan = inspect_files(files, model_type=model_type)
    if plan.missing:
        found, named = count_stored_modules(plan.config, plan.layout, files), plan.config.num_mtp_modules
        modules = f"; config.json names {named} MTP modules, the files hold {found}" if found < named else ""
        packed = [name for name in files.tensors if name.endswith(("weight_packed", ".qweight"))]
        modules += f"; {packed[0]} is quantized in a format that is not supported" if packed else ""
        raise CheckpointFileError(
            f"{files.path} lacks {len(plan.missing)} tensors{modules}; missing: {', '.join(plan.missing[:5])}"
        )
    if plan.extra and not allow_extra:
        raise CheckpointFileError(
            f"{files.path} has {len(plan.extra)} unknown tensors: {', '.join(plan.extra[:5])}; "
            "allow_extra (--allow-extra) skips them"
        )
    dtypes = {path: param_dtype(path, spec, files, plan.scales, dtype) for path, spec in plan.specs.items()}
    return dataclasses.replace(plan, other=(*plan.other, *plan.extra), dtypes=dtypes)


def inspect_files(files: CheckpointFiles, *, model_type: str | None = None) -> LoadPlan:
    """Plans loading, and lists missing and unknown tensors instead of rejecting them.

    Only headers are read, and the few tensors that decide something: copies of embedding and head, and norms.

    Args:
        files: the checkpoint.
        model_type: the family to use instead of the one that `config.json` names.

    Returns:
        The plan, without dtypes.

    Raises:
        CheckpointFileError: a tensor has the wrong shape, or fp8 scales are missing.
        ConfigError: `config.json` is damaged or not supported.
    """
    values = files.json("config.json")
    # Parse the configuration; nothing in it is executed.
    parsed = hf_config.parse_config(values, model_type)
    if "auto_map" in values:
        log.warning("config.json has auto_map: remote code is not run")
    if parsed.unknown:
        log.warning("config.json has unknown keys, which are ignored: %s", ", ".join(parsed.unknown))
    for note in parsed.notes:
        log.warning("config.json: %s", note)
    # The configuration does not say everything: the files decide how many modules there are, whether these have an
    # embedding and a head of their own, and how norms are stored.
    layout = stored_layout(parsed.layout, parsed.model, files.tensors.__contains__)
    config = _with_stored_modules(parsed, layout, files)
    config = _with_own_copies(config, layout, files)
    specs = param_specs(config, layout, files.tensors.__contains__)
    # The norms can only be read once the names of their tensors are known.
    config = _with_norm_convention(config, specs, files)
    tied = {copy: original for copy, original in tied_copies(config, layout) if copy in files.tensors}
    # Every tensor that is needed must have the shape that the configuration implies.
    wanted = {piece.name: piece.shape for spec in specs.values() for piece in spec.slices}
    for name, shape in wanted.items():
        if name in files.tensors and files.tensors[name].shape != shape:
            raise CheckpointFileError(
                f"tensor {name} has shape {files.tensors[name].shape}; config.json implies {shape}"
            )
    scales = ScaleMap(_scale_names(files, wanted, parsed.block), parsed.block)
    # Sort the remaining tensors: other parts of a multimodal model, cached tables, and unknown ones.
    known = wanted.keys() | tied.keys() | set(scales.names.values())
    known |= {f"{name}_scale_inv" for name in tied}
    other, extra = [], []
    for name in sorted(files.tensors.keys() - known):
        if name.endswith(IGNORED_SUFFIXES):
            log.info("ignored: %s", name)
        (other if name.startswith(OTHER_PARTS) or name.endswith(IGNORED_SUFFIXES) else extra).append(name)
    return LoadPlan(
        model_type=parsed.model_type,
        config=config,
        layout=layout,
        specs=specs,
        scales=scales,
        tied=tied,
        other=tuple(other),
        missing=tuple(sorted(wanted.keys() - files.tensors.keys())),
        extra=tuple(extra),
        dtypes={},
    )


def count_stored_modules(config: ModelConfig, layout: Layout, files: CheckpointFiles) -> int:
    """Counts the MTP modules that the files contain, by the first norm of each.

    Args:
        config: the model's configuration.
        layout: how its family names tensors.
        files: the checkpoint.

    Returns:
        The number of modules.
    """
    found = 0
    # Every module has a decoder layer, and every decoder layer has this norm.
    while mtp_names(config, layout, found)[0] + "input_layernorm.weight" in files.tensors:
        found += 1
    return found


def _with_stored_modules(parsed: hf_config.ParsedConfig, layout: Layout, files: CheckpointFiles) -> ModelConfig:
    """Counts MTP modules: those in the files, or those that the configuration names if the files hold some of them."""
    config = parsed.model
    found, named = count_stored_modules(config, layout, files), config.num_mtp_modules
    # Fine-tuning tools drop the modules and keep the configuration. If the files hold no tensor of a module, count 0.
    if named and not any(name.startswith(module_prefixes(config, layout)) for name in files.tensors):
        modules = f"{named} MTP module{'s' if named > 1 else ''}"
        log.warning(
            "config.json names %s, but the files hold none of their tensors: loaded as a trunk with 0 modules. "
            "mtpjax merge-mtp --input-dir %s --mtp-dir ORIGINAL --output-dir OUT puts the modules of the original "
            "release or of an export back; mtpjax.add_mtp_modules makes new ones to train",
            *(modules, files.path),
        )
        return dataclasses.replace(config, num_mtp_modules=0)
    # Some published configurations name fewer modules than the files hold. The reverse means missing tensors.
    if found > named:
        if parsed.names_modules:
            log.warning("config.json names %d MTP modules; the files hold %d, which are used", named, found)
        config = dataclasses.replace(config, num_mtp_modules=found)
    return config


def _with_own_copies(config: ModelConfig, layout: Layout, files: CheckpointFiles) -> ModelConfig:
    """Compares the copies of embedding and head in MTP modules: ties equal ones, and loads the others separately."""
    own = {"embedding": [], "head": []}
    for copy, original in tied_copies(config, layout):
        # Most checkpoints leave the copies out.
        if copy not in files.tensors or original not in files.tensors:
            log.info("%s is shared: the files contain no copy", copy)
            continue
        same = _same_bytes(files, copy, original)
        log.info("%s %s %s", copy, "equals, and is tied to," if same else "differs from, and is kept beside,", original)
        if not same and copy == layout.head:
            raise CheckpointFileError(f"tie_word_embeddings is true, but {copy} differs from the embedding")
        own["embedding" if "embed_tokens" in copy else "head"].append(not same)
    # The model has own embeddings or heads for all modules or for none.
    changes = {}
    for name, differs in own.items():
        if any(differs):
            if len(differs) < config.num_mtp_modules:
                raise CheckpointFileError(f"unsupported: some MTP modules have a {name} of their own and others do not")
            changes[f"mtp_own_{name}"] = True
    return dataclasses.replace(config, **changes) if changes else config


def _with_norm_convention(config: ModelConfig, specs: dict[str, ParamSpec], files: CheckpointFiles) -> ModelConfig:
    """Detects how norm weights are stored: as w of `1 + w` (zero-centred), or as `1 + w`, with means near 1."""
    # Norm weights are trained from 0 or from 1 and stay near it, so their mean shows the convention.
    names = [spec.slices[0].name for path, spec in specs.items() if path.endswith("norm_attention/scale")]
    stored = [name for name in names if name in files.tensors and files.tensors[name].dtype in FLOATS]
    if not config.zero_centred_norm or not stored:
        return config
    typical = float(np.median([files.read(name).astype(np.float32).mean() for name in stored]))
    if typical < 0.5:
        return config
    log.warning("norm weights have a mean of %.2f: the files store 1 + w, so 1 is not added to them", typical)
    return dataclasses.replace(config, zero_centred_norm=False)


def _same_bytes(files: CheckpointFiles, one: str, other: str) -> bool:
    a, b = files.tensors[one], files.tensors[other]
    return (a.shape, a.dtype) == (b.shape, b.dtype) and streams_equal(files.blocks(one), files.blocks(other))


def _scale_names(
    files: CheckpointFiles, wanted: dict[str, tuple[int, ...]], block: tuple[int, int] | None
) -> dict[str, str]:
    """Finds the scales of every fp8 tensor: `weight_scale_inv`, or `weight_scale` as some checkpoints name them."""
    scales = {}
    for name, shape in wanted.items():
        if name not in files.tensors or files.tensors[name].dtype != E4M3:
            continue
        found = next((f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in files.tensors), None)
        if found is None:
            raise CheckpointFileError(f"tensor {name} is float8_e4m3fn, but its scales {name}_scale_inv are missing")
        if block is None:
            raise CheckpointFileError(
                f"tensor {name} is float8_e4m3fn, but quantization_config does not describe block-wise fp8"
            )
        # There is one scale per block; blocks at the edges are smaller.
        grid = tuple(-(-size // side) for size, side in zip(shape, block, strict=True)) if len(shape) == 2 else None
        if files.tensors[found].shape != grid:
            raise CheckpointFileError(
                f"tensor {found} has shape {files.tensors[found].shape}; {shape} in blocks of {block} needs {grid}"
            )
        scales[name] = found
    return scales


def param_dtype(path: str, spec: ParamSpec, files: TensorSource, scales: ScaleMap, dtype) -> np.dtype:
    """Chooses a parameter's dtype, and rejects weights that cannot be loaded in it.

    Args:
        path: the parameter's flat name, for messages.
        spec: the parameter.
        files: the checkpoint.
        scales: its scales.
        dtype: the dtype to cast to; None keeps the files' dtype.

    Returns:
        The dtype.

    Raises:
        CheckpointFileError: the weights are not floats, or of several dtypes and `dtype` is None.
    """
    # A parameter such as `qkv` is assembled from several tensors, which must agree.
    found = {files.tensors[piece.name].dtype for piece in spec.slices}
    for piece in spec.slices:
        kind = files.tensors[piece.name].dtype
        # Integers would need scales that are not known; other floats can at least be cast.
        if kind not in FLOATS and piece.name not in scales.names and (dtype is None or kind.kind in "iub"):
            raise CheckpointFileError(
                f"tensor {piece.name} has unsupported weight dtype {kind}; supported: float32, float16, bfloat16, and "
                "float8_e4m3fn with block scales"
            )
    if dtype is not None:
        return np.dtype(dtype)
    if len(found) > 1:
        raise CheckpointFileError(
            f"{path} is assembled from tensors of several dtypes, {sorted(map(str, found))}: pass dtype to cast them"
        )
    return found.pop()
