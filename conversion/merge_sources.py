"""Reads the MTP modules for a merge, from an export or from a full checkpoint."""

import dataclasses
import logging
import pathlib
from collections.abc import Callable, Iterator

import numpy as np

from conversion.array_checks import streams_equal
from conversion.families import FAMILIES
from conversion.files import CheckpointFiles
from conversion.fp8_blocks import dequantized_blocks
from conversion.load_plan import LoadPlan, inspect_files
from conversion.names import (
    EXPORT_FILE,
    HEADS,
    TRUNK_PREFIXES,
    exported_name,
    mtp_names,
    original_name,
    param_specs,
)
from conversion.norm_storage import find_norm_storage
from conversion.quantized_formats import SCALE_ENDS
from conversion.read_params import ScaleMap
from conversion.safetensors_header import BF16
from conversion.shards import TensorEntry, entry_of
from conversion.tensor_slice import slices_under
from mtpjax.errors import CheckpointFileError
from mtpjax.messages import count_of
from mtpjax.models.config import ModelConfig

log = logging.getLogger("mtpjax.conversion")


@dataclasses.dataclass
class ModuleTensors:
    """The tensors of MTP modules, under their names in a full checkpoint."""

    count: int  # number of modules
    entries: dict[str, TensorEntry]
    blocks: Callable[[str], Iterator[np.ndarray]]  # name -> the tensor's rows, block by block
    plan: LoadPlan  # the base's plan, with the modules' tensor names
    own_embedding: bool = False  # the modules have a separate embedding


def read_modules(source: CheckpointFiles, base: CheckpointFiles, plan: LoadPlan) -> ModuleTensors:
    """Reads the modules from an export, or from a full checkpoint such as the original release of a fine-tuned model.

    Copies of the trunk's embedding and head are omitted, because the modules use the base's, as in inference engines.

    Returns:
        The modules, under their names in `base`.

    Raises:
        CheckpointFileError: the source has no modules, or they do not match the base.
    """
    is_export = (pathlib.Path(source.path) / EXPORT_FILE).is_file()
    modules = _from_export(source, base, plan) if is_export else _from_full(source, base, plan)
    _check_tensors(modules, f"{'the export' if is_export else source.path}")
    return modules


def _checked_count(path, count: object, base: CheckpointFiles, plan: LoadPlan) -> int:
    if not isinstance(count, int) or count < 1:
        raise CheckpointFileError(f"{path} has no MTP modules: their number is {count!r}")
    if (base_count := plan.config.num_mtp_modules) not in (0, count):
        raise CheckpointFileError(f"{path} has {count_of(count, 'MTP module')}, but {base.path} has {base_count}")
    return count


def _from_export(exported: CheckpointFiles, base: CheckpointFiles, plan: LoadPlan) -> ModuleTensors:
    """Lists an export's tensors, except those shared with the trunk."""
    # The export's configuration gives the number of modules. If the base has modules, the two numbers must be the same.
    values = exported.json("config.json")
    stated = values.get("num_nextn_predict_layers") if isinstance(values, dict) else None
    count = _checked_count(exported.path, stated, base, plan)
    # Modules of dense models are under `mtp.`, except in older exports, where they are additional layers.
    has_mtp = any(".mtp." in f".{name}" for name in exported.tensors)
    plan = _with_modules(plan, count, "layers" if plan.layout.mtp == "mtp_each" and not has_mtp else plan.layout.mtp)
    config = plan.config
    # Qwen exports contain the trunk's embedding and head under the original prefix. A merge keeps the base's tensors.
    names = {}
    for name in exported.tensors:
        trunk = next((each for each in TRUNK_PREFIXES if name == f"{each}embed_tokens.weight"), None)
        if plan.layout.is_under_mtp and (trunk or name in HEADS):
            kept = plan.layout.embedding if trunk else plan.layout.head
            if kept in base.tensors and not streams_equal(base.blocks(kept), exported.blocks(name)):
                log.warning("%s in the export differs from the one in the checkpoint, which is kept", name)
        else:
            # From here on, tensors have the names that they have in a full checkpoint.
            names[original_name(name, config, plan.layout)] = name
    # The tensors do not show whether copies equalled the trunk's tensors, so the configuration of an export does.
    own_embedding = values.get("mtp_use_dedicated_embeddings") is True
    own = {"embedding": own_embedding, "head": values.get("mtp_use_dedicated_head") is True}
    originals = {"embedding": plan.layout.embedding, "head": plan.layout.head}
    for part, copies in _copies(config, plan).items():
        for copy in [copy for copy in copies if copy in names and not own[part]]:
            old = names.pop(copy)
            tied = originals["embedding" if config.tie_word_embeddings else part]
            if tied in base.tensors and not streams_equal(base.blocks(tied), exported.blocks(old)):
                log.warning("%s in the export differs from %s in the checkpoint, which is used instead", old, tied)
    _check_norms_of_export(exported, names, base, plan)
    entries = {name: entry_of(exported.tensors[old])._replace(name=name) for name, old in names.items()}
    return ModuleTensors(count, entries, lambda name: exported.blocks(names[name]), plan, own_embedding)


def _from_full(source: CheckpointFiles, base: CheckpointFiles, plan: LoadPlan) -> ModuleTensors:
    """Lists the modules' tensors in a full checkpoint, or in a folder with only its modules."""
    given = inspect_files(source, is_copied=True)
    needed, trunk = slices_under("mtp_", given.specs).keys(), slices_under("trunk/", given.specs).keys()
    # A folder with only the modules' file, which uses the original names, has no trunk.
    has_modules_alone = bool(needed) and needed <= source.tensors.keys() and not trunk & source.tensors.keys()
    if given.problems and not has_modules_alone:
        raise CheckpointFileError(given.problems[0])
    count = _checked_count(source.path, given.config.num_mtp_modules, base, plan)
    require_same_norms(source.path, given.config.of_modules.zero_centred_norm, base.path, plan.config)
    plan = _with_modules(plan, count, given.layout.mtp)
    # fp8 modules stay fp8 if they are added to a checkpoint with the same block size, and otherwise become bfloat16.
    has_modules = any(path.startswith("mtp_") for path in plan.specs)
    blocks = [each.scales.block for each in (given, plan) if each.scales.names]
    keeps_fp8 = len(blocks) == 2 and blocks[0] == blocks[1] and not has_modules
    scale_names = set(given.scales.names.values())
    names = {}
    for name in source.tensors:
        new = exported_name(name, given.config, given.layout)
        # The merged modules use the base's embedding and head, so omit copies of the source's embedding and head.
        if new is None or name in given.tied or name.removesuffix("_scale_inv") in given.tied:
            continue
        if keeps_fp8 or name not in scale_names:
            names[original_name(new, plan.config, plan.layout)] = name
    # Without scales, tensors are read unchanged.
    scales = ScaleMap({}) if keeps_fp8 else given.scales
    entries = {}
    for name, old in names.items():
        dtype = BF16 if old in scales.names else source.tensors[old].dtype
        entries[name] = TensorEntry(name, dtype, source.tensors[old].shape)
    read = lambda name: dequantized_blocks(source, scales, names[name])
    return ModuleTensors(count, entries, read, plan, given.config.mtp_own_embedding)


def require_same_norms(path, is_centred: bool, base_path, base: ModelConfig) -> None:
    """Rejects modules whose norm weights are stored differently from the base's.

    Args:
        is_centred: whether the modules store `w`, which is applied as `1 + w`.

    Raises:
        CheckpointFileError: the modules store `w` and the base stores `1 + w`, or the other way round.
    """
    kinds = {True: "w (applied as 1 + w)", False: "1 + w"}
    expected = base.of_modules.zero_centred_norm
    if is_centred != expected:
        raise CheckpointFileError(
            f"the modules of {path} store norm weights as {kinds[is_centred]}, but those of {base_path} as "
            f"{kinds[expected]}: merge modules from a release that stores norms like the base"
        )


def _check_norms_of_export(exported: CheckpointFiles, names: dict[str, str], base: CheckpointFiles, plan: LoadPlan):
    """Checks that an export stores norms as the base does. `names` maps names in the base to names in the export."""
    if not FAMILIES[plan.model_type].fixed.get("zero_centred_norm"):
        return
    specs = param_specs(plan.config, plan.layout, names.__contains__)
    norms = [spec.slices[0].name for path, spec in specs.items() if path.startswith("mtp_") and path.endswith("/scale")]
    means = [float(exported.read(names[name]).astype(np.float32).mean()) for name in norms if name in names]
    default = plan.config.of_modules.zero_centred_norm
    is_centred = find_norm_storage(f"the modules of {exported.path}", means, default=default)
    require_same_norms(exported.path, is_centred, base.path, plan.config)


def _with_modules(plan: LoadPlan, count: int, mtp: str) -> LoadPlan:
    """Returns the base's plan with the number and the tensor names of the merged modules."""
    layout = plan.layout if plan.config.num_mtp_modules else dataclasses.replace(plan.layout, mtp=mtp)
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, num_mtp_modules=count), layout=layout)


def _copies(config: ModelConfig, plan: LoadPlan) -> dict[str, set[str]]:
    """Returns the names that the modules' copies of embedding and head would have."""
    around = [mtp_names(config, plan.layout, number)[1] for number in range(config.num_mtp_modules)]
    return {part: {names[part] for names in around if part in names} for part in ("embedding", "head")}


def _check_tensors(modules: ModuleTensors, where: str) -> None:
    """Checks that the modules have exactly the tensors and shapes that the base's configuration implies."""
    config, plan = modules.plan.config, modules.plan
    specs = param_specs(config, plan.layout, modules.entries.__contains__)
    wanted = slices_under("mtp_", specs)
    names, copies = set(modules.entries), set().union(*_copies(config, plan).values())
    scales = {f"{name}{end}" for name in names for end in SCALE_ENDS}
    unknown = names - wanted.keys() - copies - scales - {"rot.weight"}
    for problem, found in (("lacks", wanted.keys() - names - copies), ("has unknown", unknown)):
        if found:
            raise CheckpointFileError(
                f"{where} {problem} {count_of(len(found), 'tensor')}: {', '.join(sorted(found)[:5])}"
            )
    for name, piece in wanted.items():
        if name in names and modules.entries[name].shape != piece.shape:
            raise CheckpointFileError(
                f"tensor {name} of {where} has shape {modules.entries[name].shape}; the base requires {piece.shape}"
            )
