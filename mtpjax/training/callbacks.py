"""Callbacks are user code that a run calls after updates, evaluations and saves."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mtpjax.training.train_state import TrainState

Moment = Literal["after_update", "after_evaluation", "after_save"]


@dataclasses.dataclass(frozen=True)
class TrainEvent:
    """The event that a callback receives.

    Args:
        step: number of updates done.
        progress: fraction of the run that is done, 0..1.
        seconds: wall-clock time of the run so far, in seconds, including the time before a restart.
        metrics: after an update, `loss` (the training loss), `losses` (`[1 + num_depths]` cross-entropies of trunk and
            depths in nats), `gradient_norm`, `is_finite`, `learning_rate` and `mtp_scale`. After an
            evaluation, the panel as in `metrics.jsonl`. After a save, the metrics of the last update, if there was one.
        state: parameters, with stacked trunk layers, and optimiser state. Valid only during the call, because the next
            update reuses its memory; copy what you want to keep.
        path: after a save, the folder that was written, which is a training state, or `checkpoint/` or `drafter/` at
            the end. None after other events, and in processes that write nothing.

    Example:
        >>> from mtpjax.training import TrainEvent
        >>> event = TrainEvent(step=3, progress=0.1, seconds=2.0, metrics={"loss": 5.5}, state=None)
        >>> event.metrics["loss"]
        5.5
    """

    step: int
    progress: float
    seconds: float
    metrics: Mapping[str, Any]
    state: TrainState
    path: pathlib.Path | None = None


class Callback:
    """Base class of callbacks. Override the methods that you need, and pass instances to `mtpjax.train`.

    A method that returns True requests a stop. The run then ends as if it had reached `steps`, so it saves the model,
    evaluates, and returns its result. `--resume` continues the run. An exception ends the run after its state is saved.
    In a run with several processes, every process calls its callbacks, and a stop request in one process stops all.

    Example:
        >>> from mtpjax.training import Callback
        >>> class StopWhenGood(Callback):
        ...     '''Stops once the first draft agrees with the trunk on 90 % of the held-out positions.'''
        ...
        ...     def after_evaluation(self, event):
        ...         return event.metrics["agreement"][0] >= 0.9
    """

    def after_update(self, event: TrainEvent) -> bool | None:
        """Runs after each update, including updates that were skipped because they were not finite."""

    def after_evaluation(self, event: TrainEvent) -> bool | None:
        """Runs after each evaluation. After the last one, a stop request has no effect."""

    def after_save(self, event: TrainEvent) -> bool | None:
        """Runs after each training state is saved, and after the trained model is saved at the end."""


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Checks callbacks before a run starts."""
    for index, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            what = f"the class {callback.__name__}" if isinstance(callback, type) else repr(callback)
            raise ValueError(f"callbacks[{index}] is {what}, not an instance of a subclass of mtpjax.training.Callback")
