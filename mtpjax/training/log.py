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

from mtpjax.data.jsonl_writer import JsonlWriter, read_records

METRICS, PROFILE = "metrics.jsonl", "profile"


class Log:
    """Writes rows down, shows them, and hands them to `send`. `history` has every row of the run, also those from
    before it was gone on with. Without a `folder` rows are neither written nor shown.

    Raises `OSError` on entering where `folder` cannot be written to.
    """

    def __init__(self, folder: pathlib.Path | None, *, step: int, send: Callable[[dict[str, Any]], None] | None = None):
        self.path, self.step, self.send = folder and folder / METRICS, step, send
        self.history: list[dict[str, Any]] = []

    def __enter__(self) -> "Log":
        self.writer, self.show = None, None
        with contextlib.ExitStack() as stack:
            if self.path:
                # Without a sync per row: a row that a power failure loses costs a point of a curve.
                self.writer = stack.enter_context(JsonlWriter(self.path, sync=False))
                # Steps after the state that the run continues from are trained again, and logged again.
                is_kept = lambda row: row["step"] <= self.step
                self.history = self.writer.resume(is_kept, required=("step",), skip_damaged=True)
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
        # The history holds a row as JSON gives it back, as it does after a restart: lists for tuples, text for keys.
        self.history.append(json.loads(json.dumps(row)))
        if self.writer:
            self.writer.append([row])
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
    """Reads the rows of a `metrics.jsonl`.

    Args:
        path: the file; a missing one has no rows.

    Returns:
        The rows in order, without damaged lines and without a last line that is still being written.
    """
    return [row for _, row in read_records(path, skip_damaged=True)]


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
