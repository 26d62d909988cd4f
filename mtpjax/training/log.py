"""Where a run's rows go: `metrics.jsonl`, and a live bar or lines on stderr."""

import contextlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import rich.console
import rich.progress

from mtpjax.atomic import write_text

METRICS, PROFILE = "metrics.jsonl", "profile"


class Log:
    """Writes rows down, shows them, and hands them to `send`. `history` has every row of the run, also those from
    before it was gone on with. Without a `folder` rows are neither written nor shown.

    Raises `OSError` on entering where `folder` cannot be written to.
    """

    def __init__(self, folder: pathlib.Path | None, *, step: int, send: Callable[[dict[str, Any]], None] | None = None):
        self.path, self.step, self.send = folder and folder / METRICS, step, send
        self.history = _history(self.path, step) if self.path else []

    def __enter__(self) -> "Log":
        self.file, self.show = None, None
        with contextlib.ExitStack() as stack:
            if self.path:
                self.file = stack.enter_context(self.path.open("a"))
                self.show = stack.enter_context(display())
            self.stack = stack.pop_all()
        self.restart_clock(self.step)
        return self

    def __exit__(self, *error) -> None:
        self.stack.__exit__(*error)

    def restart_clock(self, step: int) -> None:
        """Time from here on counts towards the next row's tokens per second."""
        self.step, self.time = step, time.perf_counter()

    def record(self, row: dict[str, Any]) -> None:
        line = json.dumps(row)
        self.history.append(json.loads(line))
        if self.file:
            self.file.write(line + "\n")
            self.file.flush()
        if self.send:
            self.send(row)

    def record_step(
        self, step: int, seconds: float, progress: float, *, losses: Sequence[float], tokens_per_step: int
    ) -> None:
        """A row of losses (nats, written in bits) and of the speed since the last one."""
        rate = (step - self.step) * tokens_per_step / (time.perf_counter() - self.time)
        self.restart_clock(step)
        bits = [float(loss) / math.log(2) for loss in losses]
        row = {"step": step, "seconds": seconds, "bits": bits, "tokens_per_second": rate}
        self.record(row)
        if self.show:
            text = " ".join(f"{'main' if depth == 0 else f'mtp{depth}'}={loss:.3f}" for depth, loss in enumerate(bits))
            self.show(progress, f"step={step} {text} tokens/s={rate:.0f}", seconds)


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, but a line that a process has begun; none where there is no file."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def _history(path: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` up to a step; later ones, which will be logged again, are cut off the file."""
    rows = [row for row in read_rows(path) if row["step"] <= step]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


@contextlib.contextmanager
def trace_window(folder: pathlib.Path, *, start: int, steps: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that, told the number of updates before each, has JAX's profiler trace `steps` from `start` on.

    The trace stands in `profile/`, for TensorBoard's profile plug-in, xprof or Perfetto.
    """
    with contextlib.ExitStack() as trace:

        def at(number: int) -> None:
            if number == start and steps:
                trace.enter_context(jax.profiler.trace(str(folder / PROFILE)))
            elif number == start + steps:
                trace.close()

        yield at


@contextlib.contextmanager
def display() -> Iterator[Callable[[float, str, float], None]]:
    """Gives a function `show(progress, text, seconds)`: a live bar on a terminal, a line elsewhere."""
    console = rich.console.Console(stderr=True)
    if not console.is_terminal:

        def show_line(progress, text, seconds):
            left = seconds * (1 - progress) / max(progress, 1e-9)
            print(f"{text} done={progress:.0%} left={left:.0f}s", file=sys.stderr, flush=True)

        yield show_line
        return
    columns = (
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("compiling", total=1.0)
        yield lambda progress, text, seconds: bar.update(task, completed=progress, description=text)
