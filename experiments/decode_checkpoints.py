"""The models that `bench_decode` measures, as small Hugging Face checkpoints that every engine reads.

Two checkpoints per shape. `random`: seeded noise, on which engines must agree token for token. `rigged`: the same
shapes, so the same work per token, but every block adds nothing and every MTP module passes on the embedding it is
given, so that whatever it drafts is right. Then the next token is a fixed permutation of the last (with a tied
head: the last token again), and the accept length is `num_steps + 1`.
"""

import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from mtpjax import ModelConfig

_LLAMA: dict[str, Any] = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "num_mtp_modules": 1}
_DEEPSEEK: dict[str, Any] = {
    "attention": "latent",
    "max_position_embeddings": 2048,
    "num_mtp_modules": 1,
    "rope_interleave": True,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "router_correction_bias": True,
    "routed_scaling_factor": 2.5,
}
SHAPES = {
    "S": ModelConfig(
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1536,
        **_LLAMA,
    ),
    "M": ModelConfig(
        vocab_size=16384,
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=4096,
        **_LLAMA,
    ),
    "D": ModelConfig(
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=1536,
        q_lora_rank=256,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
        **_DEEPSEEK,
    ),
    "tiny": ModelConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        **_DEEPSEEK,
    ),
}


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that transformers reads."""
    names = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    names += ["max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta"]
    if config.attention == "latent":
        names += [
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "rope_interleave",
        ]
        names += ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"]
        names += ["n_group", "first_k_dense_replace", "topk_group", "norm_topk_prob", "routed_scaling_factor"]
        kind = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
        kind |= {"num_key_value_heads": config.num_attention_heads, "num_nextn_predict_layers": config.num_mtp_modules}
    else:
        names += ["num_key_value_heads", "head_dim"]
        kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    ends = {"bos_token_id": None, "eos_token_id": None, "torch_dtype": "float32", "hidden_act": "silu"}
    return {**kind, **{name: getattr(config, name) for name in names}, **ends}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint; matrices are `[out, in]`, one-dimensional ones are norms but for the bias."""
    D, V = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (V, D)
    for layer in range(config.num_hidden_layers + config.num_mtp_modules):
        is_mtp = layer >= config.num_hidden_layers
        own = {"input_layernorm": (D,), "post_attention_layernorm": (D,), **_attention_shapes(config)}
        own |= _feed_forward_shapes(config, is_moe=(config.mtp_kind if is_mtp else config.layer_kind(layer)).is_moe)
        if is_mtp:
            own |= {"enorm": (D,), "hnorm": (D,), "eh_proj": (D, 2 * D), "shared_head.norm": (D,)}
        for name, shape in own.items():
            end = "" if name.endswith("bias") else ".weight"
            shapes[f"model.layers.{layer}.{name}{end}"] = shape
    return shapes


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    D, N = config.hidden_size, config.num_attention_heads
    if config.attention == "grouped":
        K, H = config.num_key_value_heads, config.head_dim
        shapes = {"q_proj": (N * H, D), "k_proj": (K * H, D), "v_proj": (K * H, D), "o_proj": (D, N * H)}
    else:
        Q, R, P = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
        C, V = config.qk_nope_head_dim, config.v_head_dim
        shapes = {"q_a_proj": (Q, D), "q_a_layernorm": (Q,), "q_b_proj": (N * (C + P), Q), "o_proj": (D, N * V)}
        shapes |= {"kv_a_proj_with_mqa": (R + P, D), "kv_a_layernorm": (R,), "kv_b_proj": (N * (C + V), R)}
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _feed_forward_shapes(config: ModelConfig, *, is_moe: bool) -> dict[str, tuple[int, ...]]:
    D, E = config.hidden_size, config.n_routed_experts

    def swiglu(prefix: str, F: int) -> dict[str, tuple[int, ...]]:
        return {f"{prefix}gate_proj": (F, D), f"{prefix}up_proj": (F, D), f"{prefix}down_proj": (D, F)}

    if not is_moe:
        return swiglu("mlp.", config.intermediate_size)
    shapes = {"mlp.gate": (E, D), "mlp.gate.e_score_correction_bias": (E,)}
    shapes |= swiglu("mlp.shared_experts.", config.moe_intermediate_size * config.n_shared_experts)
    for expert in range(E):
        shapes |= swiglu(f"mlp.experts.{expert}.", config.moe_intermediate_size)
    return shapes


def bytes_per_round(config: ModelConfig, batch: int, num_steps: int, length: float) -> float:
    """Bytes of float32 weights and caches that one verifying pass and its drafts must read."""
    sizes = {name: 4 * float(np.prod(shape)) for name, shape in tensor_shapes(config).items()}
    table = sizes["model.embed_tokens.weight"]

    def layer(index: int, rows: int) -> float:
        own = {name: size for name, size in sizes.items() if name.startswith(f"model.layers.{index}.")}
        experts = sum(size for name, size in own.items() if "mlp.experts." in name)
        missed = (1 - config.num_experts_per_tok / config.n_routed_experts) ** rows if config.is_moe else 0
        if config.attention == "latent":
            entry = config.kv_lora_rank + config.qk_rope_head_dim
        else:
            entry = 2 * config.num_key_value_heads * config.head_dim
        return sum(own.values()) - missed * experts + 4 * batch * length * entry

    rows = batch * (num_steps + 1)
    trunk = table + sum(layer(index, rows) for index in range(config.num_hidden_layers))  # the head is a table's size
    levels = (rows, *[batch] * (num_steps - 1))[:num_steps]
    drafts = sum(table + layer(config.num_hidden_layers, rows) for rows in levels)
    return trunk + drafts


def write_checkpoint(folder: pathlib.Path, config: ModelConfig, *, rigged: bool, seed: int = 0) -> None:
    """Writes `config.json` and `model.safetensors`, float32."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if name.endswith("bias"):
            tensors[name] = rng.uniform(-0.3, 0.1, shape).astype(np.float32)
        elif len(shape) == 1:
            tensors[name] = rng.uniform(0.8, 1.2, shape).astype(np.float32)
        elif rigged and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros(shape, np.float32)
        else:
            tensors[name] = rng.standard_normal(shape, np.float32) / np.sqrt(shape[1], dtype=np.float32)
    tensors["model.embed_tokens.weight"] *= 16  # logits far apart, so that rounding decides no token
    if rigged:
        _rig(tensors, config, rng)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(config), indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _rig(tensors: dict[str, np.ndarray], config: ModelConfig, rng: np.random.Generator) -> None:
    D = config.hidden_size
    for layer in range(config.num_mtp_modules):
        name = f"model.layers.{config.num_hidden_layers + layer}.eh_proj.weight"
        tensors[name] = np.concatenate([np.eye(D), np.zeros((D, D))], axis=1).astype(np.float32)
    if not config.tie_word_embeddings:
        cycle = rng.permutation(config.vocab_size)  # one cycle through the whole vocabulary: nothing repeats
        head = np.empty_like(tensors["lm_head.weight"])
        head[np.roll(cycle, -1)] = tensors["model.embed_tokens.weight"][cycle]
        tensors["lm_head.weight"] = head


def read_params(folder: pathlib.Path, config: ModelConfig) -> dict[str, Any]:
    """The checkpoint as mtpjax's parameters, numpy arrays."""
    tensors = load_file(folder / "model.safetensors")
    params: dict[str, Any] = {"embedding": tensors["model.embed_tokens.weight"]}
    params["norm_final"] = {"scale": tensors["model.norm.weight"]}
    if not config.tie_word_embeddings:
        params["head"] = tensors["lm_head.weight"].T
    layers = range(config.num_hidden_layers)
    params["trunk"] = {f"layer_{layer}": _block(tensors, f"model.layers.{layer}.", config) for layer in layers}
    for module in range(config.num_mtp_modules):
        prefix = f"model.layers.{config.num_hidden_layers + module}."
        names = {"norm_embedding": "enorm", "norm_hidden": "hnorm", "norm_output": "shared_head.norm"}
        params[f"mtp_{module}"] = {
            "project": tensors[f"{prefix}eh_proj.weight"].T,
            "block": _block(tensors, prefix, config),
            **{ours: {"scale": tensors[f"{prefix}{theirs}.weight"]} for ours, theirs in names.items()},
        }
    return params


def _block(tensors: dict[str, np.ndarray], prefix: str, config: ModelConfig) -> dict[str, Any]:
    def get(name: str) -> np.ndarray:
        return tensors[f"{prefix}{name}"]

    def swiglu(name: str) -> dict[str, np.ndarray]:
        pair = [get(f"{name}.{part}.weight").T for part in ("gate_proj", "up_proj")]
        return {"gate_up": np.stack(pair, axis=1), "down": get(f"{name}.down_proj.weight").T}

    block: dict[str, Any] = {
        "norm_attention": {"scale": get("input_layernorm.weight")},
        "norm_feed_forward": {"scale": get("post_attention_layernorm.weight")},
        "attention": _latent(get, config) if config.attention == "latent" else _grouped(get, config),
    }
    if f"{prefix}mlp.gate.weight" not in tensors:
        return {**block, "dense": swiglu("mlp")}
    routed = [swiglu(f"mlp.experts.{expert}") for expert in range(config.n_routed_experts)]
    experts = {name: np.stack([expert[name] for expert in routed]) for name in ("gate_up", "down")}
    experts |= {"router": get("mlp.gate.weight").T, "correction_bias": get("mlp.gate.e_score_correction_bias")}
    return {**block, "experts": {**experts, "shared": swiglu("mlp.shared_experts")}}


def _grouped(get, config: ModelConfig) -> dict[str, Any]:
    D, K, H = config.hidden_size, config.num_key_value_heads, config.head_dim
    parts = [get(f"self_attn.{name}.weight").reshape(K, -1, H, D) for name in ("q_proj", "k_proj", "v_proj")]
    return {"qkv": np.concatenate(parts, axis=1).transpose(3, 0, 1, 2), "output": get("self_attn.o_proj.weight").T}


def _latent(get, config: ModelConfig) -> dict[str, Any]:
    N, C, R = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
    up = get("self_attn.kv_b_proj.weight").reshape(N, -1, R)
    names = {"query_down": "q_a_proj", "query_up": "q_b_proj", "latent_down": "kv_a_proj_with_mqa", "output": "o_proj"}
    norms = {"norm_query": "q_a_layernorm", "norm_latent": "kv_a_layernorm"}
    return {
        **{ours: get(f"self_attn.{theirs}.weight").T for ours, theirs in names.items()},
        **{ours: {"scale": get(f"self_attn.{theirs}.weight")} for ours, theirs in norms.items()},
        "key_up": up[:, :C],
        "value_up": up[:, C:].transpose(0, 2, 1),
    }
