"""The MTP modules of a Hugging Face checkpoint as a checkpoint of their own, laid out as xLLM's script does.

    python -m conversion.export_mtp --input-dir DIR --output-dir DIR [--model-type TYPE]

Beyond that script: Qwen3-Next, several modules, fp8 of every family dequantised by the configuration's own blocks,
shapes and names checked before and after, a few blocks in memory at once, and no remote code.
"""

import argparse
import json
import logging
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conversion import load
from conversion.files import BLOCK, INDEX, CheckpointFileError, Files
from conversion.names import Layout
from conversion.shards import Entry, copy_files, entry_of, index_of, shard, write_shards
from mtpjax.atomic import new_folder
from mtpjax.errors import CheckpointError
from mtpjax.models.config import ModelConfig

WEIGHTS = "mtp_layer_parameters.safetensors"
ASCEND = "quant_model_description.json"  # which tensors Ascend's tools have quantised, by name
AROUND = ("embed_tokens.", "shared_head.", "enorm.", "hnorm.", "eh_proj.")  # tensors around a module's decoder layer

ARCHITECTURES = {
    "deepseek_v3": "DeepseekMTPForCausalLM",
    "deepseek_v32": "DeepseekV32MtpForCausalLM",
    "glm4_moe": "Glm4MoeMtpForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaMtpForCausalLM",
    "mimo": "MiMoMtpForCausalLM",
    "qwen3_5": "Qwen3_5MtpForCausalLM",
    "qwen3_5_moe": "Qwen3_5MtpForCausalLM",
}


def export(source, target, *, model_type: str | None = None, progress: Callable[[int], Any] | None = None) -> int:
    """Writes the modules of `source` to the folder `target`; returns how many there are.

    Raises `CheckpointFileError` for a checkpoint without modules, or one that is damaged; `hf_config.ConfigError`.
    """
    with Files(source) as files:
        made = load.plan(files, model_type=model_type, allow_extra=True)
        config = made.config
        if not config.num_mtp_modules:
            raise CheckpointFileError(
                f"{files.path} has no MTP modules: neither num_nextn_predict_layers nor mtp_num_hidden_layers names "
                "one, nor do the files hold any"
            )
        names = {}  # as written -> as read
        for name in files.tensors:
            new = exported_name(name, config, made.layout)
            if new is not None and name not in made.scales.values():
                names[new] = name
        if made.layout.mtp == "mtp":
            names |= {name: name for name in shared_tensors(config, made.layout)}
        entries = [
            Entry(new, load.BF16 if name in made.scales else files.tensors[name].dtype, files.tensors[name].shape)
            for new, name in sorted(names.items())
        ]
        shards = [shard(WEIGHTS, entries, {"format": "pt"})]
        content = edited_config(files.json("config.json"), made)

        with new_folder(pathlib.Path(target).resolve(), is_export) as folder:
            write_shards(folder, shards, lambda entry: dequantised_blocks(files, made, names[entry.name]), progress)
            copy_files(folder, files.bytes_of, [name for name in files.others() if name not in (INDEX, "config.json")])
            (folder / INDEX).write_bytes(index_of(shards))
            (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
            if (folder / ASCEND).is_file():
                described = _rename_described(files.json(ASCEND), config, made.layout)
                (folder / ASCEND).write_text(json.dumps(described, indent=2) + "\n")
            with Files(folder) as written:
                assert [entry_of(tensor) for _, tensor in sorted(written.tensors.items())] == entries
        return config.num_mtp_modules


def exported_name(name: str, config: ModelConfig, layout: Layout) -> str | None:
    """What a tensor of an MTP module is called in an export; None for other tensors.

    A module's decoder layer becomes `model.layers.<module>`. What stands around the layer goes up to `model.` where
    there is one module, and stays with its layer where there are several (which xLLM's script refuses).
    """
    if layout.mtp == "mtp":
        return name if name.startswith(("mtp.", "model.mtp.")) else None
    if layout.mtp == "mimo":
        return name if name.startswith(f"{layout.trunk}mtp_layers.") else None
    if name == "rot.weight":
        return "model.rot.weight"
    found = re.fullmatch(rf"{re.escape(layout.trunk)}layers\.(\d+)\.(.+)", name)
    if found is None or int(found[1]) < config.num_hidden_layers:
        return None
    if config.num_mtp_modules == 1 and found[2].startswith(AROUND):
        return f"model.{found[2]}"
    return f"model.layers.{int(found[1]) - config.num_hidden_layers}.{found[2]}"


def original_name(name: str, config: ModelConfig, layout: Layout) -> str:
    """The inverse of `exported_name`, for the tensors of an export."""
    if layout.mtp != "layers":
        return name
    if name == "model.rot.weight":
        return "rot.weight"
    found = re.fullmatch(r"model\.(?:layers\.(\d+)\.)?(.+)", name)
    if found is None:
        raise CheckpointFileError(f"tensor {name} is of no MTP module")
    return f"{layout.trunk}layers.{config.num_hidden_layers + int(found[1] or 0)}.{found[2]}"


def shared_tensors(config: ModelConfig, layout: Layout) -> list[str]:
    """What Qwen's exports hold beside the modules: the trunk's embedding and head."""
    embedding = f"{layout.trunk}embed_tokens.weight"
    return [embedding] if config.tie_word_embeddings else [embedding, "lm_head.weight"]


def dequantised_blocks(files: Files, made: load.Plan, name: str, dtype=load.BF16) -> Iterator[np.ndarray]:
    """A tensor by blocks of rows, in `dtype` where the files hold scaled fp8."""
    if name not in made.scales:
        yield from files.blocks(name)
        return
    assert made.block is not None
    rows, columns = files.tensors[name].shape
    side = made.block[0]
    step = max(1, BLOCK // (side * columns * 4)) * side
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        scales = files.read(made.scales[name], begin // side, -(-end // side)).astype(np.float32)
        scales = np.repeat(scales, side, axis=0)[: end - begin]
        yield load.dequantise(files.read_checked(name, begin, end), scales, 1, made.block[1], 0).astype(dtype)


def edited_config(values: dict[str, Any], made: load.Plan) -> dict[str, Any]:
    """The export's `config.json`: a model whose only layers are the modules."""
    count = made.config.num_mtp_modules
    base = made.model_type.removesuffix("_text")
    sizes = {"num_hidden_layers": count, "num_nextn_predict_layers": count}
    values = {**values, **sizes, "first_k_dense_replace": 0, "quantization_config": ""}
    values["architectures"] = [ARCHITECTURES.get(base, "MtpForCausalLM")]
    values["model_type"] = f"{base}_mtp"
    if made.layout.mtp == "mtp":
        values["mtp_num_hidden_layers"] = count
        kinds = {"mtp_num_hidden_layers": count, "layer_types": ["full_attention"] * count}
        if "text_config" in values:
            values["text_config"] = {**values["text_config"], "num_hidden_layers": count, **kinds}
        else:
            values |= kinds
    if made.config.index_topk and values.get("index_share_for_mtp_iteration"):
        frequency = values.get("index_topk_freq") or 0
        shared = {"index_topk_freq": max(frequency, 2), "index_skip_topk_offset": 0, "index_topk_pattern": "S"}
        shared["indexer_types"] = ["full"]
        values |= {key: value for key, value in shared.items() if key in values}
    return values


def is_export(path: pathlib.Path) -> bool:
    """Whether `path` is a folder that a later export may replace."""
    return (path / WEIGHTS).is_file()


def _rename_described(described: dict[str, Any], config: ModelConfig, layout: Layout) -> dict[str, Any]:
    kept = {}
    for name, value in described.items():
        new = exported_name(name, config, layout) if name.endswith((".weight", ".bias", "_scale", "_offset")) else name
        if new is not None:
            kept[new] = value
    return kept


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line of this file, which takes the flags of xLLM's script.

    Args:
      arguments: the arguments; those of the process by default.

    Returns:
      The exit code: 0, or 3 for a checkpoint that cannot be exported.
    """
    parser = argparse.ArgumentParser(prog="python -m conversion.export_mtp", description=__doc__)
    parser.add_argument("--input-dir", required=True, help="a full Hugging Face checkpoint")
    parser.add_argument("--output-dir", required=True, help="folder to write; it appears complete or not at all")
    parser.add_argument("--model-type", default=None, help="use this family instead of the one in config.json")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        export(options.input_dir, options.output_dir, model_type=options.model_type)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
