"""The fields that every results file has, and a function that writes it."""

import datetime
import json
import pathlib
import platform
import sys
from collections.abc import Sequence
from typing import Any

import jax

from mtpjax.atomic import write_text
from mtpjax.evaluation.machine import describe_machine


def about(argv: Sequence[str] | None = None, **more: Any) -> dict[str, Any]:
    """Returns the date, machine, versions and arguments of a measurement, plus the fields in `more`."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "argv": sys.argv[1:] if argv is None else list(argv),
        **more,
    }


def write(path: pathlib.Path | None, content: Any) -> None:
    """Writes JSON atomically, so that an interrupted run leaves the last complete file. Does nothing without a path."""
    if path is not None:
        write_text(path, json.dumps(content, indent=1) + "\n")
