"""Exports a Hugging Face checkpoint's MTP modules as a separate checkpoint, in the layout of xLLM's export script.

    python -m conversion.export_mtp --input-dir DIR --output-dir DIR [--model-type TYPE]

Inference engines load such an export as a draft model. Unlike xLLM's script, this one supports Qwen3-Next and several
modules, dequantizes fp8 for every family with the block size from the configuration, checks names and shapes, keeps
only a few blocks in memory, and runs no remote code.
"""

import argparse
import fnmatch
import json
import logging
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from conversion.families import Layout
from conversion.files import CheckpointFiles
from conversion.fp8_blocks import dequantized_blocks
from conversion.gguf_files import open_checkpoint
from conversion.load_plan import LoadPlan, make_plan
from conversion.names import EXPORT_FILE, exported_name, shared_tensors
from conversion.safetensors_header import BF16
from conversion.shards import TensorEntry, copy_files, entry_of, make_shard, write_index, write_shards
from mtpjax.atomic import atomic_folder
from mtpjax.errors import CheckpointError, CheckpointFileError
from mtpjax.models.config import ModelConfig

ASCEND_QUANTIZATION = "quant_model_description.json"  # Ascend's list of quantized tensors, by name
# The usual names of small files that belong to a checkpoint. Other files, such as plots, logs, results and the
# description of the whole model, are not copied.
CHECKPOINT_FILES = (
    *("generation_config.json", "tokenizer*.json", "tokenizer.model", "tiktoken.model", "*.tiktoken"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.*", "additional_chat_templates/*.jinja", "*processor_config.json", "LICENSE*"),
    "quant_model_description*.json",
    *("configuration_*.py", "modeling_*.py", "tokenization_*.py"),  # the code that auto_map refers to
)

# The architecture that engines use for an export. It is "MtpForCausalLM" for families that are not listed.
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
    """Writes a checkpoint's MTP modules to a folder.

    Args:
        source: a full Hugging Face checkpoint.
        target: the folder to write, which appears only when it is complete. An older export is replaced.
        model_type: the family to use instead of the one in `config.json`.
        progress: called with the size in bytes of each written block.

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
                f"{files.path} has no MTP modules: config.json states none (num_nextn_predict_layers, "
                "mtp_num_hidden_layers), and the files contain none"
            )
        # Choose the modules' tensors and their new names. Omit scales, because fp8 becomes bfloat16.
        sources = {}  # new name -> name in the checkpoint
        for name in files.tensors:
            new = exported_name(name, config, plan.layout)
            if new is not None and name not in plan.scales.names.values():
                sources[new] = name
        if plan.layout.is_under_mtp:
            sources |= {name: name for name in shared_tensors(config, plan.layout)}
        entries = []
        for new, name in sorted(sources.items()):
            dtype = BF16 if name in plan.scales.names else files.tensors[name].dtype
            entries.append(TensorEntry(new, dtype, files.tensors[name].shape))
        shards = [make_shard(EXPORT_FILE, entries, {"format": "pt"})]
        content = _edit_config(files.json("config.json"), plan)

        # Write the tensors, copy the checkpoint's small files, and replace the files that describe the weights.
        blocks = lambda entry: dequantized_blocks(files, plan.scales, sources[entry.name])
        with atomic_folder(pathlib.Path(target).resolve(), is_export) as folder:
            write_shards(folder, shards, blocks, progress)
            copy_files(folder, files.bytes_of, filter(belongs_to_checkpoint, files.other_files()))
            write_index(folder, shards)
            (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
            if (folder / ASCEND_QUANTIZATION).is_file():
                described = _rename_described(files.json(ASCEND_QUANTIZATION), config, plan.layout)
                (folder / ASCEND_QUANTIZATION).write_text(json.dumps(described, indent=2) + "\n")
            # Read the export back before it is renamed into place.
            with CheckpointFiles(folder) as written:
                assert [entry_of(tensor) for _, tensor in sorted(written.tensors.items())] == entries
        return config.num_mtp_modules


def belongs_to_checkpoint(name: str) -> bool:
    """Returns whether an export includes a file, such as tokenizer, chat template, generation settings or code."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in CHECKPOINT_FILES)


def is_export(path: pathlib.Path) -> bool:
    """Returns whether a folder is an export, which a later one may replace."""
    return (path / EXPORT_FILE).is_file()


def _edit_config(values: dict[str, Any], plan: LoadPlan) -> dict[str, Any]:
    """Makes the export's `config.json`, which describes a model whose only layers are the modules."""
    # Engines read the number of layers, and choose the class by `architectures` and `model_type`.
    count = plan.config.num_mtp_modules
    family = plan.model_type.removesuffix("_text")
    sizes = {"num_hidden_layers": count, "num_nextn_predict_layers": count}
    values = {**values, **sizes, "first_k_dense_replace": 0, "quantization_config": ""}
    values["architectures"] = [ARCHITECTURES.get(family, "MtpForCausalLM")]
    values["model_type"] = f"{family}_mtp"
    # These keys make a merge keep the modules' embedding or head if it differs from the trunk's. A merge omits copies.
    if plan.config.mtp_own_embedding:
        values["mtp_use_dedicated_embeddings"] = True
    if plan.config.mtp_own_head:
        values["mtp_use_dedicated_head"] = True
    # Qwen's modules have full attention, and multimodal configurations nest the sizes.
    if plan.layout.is_under_mtp:
        values["mtp_num_hidden_layers"] = count
        kinds = {"mtp_num_hidden_layers": count, "layer_types": ["full_attention"] * count}
        if "text_config" in values:
            values["text_config"] = {**values["text_config"], "num_hidden_layers": count, **kinds}
        else:
            values |= kinds
    # GLM-5.2's module runs several times, and reuses the tokens that its indexer selected in the first run.
    if plan.config.index_topk and values.get("index_share_for_mtp_iteration"):
        frequency = values.get("index_topk_freq") or 0
        shared = {"index_topk_freq": max(frequency, 2), "index_skip_topk_offset": 0, "index_topk_pattern": "S"}
        shared["indexer_types"] = ["full"]
        values |= {key: value for key, value in shared.items() if key in values}
    return values


def _rename_described(described: dict[str, Any], config: ModelConfig, layout: Layout) -> dict[str, Any]:
    """Renames the tensors in Ascend's list, and drops the trunk's tensors."""
    kept = {}
    for name, value in described.items():
        new = exported_name(name, config, layout) if name.endswith((".weight", ".bias", "_scale", "_offset")) else name
        if new is not None:
            kept[new] = value
    return kept


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line, which has the same flags as xLLM's script. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m conversion.export_mtp", description=__doc__)
    parser.add_argument("--input-dir", required=True, help="a full Hugging Face checkpoint")
    parser.add_argument("--output-dir", required=True, help="folder to write, which appears once it is complete")
    parser.add_argument("--model-type", default=None, help="family to use instead of the one in config.json")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # Report a faulty checkpoint in one line. Any other error keeps its traceback.
    try:
        export_mtp(options.input_dir, options.output_dir, model_type=options.model_type)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
