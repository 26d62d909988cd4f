"""Parses the `config.json` keys for sliding-window attention, which differ between families."""

import math
from typing import Any

from conversion.config_reader import ConfigReader
from mtpjax.errors import ConfigError


def read_windows(reader: ConfigReader, fields: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Reads which layers have sliding-window attention, and how they differ from full-attention layers.

    Raises:
        ConfigError: the keys contradict each other, or need unsupported arithmetic.
    """
    sizes = fields["num_hidden_layers"], fields["num_mtp_modules"]
    types, of_modules = reader.per_layer("layer_types", str, *sizes)
    # In MiMo-V2, 1 marks a layer with a window.
    pattern, mark_of_modules = reader.per_layer("hybrid_layer_pattern", int, *sizes)
    if pattern and not types:
        names = {None: None, 0: "full_attention"}
        types = tuple(names.get(mark, "sliding_attention") for mark in pattern)
        of_modules = names.get(mark_of_modules, "sliding_attention")
    if not types:
        raise ConfigError("config.json lacks layer_types")
    made: dict[str, Any] = {"layer_types": types, "sliding_window": _window(reader)}
    if of_modules is not None:
        made["mtp_layer_type"] = of_modules
    # In MiMo-V2, layers with a window have twice as many key/value heads, which transformers does not write.
    kv_heads = fields["num_key_value_heads"] * (2 if model_type == "mimo_v2_flash" else 1)
    made["sliding_num_attention_heads"] = reader.integer("swa_num_attention_heads", fields["num_attention_heads"])
    made["sliding_num_key_value_heads"] = reader.integer("swa_num_key_value_heads", kv_heads)
    # Head widths are the same in all layers.
    made["v_head_dim"] = reader.integer("v_head_dim", fields["head_dim"])
    reader.require("swa_head_dim", fields["head_dim"])
    reader.require("swa_v_head_dim", made["v_head_dim"])
    if "sliding_rope_theta" not in fields:
        made["sliding_rope_theta"] = reader.number("swa_rope_theta", fields["rope_theta"])
    if "attention_sinks" not in fields:
        made["attention_sinks"] = _sinks(reader)
    # Other families' classes do not read these keys.
    if model_type == "mimo_v2_flash":
        made["attention_value_scale"] = reader.number("attention_value_scale", 1.0)
    # Activations are clamped with one bound per layer (Step-3.5) or one for all layers (gpt-oss).
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        made[key] = _limits(reader, key)
    if model_type == "gpt_oss":
        made["swiglu_limits"] = (reader.number("swiglu_limit", 0.0),) * fields["num_hidden_layers"]
        made["swiglu_alpha"] = reader.number("swiglu_alpha", 0.0)
    method = reader.section("quantization_config").get("quant_method")
    if method == "mxfp4":
        raise ConfigError("config.json: quant_method mxfp4 is not supported: save the model in bfloat16 first")
    return made


def _limits(reader: ConfigReader, key: str) -> tuple[float, ...]:
    """Reads each layer's bound. The tuple is empty if no layer is clamped."""
    limits = tuple(float(limit) for limit in reader.items(key, (int, float)))
    if any(not 0 <= limit < math.inf for limit in limits):
        raise ConfigError(f"config.json: {key} is {list(limits)}, not a list of finite, non-negative bounds")
    return limits if any(limits) else ()


def _window(reader: ConfigReader) -> int:
    """Reads the window size, including the query's position."""
    # MiMo-V2's key excludes the query, as in SGLang and transformers.
    if reader.get("sliding_window_size") is None:
        return reader.integer("sliding_window")
    reader.seen.add("sliding_window")
    return reader.integer("sliding_window_size") + 1


def _sinks(reader: ConfigReader) -> str:
    """Reads which layers have learned attention sinks. By default, layers with a sliding window have them."""
    in_full = reader.flag("add_full_attention_sink_bias", False)
    in_sliding = reader.flag("add_swa_attention_sink_bias", True)
    if in_full and not in_sliding:
        raise ConfigError("config.json: attention sinks only in layers with full attention are not supported")
    return "all" if in_full else "sliding" if in_sliding else "none"
