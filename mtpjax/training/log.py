"""Logs a run to `metrics.jsonl`, and shows a live progress bar or plain lines on stderr."""

import contextlib
import json
import math
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import rich.console
import rich.progress

from mtpjax.data.jsonl_writer import JsonlWriter, read_resumable_records
from mtpjax.training.run_dir import METRICS_FILE, PROFILE_FOLDER


class UpdateWork(NamedTuple):
    """What an update processes.

    Attributes:
        tokens: tokens of the batch, including padding.
        flops: expected model FLOPs, the mean over the training rows; None for a drafter that does not count them.
        peak_flops: FLOP/s of all devices in the compute dtype, from the data sheet; None for an unknown device, such as
            a CPU.
    """

    tokens: int
    flops: float | None
    peak_flops: float | None


class MetricsLog:
    """Writes the rows of a run, shows them and passes them to trackers. A context manager.

    `history` holds every row of the run, including rows from before a restart.

    Args:
        folder: run folder; None: rows are neither written nor shown.
        step: number of updates that the run continues from; later rows in the file are dropped.
        send: called with every row, for trackers.

    Raises:
        OSError: on entering, if the folder is not writable.
    """

    def __init__(self, folder: pathlib.Path | None, *, step: int, send: Callable[[dict[str, Any]], None] | None = None):
        self.path, self.step, self.send = folder and folder / METRICS_FILE, step, send
        self.history: list[dict[str, Any]] = []

    def __enter__(self) -> "MetricsLog":
        self.writer, self.show = None, None
        with contextlib.ExitStack() as stack:
            if self.path:
                # Do not sync each row, because a row lost in a power failure is only one point of a curve.
                self.writer = stack.enter_context(JsonlWriter(self.path, sync=False))
                # Steps after the state that the run continues from are trained and logged again.
                is_kept = lambda row: not _has_step(row) or row["step"] <= self.step
                self.history = list(filter(_has_step, self.writer.resume(is_kept, skip_damaged=True)))
                self.show = stack.enter_context(progress_display())
            self.stack = stack.pop_all()
        self.restart_clock(self.step)
        return self

    def __exit__(self, *error) -> None:
        self.stack.__exit__(*error)

    def restart_clock(self, step: int) -> None:
        """Starts measuring speed from here, so that evaluations and saving do not count."""
        self.step, self.time, self.seconds_waited = step, time.perf_counter(), 0.0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Counts the time inside the context as time in which the run waits for data."""
        begin = time.perf_counter()
        yield
        self.seconds_waited += time.perf_counter() - begin

    def record(self, row: dict[str, Any]) -> None:
        """Appends a row, a dict with at least `step`."""
        # Convert through JSON, where tuples become lists and keys strings, so that a restart reads the same rows.
        self.history.append(json.loads(json.dumps(row)))
        if self.writer:
            self.writer.append([row])
        if self.send:
            self.send(row)

    def record_step(self, row: dict[str, Any], *, work: UpdateWork, progress: float) -> None:
        """Records an update, with the speed, the utilisation and the share of time without data since the last row.

        Args:
            row: at least `step`, `seconds` and `bits`, the losses of trunk and depths.
            work: what an update processes.
            progress: fraction of the run that is done, 0..1.
        """
        step, bits, seconds = row["step"], row["bits"], time.perf_counter() - self.time
        updates_per_second, data_wait = (step - self.step) / seconds, self.seconds_waited / seconds
        self.restart_clock(step)
        rate = updates_per_second * work.tokens
        flops = None if work.flops is None else updates_per_second * work.flops
        mfu = None if flops is None or work.peak_flops is None else flops / work.peak_flops
        speed = {"tokens_per_second": rate, "model_flops_per_second": flops, "mfu": mfu, "data_wait": data_wait}
        self.record({**row, **speed})
        if self.show:
            text = " ".join(f"{'main' if depth == 0 else f'mtp{depth}'}={loss:.3f}" for depth, loss in enumerate(bits))
            text += f" tokens/s={rate:.0f}" + ("" if mfu is None else f" mfu={mfu:.1%}") + f" data_wait={data_wait:.1%}"
            self.show(progress, f"update={step} {text}", row["seconds"])


def peak_memory_bytes() -> int:
    """Returns the peak memory so far in bytes, for the first device if JAX reports it, else for this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the rows of a `metrics.jsonl`.

    Args:
        path: the file; if it does not exist, there are no rows.

    Returns:
        The rows in order, without damaged lines or a last line that is still being written.
    """
    return [row for _, row in read_resumable_records(path, skip_damaged=True) if _has_step(row)]


def _has_step(row: Mapping[str, Any]) -> bool:
    """Returns whether a row has a valid `step`, as every row of a run does."""
    return isinstance(row.get("step"), (int, float)) and math.isfinite(row["step"])


@contextlib.contextmanager
def trace_window(folder: pathlib.Path, *, start: int, steps: int) -> Iterator[Callable[[int], None]]:
    """Traces some updates with JAX's profiler into `profile/`, for TensorBoard's profile plug-in, xprof or Perfetto.

    Args:
        steps: number of updates to trace; 0: none.

    Yields:
        A function to call before each update, with the number of updates done so far.
    """
    # If the run ends before the last update to trace, leaving the stack ends the trace.
    with contextlib.ExitStack() as trace:

        def at(number: int) -> None:
            if number == start and steps:
                trace.enter_context(jax.profiler.trace(str(folder / PROFILE_FOLDER)))
            elif number == start + steps:
                trace.close()

        yield at


@contextlib.contextmanager
def progress_display() -> Iterator[Callable[[float, str, float], None]]:
    """Shows progress on stderr, as a live bar on a terminal and as one line per call elsewhere.

    Yields `show(progress, text, seconds)` with the fraction done 0..1, a description, and the seconds since the start.
    """
    console = rich.console.Console(stderr=True)
    # Log files and pipes get plain lines; the remaining time is extrapolated from the progress so far.
    if not console.is_terminal:

        def show_line(progress, text, seconds):
            left = seconds * (1 - progress) / max(progress, 1e-9)
            print(f"{text} done={progress:.0%} left={left:.0f}s", file=sys.stderr, flush=True)

        yield show_line
        return
    # The first update compiles; the bar says so until the first row arrives.
    columns = (
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("compiling", total=1.0)
        yield lambda progress, text, seconds: bar.update(task, completed=progress, description=text)
