"""Flags, progress bars and threads that several commands share."""

import contextlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

from mtpjax import compilation_cache
from mtpjax.errors import UsageError, printable
from mtpjax.evaluation.plot_style import DEFAULT_FORMATS, FORMATS
from mtpjax.models.config import IMPLEMENTATIONS


def add_model_path_flag(parser) -> None:
    parser.flag_group("model").add_argument(
        "--model-path",
        "--model",
        required=True,
        help="a checkpoint, a run folder that holds one, a Hugging Face directory, a GGUF file, or a repository of the "
        "Hugging Face Hub: org/name, org/name@revision or org/name/file.gguf",
    )
    add_model_type_flag(parser)


def add_model_type_flag(parser) -> None:
    parser.flag_group("model").add_argument(
        "--model-type",
        default="auto",
        help="family to read a Hugging Face checkpoint as, such as qwen3_next (default: the model_type of its "
        "config.json)",
    )


def add_implementation_flag(parser) -> None:
    parser.flag_group("model").add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        default="auto",
        metavar="NAME",
        help="implementation of the ops: xla (plain JAX), triton (GPU kernels), interpreted (the GPU kernels on any "
        "machine, slowly), or auto, which on a GPU chooses for each op: by the times of `mtpjax tune`, else kernels "
        "for experts, fp8 weights, prefill attention and attention over the pages of many rows",
    )


def model_type(options) -> str | None:
    """Returns the family of `--model-type`; None: the checkpoint's own."""
    return None if options.model_type == "auto" else options.model_type


def check_minimums(options, **minimums: int) -> None:
    """Raises UsageError if the value of a flag is below its minimum."""
    for name, minimum in minimums.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {minimum}, got {value}")


def add_plot_formats_flag(parser) -> None:
    parser.flag_group("output").add_argument(
        "--plot-formats",
        nargs="*",
        choices=FORMATS,
        default=list(DEFAULT_FORMATS),
        metavar="FORMAT",
        help=f"formats of the plots: {', '.join(FORMATS)}; no value: no plots",
    )


def set_threads(model_path: str, threads: int = 0) -> None:
    """Sets the number of XLA's CPU threads, unless JAX is already imported, and enables the compilation cache.

    Args:
        model_path: the checkpoint; models below 16 MiB decode fastest on one thread.
        threads: the number of threads; 0 chooses by the size of the model. A negative number raises ValueError.
    """
    from mtpjax.host import choose_num_threads, limit_threads
    from mtpjax.io.checkpoint_format import checkpoint_bytes

    if threads < 0:
        raise ValueError(f"threads must be at least 0, got {threads}")
    # XLA reads the number once, when JAX makes its devices.
    if "jax" not in sys.modules:
        limit_threads(threads or choose_num_threads(checkpoint_bytes(model_path)))
    compilation_cache.enable()


def progress_bar(*columns):
    """Makes a `rich` progress bar on stderr, shown only on a terminal and removed at the end."""
    import rich.console
    from rich.progress import Progress

    # stdout carries the command's results only, so that they can be piped.
    console = rich.console.Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextlib.contextmanager
def show_bytes_read(source: str | pathlib.Path, target: str) -> Iterator[Callable[[int], None]]:
    """Shows how many bytes a command has read: a bar on a terminal, and one closing line on stderr.

    Args:
        source: file or folder that the command reads; its size is the bar's total.
        target: what the command writes, named in the closing line.

    Yields:
        A function that takes the number of bytes read since the last call.
    """
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    place = pathlib.Path(source)
    # `rglob` of a file yields nothing, so this holds for a file and for a folder.
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
    # The bar disappears at the end; this line stays, also in logs.
    seconds = time.perf_counter() - begin
    print(
        f"{printable(target)}: {done / 1e9:.3f} GB in {seconds:.1f} s, {done / 1e6 / seconds:.0f} MB/s", file=sys.stderr
    )


def list_data(options) -> list[pathlib.Path]:
    """Lists the files of `--data` and `--pattern`, and prints how many of a folder are left out."""
    from mtpjax.data.data_files import list_data_files

    files = list_data_files(options.data, options.pattern)
    if left_out := files.describe_left_out():
        print(f"left out files of {printable(options.data)}: {left_out}", file=sys.stderr, flush=True)
    return files.paths
