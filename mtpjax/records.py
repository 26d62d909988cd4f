"""Loads records of users, such as acceptance rules, by `package.module:RECORD`. Imports nothing of mtpjax."""

import importlib
from typing import TypeVar

T = TypeVar("T")


def import_record(name: str, kind: type[T]) -> T:
    """Imports a record.

    Args:
        name: `package.module:RECORD`; the module must be installed or on `PYTHONPATH`.
        kind: the class of the record.

    Returns:
        The record.

    Raises:
        ValueError: the module cannot be imported, or has no such record. One line.
    """
    # What is missing or misspelt is an error of one line; other errors of the module keep their traceback.
    module, _, attribute = name.partition(":")
    try:
        record = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name} cannot be imported: {error}") from error
    if not isinstance(record, kind):
        raise ValueError(f"{name} must be an instance of {kind.__name__}, got {type(record).__name__}")
    return record
