"""Writes `config.json`: for an mtpjax model (`describe_config`), and for changed weights (`edit_config`)."""

import dataclasses
import itertools
from typing import Any

from conversion.families import FAMILIES, Layout
from conversion.hf_config import parse_config
from mtpjax.errors import ConfigError
from mtpjax.models.config import Llama3Scaling, ModelConfig


def describe_config(config: ModelConfig, model_type: str | None = None) -> tuple[str, dict[str, Any]]:
    """Finds a family that can describe a model, and makes its `config.json`.

    Args:
        config: the model's configuration.
        model_type: the family to use; by default the first that fits.

    Returns:
        `(model_type, values)`, where `parse_config(values)` gives `config` again.

    Raises:
        ConfigError: no family can describe the model; the message names the fields that the closest one cannot express.
    """
    if model_type is not None and model_type not in FAMILIES:
        raise ConfigError(f"unsupported model_type {model_type!r}; supported: {', '.join(FAMILIES)}")
    # Try the text-only families in order, and check each by parsing what was written.
    nested = [name for name, family in FAMILIES.items() if family.layout.trunk != "model."]
    names = [name for name in FAMILIES if name not in nested] if model_type is None else [model_type]
    nearest: list[str] | None = None
    for name in names:
        # Write the values as the family spells them, and parse them back.
        values = {"architectures": [], "model_type": name, **_values(config, FAMILIES[name].layout)}
        try:
            found = parse_config(values).model
        except ConfigError:
            continue
        fields = [field.name for field in dataclasses.fields(config)]
        differing = [field for field in fields if getattr(found, field) != getattr(config, field)]
        if not differing:
            return name, values
        nearest = min(nearest or differing, differing, key=len)
    raise ConfigError(
        "no supported family can describe this model; the closest one cannot express "
        f"{', '.join(nearest) if nearest else 'its sizes'}"
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
    """Edits a `config.json` for weights that have changed. Keys that are not concerned stay as they are.

    Args:
        values: the content of the file.
        layout: how the family names tensors.
        num_mtp_modules: the new number of MTP modules.
        own_embedding: the modules have an embedding of their own.
        dtypes: names of the dtypes of the weights, such as "bfloat16".
        drop_quantization: remove `quantization_config`, because the weights are no longer quantized.

    Returns:
        The new content.
    """
    values = {**values}
    if drop_quantization:
        values.pop("quantization_config", None)
    # The language model's keys are nested in multimodal configurations.
    level = values
    if "text_config" in values:
        level = values["text_config"] = {**values["text_config"]}
    if num_mtp_modules is not None:
        level["mtp_num_hidden_layers" if layout.mtp == "mtp" else "num_nextn_predict_layers"] = num_mtp_modules
    if own_embedding:
        level["mtp_use_dedicated_embeddings"] = True
    # Name the main dtype: beside bfloat16 weights, a few such as router biases are float32.
    if dtypes is not None:
        main = sorted(dtypes, key=lambda name: (name == "float32", name))[0]
        for part, key in itertools.product((values, level), ("torch_dtype", "dtype")):
            if key in part and (drop_quantization or part[key] not in dtypes):
                part[key] = main
    return values


def _values(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    """Makes the keys of `config.json`; sections that the model does not have are left out."""
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    # What every family has.
    names = [*same, "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta"]
    names += ["partial_rotary_factor", "attention_bias", *(["use_qk_norm"] if config.use_qk_norm else [])]
    # Attention: latent (MLA) with an optional indexer, or grouped (GQA); some layers may be linear.
    if config.attention == "latent":
        names += ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
        names += ["rope_interleave"]
    else:
        names += ["num_key_value_heads", "head_dim"]
    if config.index_topk:
        names += ["index_topk", "index_n_heads", "index_head_dim", "indexer_rope_interleave", "indexer_types"]
    if config.layer_types:
        names += [f"linear_{name}" for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")]
        names += ["linear_conv_kernel_dim", "layer_types"]
    # Mixture of experts.
    if config.is_moe:
        names += ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"]
        names += ["n_shared_experts", "shared_expert_intermediate_size", "norm_topk_prob", "routed_scaling_factor"]
        names += ["scoring_func", "first_k_dense_replace", "mlp_only_layers"]
    values = {name: getattr(config, name) for name in names}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    # What is spelled differently from ModelConfig's field: rotary scaling, the output gate, and MTP modules.
    if config.rope_scaling is not None:
        kind = "llama3" if isinstance(config.rope_scaling, Llama3Scaling) else "yarn"
        values["rope_scaling"] = {"rope_type": kind, **dataclasses.asdict(config.rope_scaling)}
    if config.linear_output_gate == "sigmoid":
        values["output_gate_type"] = "sigmoid"
    values["mtp_num_hidden_layers" if layout.mtp == "mtp" else "num_nextn_predict_layers"] = config.num_mtp_modules
    if config.mtp_own_embedding:
        values["mtp_use_dedicated_embeddings"] = True
    return values
