"""Detects the draft method of a drafter's files.

Published files specify the method in different places: `speculators_model_type`, a key that only one method uses, the
class in `architectures`, `model_type`, or only the tensor names. Several programs put the trunk's family into the class
name, so it is enough that the class name contains a method's name.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from mtpjax.drafters.files.layers_config import class_names
from mtpjax.drafters.method import DraftMethod
from mtpjax.errors import ConfigError
from mtpjax.messages import count_of

# These methods are not supported, although their class names contain the names of supported methods.
NOT_SUPPORTED = ("dflash2", "peagle")
NUM_SHOWN = 5  # tensor names shown in a message


def detect_method(values: dict[str, Any], names: Collection[str], methods: Sequence[DraftMethod]) -> DraftMethod:
    """Detects the method from `config.json` and plain tensor names; raises `ConfigError` if no method matches."""
    known = {method: method.files for method in methods if method.files is not None}
    # 1. Look for the method's name in speculators' format.
    section = values.get("speculators_config")
    kind = values.get("speculators_model_type") or (section.get("algorithm") if isinstance(section, dict) else None)
    if kind is not None:
        supported = {method.name: method for method, files in known.items() if files.is_of_speculators}
        if kind in supported:
            return supported[kind]
        raise ConfigError(
            f"config.json: speculators_model_type {kind!r} is not supported; supported: "
            + ", ".join(map(repr, supported))
        )
    # 2. Look for keys that only one method uses.
    blocks = values.get("dflash_config")
    sections = (values, blocks if isinstance(blocks, dict) else {})
    for method, files in known.items():
        for key, value in files.keys.items():
            if any(key in each and value in (None, each[key]) for each in sections):
                return method
    # 3. Look for a method's name in the class, then in the type.
    for text in (*class_names(values), str(values.get("model_type"))):
        plain = re.sub(r"[^a-z0-9]", "", text.lower())
        if not any(other in plain for other in NOT_SUPPORTED):
            for method in known:
                if method.name in plain:
                    return method
    # 4. Look for a method's tensors, unless the class belongs to an unsupported method, whose tensors may have the same
    # names. A method that extends another has all of its tensors and comes after it, so start with the last method.
    if not any(other in name.lower() for name in class_names(values) for other in NOT_SUPPORTED):
        for method, files in reversed(known.items()):
            if any(name in names for name in files.tensors):
                return method
    raise ConfigError(_describe_what_was_found(values, names))


def _describe_what_was_found(values: dict[str, Any], names: Collection[str]) -> str:
    """Returns the message for files that match no supported method."""
    keys = ("architectures", "model_type", "speculators_model_type", "medusa_num_heads", "dflash_config")
    found = ", ".join(f"{key} {values.get(key)!r}" if values.get(key) is not None else f"no {key}" for key in keys)
    shown = ", ".join(sorted(names)[:NUM_SHOWN]) or "none"
    plain = " ".join(class_names(values)).lower()
    hint = ""
    if "eagle" in plain and "eagle3" not in plain:
        hint = "; EAGLE-1 and EAGLE-2 are not supported, but EAGLE-3 is"
    elif any(other in plain for other in NOT_SUPPORTED):
        hint = "; P-EAGLE and DFlash 2 are not supported"
    return (
        f"not a supported drafter: config.json has {found}; the files hold {count_of(len(names), 'tensor')} ({shown}). "
        "EAGLE-3, Medusa, DFlash and DSpark are supported, and recognised by a class in architectures such as "
        "LlamaForCausalLMEagle3, DFlashDraftModel or Qwen3DSparkModel, by speculators_model_type, medusa_num_heads or "
        f"model_type 'medusa', or by their tensors{hint}"
    )
