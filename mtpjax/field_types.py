"""Checks the fields of a settings dataclass when it is created, so that a wrong value does not fail later in a run."""

import dataclasses
import functools
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

from mtpjax.errors import printable
from mtpjax.messages import require, require_choice

SCALARS = (bool, int, float, str)
NAMES = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}


def check_scalar_fields(config: Any) -> None:
    """Checks the fields annotated as `bool`, `int`, `float`, `str` or a `Literal`, or as one of these or None.

    NumPy numbers and paths are converted to Python numbers and strings, which JSON supports.

    Raises:
        ValueError: a value has the wrong type or is not one of the choices. The message names the field.
    """
    for name, (kind, is_optional) in _scalar_fields(type(config)).items():
        value = getattr(config, name)
        if value is None and is_optional:
            continue
        if isinstance(kind, tuple):
            require_choice(name, value, kind)
        elif type(value) is not kind:
            object.__setattr__(config, name, _convert(name, value, kind, is_optional))


@functools.cache
def _scalar_fields(kind: type) -> dict[str, tuple[type | tuple[str, ...], bool]]:
    """Returns the type or the choices of each scalar field of a dataclass, and whether it may be None."""
    found, hints = {}, typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        options = typing.get_args(hint) if is_union else (hint,)
        plain = [each for each in options if each is not type(None)]
        if len(plain) == 1 and typing.get_origin(plain[0]) is Literal:
            found[field.name] = (typing.get_args(plain[0]), len(options) > 1)
        elif len(plain) == 1 and plain[0] in SCALARS:
            found[field.name] = (plain[0], len(options) > 1)
    return found


def _convert(name: str, value: Any, kind: type, is_optional: bool) -> Any:
    """Converts a value to its field's type. Integers in float fields stay integers."""
    # Compare type names, because this file does not import NumPy.
    is_bool = type(value).__name__ in ("bool", "bool_")
    if kind is bool and is_bool:
        return bool(value)
    if kind is int and not is_bool:
        try:
            return operator.index(value)
        except TypeError:
            pass
    if kind is float and not is_bool and isinstance(value, numbers.Real):
        return value if isinstance(value, int) else float(value)
    if kind is str and isinstance(value, str | os.PathLike):
        return os.fspath(value)
    raise ValueError(f"{name} must be {NAMES[kind]}{' or None' if is_optional else ''}, got {value!r:.80}")


def check_mapping(name: str, value: Any) -> dict[Any, Any]:
    """Converts a mapping or key-value pairs to a dict. Raises `ValueError` for other values."""
    try:
        return dict(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a mapping or pairs, got {value!r:.80}") from error


def check_range(name: str, value: float | None, low: float, high: float = math.inf) -> None:
    """Raises `ValueError` unless a value is None, or finite and within `low..high`. The message names the limit."""
    if value is None:
        return
    shown = printable(value, 40)
    require(value >= low, f"{name} must be at least {low}, not {shown}")
    require(value < math.inf, f"{name} must be finite, not {shown}")
    require(value <= high, f"{name} must be at most {high}, not {shown}")


def check_used(config: Any, rows: Iterable[tuple[str, bool, str]], prefix: str = "") -> None:
    """Raises `ValueError` for a setting that differs from its default but has no effect.

    Args:
        config: a dataclass.
        rows: one tuple per setting, with its name, whether it has an effect, and what it needs to have an effect.
        prefix: prefix of the names in messages, such as "objective.".
    """
    for name, has_effect, need in rows:
        value = getattr(config, name)
        shown = printable(repr(value), 80)
        is_default = value == getattr(type(config), name)
        require(has_effect or is_default, f"{prefix}{name} {shown} is unused: it needs {need}")
