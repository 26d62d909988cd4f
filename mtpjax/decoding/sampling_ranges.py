"""Checks types and ranges of sampling parameters. Imports neither JAX nor NumPy, so `mtpjax --help` starts quickly.

`SamplingParams` checks its fields when it is made. A call checks them again, because lists and arrays can change.
"""

import math
import numbers
import operator
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mtpjax.messages import require


class Option(NamedTuple):
    """A numeric sampling option.

    Attributes:
        feature: the option's name in `SamplingArrays` and `SamplingFeatures`.
        minimum: smallest value.
        maximum: largest value; infinity itself is not allowed.
        neutral: the value that turns the option off.
        is_positive: whether the value must be above 0.
        is_integer: whether the value must be an integer.
    """

    feature: str
    minimum: float = 0
    maximum: float = math.inf
    neutral: float = 0
    is_positive: bool = False
    is_integer: bool = False


# Keyed by the names in `SamplingParams`.
OPTIONS = {
    "temperature": Option("temperature"),
    "top_k": Option("top_k", is_integer=True),
    "top_p": Option("top_p", maximum=1, neutral=1, is_positive=True),
    "min_p": Option("min_p", maximum=1),
    "repetition_penalty": Option("repetition", neutral=1, is_positive=True),
    "frequency_penalty": Option("frequency", minimum=-math.inf),
    "presence_penalty": Option("presence", minimum=-math.inf),
    "min_new_tokens": Option("min_new", is_integer=True),
}
MAX_SEED = 2**64 - 1


def check_sampling(values: Mapping[str, Any]) -> None:
    """Checks the fields of `SamplingParams` as far as possible without knowing the model or the number of rows.

    Args:
        values: the fields by name.

    Raises:
        ValueError: a value has the wrong type or is out of range. The message names the field and the value.
    """
    for name in OPTIONS:
        check_numbers(name, values[name])
    check_seed(values["seed"])
    _check_biases(values["logit_bias"])
    for name in ("allowed_tokens", "banned_tokens"):
        _check_tokens(name, values[name])


def check_numbers(name: str, value: Any) -> None:
    """Checks a number, or one number per row.

    Args:
        name: the field.
        value: a number, a sequence or an array. Values that JAX traces are unknown and pass unchecked.

    Raises:
        ValueError: an element is not a number, or is out of range.
    """
    _, minimum, maximum, _, is_positive, is_integer = OPTIONS[name]
    plain = _plain(value)
    for number in plain if isinstance(plain, list) else [plain]:
        if number is _TRACED:
            continue
        require(_is_number(number), f"{name} must be a number or one per row, got {value!r}")
        if not (minimum <= number <= maximum and abs(number) <= sys.float_info.max):
            raise ValueError(f"{name} {value} must be within {minimum}..{maximum}")
        require(not is_integer or number == int(number), f"{name} must be an integer, got {value}")
        require(not is_positive or number > 0, f"{name} must be above 0, got {value}")


def check_seed(value: Any) -> None:
    """Checks a seed, or one seed per row; None is allowed. Raises ValueError as `check_numbers` does."""
    plain = _plain(value)
    if plain is None:
        return
    for seed in plain if isinstance(plain, list) else [plain]:
        if seed is not _TRACED and not (_is_integer(seed) and 0 <= seed <= MAX_SEED):
            raise ValueError(f"seed must be an integer within 0..2^64-1, got {seed!r}")


def _check_biases(value: Any) -> None:
    """Raises ValueError unless `value` is a mapping of token ids to finite numbers, or one mapping or None per row."""
    if value is None:
        return
    require(isinstance(value, Mapping | list | tuple), f"logit_bias must be a mapping or one per row, got {value!r}")
    for mapping in [value] if isinstance(value, Mapping) else value:
        if mapping is None:
            continue
        require(isinstance(mapping, Mapping), f"logit_bias must be a mapping or one per row, got {value!r}")
        _check_tokens("logit_bias", list(mapping))
        for bias in map(_plain, mapping.values()):
            if bias is _TRACED:
                continue
            require(_is_number(bias), f"logit_bias must hold numbers, got {bias!r}")
            if not abs(bias) <= sys.float_info.max:
                raise ValueError("logit_bias holds a value that is not finite; use banned_tokens to ban a token")


def _check_tokens(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is None, a sequence of token ids, or one sequence or None per row."""
    if value is None:
        return
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a sequence, got {value!r}")
    elements: Any = _plain(value)
    for each in [] if elements is _TRACED else elements:
        is_row = isinstance(each, Iterable) and not isinstance(each, str | bytes)
        row: Any = _plain(each) if is_row else [] if each is None else [each]
        for token in [] if row is _TRACED else row:
            if token is _TRACED:
                continue
            require(_is_integer(token), f"{name} must hold token ids, got {token!r}")
            require(token >= 0, f"{name} holds token id {token}, which is negative")


_TRACED = object()  # replaces a value that JAX traces


def _plain(value: Any) -> Any:
    """Converts arrays, sets and sequences to Python numbers or lists of them; returns anything else unchanged."""
    if hasattr(value, "tolist"):
        try:
            return value.tolist()
        # JAX raises a TypeError for traced values, for example inside `jax.jit`.
        except TypeError:
            return _TRACED
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return [_plain(each) if hasattr(each, "tolist") else each for each in value]
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) is not None
    except TypeError:
        return False
