"""Reads the training cost of a drafter from the files of its run."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtpjax.drafters.methods import DRAFTER_FOLDER
from mtpjax.training.log import read_metrics
from mtpjax.training.run_dir import CHECKPOINT_FOLDER, METRICS_FILE, read_run_file


@dataclasses.dataclass(frozen=True)
class TrainingCost:
    """The cost of the run that trained a drafter.

    Attributes:
        updates: number of updates.
        tokens: number of tokens in all updates.
        seconds: wall-clock time, including compilation and evaluations.
        seconds_per_update: median over the intervals between logged updates.
    """

    updates: int
    tokens: int
    seconds: float
    seconds_per_update: float


def read_training_cost(folder) -> TrainingCost | None:
    """Reads the training cost of a drafter from its run folder.

    Args:
        folder: a run folder, its `drafter/` or `checkpoint/`, or any other path.

    Returns:
        The cost; None if the folder is not from a run that trained only a drafter, or has too few logged updates.
    """
    folder = pathlib.Path(folder)
    folder = folder.parent if folder.name in (DRAFTER_FOLDER, CHECKPOINT_FOLDER) else folder
    try:
        (settings,) = read_run_file(folder)
        # A run that trained trunk and modules together does not show the cost of the modules alone. A run
        # that continued training a drafter does not show the cost of earlier updates.
        if settings["trains"] != "modules" or settings.get("draft_init_from"):
            return None
        tokens_per_update = int(settings["batch_size"]) * int(settings["row_length"])
        history = read_metrics(folder / METRICS_FILE)
        per_update = seconds_per_update(history)
        updates, seconds = int(history[-1]["step"]), float(history[-1]["seconds"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    if per_update is None:
        return None
    return TrainingCost(updates, updates * tokens_per_update, seconds, per_update)


def seconds_per_update(history: Sequence[Mapping[str, Any]]) -> float | None:
    """Computes the median duration of an update over the intervals between a run's logged updates.

    Returns the duration in seconds, or None if fewer than two updates are logged.
    """
    # Rows with losses are the logged updates; the other rows are evaluations.
    logged = np.array([(row["step"], row["seconds"]) for row in history if "bits" in row], float)
    # Two rows make an interval; the time before the first row is mostly compilation.
    if len(logged) < 2:
        return None
    steps, durations = np.diff(logged, axis=0).T
    return float(np.median(durations / steps))
