"""Imports user-defined acceptance rules and draft methods, given as `package.module:RECORD`."""

import importlib
import os
import sys
from typing import TypeVar

from mtpjax.errors import UsageError, printable

T = TypeVar("T")


def import_record(name: str, kind: type[T]) -> T:
    """Imports an acceptance rule or a draft method.

    Args:
        name: `package.module:RECORD`; the module is installed, on `PYTHONPATH`, or a file in the current folder.
        kind: the class that the object must be an instance of.

    Raises:
        UsageError: the module cannot be imported or does not define the name, or the object has a different class.
    """
    # A missing or misspelled name gives a one-line error; other errors in the module keep their traceback.
    module, _, attribute = name.partition(":")
    if (folder := os.getcwd()) not in sys.path:  # as with `python -m`
        sys.path.append(folder)
    try:
        record = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{printable(name, 200)} cannot be imported: {error}") from error
    if not isinstance(record, kind):
        raise UsageError(f"{printable(name, 200)} must be an instance of {kind.__name__}, got {type(record).__name__}")
    return record
