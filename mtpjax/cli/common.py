"""Flags, checks and progress bars that several commands share."""

import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from mtpjax import compilation_cache
from mtpjax.atomic import check_output_file, write_text
from mtpjax.errors import UsageError, printable
from mtpjax.evaluation.plot_style import DEFAULT_FORMATS, FORMATS
from mtpjax.messages import require
from mtpjax.models.config import IMPLEMENTATIONS

PROMPT_FILE_HELP = (
    "file of prompts: JSONL (Spec-Bench, GSM8K and others), or a text file with one prompt per line, or per paragraph "
    "if it has blank lines"
)


def add_model_path_flag(parser, *, is_required: bool = True) -> None:
    parser.flag_group("model").add_argument(
        "--model-path",
        "--model",
        required=is_required,
        help="a checkpoint, a training run's folder, a Hugging Face directory, a GGUF file, or a Hugging Face Hub "
        "repository: org/name, org/name@revision or org/name/file.gguf",
    )
    add_model_type_flag(parser)


def add_model_type_flag(parser) -> None:
    parser.flag_group("model").add_argument(
        "--model-type",
        help="model family of a Hugging Face checkpoint, such as qwen3_next (default: model_type in its config.json)",
    )


def add_decoding_model_flags(parser, *, is_required: bool = True) -> None:
    add_model_path_flag(parser, is_required=is_required)
    parser.flag_group("model").add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        default="auto",
        metavar="NAME",
        help="implementation of the ops: xla (plain JAX), triton (GPU kernels), interpreted (the GPU kernels, emulated "
        "slowly on any device), or auto (on a GPU, the faster one for each op as measured by `mtpjax tune`; without "
        "measurements, kernels for experts, fp8 weights, prefill attention and paged attention with many rows)",
    )


def add_chat_flag(group) -> None:
    group.add_argument("--chat", action="store_true", help="apply the chat template to each prompt as a user message")


def add_data_flags(parser, help: str):
    """Adds `--data` with this help text and `--pattern`, which `list_data` reads. Returns the group of these flags."""
    group = parser.flag_group("data")
    group.add_argument("--data", required=True, metavar="PATH", help=help)
    group.add_argument("--pattern", default="*", help="glob pattern for the files to read in a folder, such as *.jsonl")
    return group


def check_minimums(options, **minimums: float) -> None:
    """Raises UsageError if a flag's value, or one of its values, is below the minimum."""
    for name, minimum in minimums.items():
        value = getattr(options, name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None and each < minimum:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {minimum}, got {each}")


def add_plot_formats_flag(parser) -> None:
    parser.flag_group("output").add_argument(
        "--plot-formats",
        nargs="*",
        choices=FORMATS,
        default=list(DEFAULT_FORMATS),
        metavar="FORMAT",
        help=f"file formats of the plots: {', '.join(FORMATS)}; pass the flag without a format to skip the plots",
    )


def check_output(options) -> None:
    """Raises ValueError if the `--output` file cannot be written. Call it before the work that produces the output."""
    if options.output is not None:
        check_output_file(options.output)


def write_json(path: str | None, content: Any, *, allow_nan: bool = True) -> None:
    """Writes a JSON file, or does nothing if there is no path."""
    if path is not None:
        write_text(path, json.dumps(content, indent=1, allow_nan=allow_nan) + "\n")


def set_threads(model_path: str, threads: int = 0) -> None:
    """Sets the number of XLA's CPU threads, unless JAX is already imported, and enables the compilation cache.

    Args:
        model_path: the checkpoint; models below 16 MiB decode fastest on one thread.
        threads: the number of threads, or 0 to choose it by the size of the model. A negative number raises ValueError.
    """
    from mtpjax.host import choose_num_threads, limit_threads
    from mtpjax.io.checkpoint_format import checkpoint_bytes

    require(threads >= 0, f"threads must be at least 0, got {threads}")
    # XLA reads the number once, when JAX initializes its devices.
    if "jax" not in sys.modules:
        limit_threads(threads or choose_num_threads(checkpoint_bytes(model_path)))
    compilation_cache.enable()


@contextlib.contextmanager
def show_bytes_read(source: str | pathlib.Path, target: str) -> Iterator[Callable[[int], None]]:
    """Shows how many bytes a command has read, with a progress bar on a terminal and one final line on stderr.

    Args:
        source: the file or folder to read; its size is the bar's total.
        target: the output, which the final line mentions.

    Yields:
        A function that takes the number of bytes read since the last call.
    """
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from mtpjax.console import progress_bar

    place = pathlib.Path(source)
    # `rglob` yields nothing for a file, so this works for both files and folders.
    total = sum(file.stat().st_size for file in (place, *place.rglob("*")) if file.is_file())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    done, start = 0, time.perf_counter()
    with progress_bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(pathlib.Path(target).name, total=total)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.update(task, completed=done)

        yield advance
    # The bar disappears at the end, but this line remains, and it also appears in logs.
    seconds = time.perf_counter() - start
    speed = f"{done / 1e9:.3f} GB in {seconds:.1f} s, {done / 1e6 / seconds:.0f} MB/s"
    print(f"{printable(target)}: {speed}", file=sys.stderr)


def list_data(options) -> list[pathlib.Path]:
    """Lists the files that `--data` and `--pattern` select, and prints how many files in a folder are left out."""
    from mtpjax.data.data_files import list_data_files

    files = list_data_files(options.data, options.pattern)
    if left_out := files.describe_left_out():
        print(f"left out files of {printable(options.data)}: {left_out}", file=sys.stderr, flush=True)
    return files.paths
