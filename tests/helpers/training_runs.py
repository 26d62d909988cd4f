"""Small training runs, in this process or another, and their losses."""

import os
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

from mtpjax.training.log import read_metrics
from mtpjax.training.run_dir import METRICS_FILE

SETTINGS = {"batch_size": 2, "row_length": 32, "log_every": 1, "num_depths": 1, "panel_prompts": 0}


def write_corpus(folder: pathlib.Path) -> pathlib.Path:
    """Forty small files, some of which will be held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(40):
        (folder / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 8)
    return folder


def train_command(corpus: pathlib.Path, output: pathlib.Path, settings: dict[str, Any]) -> list[str]:
    pairs = {**SETTINGS, **settings, "data": corpus, "output": output}
    return [sys.executable, "-m", "mtpjax.cli.start", "train", *(f"{name}={value}" for name, value in pairs.items())]


def environment(cache: pathlib.Path) -> dict[str, str]:
    """Of a process that compiles quickly and keeps what it compiled."""
    return os.environ | {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_FLAGS": "",
        "GLIBC_TUNABLES": "",  # set already: the command does not start itself again
    }


def read_losses(folder: pathlib.Path) -> dict[int, list[float]]:
    """Step -> bits, of what a run has logged so far."""
    return losses(read_metrics(folder / METRICS_FILE))


def losses(rows: Iterable[dict[str, Any]]) -> dict[int, list[float]]:
    """Step -> bits, of a run's rows."""
    return {row["step"]: row["bits"] for row in rows if "bits" in row}
