"""Where a run's rows go: `metrics.jsonl`, and a live bar or lines on stderr."""

import contextlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich.console
import rich.progress

from mtpjax.atomic import write_text

METRICS = "metrics.jsonl"


class Log:
    """Writes rows down and shows them. `history` has every row of the run, also those from before it was gone on with.

    Raises `OSError` on entering where `folder` cannot be written to.
    """

    def __init__(self, folder: pathlib.Path, *, step: int):
        self.path, self.step = folder / METRICS, step
        self.history = _history(self.path, step)

    def __enter__(self) -> "Log":
        with contextlib.ExitStack() as stack:
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
        self.file.write(line + "\n")
        self.file.flush()

    def record_step(
        self, step: int, seconds: float, progress: float, *, losses: Sequence[float], tokens_per_step: int
    ) -> None:
        """A row of losses (nats, written in bits) and of the speed since the last one."""
        rate = (step - self.step) * tokens_per_step / (time.perf_counter() - self.time)
        self.restart_clock(step)
        bits = [float(loss) / math.log(2) for loss in losses]
        row = {"step": step, "seconds": seconds, "bits": bits, "tokens_per_second": rate}
        self.record(row)
        text = " ".join(f"{'main' if depth == 0 else f'mtp{depth}'}={loss:.3f}" for depth, loss in enumerate(bits))
        self.show(progress, f"step={step} {text} tokens/s={rate:.0f}", seconds)


def _history(path: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` up to a step; later ones, which will be logged again, are cut off the file."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a line that a killed process had begun
                rows.append(json.loads(line))
    rows = [row for row in rows if row["step"] <= step]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


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
