"""Converts a GGUF file's metadata to a `config.json`."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from conversion.gguf_header import GGUFHeader
from mtpjax.errors import ConfigError
from mtpjax.messages import count_of

ROPE_FACTORS = "rope_freqs.weight"
MAX_EXPERTS = 1 << 17  # the maximum number of expert matrices; Kimi-K2 has 69,000
SIGMOID = 2  # llama.cpp's number for the router's scoring function
# Keys that would change every logit. For each, the only supported value is the one without an effect.
NEUTRAL = {
    **{"attention.scale": 0.0, "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attention.causal": True},
    **{"logit_scale": 0.0, "residual_scale": 0.0, "embedding_scale": 0.0, "attention.sliding_window": 0},
    **{"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0},
}


class Metadata:
    """Reads and checks a file's metadata. Keys are passed without the architecture's prefix."""

    def __init__(self, header: GGUFHeader):
        """Checks the architecture.

        Raises:
            ConfigError: the architecture is not supported.
        """
        name = header.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise ConfigError(f"unsupported GGUF architecture {name!r}; supported: {', '.join(ARCHITECTURES)}")
        self.header, self.architecture = header, name

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value or the default. Without a default, the key is required. Raises `ConfigError` for arrays."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ConfigError(f"the GGUF file lacks {self.architecture}.{key}")
        if isinstance(value, (list, np.ndarray)):
            raise ConfigError(f"{self.architecture}.{key} is an array of {len(value)} values; supported: one value")
        return value

    def error(self, key: str, problem: str) -> ConfigError:
        """Makes an error whose message has the key and the value, followed by the problem."""
        return ConfigError(f"{self.architecture}.{key} is {self.get(key)!r}{problem}")

    def integer(self, key: str, default: int | None = None, *, low: int = 0) -> int:
        """Returns an integer of at least `low`. Without a default, the key is required."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{self.architecture}.{key} is {value!r}; supported: one integer of at least {low}")
        return value


def describe_config(
    header: GGUFHeader, tokens: dict[str, Any], rope_factors: np.ndarray | None = None
) -> dict[str, Any]:
    """Converts a file's metadata to a `config.json`, whose values `conversion.hf_config` checks.

    Args:
        tokens: other keys for the `config.json`, such as the end tokens.
        rope_factors: the tensor `rope_freqs.weight`, if the file has one.

    Raises:
        ConfigError: the architecture is not supported, a value is missing, or the file is one of several parts.
    """
    # Only the first part describes the model.
    parts = header.metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise ConfigError(f"the GGUF file is one of {parts} parts: join them first (llama-gguf-split --merge)")
    data = Metadata(header)
    model_type, attention, has_experts = ARCHITECTURES[data.architecture]
    for key, neutral in NEUTRAL.items():
        if data.get(key, neutral) != neutral:
            raise data.error(key, f"; supported: {neutral!r}")
    if data.get("expert_count", 0) and not has_experts:
        raise data.error("expert_count", f": experts are not supported in GGUF files of {data.architecture}")
    heads, width = data.integer("attention.head_count", low=1), data.integer("embedding_length", low=1)
    # Reject wrong counts before the names of all layers and experts are generated.
    blocks = data.integer("block_count", low=1)
    if blocks > len(header.tensors):
        raise data.error("block_count", f", but the file has {len(header.tensors)} tensors")
    # MTP modules are the last blocks, and llama.cpp includes them in the number of blocks.
    modules = data.integer("nextn_predict_layers", 0)
    if modules >= blocks:
        raise data.error("nextn_predict_layers", f", but block_count, which includes these layers, is {blocks}")
    # Some programs drop the modules but keep the key with their number, and all blocks then belong to the trunk.
    is_dropped = modules and not any(".nextn." in name for name in header.tensors)
    trunk = blocks if is_dropped and any(f"blk.{blocks - 1}." in name for name in header.tensors) else blocks - modules
    vocabulary = header.tensors.get("token_embd.weight")
    return {
        "model_type": model_type,
        "vocab_size": vocabulary.shape[0] if vocabulary else data.get("vocab_size"),
        "hidden_size": width,
        "intermediate_size": data.get("feed_forward_length"),
        "num_hidden_layers": trunk,
        **({"num_nextn_predict_layers": modules} if modules else {}),
        "num_attention_heads": heads,
        "max_position_embeddings": data.get("context_length"),
        "rms_norm_eps": data.get("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "attention_output_bias": "blk.0.attn_output.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_theta": data.get("rope.freq_base", 10000.0),
        **attention(data, heads, width, rope_factors),
        **(_experts(data) if has_experts else {}),
        **tokens,
    }


def _grouped(data: Metadata, heads: int, width: int, factors: np.ndarray | None) -> dict[str, Any]:
    """Reads grouped-query attention with fully rotated heads."""
    head_dim = data.get("attention.key_length", data.get("rope.dimension_count", width // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if data.get(key, head_dim) != head_dim:
            raise data.error(key, f", but the head size is {head_dim!r}: not supported")
    if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2:
        raise ConfigError(f"the head size is {head_dim!r}, not an even number")
    return {
        "num_key_value_heads": data.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_scaling": _rope_scaling(data, head_dim, factors),
    }


def _partial(data: Metadata, heads: int, width: int, factors: np.ndarray | None) -> dict[str, Any]:
    """Reads GLM-4.5's grouped-query attention, with partial rotation and optional query and key norms."""
    head_dim = data.integer("attention.key_length", width // heads, low=1)
    if data.get("attention.value_length", head_dim) != head_dim:
        raise data.error("attention.value_length", f", but the head size is {head_dim}: not supported")
    return {
        "num_key_value_heads": data.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "partial_rotary_factor": data.integer("rope.dimension_count", head_dim, low=2) / head_dim,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in data.header.tensors,
        "rope_scaling": _rope_scaling(data, head_dim, factors),
    }


def _latent(data: Metadata, heads: int, width: int, factors: np.ndarray | None) -> dict[str, Any]:
    """Reads multi-head latent attention.

    Files with a split `kv_b_proj` store the latent head size as `key_length`, and the model's head size as
    `key_length_mla`. Older files store only the model's head size, as `key_length`.
    """
    key = "attention.key_length_mla"
    rotated = data.integer("rope.dimension_count", low=1)
    key_length = data.integer(key, data.integer("attention.key_length"))
    if key_length <= rotated:
        raise ConfigError(
            f"{data.architecture}.{key} is {key_length}, but must be larger than rope.dimension_count "
            f"({rotated}), the size of its rotated part"
        )
    return {
        "q_lora_rank": data.integer("attention.q_lora_rank", 0),
        "kv_lora_rank": data.integer("attention.kv_lora_rank", low=1),
        "qk_nope_head_dim": key_length - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": data.integer("attention.value_length_mla", data.integer("attention.value_length")),
        "attention_bias": False,
        "rope_scaling": _rope_scaling(data, rotated, factors),
    }


def _experts(data: Metadata) -> dict[str, Any]:
    """Reads the mixture of experts, and checks that the stacked tensors have the same number of experts."""
    count, tensors = data.integer("expert_count", 0), data.header.tensors
    if not count:
        return {}
    stacks = [tensor for name, tensor in tensors.items() if name.endswith("_exps.weight")]
    for tensor in stacks:
        if len(tensor.shape) != 3 or tensor.shape[0] != count:
            shapes = f"has shape {list(tensor.shape)}, not [{count}, rows, columns]"
            raise data.error("expert_count", f", but tensor {tensor.name!r} {shapes}")
    if not stacks or count * len(stacks) > MAX_EXPERTS:
        supported = f"at least one stack and at most {MAX_EXPERTS} matrices"
        raise data.error(
            "expert_count", f", and the file has {count_of(len(stacks), 'stack')} of experts; supported: {supported}"
        )
    scoring = data.get("expert_gating_func", 0)
    if scoring != SIGMOID:
        raise ConfigError(
            f"{data.architecture}.expert_gating_func is {scoring!r}; supported: {SIGMOID} (sigmoid), as in "
            "DeepSeek-V3 and GLM-4.5"
        )
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": data.get("expert_used_count"),
        "moe_intermediate_size": data.get("expert_feed_forward_length"),
        "n_shared_experts": data.get("expert_shared_count", 0),
        # Files from older converters have no groups, and llama.cpp then chooses among all experts.
        "n_group": data.integer("expert_group_count", 0) or 1,
        "topk_group": data.integer("expert_group_used_count", 0) or 1,
        "norm_topk_prob": data.get("expert_weights_norm", False),
        "routed_scaling_factor": data.get("expert_weights_scale", 0) or 1.0,
        "first_k_dense_replace": data.get("leading_dense_block_count", 0),
    }


def _rope_scaling(data: Metadata, head_dim: int, factors: np.ndarray | None) -> dict[str, Any] | None:
    """Reads rotary scaling from the metadata, or from Llama 3.1's frequency factors."""
    if factors is not None:
        return _llama3_scaling(np.asarray(factors, np.float64), data.get("rope.freq_base", 10000.0), head_dim)
    # As in llama.cpp, a factor without a type means linear scaling. Old files store it under a different key.
    kind = data.get("rope.scaling.type", "linear")
    factor = data.get("rope.scaling.factor", data.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    # Settings that replace YaRN's factors would change every logit, so they must not be ignored.
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if data.get(f"rope.scaling.{key}", 1.0) != 1.0:
            raise data.error(f"rope.scaling.{key}", "; supported: 1.0")
    original = data.get("rope.scaling.original_context_length", data.get("context_length"))
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    betas = {name: data.get(f"rope.scaling.yarn_{name}", 0) for name in ("beta_fast", "beta_slow")}
    scaling |= {name: value for name, value in betas.items() if value}
    # llama.cpp stores 0.1 times DeepSeek's `mscale_all_dim`, and assumes an equal `mscale`, as in published models.
    log_multiplier = data.get("rope.scaling.yarn_log_multiplier", 0.0)
    if not isinstance(log_multiplier, float) or not math.isfinite(log_multiplier):
        raise data.error("rope.scaling.yarn_log_multiplier", ", not a finite number")
    if log_multiplier:
        mscale = round(10 * log_multiplier, 6)  # removes the error of the file's float32
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    return scaling


def _llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Recovers Llama 3.1's settings from the frequency factors, which are all that the file stores."""
    if factors.shape != (head_dim // 2,) or not isinstance(theta, (int, float)) or not theta > 0:
        raise ConfigError(
            f"{ROPE_FACTORS} has shape {list(factors.shape)} and rope.freq_base is {theta!r}: not supported"
        )
    # llama3 scaling divides the lowest frequencies by the full scaling factor, which is therefore the largest stored
    # factor. The other settings are the same in all Llama releases that use this scaling.
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    wavelengths = 2 * math.pi * float(theta) ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-4):
        raise ConfigError(f"{ROPE_FACTORS} differs from Llama 3.1's factors: not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


Attention = Callable[[Metadata, int, int, np.ndarray | None], dict[str, Any]]
# GGUF architecture -> (`model_type`, attention reader, whether layers may have experts).
ARCHITECTURES: dict[str, tuple[str, Attention, bool]] = {
    "llama": ("llama", _grouped, False),
    "qwen3": ("qwen3", _grouped, False),
    "deepseek2": ("deepseek_v3", _latent, True),
    "glm4moe": ("glm4_moe", _partial, True),
}
