"""What several commands have in common."""

import contextlib
import pathlib
import sys
import time


def add_model(parser) -> None:
    """The flag that names a checkpoint."""
    parser.add_argument("--model-path", "--model", required=True, help="a checkpoint, or a run folder with one")


@contextlib.contextmanager
def bytes_done(source: str, target: str):
    """Yields what takes counts of bytes: a bar with bytes/s on a terminal, and one closing line everywhere."""
    import rich.console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = rich.console.Console(stderr=True)
    place = pathlib.Path(source)
    total = sum(file.stat().st_size for file in (place, *place.rglob("*")) if file.is_file())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    done, begin = 0, time.perf_counter()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(pathlib.Path(target).name, total=total)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.update(task, completed=done)

        yield advance
    seconds = time.perf_counter() - begin
    print(f"{target}: {done / 1e9:.3f} GB in {seconds:.1f} s, {done / 1e6 / seconds:.0f} MB/s", file=sys.stderr)
