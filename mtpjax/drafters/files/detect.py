"""Finds the draft method of a drafter's files.

Published files say it in different places: `speculators_model_type`, a key of one method, the class in `architectures`,
`model_type`, or only by their tensors. Several programs name the class after the trunk's family, so that a class counts
by the method in its name.
"""

import re
from collections.abc import Collection
from typing import Any, Literal, get_args

from mtpjax.errors import ConfigError
from mtpjax.messages import count_of

Method = Literal["eagle3", "medusa", "dflash", "dspark"]
METHODS: tuple[Method, ...] = get_args(Method)
SPECULATORS_METHODS: tuple[Method, ...] = ("eagle3", "dflash", "dspark")
# Sections that only speculators' configurations have.
SPECULATORS_SECTIONS = ("speculators_config", "transformer_layer_config")
# Classes of these methods are not supported, though their names contain others.
NOT_SUPPORTED = ("dflash2", "peagle")
# A tensor that only one method has, by its plain name.
SIGNS: dict[str, Method] = {
    "markov_head.markov_w1.weight": "dspark",
    "layers.0.hidden_norm.weight": "eagle3",
    "hidden_norm.weight": "dflash",
    "0.0.linear.weight": "medusa",
    "blocks.0.layers.0.weight": "medusa",
}
KEYS: dict[str, Method] = {"medusa_num_heads": "medusa", "dspark_config": "dspark"}  # that only one method has
NUM_SHOWN = 5  # names of tensors in a message


def is_speculators(values: dict[str, Any]) -> bool:
    """Returns whether a `config.json` has speculators' format."""
    return values.get("speculators_model_type") is not None or any(values.get(key) for key in SPECULATORS_SECTIONS)


def class_names(values: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names in `architectures`; none if it is not a list."""
    names = values.get("architectures")
    return tuple(map(str, names)) if isinstance(names, list) else ()


def find_method(values: dict[str, Any], names: Collection[str]) -> Method:
    """Finds the method of a drafter.

    Args:
        values: the content of `config.json`.
        names: the tensors' plain names; may be empty.

    Returns:
        The method.

    Raises:
        ConfigError: no sign of a method that is supported; the message says what was looked at.
    """
    # 1. What speculators' format names.
    section = values.get("speculators_config")
    kind = values.get("speculators_model_type") or (section.get("algorithm") if isinstance(section, dict) else None)
    if kind is not None:
        for method in SPECULATORS_METHODS:
            if kind == method:
                return method
        raise ConfigError(
            f"config.json: speculators_model_type {kind!r} is not supported here; supported: "
            + ", ".join(map(repr, SPECULATORS_METHODS))
        )
    # 2. Keys of one method.
    for key, method in KEYS.items():
        if key in values:
            return method
    blocks = values.get("dflash_config")
    for each in (values, blocks if isinstance(blocks, dict) else {}):
        if each.get("projector_type") == "dspark":
            return "dspark"
    # 3. The class, then the type.
    for text in (*class_names(values), str(values.get("model_type"))):
        plain = re.sub(r"[^a-z0-9]", "", text.lower())
        if not any(other in plain for other in NOT_SUPPORTED):
            for method in METHODS:
                if method in plain:
                    return method
    # 4. The tensors. A class of a method that is not supported may have the tensors of one that is.
    if not any(other in name.lower() for name in class_names(values) for other in NOT_SUPPORTED):
        for name, method in SIGNS.items():
            if name in names:
                return method
    raise ConfigError(_describe_what_was_found(values, names))


def _describe_what_was_found(values: dict[str, Any], names: Collection[str]) -> str:
    """Returns the message for files of no supported method."""
    keys = ("architectures", "model_type", "speculators_model_type", "medusa_num_heads", "dflash_config")
    found = ", ".join(f"{key} {values.get(key)!r}" if values.get(key) is not None else f"no {key}" for key in keys)
    shown = ", ".join(sorted(names)[:NUM_SHOWN]) or "none"
    plain = " ".join(class_names(values)).lower()
    hint = ""
    if "eagle" in plain and "eagle3" not in plain:
        hint = "; EAGLE-1 and EAGLE-2 are not supported, EAGLE-3 is"
    elif any(other in plain for other in NOT_SUPPORTED):
        hint = "; P-EAGLE and DFlash 2 are not supported"
    return (
        f"this is no drafter that is supported: config.json has {found}; the files hold "
        f"{count_of(len(names), 'tensor')} ({shown}). Supported are EAGLE-3, Medusa, DFlash and "
        "DSpark, by a class in architectures such as "
        "LlamaForCausalLMEagle3, DFlashDraftModel or Qwen3DSparkModel, by speculators_model_type, medusa_num_heads or "
        f"model_type 'medusa', or by their tensors{hint}"
    )
