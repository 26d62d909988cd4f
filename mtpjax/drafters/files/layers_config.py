"""Reads the configuration of a drafter's own layers, which have Llama's or Qwen3's architecture, not the trunk's.

Training programs often copy the trunk's `config.json`, with its `model_type` and keys about latent attention or
experts, so the architecture is inferred from the tensors.
"""

import dataclasses
import logging
import re
from collections.abc import Collection
from typing import Any

from conversion.hf_config import parse_config
from mtpjax.errors import ConfigError
from mtpjax.models.config import ModelConfig

log = logging.getLogger("mtpjax.conversion")

LLAMA, QWEN3 = "llama", "qwen3"
# Sections that only speculators' configurations have.
SPECULATORS_SECTIONS = ("speculators_config", "transformer_layer_config")
LATENT = re.compile(r"\.(kv_a_proj|kv_b_proj|q_a_proj|q_b_proj|fused_qkv_a_proj|kv_a_layernorm)")
QUERY_NORM = ".self_attn.q_norm.weight"
EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
# Families in the names of classes whose layers are Llama's, if their tensors are.
LIKE_LLAMA = (LLAMA, QWEN3, "mistral", "deepseek", "kimi")
# Words in class names that are not families. SGLang and vLLM run these classes as Llama, or blocks as Qwen3.
NO_FAMILY = re.compile(r"eagle3|dflash|dspark|speculator|draft|model|forcausallm|deep")


def is_speculators(values: dict[str, Any]) -> bool:
    """Returns whether a `config.json` has speculators' format."""
    return values.get("speculators_model_type") is not None or any(values.get(key) for key in SPECULATORS_SECTIONS)


def class_names(values: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names in `architectures`; none if it is not a list."""
    names = values.get("architectures")
    return tuple(map(str, names)) if isinstance(names, list) else ()


def parse_layers(
    values: dict[str, Any], known_keys: set[str], names: Collection[str] = (), *, classes: tuple[str, ...] = ()
) -> ModelConfig:
    """Parses the sizes of a drafter's own layers.

    Args:
        values: the keys of the layers, possibly among others.
        known_keys: the expected other keys; further ones cause a warning.
        names: the plain names of the drafter's tensors; may be empty.
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
            "are not supported: the attention of the first layer reads an input of twice the width, for which no "
            "latent form is implemented; supported: layers of Llama and Qwen3"
        )
    kind = _layer_type(model_type, names, classes)
    # Experts of the trunk, in a configuration that was copied from it.
    if names and not any(".experts." in name for name in names):
        values = {key: value for key, value in values.items() if key not in EXPERT_KEYS}
    parsed = parse_config(values, kind)
    unknown = set(parsed.unknown) - known_keys
    if unknown:
        log.warning("config.json has unknown keys, which are ignored: %s", ", ".join(sorted(unknown)))
    return dataclasses.replace(parsed.model, num_mtp_modules=0)


def _layer_type(model_type: Any, names: Collection[str], classes: tuple[str, ...]) -> str:
    """Returns the family that the layers belong to."""
    text = [name.lower() for name in classes]
    others = [name for name in text if not any(each in name for each in LIKE_LLAMA) and NO_FAMILY.sub("", name)]
    if others and model_type not in (LLAMA, QWEN3):
        raise ConfigError(
            f"config.json: model_type {model_type!r} of a drafter is not supported: {LLAMA} and {QWEN3} are, and "
            f"others where no class in architectures names another family, unlike {list(classes)}"
        )
    # The two differ in the norms of queries and keys, which the tensors show.
    has_query_norm = any(name.endswith(QUERY_NORM) for name in names)
    is_qwen = model_type == QWEN3 and not any(LLAMA in name for name in text)
    return QWEN3 if has_query_norm or is_qwen else LLAMA
