"""Computes the progress of a run, and the learning rate, which depends on the progress."""

import math
import time

from mtpjax.training.config import TrainConfig


def learning_rate_at(progress: float, config: TrainConfig) -> float:
    """Returns the learning rate at a point of the run, from a cosine schedule multiplied by a linear warm-up.

    Args:
        progress: fraction of the run that is done, 0..1.
        config: the settings.

    Returns:
        The learning rate, which ends at `final_learning_rate * learning_rate`.

    Example:
        >>> from mtpjax import TrainConfig
        >>> from mtpjax.training import learning_rate_at
        >>> config = TrainConfig(learning_rate=1.0, warmup=0.1, final_learning_rate=0.05)
        >>> [round(learning_rate_at(progress, config), 2) for progress in (0.0, 0.1, 1.0)]
        [0.0, 0.98, 0.05]
    """
    warm = min(progress / config.warmup, 1.0) if config.warmup else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * warm * (config.final_learning_rate + (1 - config.final_learning_rate) * cosine)


class ProgressClock:
    """Measures the progress of a run by updates or by wall-clock time, whichever is further along.

    Progress by time is capped at the progress towards `min_steps`. `progress` changes only when `tick` is called, so
    that everything within one update sees the same value.

    Args:
        config: `steps`, `seconds` and `min_steps`.
        step: number of updates that the run continues from.
        seconds: seconds that these updates took.
    """

    def __init__(self, config: TrainConfig, *, step: int = 0, seconds: float = 0.0):
        self.config, self.step, self.begin = config, step, time.perf_counter() - seconds
        self.progress = self._progress()

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run, including the time before a restart."""
        return time.perf_counter() - self.begin

    def tick(self) -> None:
        """Counts an update."""
        self.step += 1
        self.progress = self._progress()

    def _progress(self) -> float:
        by_seconds = self.seconds / self.config.seconds
        # On a slow or busy machine, the updates, not the seconds, decide when the run ends.
        if self.config.min_steps:
            by_seconds = min(by_seconds, self.step / self.config.min_steps)
        return min(max(self.step / self.config.steps, by_seconds), 1.0)
