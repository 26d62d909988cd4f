"""Parses and generates the configuration of a drafter's own layers, which are Llama or Qwen3 layers for every trunk.

Training programs often copy the trunk's `config.json`, including `model_type` and the keys for latent attention or
experts, so the architecture is inferred from the tensors.
"""

import dataclasses
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from conversion.attention_names import grouped_names
from conversion.describe_config import describe_config
from conversion.families import Layout
from conversion.hf_config import parse_config
from conversion.tensor_slice import ParamSpec, copied, gate_up, linear, prefixed
from mtpjax.drafters.architecture import LayersConfig
from mtpjax.errors import ConfigError
from mtpjax.models.config import ModelConfig

log = logging.getLogger("mtpjax.conversion")
T = TypeVar("T", bound=LayersConfig)

LLAMA, QWEN3 = "llama", "qwen3"
# Sections that exist only in speculators' configurations.
SPECULATORS_SECTIONS = ("speculators_config", "transformer_layer_config")
LATENT = re.compile(r"\.(kv_a_proj|kv_b_proj|q_a_proj|q_b_proj|fused_qkv_a_proj|kv_a_layernorm)")
QUERY_NORM = ".self_attn.q_norm.weight"
COUNTS_OF_MODULES = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
# Family names that class names may contain. Drafters for these families have Llama layers if they have Llama tensors.
LIKE_LLAMA = (LLAMA, QWEN3, "mistral", "deepseek", "kimi")
# Words in class names that name no family. SGLang and vLLM run such classes as Llama, and block drafters as Qwen3.
NO_FAMILY = re.compile(r"eagle3|dflash|dspark|speculator|draft|model|forcausallm|deep")


def is_speculators(values: dict[str, Any]) -> bool:
    """Returns whether a `config.json` is in speculators' format."""
    return values.get("speculators_model_type") is not None or any(values.get(key) for key in SPECULATORS_SECTIONS)


def class_names(values: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names in `architectures`; () if it is not a list."""
    names = values.get("architectures")
    return tuple(map(str, names)) if isinstance(names, list) else ()


def parse_layers(
    values: dict[str, Any], known_keys: set[str], names: Collection[str] = (), *, classes: tuple[str, ...] = ()
) -> ModelConfig:
    """Parses the sizes of a drafter's own layers.

    Args:
        values: the `config.json` values, which may include other keys.
        known_keys: other expected keys. Unexpected keys cause a warning.
        names: plain names of the drafter's tensors; () if they are unknown.
        classes: the names in `architectures`.

    Returns:
        The sizes.

    Raises:
        ConfigError: the layers are damaged or not supported.
    """
    model_type = values.get("model_type")
    latent = sorted(name for name in names if LATENT.search(name))
    if latent or (not names and values.get("kv_lora_rank") is not None):
        raise ConfigError(
            f"drafters with latent attention ({latent[0] if latent else 'kv_lora_rank'}, model_type {model_type!r}) "
            "are not supported: the first layer's attention reads an input of twice the width, which latent attention "
            "does not implement; supported: layers of Llama and Qwen3"
        )
    kind = _layer_type(model_type, names, classes)
    # Drop the keys for the trunk's experts, which remain if the configuration was copied from the trunk.
    if names and not any(".experts." in name for name in names):
        values = {key: value for key, value in values.items() if key not in EXPERT_KEYS}
    parsed = parse_config(values, kind)
    warn_of_unknown_keys("config.json", set(parsed.unknown) - known_keys)
    return dataclasses.replace(parsed.model, num_mtp_modules=0)


def _layer_type(model_type: Any, names: Collection[str], classes: tuple[str, ...]) -> str:

    text = [name.lower() for name in classes]
    others = [name for name in text if not any(each in name for each in LIKE_LLAMA) and NO_FAMILY.sub("", name)]
    if others and model_type not in (LLAMA, QWEN3):
        raise ConfigError(
            f"config.json: model_type {model_type!r} with architectures {list(classes)} is not supported in a drafter; "
            f"supported: {LLAMA}, {QWEN3}, or any model_type whose architectures contain no other family's name"
        )
    # Llama and Qwen3 differ in the query and key norms, which are visible in the tensor names.
    has_query_norm = any(name.endswith(QUERY_NORM) for name in names)
    is_qwen = model_type == QWEN3 and not any(LLAMA in name for name in text)
    return QWEN3 if has_query_norm or is_qwen else LLAMA


def warn_of_unknown_keys(section: str, keys: Collection[str]) -> None:
    if keys:
        log.warning("%s has unknown keys, which are ignored: %s", section, ", ".join(sorted(keys)))


def make_architecture(kind: type[T], shapes: Mapping[str, tuple[int, ...]], **fields: Any) -> T:
    """Makes an architecture with its own embedding and head if the files contain them.

    Raises:
        ConfigError: the fields are inconsistent.
    """
    fields |= {"own_embedding": "embed_tokens.weight" in shapes, "own_head": "lm_head.weight" in shapes}
    try:
        return kind(**fields)
    except ValueError as error:
        raise ConfigError(f"config.json: {error}") from error


def describe_layers(block: ModelConfig) -> dict[str, Any]:
    """Returns the `config.json` keys that `parse_layers` reads."""
    _, layers = describe_config(block, QWEN3 if block.use_qk_norm else LLAMA)
    return {name: value for name, value in layers.items() if name not in COUNTS_OF_MODULES}


def describe_speculators(method: str, layers: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Returns the keys that all speculators configurations have."""
    return {
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        "speculators_model_type": method,
        "transformer_layer_config": {name: value for name, value in layers.items() if name != "architectures"},
    }


def layers_specs(config: LayersConfig, *, has_wide_first: bool = False) -> dict[str, ParamSpec]:
    """Lists the parameters of the projection, layers, final norm, embedding and head, with plain tensor names.

    Args:
        has_wide_first: whether the first layer's attention also reads the embedding, with a norm for each input
            (EAGLE-3).
    """
    block, D, F = config.block, config.block.hidden_size, config.block.intermediate_size
    specs = {"fc": linear("fc.weight", config.features_size, D), "norm_final/scale": copied("norm.weight", D)}
    for index, kind in enumerate(config.kinds):
        prefix, is_wide = f"layers.{index}.", has_wide_first and index == 0
        norms = {"norm_attention": "input_layernorm"}
        if is_wide:
            norms = {"norm_embedding": "input_layernorm", "norm_hidden": "hidden_norm"}
        norms |= {"norm_feed_forward": "post_attention_layernorm"}
        layer = {f"{path}/scale": copied(f"{prefix}{name}.weight", D) for path, name in norms.items()}
        attention = grouped_names(block, kind, prefix, Layout(), input_size=2 * D if is_wide else D)
        layer |= prefixed("attention/", attention)
        layer["dense/gate_up"] = gate_up(f"{prefix}mlp.", D, F)
        layer["dense/down"] = linear(f"{prefix}mlp.down_proj.weight", F, D)
        specs |= prefixed(f"layer_{index}/", layer)
    if config.own_embedding:
        specs["embedding"] = copied("embed_tokens.weight", block.vocab_size, D)
    if config.own_head:
        specs["head"] = linear("lm_head.weight", D, config.draft_vocab_size)
    return specs
