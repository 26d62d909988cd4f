"""GGUF files of golden checkpoints, as llama.cpp's converters write them, with the `gguf` package."""

import pathlib
import re

import numpy as np

from conversion.files import CheckpointFiles
from conversion.fp8_blocks import dequantized_blocks
from conversion.load_plan import make_plan

# What gguf 0.19 does not yet list for deepseek2.
NEXTN = {
    **{name: f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"shared_head.{name}": f"nextn.shared_head_{name}" for name in ("head", "norm")},
}


def write_gguf(
    source, path, *, kind="F32", is_split=True, modules=True, change=None, with_tensors=None
) -> pathlib.Path:
    """Writes a DeepSeek-V3 or GLM-4.5 checkpoint.

    `is_split` splits `kv_b_proj` as today's converters do. `modules` False leaves the MTP modules out, as llama.cpp's
    `--no-mtp` does. `change` may edit the writer's keys, and `with_tensors` the tensors by their names in the file.
    """
    import gguf

    with CheckpointFiles(source) as files:
        plan = make_plan(files)
        config = files.json("config.json")
        scales = set(plan.scales.names.values())
        weights = {
            name: np.concatenate(list(dequantized_blocks(files, plan.scales, name, np.float32))).astype(np.float32)
            for name in files.tensors
            if name not in scales
        }
    is_latent = config["model_type"] == "deepseek_v3"
    architecture = "deepseek2" if is_latent else "glm4moe"
    count = config["num_nextn_predict_layers"] if modules else 0
    blocks = config["num_hidden_layers"] + count
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH["DEEPSEEK2" if is_latent else "GLM4_MOE"], blocks)
    writer = gguf.GGUFWriter(path, architecture)
    _write_keys(gguf, writer, config, blocks, count, is_latent, is_split)
    if change is not None:
        change(writer)
    tensors = {}
    for name, array in _converted(weights, config, is_latent and is_split).items():
        layer = re.match(r"model\.layers\.(\d+)\.(.*)\.(weight|bias)$", name)
        if layer and int(layer[1]) >= blocks:
            continue
        if layer and layer[2] in NEXTN:
            stored = f"blk.{layer[1]}.{NEXTN[layer[2]]}.{layer[3]}"
        else:
            stored = names.get_name(name, (".weight", ".bias"))
        assert stored is not None, name
        tensors[stored] = array
    if with_tensors is not None:
        tensors = with_tensors(tensors)
    for name, array in tensors.items():
        # llama.cpp keeps norms and routers in float32, and rows that its blocks do not divide.
        of = gguf.GGMLQuantizationType[kind]
        if array.ndim == 1 or "ffn_gate_inp" in name or array.shape[-1] % gguf.GGML_QUANT_SIZES[of][0]:
            of = gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return pathlib.Path(path)


def _write_keys(gguf, writer, config, blocks: int, count: int, is_latent: bool, is_split: bool) -> None:
    """Writes the metadata that `set_gguf_parameters` of llama.cpp writes."""
    writer.add_block_count(blocks)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config["rope_theta"]))
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if count:
        writer.add_nextn_predict_layers(count)
    if not is_latent:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
        return
    key_length = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    if is_split:
        writer.add_head_count_kv(1)
        writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(key_length)
        writer.add_value_length_mla(config["v_head_dim"])
    else:
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(key_length)
        writer.add_value_length(config["v_head_dim"])
    scaling = config["rope_scaling"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def _converted(weights, config, is_split: bool) -> dict[str, np.ndarray]:
    """Stacks experts, splits `kv_b_proj`, and renames the router's bias, as `modify_tensors` of llama.cpp does."""
    made, stacks = {}, {}
    for name, array in weights.items():
        expert = re.match(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight$", name)
        if expert:
            stacks.setdefault(f"{expert[1]}.{expert[3]}.weight", {})[int(expert[2])] = array
        elif name.endswith("kv_b_proj.weight") and is_split:
            heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
            keys, values = np.split(array.reshape(heads, -1, array.shape[-1]), [nope], axis=1)
            made[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(0, 2, 1)
            made[name.replace("kv_b_proj", "v_b_proj")] = values
        else:
            made[name.replace("e_score_correction_bias", "e_score_correction.bias")] = array
    return made | {name: np.stack([found[e] for e in sorted(found)]) for name, found in stacks.items()}
