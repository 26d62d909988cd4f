"""Merges MTP modules, from an export or from an mtpjax checkpoint, into a full Hugging Face checkpoint."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from conversion.export import TensorAssembler
from conversion.gguf_files import open_checkpoint
from conversion.load_plan import LoadPlan, make_plan
from conversion.merge_mtp import MergeReport, merge_export, merge_tensors
from conversion.merge_sources import ModuleTensors, require_same_norms
from conversion.names import param_specs
from conversion.read_params import ScaleMap
from conversion.safetensors_header import BF16
from conversion.shards import TensorEntry
from mtpjax.errors import CheckpointFileError
from mtpjax.io.checkpoint_format import find_checkpoint, is_checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader


def merge_mtp(
    base,
    modules,
    target,
    *,
    model_type: str | None = None,
    progress: Callable[[int], Any] | None = None,
) -> MergeReport:
    """Writes the Hugging Face checkpoint `base` with the MTP modules of `modules` to `target`.

    Args:
        base: a full Hugging Face checkpoint, with or without MTP modules. Modules that it lacks go into a new file.
        modules: a folder that `mtpjax export-mtp` wrote, a full Hugging Face checkpoint such as the original release
            of a fine-tuned model, an mtpjax checkpoint, or a run folder that holds one.
        target: the folder to write. It appears only when it is complete.
        model_type: the family of `base` to use instead of the one that its `config.json` names.
        progress: called with the number of bytes of each block that is written.

    Returns:
        The numbers of the modules' tensors that equal those of `base`, replaced one, or were added.

    Raises:
        CheckpointError: a checkpoint is damaged, or the two do not fit.
    """
    # An export has Hugging Face names already; a trained checkpoint is renamed by the plan of the base.
    path = find_checkpoint(modules)
    if not is_checkpoint(path):
        return merge_export(base, modules, target, model_type=model_type, progress=progress)
    with open_checkpoint(base) as files:
        plan = make_plan(files, model_type=model_type, is_copied=True)
        return merge_tensors(
            files, plan, _module_tensors(CheckpointReader(path), plan, base), target, progress=progress
        )


def _module_tensors(reader: CheckpointReader, plan: LoadPlan, base) -> ModuleTensors:
    """Lists the tensors of a checkpoint's MTP modules under their Hugging Face names."""
    config = reader.model_config()
    if not config.num_mtp_modules:
        raise CheckpointFileError(f"{reader.path} has no MTP modules")
    # The trunk must be that of the base. Fields that modules may change, or that the tokenizer sets, are not compared.
    ignored = ("num_mtp_modules", "mtp_own_embedding", "mtp_own_head", "num_tokens")
    expected = dataclasses.replace(plan.config, **{name: getattr(config, name) for name in ignored})
    differing = [key for key, value in expected.to_dict().items() if config.to_dict()[key] != value]
    if differing and set(differing) <= {"zero_centred_norm", "mtp_norm_differs"}:
        require_same_norms(reader.path, config.of_modules.zero_centred_norm, base, plan.config)
    if differing:
        raise CheckpointFileError(f"{reader.path} is another model: it differs in {', '.join(differing)}")
    # Name the tensors as the base does: its layout, and its experts stacked or separate.
    stored_names = {piece.name for spec in plan.specs.values() for piece in spec.slices}
    specs = {
        path: spec
        for path, spec in param_specs(config, plan.layout, stored_names.__contains__).items()
        if path.startswith("mtp_")
    }
    names = {piece.name: (path, piece.shape) for path, spec in specs.items() for piece in spec.slices}
    assembly = TensorAssembler(specs, reader.read, scaled=reader.scaled, scales=ScaleMap({}, None), tied={})

    def entry(name: str) -> TensorEntry:
        # fp8 modules are compared and written as bfloat16; the merge quantizes them again where the base is fp8.
        path, shape = names[name]
        dtype = BF16 if path in reader.scaled else np.dtype(reader.records[path]["dtype"])
        return TensorEntry(name, dtype, shape)

    entries = {name: entry(name) for name in names}
    return ModuleTensors(
        config.num_mtp_modules,
        entries,
        lambda name: assembly.blocks(entry(name)),
        dataclasses.replace(plan, config=config),
        config.mtp_own_embedding,
    )
