"""What several commands have in common."""

import contextlib
import pathlib
import sys
import time


def add_model(parser) -> None:
    """The flag that names a checkpoint."""
    parser.add_argument("--model-path", "--model", required=True, help="a checkpoint, or a run folder with one")


def set_threads(model_path: str, threads: int = 0) -> None:
    """XLA's on a CPU, if JAX is not imported yet: 0 is what suits the model. Raises `ValueError` below 0."""
    from mtpjax.host import limit_threads, suitable_threads
    from mtpjax.io.checkpoint_format import checkpoint_bytes

    if threads < 0:
        raise ValueError(f"threads must be 0 or more, not {threads}")
    if "jax" not in sys.modules:
        limit_threads(threads or suitable_threads(checkpoint_bytes(model_path)))


def progress_bar(*columns):
    """A `rich` bar on the error stream, if that is a terminal, which goes when all is done."""
    import rich.console
    from rich.progress import Progress

    console = rich.console.Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextlib.contextmanager
def bytes_done(source: str, target: str):
    """Yields what takes counts of bytes: a bar with bytes/s on a terminal, and one closing line everywhere."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    place = pathlib.Path(source)
    total = sum(file.stat().st_size for file in (place, *place.rglob("*")) if file.is_file())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    done, begin = 0, time.perf_counter()
    with progress_bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(pathlib.Path(target).name, total=total)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.update(task, completed=done)

        yield advance
    seconds = time.perf_counter() - begin
    print(f"{target}: {done / 1e9:.3f} GB in {seconds:.1f} s, {done / 1e6 / seconds:.0f} MB/s", file=sys.stderr)
