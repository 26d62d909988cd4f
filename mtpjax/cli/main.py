"""The `mtpjax` command: parses the flags, runs the command, maps exceptions to exit codes."""

import contextlib
import io
import logging
import signal
import sys
from typing import NoReturn

from mtpjax.cli import conversion, decoding, measuring, serving, training
from mtpjax.cli.flag_checks import check_command_line
from mtpjax.cli.help import CommandParser, HelpFormatter
from mtpjax.cli.interrupts import defer_interrupts
from mtpjax.cli.supervisor import LOST_PROCESS, continue_in_child
from mtpjax.errors import (
    INTERRUPTED,
    CheckpointError,
    LostProcess,
    MemoryTooSmall,
    ResumableError,
    UsageError,
    is_memory_error,
    printable,
)
from mtpjax.host import describe_address_limit, keep_freed_memory
from mtpjax.version import __version__

GROUPS = (training, decoding, conversion, measuring, serving)
COMMANDS = {name: run for group in GROUPS for name, run in group.COMMANDS.items()}
# Exit code of an exception: the first class that it is an instance of. `errors.py` says what each means.
EXIT_CODES = (
    (UsageError, 2),
    (CheckpointError, 3),
    (MemoryTooSmall, 5),
    (ResumableError, 75),
    ((ValueError, OSError), 2),
)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and exits.

    The exit code is 0 on success. Errors have 2 (wrong usage), 3 (bad checkpoint), 5 (memory too small) or 1 (any
    other). 4 means that a text differs from plain decoding's, and 130 Ctrl-C. 75 means that the run was interrupted and
    the same command continues it.

    Args:
        arguments: the command line without the program's name; None: `sys.argv`.
    """
    if arguments is None:
        defer_interrupts()
    try:
        _run(arguments)
    except SystemExit as end:
        # Only a process that runs nothing else may end at once.
        if arguments is None:
            _end_while_compiling(end.code)
        raise


def _run(arguments: list[str] | None) -> NoReturn:
    given = sys.argv[1:] if arguments is None else arguments
    command = given[0] if given and given[0] in COMMANDS else ""
    name, advice = f"mtpjax {command}".rstrip(), ""
    try:
        options = _parse(given)
        advice = "; continue with --resume" if command == "train" else ""
        _prepare_process(options.subcommand, is_own=arguments is None)
        if arguments is None:
            _watch_for_aborts(name, getattr(options[options.subcommand], "nnodes", 1) > 1, advice)
        sys.exit(COMMANDS[options.subcommand](options[options.subcommand]))
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except LostProcess as lost:
        print(f"{name}: {lost}{advice}", file=sys.stderr)
        from mtpjax.distributed import exit_without_shutdown

        # A normal exit would wait in JAX's shutdown barrier for the lost process, and then abort.
        exit_without_shutdown(_exit_code(LostProcess))
    except Exception as error:
        # A full memory shows up as all kinds of errors: of an import, of a thread, of a file that cannot be read.
        if is_memory_error(error) and not isinstance(error, MemoryTooSmall):
            print(f"{name}: {_describe_full_memory(error)}", file=sys.stderr)
            sys.exit(_exit_code(MemoryTooSmall))
        if not isinstance(error, ValueError | OSError | ResumableError):
            raise
        # The user's fault, not the program's: one line without a traceback.
        print(f"{name}: {printable(error)}", file=sys.stderr)
        sys.exit(_exit_code(type(error)))


def _end_while_compiling(code: object) -> None:
    """Ends the process at once if one of its threads compiles: XLA would crash when the interpreter ends."""
    background = sys.modules.get("mtpjax.serving.background")
    if background is not None and background.is_compiling():
        from mtpjax.distributed import exit_without_shutdown

        exit_without_shutdown(code if isinstance(code, int) else int(code is not None))


def _watch_for_aborts(name: str, has_peers: bool, advice: str) -> None:
    """Continues in a child process where native code may abort this one for a reason that the user should read."""
    if has_peers:
        continue_in_child(name, _exit_code(LostProcess), LOST_PROCESS + advice)
    elif limit := describe_address_limit():
        message = f"memory is too small: native code ended the process; {limit}"
        signals = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
        continue_in_child(name, _exit_code(MemoryTooSmall), message, signals)


def _describe_full_memory(error: BaseException) -> str:
    parts = [f"memory is too small ({type(error).__name__}: {printable(error, 200)})", describe_address_limit()]
    return "; ".join(filter(None, parts))


def _exit_code(kind: type[Exception]) -> int:
    return next(code for base, code in EXIT_CODES if issubclass(kind, base))


def _prepare_process(command: str, *, is_own: bool) -> None:
    """Sets up the process for a command; with `is_own`, the process runs only this command."""
    # `keep_freed_memory` may restart the process.
    if is_own and command in ("quickstart", "train"):
        keep_freed_memory()
    # Warnings of the library, such as MTP modules that draft badly, reach the user in one line each.
    logging.basicConfig(level=logging.WARNING, format="mtpjax: %(message)s")
    # SIGTERM and SIGHUP raise SystemExit, so that conversions remove their unfinished folders, as after Ctrl-C.
    if is_own and command in ("convert", "export-mtp", "merge-mtp"):
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


def _parse(arguments: list[str]):
    """Parses the flags. Help that cannot be written, as on a full disk, is an error."""
    parser = make_parser()
    arguments = check_command_line(arguments, parser)
    # argparse ignores errors of writing, so it writes into memory.
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            return parser.parse_args(arguments)
    except SystemExit:
        try:
            sys.stdout.write(printed.getvalue())
            sys.stdout.flush()
        except OSError as error:
            # The interpreter would flush again at its end, and fail again.
            sys.stdout = None
            print(f"mtpjax: the output cannot be written: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        raise


def make_parser() -> CommandParser:
    """Makes the parser of `mtpjax` with all subcommands."""
    # This runs without JAX, so `--help` answers at once.
    parser = CommandParser(
        prog="mtpjax",
        description="Multi-token prediction in JAX: training, speculative decoding, conversion and a server. "
        "`mtpjax COMMAND --help` explains a command.",
        version=__version__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subcommands(title="commands", metavar="COMMAND", description=None)
    for group in GROUPS:
        group.add_commands(commands)
    return parser


if __name__ == "__main__":
    main()
