"""Sends the rows of a run to TensorBoard and Weights & Biases. Their failures never stop training."""

import contextlib
import importlib
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from mtpjax.atomic import write_text
from mtpjax.errors import install_extra
from mtpjax.training.config import TrainConfig
from mtpjax.training.run_dir import TENSORBOARD_FOLDER, WANDB_ID_FILE

log = logging.getLogger("mtpjax.train")


class Tracker(Protocol):
    """A destination for the numbers of a run, by name and step."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def flatten(row: Any, name: str = "") -> dict[str, float]:
    """Flattens a row of any structure to its numbers.

    Args:
        row: a mapping, list or value. Text and None are left out.

    Returns:
        Numbers by path. Elements of lists are numbered from 1, as draft levels are. Lists of bits start with the trunk:
        `bits/main`, `bits/mtp1`.
    """
    if isinstance(row, Mapping):
        items = [(str(key), value) for key, value in row.items()]
    elif isinstance(row, list | tuple):
        names = map(str, range(1, len(row) + 1))
        if name.rpartition("/")[2].startswith("bits"):
            names = ["main", *(f"mtp{depth}" for depth in range(1, len(row)))]
        items = list(zip(names, row, strict=False))
    else:
        return {name: float(row)} if isinstance(row, int | float) else {}
    numbers = {}
    for key, value in items:
        numbers |= flatten(value, f"{name}/{key}".lstrip("/"))
    return numbers


class TensorBoard:
    """Writes TensorBoard event files.

    It writes in the thread of the run. The usual `SummaryWriter` passes events to another thread, which ends silently
    when the disk is full, and then blocks.

    Args:
        folder: folder of the event files.
        step: number of updates that the run continues from.
    """

    def __init__(self, folder: pathlib.Path, step: int):
        from tensorboardX.event_file_writer import EventsWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.event: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        self.summary: Any = importlib.import_module("tensorboardX.proto.summary_pb2").Summary
        self.file = EventsWriter(str(folder / "events"), f".{os.getpid()}.{step}")
        # A session start makes TensorBoard drop later steps of older files.
        self._add(step + 1, session_log=self.event.SessionLog(status=self.event.SessionLog.START))

    def _add(self, step: int, **content) -> None:
        self.file.write_event(self.event.Event(wall_time=time.time(), step=step, **content))
        self.file.flush()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self.summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._add(step, summary=self.summary(value=values))

    def close(self) -> None:
        self.file.close()


class Wandb:
    """Logs to Weights & Biases.

    Args:
        folder: the run folder, which stores the id.
        project: the project.
        settings: settings of the run.
    """

    def __init__(self, folder: pathlib.Path, project: str, settings: Mapping[str, Any]):
        import wandb

        # A resumed run continues under its stored id. Weights & Biases ignores steps that it already has.
        file = folder / WANDB_ID_FILE
        known = file.read_text().strip() if file.exists() else None
        self.run = wandb.init(
            project=project, name=folder.name, dir=str(folder), id=known, resume="allow", config=dict(settings)
        )
        write_text(file, f"{self.run.id}\n")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        self.run.finish()


def require_trackers(config: TrainConfig) -> None:
    """Raises `ValueError` if a package is missing that a tracker of `config` needs."""
    for wanted, name, install in (
        (config.tensorboard, "tensorboardX", f"{install_extra('train')}, or leave out tensorboard"),
        (config.wandb is not None, "wandb", f"run pip install wandb, or leave out wandb={config.wandb}"),
    ):
        if wanted:
            try:
                __import__(name)
            except ImportError as error:
                raise ValueError(f"{name} is not installed: {install}") from error


@contextlib.contextmanager
def open_trackers(
    folder: pathlib.Path, step: int, config: TrainConfig, settings: Mapping[str, Any]
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Opens the trackers of a run. A tracker that fails is logged once and disabled.

    Yields a function that sends a row of `metrics.jsonl` to every tracker.
    """
    # Factories, because making a tracker can fail too, for example without a network.
    makers: dict[str, Callable[[], Tracker]] = {}
    if config.tensorboard:
        makers["TensorBoard"] = lambda: TensorBoard(folder / TENSORBOARD_FOLDER, step)
    if config.wandb is not None:
        makers["Weights & Biases"] = lambda: Wandb(folder, str(config.wandb), settings)
    trackers: dict[str, Tracker] = {}

    # Third-party code may raise anything, and none of its errors may end a run, so all are caught.
    def attempt(name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            if (tracker := trackers.pop(name, None)) is not None:
                with contextlib.suppress(Exception):
                    tracker.close()
            log.warning("%s is disabled for the rest of this run: %s: %s", name, type(error).__name__, error)

    for name, make in makers.items():
        if (tracker := attempt(name, make)) is not None:
            trackers[name] = tracker

    # Trackers have their own step axis and clock, so those two fields are not sent as numbers.
    def send(row: Mapping[str, Any]) -> None:
        numbers = flatten({key: value for key, value in row.items() if key not in ("step", "seconds")})
        for name, tracker in list(trackers.items()):
            attempt(name, lambda tracker=tracker: tracker.write(row["step"], numbers))

    try:
        yield send
    finally:
        for name, tracker in list(trackers.items()):
            attempt(name, tracker.close)
