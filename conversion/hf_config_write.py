"""Edits a `config.json` for changed weights."""

import itertools
from typing import Any

from conversion.families import Layout
from conversion.hf_config import MODULE_KEYS

# Keys whose lists have one entry per layer, optionally followed by one per MTP module.
PER_LAYER = (
    *("layer_types", "mlp_layer_types", "hybrid_layer_pattern", "moe_layer_freq", "indexer_types", "swiglu_limits"),
    *("swiglu_limits_shared", "rope_theta", "partial_rotary_factors", "use_rope_layers"),
)


def edit_config(
    values: dict[str, Any],
    layout: Layout,
    *,
    num_mtp_modules: int | None = None,
    own_embedding: bool = False,
    dtypes: set[str] | None = None,
    drop_quantization: bool = False,
) -> dict[str, Any]:
    """Edits a `config.json` for changed weights. Other keys stay the same.

    Args:
        dtypes: the weights' dtypes by name, such as "bfloat16".
        drop_quantization: remove `quantization_config`, because the weights are no longer quantized.
    """
    values = {**values}
    if drop_quantization:
        values.pop("quantization_config", None)
    # Multimodal configurations nest the language model's keys.
    level = values
    if "text_config" in values:
        level = values["text_config"] = {**values["text_config"]}
    if num_mtp_modules is not None:
        level |= _resize_lists(level, num_mtp_modules)
        # A file may give the number of modules under several keys, which must agree.
        keys = [key for key in MODULE_KEYS if key in level]
        keys = keys or ["mtp_num_hidden_layers" if layout.mtp == "mtp" else "num_nextn_predict_layers"]
        level |= dict.fromkeys(keys, num_mtp_modules)
    if own_embedding:
        level["mtp_use_dedicated_embeddings"] = True
    # Write the main dtype, because some tensors in a bfloat16 model, such as router biases, are float32.
    if dtypes is not None:
        main = sorted(dtypes, key=lambda name: (name == "float32", name))[0]
        for part, key in itertools.product((values, level), ("torch_dtype", "dtype")):
            if key in part and (drop_quantization or part[key] not in dtypes):
                part[key] = main
    return values


def _resize_lists(level: dict[str, Any], num_mtp_modules: int) -> dict[str, list]:
    """Resizes lists with one entry per layer and module to a new number of modules, which all have the same entry."""
    layers, counts = level.get("num_hidden_layers", 0), [level[key] for key in MODULE_KEYS if level.get(key)]
    made = {}
    for key in PER_LAYER if counts else ():
        value = level.get(key)
        if isinstance(value, list) and len(value) == layers + counts[0]:
            made[key] = value[:layers] + value[layers : layers + 1] * num_mtp_modules
        if isinstance(level.get(f"mtp_{key}"), list):
            made[f"mtp_{key}"] = level[f"mtp_{key}"][:1] * num_mtp_modules
    return made
