"""Makes the keys of `config.json` about layers that attend to a window, as each family spells them."""

from typing import Any

from conversion.rope import FULL, SLIDING, describe_scaling
from conversion.step_config import STEP
from mtpjax.models.config import ModelConfig


def describe_windows(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """Makes the keys that `conversion.windows` and `conversion.step_config` read."""
    values: dict[str, Any] = {"layer_types": list(config.layer_types), "sliding_window": config.sliding_window}
    if model_type == "gpt_oss":
        limit = {"swiglu_limit": config.swiglu_limits[0]} if config.swiglu_limits else {}
        rope = {"rope_parameters": {**describe_scaling(config.rope_scaling), "rope_theta": config.rope_theta}}
        return values | limit | rope | {"swiglu_alpha": config.swiglu_alpha}
    if model_type in STEP:
        return values | _describe_step(config)
    return values | {
        "swa_num_attention_heads": config.sliding_num_attention_heads,
        "swa_num_key_value_heads": config.sliding_num_key_value_heads,
        "v_head_dim": config.value_dim,
        "attention_value_scale": config.attention_value_scale,
        "add_full_attention_sink_bias": config.attention_sinks == "all",
        "add_swa_attention_sink_bias": config.attention_sinks != "none",
        "rope_parameters": {
            FULL: {
                **describe_scaling(config.rope_scaling),
                "rope_theta": config.rope_theta,
                "partial_rotary_factor": config.partial_rotary_factor,
            },
            SLIDING: {
                **describe_scaling(config.rope_scaling if config.sliding_rope_scaling else None),
                "rope_theta": config.sliding_rope_theta,
                "partial_rotary_factor": config.sliding_partial_rotary_factor,
            },
        },
    }


def _describe_step(config: ModelConfig) -> dict[str, Any]:
    """Lists an entry per layer and then per MTP module."""
    types = [*config.layer_types, *[config.mtp_layer_type] * config.num_mtp_modules]
    bases = {FULL: config.rope_theta, SLIDING: config.sliding_rope_theta}
    shares = {FULL: config.partial_rotary_factor, SLIDING: config.sliding_partial_rotary_factor}
    values: dict[str, Any] = {
        "layer_types": types,
        "rope_theta": [bases[kind] for kind in types],
        "partial_rotary_factors": [shares[kind] for kind in types],
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
