"""Merges MTP modules, from an export or from an mtpjax checkpoint, into a full Hugging Face checkpoint."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from conversion.export import TensorAssembler
from conversion.gguf_files import open_checkpoint
from conversion.load_plan import LoadPlan, make_plan
from conversion.merge_mtp import MergeReport, merge_tensors
from conversion.merge_sources import ModuleTensors, read_modules, require_same_norms
from conversion.names import param_specs
from conversion.read_params import ScaleMap
from conversion.safetensors_header import BF16
from conversion.shards import TensorEntry
from mtpjax.errors import CheckpointFileError
from mtpjax.io.checkpoint_format import find_checkpoint, is_checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.safe_open import is_gguf


def merge_mtp(
    base,
    modules,
    target,
    *,
    model_type: str | None = None,
    progress: Callable[[int], Any] | None = None,
) -> MergeReport:
    """Writes the Hugging Face checkpoint `base`, with the MTP modules from `modules`, to `target`.

    Args:
        base: a full Hugging Face checkpoint or a GGUF file, with or without MTP modules. Modules that it lacks are
            written to a new file.
        modules: a folder written by `mtpjax export-mtp`, a full Hugging Face checkpoint or GGUF file (such as the
            original release of a fine-tuned model), an mtpjax checkpoint, or a run folder.
        target: the folder to write. It appears only when it is complete.
        model_type: the family to use for `base` instead of the one in its `config.json`.
        progress: called with the size in bytes of each written block.

    Returns:
        The numbers of module tensors that equal a tensor in `base`, that replaced one, and that were added.

    Raises:
        CheckpointError: a checkpoint is damaged, or the two do not match.
    """
    path = find_checkpoint(modules)
    with contextlib.ExitStack() as opened:
        files = opened.enter_context(open_checkpoint(base))
        plan = make_plan(files, model_type=model_type, is_copied=True)
        # Parameters of a trained checkpoint get the base's tensor names; other sources already use Hugging Face names.
        if is_checkpoint(path):
            found = _module_tensors(CheckpointReader(path), plan, base)
        elif is_gguf(path) or (path / "config.json").is_file():
            found = read_modules(opened.enter_context(open_checkpoint(path)), files, plan)
        else:
            raise CheckpointFileError(f"{modules} is neither an MTP export nor a checkpoint: it has no config.json")
        return merge_tensors(files, plan, found, target, progress=progress)


def _module_tensors(reader: CheckpointReader, plan: LoadPlan, base) -> ModuleTensors:
    """Lists the tensors of a checkpoint's MTP modules under their Hugging Face names."""
    config = reader.model_config()
    if not config.num_mtp_modules:
        raise CheckpointFileError(f"{reader.path} has no MTP modules")
    # The trunk must match the base's. Settings that belong to the modules or to the tokenizer are not compared.
    ignored = ("num_mtp_modules", "mtp_own_embedding", "mtp_own_head", "num_tokens")
    expected = dataclasses.replace(plan.config, **{name: getattr(config, name) for name in ignored})
    differing = [key for key, value in expected.to_dict().items() if config.to_dict()[key] != value]
    if differing and set(differing) <= {"zero_centred_norm", "mtp_norm_differs"}:
        require_same_norms(reader.path, config.of_modules.zero_centred_norm, base, plan.config)
    if differing:
        raise CheckpointFileError(
            f"{reader.path} is a different model from {base}: it differs in {', '.join(differing)}"
        )
    # Name the tensors as in the base, with experts stacked or separate.
    stored_names = {piece.name for spec in plan.specs.values() for piece in spec.slices}
    specs = {
        path: spec
        for path, spec in param_specs(config, plan.layout, stored_names.__contains__).items()
        if path.startswith("mtp_")
    }
    assembly = TensorAssembler(specs, reader.read, scaled=reader.scaled, scales=ScaleMap({}), tied={})
    entries = {}
    for path, spec in specs.items():
        # fp8 modules are compared and written as bfloat16; the merge quantizes them again where the base is fp8.
        dtype = BF16 if path in reader.scaled else np.dtype(reader.records[path]["dtype"])
        entries |= {piece.name: TensorEntry(piece.name, dtype, piece.shape) for piece in spec.slices}
    plan = dataclasses.replace(plan, config=config)
    blocks = lambda name: assembly.blocks(entries[name])
    return ModuleTensors(config.num_mtp_modules, entries, blocks, plan, config.mtp_own_embedding)
