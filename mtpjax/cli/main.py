"""The `mtpjax` command: parse, call, print."""

import importlib.metadata
import logging
import os
import sys

import jsonargparse

from mtpjax.cli import conversion, decoding, measuring, training
from mtpjax.errors import CheckpointError, ResumableError, UsageError

GROUPS = (training, decoding, conversion, measuring)
COMMANDS = {name: run for group in GROUPS for name, run in group.COMMANDS.items()}
# Exit code of an exception: the first class that it is an instance of. `errors.py` says what each means.
EXIT_CODES = (
    (UsageError, 2),
    (CheckpointError, 3),
    (ResumableError, 75),
    ((ValueError, OSError), 2),
)


def main(arguments: list[str] | None = None) -> None:
    """Exits with 0; 2 for wrong usage, 3 for a bad checkpoint, 4 if a text differs from the plain one, 1 otherwise.

    75: interrupted with all that is needed to go on where it was.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if arguments is None and options.subcommand in ("quickstart", "train"):
        _keep_memory()
    logging.basicConfig(level=logging.WARNING, format="mtpjax: %(message)s")
    command = options.subcommand
    try:
        sys.exit(COMMANDS[command](options[command]))
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, ResumableError) as error:
        print(f"mtpjax {command}: {error}", file=sys.stderr)
        sys.exit(next(code for kind, code in EXIT_CODES if isinstance(error, kind)))


def _keep_memory() -> None:
    """Starts the command again with a C library that keeps freed memory, in huge pages, where none was set up.

    Every training step frees and takes some hundred megabytes; faulting them in anew took 40 % of a step (glibc).
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        tunables = ("hugetlb=1", "mmap_threshold=4000000000", "trim_threshold=8000000000")
        os.environ["GLIBC_TUNABLES"] = ":".join(f"glibc.malloc.{tunable}" for tunable in tunables)
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "mtpjax.cli.main", *sys.argv[1:]])


def _parser() -> jsonargparse.ArgumentParser:
    version = importlib.metadata.version("mtpjax")
    parser = jsonargparse.ArgumentParser(prog="mtpjax", description="Multi-token prediction in JAX.", version=version)
    commands = parser.add_subcommands(title="commands", metavar="COMMAND")
    for group in GROUPS:
        group.add(commands)
    return parser


if __name__ == "__main__":
    main()
