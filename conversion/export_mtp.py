"""Exports the MTP modules of a Hugging Face checkpoint as a separate checkpoint, in the layout of xLLM's script.

    python -m conversion.export_mtp --input-dir DIR --output-dir DIR [--model-type TYPE]

Inference engines load such an export as a draft model. Unlike xLLM's script, this one supports Qwen3-Next and several
modules, dequantizes fp8 of every family by the block size of the configuration, and checks names and shapes. It keeps
only a few blocks in memory and runs no remote code.
"""

import argparse
import fnmatch
import json
import logging
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

from conversion.families import Layout
from conversion.files import CheckpointFiles
from conversion.fp8_blocks import dequantized_blocks
from conversion.gguf_files import open_checkpoint
from conversion.load_plan import LoadPlan, make_plan
from conversion.safetensors_header import BF16
from conversion.shards import TensorEntry, copy_files, entry_of, index_bytes, make_shard, write_shards
from conversion.weight_files import INDEX
from mtpjax.atomic import atomic_folder
from mtpjax.errors import CheckpointError, CheckpointFileError
from mtpjax.models.config import ModelConfig

WEIGHTS = "mtp_layer_parameters.safetensors"
ASCEND_QUANTIZATION = "quant_model_description.json"  # Ascend's list of quantized tensors, by name
# Tensors beside a module's decoder layer.
AROUND = (
    *("embed_tokens.", "shared_head.", "transformer.shared_head.", "final_layernorm."),
    *("enorm.", "hnorm.", "eh_proj."),
)
# Small files that belong to a checkpoint, by their usual names. The source's other files are not copied: pictures,
# logs, results, and the description of the whole model.
CHECKPOINT_FILES = (
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "tiktoken.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "*processor_config.json",
    "quant_model_description*.json",
    "configuration_*.py",  # code that config.json names in auto_map
    "modeling_*.py",
    "tokenization_*.py",
    "LICENSE*",
)

# The architecture that engines load an export as; "MtpForCausalLM" for families that are not listed.
ARCHITECTURES = {
    "deepseek_v3": "DeepseekMTPForCausalLM",
    "deepseek_v32": "DeepseekV32MtpForCausalLM",
    "glm4_moe": "Glm4MoeMtpForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaMtpForCausalLM",
    "mimo": "MiMoMtpForCausalLM",
    "qwen3_5": "Qwen3_5MtpForCausalLM",
    "qwen3_5_moe": "Qwen3_5MtpForCausalLM",
}


def export_mtp(source, target, *, model_type: str | None = None, progress: Callable[[int], Any] | None = None) -> int:
    """Writes the MTP modules of a checkpoint to a folder.

    Args:
        source: a full Hugging Face checkpoint.
        target: the folder to write. It appears only when it is complete; an older export is replaced.
        model_type: the family to use instead of the one that `config.json` names.
        progress: called with the number of bytes of each block that is written.

    Returns:
        The number of modules.

    Raises:
        CheckpointFileError: the checkpoint has no MTP modules, or is damaged.
        ConfigError: its configuration is damaged or not supported.
        FileExistsError: `target` is neither empty nor an export.
    """
    with open_checkpoint(source) as files:
        plan = make_plan(files, model_type=model_type, is_copied=True)
        config = plan.config
        if not config.num_mtp_modules:
            raise CheckpointFileError(
                f"{files.path} has no MTP modules: config.json names none (num_nextn_predict_layers, "
                "mtp_num_hidden_layers), and the files contain none"
            )
        # Choose the modules' tensors and their new names. Scales are left out, since fp8 becomes bfloat16.
        sources = {}  # new name -> name in the checkpoint
        for name in files.tensors:
            new = exported_name(name, config, plan.layout)
            if new is not None and name not in plan.scales.names.values():
                sources[new] = name
        if plan.layout.is_under_mtp:
            sources |= {name: name for name in shared_tensors(config, plan.layout)}
        entries = [_entry(files, plan, new, name) for new, name in sorted(sources.items())]
        shards = [make_shard(WEIGHTS, entries, {"format": "pt"})]
        content = _edit_config(files.json("config.json"), plan)

        # Write the tensors, copy the small files of a checkpoint, and replace those that describe the weights.
        with atomic_folder(pathlib.Path(target).resolve(), is_export) as folder:

            def blocks(entry: TensorEntry):
                return dequantized_blocks(files, plan.scales, sources[entry.name])

            write_shards(folder, shards, blocks, progress)
            copy_files(folder, files.bytes_of, filter(belongs_to_checkpoint, files.other_files()))
            (folder / INDEX).write_bytes(index_bytes(shards))
            (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
            if (folder / ASCEND_QUANTIZATION).is_file():
                described = _rename_described(files.json(ASCEND_QUANTIZATION), config, plan.layout)
                (folder / ASCEND_QUANTIZATION).write_text(json.dumps(described, indent=2) + "\n")
            # Verify the export by reading it back before it is renamed into place.
            with CheckpointFiles(folder) as written:
                assert [entry_of(tensor) for _, tensor in sorted(written.tensors.items())] == entries
        return config.num_mtp_modules


def exported_name(name: str, config: ModelConfig, layout: Layout) -> str | None:
    """Renames a tensor for an export.

    The decoder layer of module k becomes `model.layers.k`. Tensors around the layer move up to `model.` if there is one
    module, and stay with their layer if there are several, a case that xLLM's script rejects. Qwen, MiMo and Ernie keep
    their names, under `mtp.` and `model.`.

    Returns:
        The name in the export, or `None` if the tensor does not belong to a module.
    """
    if layout.is_under_mtp:
        return f"mtp.{name.removeprefix(layout.modules)}" if name.startswith(layout.modules) else None
    if layout.mtp in ("mimo", "mimo_v2", "ernie"):
        is_of_module = name.startswith((f"{layout.modules}mtp_", f"{layout.modules}mtp."))
        return f"model.{name.removeprefix(layout.modules)}" if is_of_module else None
    if name == "rot.weight":  # a rotation that some quantized checkpoints have
        return "model.rot.weight"
    # Modules are the decoder layers after those of the trunk.
    found = re.fullmatch(rf"{re.escape(layout.modules)}layers\.(\d+)\.(.+)", name)
    if found is None or int(found[1]) < config.num_hidden_layers:
        return None
    if config.num_mtp_modules == 1 and found[2].startswith(AROUND):
        return f"model.{found[2]}"
    return f"model.layers.{int(found[1]) - config.num_hidden_layers}.{found[2]}"


def original_name(name: str, config: ModelConfig, layout: Layout) -> str:
    """Inverts `exported_name`.

    Raises:
        CheckpointFileError: an export has no tensor of this name.
    """
    if layout.is_under_mtp:
        return re.sub(r"^(?:[\w.]+\.)?mtp\.", layout.modules, name)
    if layout.mtp != "layers":
        return layout.modules + name.removeprefix("model.")
    if name == "model.rot.weight":
        return "rot.weight"
    # Tensors of a single module have no layer number, except those of its decoder layer.
    found = re.fullmatch(r"model\.(?:layers\.(\d+)\.)?(.+)", name)
    if found is None:
        raise CheckpointFileError(f"tensor {name} does not belong to an MTP module")
    return f"{layout.modules}layers.{config.num_hidden_layers + int(found[1] or 0)}.{found[2]}"


def shared_tensors(config: ModelConfig, layout: Layout) -> list[str]:
    """Lists the trunk's tensors that Qwen's exports contain besides the modules: the embedding and the head."""
    # The engines run Qwen's export as a complete model, so it needs both.
    return [layout.embedding] if config.tie_word_embeddings else [layout.embedding, layout.head]


def belongs_to_checkpoint(name: str) -> bool:
    """Returns whether a file other than the weights belongs to a checkpoint and is copied to an export.

    Returns:
        True for tokenizer, chat template, generation settings, licence, and code that `config.json` may name.
    """
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in CHECKPOINT_FILES)


def is_export(path: pathlib.Path) -> bool:
    """Returns whether a folder is an export, which a later one may replace."""
    return (path / WEIGHTS).is_file()


def _entry(files: CheckpointFiles, plan: LoadPlan, new: str, name: str) -> TensorEntry:
    """Makes the entry of an exported tensor: fp8 with scales becomes bfloat16, other dtypes stay."""
    tensor = files.tensors[name]
    return TensorEntry(new, BF16 if name in plan.scales.names else tensor.dtype, tensor.shape)


def _edit_config(values: dict[str, Any], plan: LoadPlan) -> dict[str, Any]:
    """Makes the export's `config.json`: a model whose only layers are the modules."""
    # Engines read the number of layers, and pick the class by `architectures` and `model_type`.
    count = plan.config.num_mtp_modules
    family = plan.model_type.removesuffix("_text")
    sizes = {"num_hidden_layers": count, "num_nextn_predict_layers": count}
    values = {**values, **sizes, "first_k_dense_replace": 0, "quantization_config": ""}
    values["architectures"] = [ARCHITECTURES.get(family, "MtpForCausalLM")]
    values["model_type"] = f"{family}_mtp"
    # Modules whose embedding or head is not a copy of the trunk's: a merge keeps these, and leaves out mere copies.
    if plan.config.mtp_own_embedding:
        values["mtp_use_dedicated_embeddings"] = True
    if plan.config.mtp_own_head:
        values["mtp_use_dedicated_head"] = True
    # Qwen: modules have full attention, and multimodal configurations nest the sizes.
    if plan.layout.is_under_mtp:
        values["mtp_num_hidden_layers"] = count
        kinds = {"mtp_num_hidden_layers": count, "layer_types": ["full_attention"] * count}
        if "text_config" in values:
            values["text_config"] = {**values["text_config"], "num_hidden_layers": count, **kinds}
        else:
            values |= kinds
    # GLM-5.2: one module runs several times, and reuses the tokens that its indexer has selected.
    if plan.config.index_topk and values.get("index_share_for_mtp_iteration"):
        frequency = values.get("index_topk_freq") or 0
        shared = {"index_topk_freq": max(frequency, 2), "index_skip_topk_offset": 0, "index_topk_pattern": "S"}
        shared["indexer_types"] = ["full"]
        values |= {key: value for key, value in shared.items() if key in values}
    return values


def _rename_described(described: dict[str, Any], config: ModelConfig, layout: Layout) -> dict[str, Any]:
    """Renames the tensors in Ascend's list; entries that are not about tensors stay."""
    # Entries about other layers are dropped, like the tensors themselves.
    kept = {}
    for name, value in described.items():
        new = exported_name(name, config, layout) if name.endswith((".weight", ".bias", "_scale", "_offset")) else name
        if new is not None:
            kept[new] = value
    return kept


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line of this file, which has the flags of xLLM's script.

    Args:
        arguments: the arguments; those of the process by default.

    Returns:
        The exit code: 0, or 3 for a checkpoint that cannot be exported.
    """
    parser = argparse.ArgumentParser(prog="python -m conversion.export_mtp", description=__doc__)
    parser.add_argument("--input-dir", required=True, help="a full Hugging Face checkpoint")
    parser.add_argument("--output-dir", required=True, help="folder to write; it appears only when it is complete")
    parser.add_argument("--model-type", default=None, help="use this family instead of the one in config.json")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # Print one line for a faulty checkpoint; anything else is a bug and keeps its traceback.
    try:
        export_mtp(options.input_dir, options.output_dir, model_type=options.model_type)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
