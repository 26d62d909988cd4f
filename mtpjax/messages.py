"""Shared wording of messages, and checks that raise `ValueError` with them. Imports nothing from mtpjax."""

import difflib
from collections.abc import Iterable
from typing import Any


def count_of(number: int, noun: str) -> str:
    """Returns a number and its noun, in the plural unless the number is 1.

    Args:
        noun: the noun in the singular, such as "round".
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def json_type_name(value: Any) -> str:
    """Returns the JSON type of a value for an error message, such as "an object"."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that a misspelled name most likely means.

    Returns:
        The name that starts with `name`, if there is only one; else the one with the most similar spelling. None if no
        name is similar.
    """
    known = list(known)
    longer = [each for each in known if each.startswith(name)]
    if len(longer) == 1:
        return longer[0]
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: ": did you mean X?", or "" if no name is similar."""
    found = nearest(name, known)
    return f": did you mean {found}?" if found else ""


def require(condition: bool, message: str) -> None:
    """Raises `ValueError` with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises `ValueError` unless the value is one of the choices."""
    hint = did_you_mean(str(value), choices)
    require(value in choices, f"{name} '{value}' is not one of {', '.join(choices)}{hint}")


def require_divisible(name: str, value: int, by_name: str, by: int) -> None:
    require(value % by == 0, f"{name} ({value}) must be divisible by {by_name} ({by})")
