"""Sends a run's logged rows to TensorBoard and Weights & Biases. Tracker failures never stop training."""

import contextlib
import importlib
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mtpjax.atomic import write_text
from mtpjax.errors import install_extra
from mtpjax.training.config import TrainConfig
from mtpjax.training.run_dir import TENSORBOARD_FOLDER, WANDB_ID_FILE

log = logging.getLogger("mtpjax.train")
Write = Callable[[int, Mapping[str, float]], None]  # write(step, numbers by name)


def flatten(row: Any, name: str = "") -> dict[str, float]:
    """Flattens a nested row to the numbers in it.

    Args:
        row: a mapping, list or value. Text and None are left out.

    Returns:
        Numbers by path. List elements are numbered from 1, like draft levels. Lists of bits start with the trunk:
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


@contextlib.contextmanager
def _tensorboard(folder: pathlib.Path, step: int) -> Iterator[Write]:
    """Opens TensorBoard event files. `step` is the number of updates that the run continues from.

    Events are written in the run's own thread. The usual `SummaryWriter` passes them to a separate thread, which dies
    silently when the disk is full; the writer then blocks.
    """
    from tensorboardX.event_file_writer import EventsWriter

    folder.mkdir(parents=True, exist_ok=True)
    event: Any = importlib.import_module("tensorboardX.proto.event_pb2")
    summary: Any = importlib.import_module("tensorboardX.proto.summary_pb2").Summary
    file = EventsWriter(str(folder / "events"), f".{os.getpid()}.{step}")

    def add(step: int, **content) -> None:
        file.write_event(event.Event(wall_time=time.time(), step=step, **content))
        file.flush()

    # A session-start event makes TensorBoard drop later steps of older files.
    add(step + 1, session_log=event.SessionLog(status=event.SessionLog.START))
    with contextlib.closing(file):
        yield lambda step, numbers: add(
            step, summary=summary(value=[summary.Value(tag=tag, simple_value=each) for tag, each in numbers.items()])
        )


@contextlib.contextmanager
def _wandb(folder: pathlib.Path, project: str, settings: Mapping[str, Any]) -> Iterator[Write]:
    """Opens a run at Weights & Biases. The run folder stores its id."""
    import wandb

    # A resumed run continues under its stored id. Weights & Biases ignores steps that it already has.
    file = folder / WANDB_ID_FILE
    known = file.read_text().strip() if file.exists() else None
    run = wandb.init(
        project=project, name=folder.name, dir=str(folder), id=known, resume="allow", config=dict(settings)
    )
    write_text(file, f"{run.id}\n")
    yield lambda step, numbers: run.log(dict(numbers), step=step)
    run.finish()


def require_trackers(config: TrainConfig) -> None:
    """Raises `ValueError` if a tracker in `config` needs a package that is missing."""
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
    """Opens the trackers of a run. The first error of a tracker is logged and disables it.

    Yields a function that sends a row of `metrics.jsonl` to every tracker.
    """
    makers: dict[str, contextlib.AbstractContextManager[Write]] = {}
    if config.tensorboard:
        makers["TensorBoard"] = _tensorboard(folder / TENSORBOARD_FOLDER, step)
    if config.wandb is not None:
        makers["Weights & Biases"] = _wandb(folder, config.wandb, settings)
    trackers: dict[str, tuple[Write, contextlib.ExitStack]] = {}

    # Third-party code may raise anything, and none of its errors may end a run, so all are caught.
    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            if name in trackers:
                with contextlib.suppress(Exception):
                    trackers.pop(name)[1].close()
            log.warning("%s is disabled for the rest of this run: %s: %s", name, type(error).__name__, error)

    def start(name: str) -> None:
        stack = contextlib.ExitStack()
        trackers[name] = stack.enter_context(makers[name]), stack

    for name in makers:
        attempt(name, lambda name=name: start(name))

    # Trackers have their own step axis and clock, so those two fields are not sent as numbers.
    def send(row: Mapping[str, Any]) -> None:
        numbers = flatten({key: value for key, value in row.items() if key not in ("step", "seconds")})
        for name, (write, _) in list(trackers.items()):
            attempt(name, lambda write=write: write(row["step"], numbers))

    try:
        yield send
    finally:
        for name, (_, stack) in list(trackers.items()):
            attempt(name, stack.close)
