"""Overrides single fields of a `ModelConfig` from training settings and the command line."""

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from mtpjax.messages import require
from mtpjax.models.config import ModelConfig
from mtpjax.models.rope_scaling import make_scaling

MODEL_FIELDS: dict[str, Any] = typing.get_type_hints(ModelConfig)  # the type of each field
# Types that are valid for the values of plain fields. An int counts as a float, but a bool does not count as an int.
_PLAIN_TYPES: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,)}


def check_field_name(name: str, prefix: str = "") -> None:
    """Raises `ValueError`, with suggestions that include `prefix`, unless `ModelConfig` has a field of this name."""
    if name in MODEL_FIELDS:
        return
    near = difflib.get_close_matches(name, MODEL_FIELDS, n=3)
    # If no name is similar, list all fields instead of guessing.
    guess = " or ".join(", ".join(f"{prefix}{each}" for each in near).rsplit(", ", 1))
    hint = f"did you mean {guess}?" if near else f"the fields are {', '.join(MODEL_FIELDS)}"
    raise ValueError(f"unknown setting {prefix}{name}: {hint}")


def model_changes(model: ModelConfig | Mapping[str, Any] | Iterable[tuple[str, Any]] | None) -> dict[str, Any]:
    """Reads the fields to change, and makes their values hashable.

    Args:
        model: a `ModelConfig` to set every field, a mapping or (name, value) pairs to set some, or None to set none.

    Raises:
        ValueError: a field is unknown, or a value has the wrong type.
    """
    if isinstance(model, str):
        raise ValueError(
            f"model must be a ModelConfig or a mapping of its fields, not {model!r}: read a YAML file with"
            " mtpjax.training.read_model_config"
        )
    if isinstance(model, ModelConfig):
        return {name: getattr(model, name) for name in MODEL_FIELDS}
    changes = dict(model or ())
    for name, value in changes.items():
        check_field_name(name, "model.")
        changes[name] = _hashable_value(name, value)
    return changes


def _hashable_value(name: str, value: Any) -> Any:
    """Turns lists into tuples and the rotary scaling into its dataclass. Raises `ValueError` for a wrong type."""
    if name == "rope_scaling" and isinstance(value, Mapping):
        try:
            return make_scaling(value)
        except TypeError as error:
            raise ValueError(f"model.rope_scaling is not a rotary scaling: {error}") from error
    wanted = MODEL_FIELDS[name]
    if wanted in _PLAIN_TYPES:
        is_right = isinstance(value, _PLAIN_TYPES[wanted]) and (wanted is bool or not isinstance(value, bool))
        require(is_right, f"model.{name} must be of type {wanted.__name__}, not {value!r}")
    if typing.get_origin(wanted) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"model.{name} must be a list, not {value!r}")
        return tuple(value)
    return value


def override_config(base: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    """Overrides fields of an architecture with `changes`, the result of `model_changes`.

    If the base's `head_dim` and `num_key_value_heads` are the defaults for its other fields, they are recomputed for
    the changed fields. For example, changing `hidden_size` from 64 to 96 makes four heads 24 wide instead of 16.

    Raises:
        ValueError: the values are inconsistent.
    """
    follow = {}
    if base.attention == "grouped":
        if base.head_dim * base.num_attention_heads == base.hidden_size:
            follow["head_dim"] = 0
        if base.num_key_value_heads == base.num_attention_heads:
            follow["num_key_value_heads"] = 0
    return dataclasses.replace(base, **{**follow, **changes})
