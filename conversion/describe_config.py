"""Writes an mtpjax model's `config.json` in the format of a family that transformers can load."""

import dataclasses
from typing import Any

from conversion.families import FAMILIES
from conversion.hf_config import parse_config
from conversion.rope import FULL, SLIDING, describe_scaling
from conversion.step_config import STEP
from mtpjax.errors import ConfigError
from mtpjax.models.config import ModelConfig
from mtpjax.models.rope_scaling import RopeScaling

# Families to try, simplest first, for models that were not converted from a checkpoint.
ORDER = (
    *("llama", "qwen3", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "mimo", "kimi_k2"),
    *("qwen3_moe", "glm4_moe_lite", "hy_v3", "ernie4_5_moe", "mimo_v2_flash", "step3p5"),
    "gpt_oss",
)
QWEN_HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
# These families list each layer's feed-forward type instead of the number of dense layers.
LISTS_FEED_FORWARD = ("glm4_moe_lite", "hy_v3", "mimo_v2_flash", "step3p5", "step3p7")
# Fields that are determined by the files or the tokenizer, not by `config.json`.
NOT_DESCRIBED = ("num_tokens", "mtp_own_embedding", "mtp_own_head")
# MTP module conventions, which are written if a model's conventions differ from its family's.
MTP_CONVENTIONS = (
    *("mtp_chaining", "mtp_input", "mtp_hidden_post_norm", "mtp_chain_post_norm", "mtp_mask_first"),
    *("mtp_dense", "mtp_output_norm", "mtp_layer_type", "mtp_norm_differs"),
)


def describe_config(config: ModelConfig, model_type: str | None = None) -> tuple[str, dict[str, Any]]:
    """Finds a family that can describe a model, and writes its `config.json`.

    Args:
        model_type: the family to use; by default, the first that fits.

    Returns:
        `(model_type, values)`, where `parse_config(values)` returns a config equal to `config`.

    Raises:
        ConfigError: no family can describe the model. The message lists what the closest family cannot express.
    """
    if model_type is not None and model_type not in FAMILIES:
        raise ConfigError(f"unsupported model_type {model_type!r}; supported: {', '.join(FAMILIES)}")
    # Try the families in order, and check each by parsing the values that it writes.
    nearest: list[str] | None = None
    for name in ORDER if model_type is None else (model_type,):
        values = _values(config, name)
        try:
            found = parse_config(values).model
        except ConfigError:
            continue
        differing = differing_fields(found, config) + _unsupported(config, name)
        if not differing:
            return name, values
        nearest = min(nearest or differing, differing, key=len)
    raise ConfigError(
        "no supported family can describe this model; the closest family cannot express "
        f"{', '.join(nearest) if nearest else 'the sizes'}"
    )


def differing_fields(found: ModelConfig, config: ModelConfig) -> list[str]:
    """Lists the fields in which two configurations differ, except those that `config.json` does not determine."""
    names = (field.name for field in dataclasses.fields(config) if field.name not in NOT_DESCRIBED)
    return [name for name in names if getattr(found, name) != getattr(config, name)]


def _unsupported(config: ModelConfig, model_type: str) -> list[str]:
    """Lists fields with values that mtpjax supports for a family but the family's transformers class does not."""
    is_moe = config.is_moe
    doubled = config.sliding_num_key_value_heads == 2 * config.num_key_value_heads
    dense = bool(config.mlp_only_layers or (is_moe and config.first_k_dense_replace))
    mixes_dense = ("qwen3_next", "qwen3_moe", *LISTS_FEED_FORWARD)
    rows: tuple[tuple[bool, str, Any], ...] = (
        (model_type in ("llama", "qwen3"), "n_routed_experts", config.n_routed_experts),
        (model_type == "llama", "use_qk_norm", config.use_qk_norm),
        # These mixture-of-experts classes do not support dense models.
        (model_type in ("qwen3_moe", "hy_v3", "ernie4_5_moe"), "n_routed_experts", not is_moe),
        # Qwen3-Next and a few others mix dense and expert layers; Qwen3.5 does not.
        (model_type.startswith("qwen3_5"), "mlp_only_layers", dense),
        (model_type not in mixes_dense, "mlp_only_layers", config.mlp_only_layers),
        (model_type in QWEN_HYBRID, "n_routed_experts", is_moe == (model_type in ("qwen3_5", "qwen3_5_text"))),
        # In MiMo-V2, layers with a window have attention sinks and twice as many key/value heads as the other layers.
        (model_type == "mimo_v2_flash", "sliding_num_key_value_heads", not doubled),
        (model_type == "mimo_v2_flash", "attention_sinks", config.attention_sinks != "sliding"),
        (model_type == "deepseek_v32", "indexer_types", "shared" in config.indexer_types),
    )
    return [field for is_family, field, is_wrong in rows if is_family and is_wrong]


def _values(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """Makes the `config.json` keys for the parts of the model."""
    family = FAMILIES[model_type]
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    # Keys that every family has.
    names = [*same, "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta"]
    names += ["partial_rotary_factor", "attention_bias", *(["use_qk_norm"] if config.use_qk_norm else [])]
    # Attention is latent (MLA) with an optional indexer, or grouped (GQA). Some layers may have linear attention.
    if config.attention == "latent":
        names += ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
        names += ["rope_interleave"]
    else:
        names += ["num_key_value_heads", "head_dim"]
    if config.index_topk:
        names += ["index_topk", "index_n_heads", "index_head_dim", "indexer_rope_interleave", "indexer_types"]
    if "linear_attention" in config.layer_types:
        names += [f"linear_{name}" for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")]
        names += ["linear_conv_kernel_dim", "layer_types"]
    values = {name: getattr(config, name) for name in names}
    values |= _experts(config, model_type)
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    # Add keys that differ from ModelConfig's fields, and keys that transformers needs because its default number of key
    # heads is different and it replaces an empty list of indexer types with a pattern.
    if config.attention == "latent":
        values["num_key_value_heads"] = config.num_attention_heads
    if config.index_topk and not config.indexer_types:
        values["indexer_types"] = ["full"] * config.num_hidden_layers
    if config.rope_scaling is not None:
        values["rope_scaling"] = describe_scaling(config.rope_scaling)
    if family.has_windows:
        values |= _windows(config, model_type)
    if config.linear_output_gate == "sigmoid":
        values["output_gate_type"] = "sigmoid"
    # The tokenizer determines the end tokens. Without these keys, transformers would use the family's defaults.
    head = {"architectures": [family.architecture], "model_type": model_type, "hidden_act": "silu", "dtype": "float32"}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    values = {**head, **ends, **values, **_modules(config, model_type)}
    return {family.keys.get(name, name): value for name, value in values.items()}


def _experts(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """Makes the keys for the mixture of experts and for dense layers."""
    # Without experts, transformers' mixture-of-experts classes need a key that makes all layers dense.
    if not config.is_moe:
        is_mixture = model_type not in ("llama", "qwen3", "mimo", *QWEN_HYBRID)
        return {"first_k_dense_replace": config.num_hidden_layers} if is_mixture else {}
    names = ["num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"]
    values: dict[str, Any] = {}
    if model_type in ("qwen3_moe", *QWEN_HYBRID):
        dense = (*range(config.first_k_dense_replace), *config.mlp_only_layers)
        values |= {"num_experts": config.n_routed_experts, "mlp_only_layers": dense, "decoder_sparse_step": 1}
        names += ["shared_expert_intermediate_size"] if model_type in QWEN_HYBRID else []
    else:
        names += ["n_routed_experts", "n_group", "topk_group", "n_shared_experts", "routed_scaling_factor"]
        names += ["scoring_func", "first_k_dense_replace", *(["mlp_only_layers"] if config.mlp_only_layers else [])]
        names += ["shared_expert_intermediate_size"] if config.shared_expert_intermediate_size else []
    if model_type in LISTS_FEED_FORWARD:
        values["mlp_layer_types"] = ["sparse" if kind.is_moe else "dense" for kind in config.trunk_kinds]
    return values | {name: getattr(config, name) for name in names}


def _modules(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """Makes the `config.json` keys for the number of MTP modules and any conventions that differ from the family's."""
    family = FAMILIES[model_type]
    key = "mtp_num_hidden_layers" if family.layout.mtp == "mtp" else "num_nextn_predict_layers"
    values: dict[str, Any] = {key: config.num_mtp_modules}
    if config.mtp_own_embedding:
        values["mtp_use_dedicated_embeddings"] = True
    defaults = {field.name: field.default for field in dataclasses.fields(ModelConfig)} | family.fixed
    return values | {name: getattr(config, name) for name in MTP_CONVENTIONS if getattr(config, name) != defaults[name]}


def _windows(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """Makes the keys for sliding-window attention, which `conversion.windows` and `conversion.step_config` read."""
    values: dict[str, Any] = {"layer_types": list(config.layer_types), "sliding_window": config.sliding_window}
    if model_type == "gpt_oss":
        limit = {"swiglu_limit": config.swiglu_limits[0]} if config.swiglu_limits else {}
        rope = {"rope_parameters": {**describe_scaling(config.rope_scaling), "rope_theta": config.rope_theta}}
        return values | limit | rope | {"swiglu_alpha": config.swiglu_alpha}
    if model_type in STEP:
        return values | _step_lists(config)
    return values | {
        "swa_num_attention_heads": config.sliding_num_attention_heads,
        "swa_num_key_value_heads": config.sliding_num_key_value_heads,
        "v_head_dim": config.value_dim,
        "attention_value_scale": config.attention_value_scale,
        "add_full_attention_sink_bias": config.attention_sinks == "all",
        "add_swa_attention_sink_bias": config.attention_sinks != "none",
        "rope_parameters": {
            kind: {**describe_scaling(scaling), "rope_theta": base, "partial_rotary_factor": share}
            for kind, (scaling, base, share) in _rope_by_type(config).items()
        },
    }


def _rope_by_type(config: ModelConfig) -> dict[str, tuple[RopeScaling | None, float, float]]:
    """Returns the scaling, base and rotated share for each layer type."""
    sliding = config.rope_scaling if config.sliding_rope_scaling else None
    return {
        FULL: (config.rope_scaling, config.rope_theta, config.partial_rotary_factor),
        SLIDING: (sliding, config.sliding_rope_theta, config.sliding_partial_rotary_factor),
    }


def _step_lists(config: ModelConfig) -> dict[str, Any]:
    """Makes Step-3.5's lists, which have one entry per layer and then one per MTP module."""
    types = [*config.layer_types, *[config.mtp_layer_type] * config.num_mtp_modules]
    rope = _rope_by_type(config)
    values: dict[str, Any] = {
        "layer_types": types,
        "rope_theta": [rope[kind][1] for kind in types],
        "partial_rotary_factors": [rope[kind][2] for kind in types],
        "yarn_only_types": [FULL, SLIDING] if config.sliding_rope_scaling else [FULL],
        "moe_layers_enum": ",".join(str(layer) for layer, kind in enumerate(config.trunk_kinds) if kind.is_moe),
        "attention_other_setting": {
            "attention_type": SLIDING,
            "num_attention_heads": config.sliding_num_attention_heads,
            "num_attention_groups": config.sliding_num_key_value_heads,
            "head_dim": config.head_dim,
        },
    }
    for name in ("swiglu_limits", "swiglu_limits_shared"):
        limits = getattr(config, name)
        values[name] = [*limits, *[0.0] * config.num_mtp_modules] if limits else None
    if config.rope_scaling is not None:
        values["rope_scaling"] = describe_scaling(config.rope_scaling)
    return values
