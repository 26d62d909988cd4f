"""The `mtpjax` command, which parses the flags, runs a command, and maps exceptions to exit codes."""

import contextlib
import io
import logging
import signal
import sys
from typing import NoReturn

from mtpjax.cli import (
    bench_serving,
    chat,
    conversion,
    generate,
    measuring,
    planning,
    regenerate,
    serve,
    training,
    tuning,
    vocabulary,
)
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

# In the order in which `--help` lists them.
MODULES = (
    training,
    generate,
    chat,
    regenerate,
    conversion,
    planning,
    tuning,
    measuring,
    vocabulary,
    serve,
    bench_serving,
)
COMMANDS = {name: run for module in MODULES for name, run in module.COMMANDS.items()}
# The first class that an exception is an instance of determines the exit code. `errors.py` explains the codes.
EXIT_CODES = (
    (UsageError, 2),
    (CheckpointError, 3),
    (MemoryTooSmall, 5),
    (ResumableError, 75),
    ((ValueError, OSError), 2),
)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and exits.

    The exit code is 0 on success, 2 for wrong usage, 3 for a bad checkpoint, 4 if a text differs from plain decoding, 5
    if memory is too small, 75 if the run was interrupted and the same command resumes it, 130 after Ctrl-C, and 1 for
    all other errors.

    Args:
        arguments: the command line without the program's name, or None for `sys.argv`.
    """
    if arguments is None:
        defer_interrupts()
    try:
        _run(arguments)
    except SystemExit as end:
        # Only a process that runs nothing else may exit immediately.
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
        # Running out of memory causes many kinds of errors, such as an import that fails, a thread that does not start,
        # or a file that cannot be read.
        if is_memory_error(error) and not isinstance(error, MemoryTooSmall):
            problem = f"memory is too small ({type(error).__name__}: {printable(error, 200)})"
            print(f"{name}: {'; '.join(filter(None, [problem, describe_address_limit()]))}", file=sys.stderr)
            sys.exit(_exit_code(MemoryTooSmall))
        if not isinstance(error, ValueError | OSError | ResumableError):
            raise
        # This is a user error and not a bug, so print one line without a traceback.
        print(f"{name}: {printable(error)}", file=sys.stderr)
        sys.exit(_exit_code(type(error)))


def _end_while_compiling(code: object) -> None:
    """Exits immediately if a thread is compiling: XLA would crash during a normal shutdown of the interpreter."""
    background = sys.modules.get("mtpjax.serving.background")
    if background is not None and background.is_compiling():
        from mtpjax.distributed import exit_without_shutdown

        exit_without_shutdown(code if isinstance(code, int) else int(code is not None))


def _watch_for_aborts(name: str, has_peers: bool, advice: str) -> None:
    """Continues in a child process if native code may abort the process, so that the parent can print the reason."""
    if has_peers:
        continue_in_child(name, _exit_code(LostProcess), LOST_PROCESS + advice)
    elif limit := describe_address_limit():
        message = f"memory is too small: native code ended the process; {limit}"
        signals = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
        continue_in_child(name, _exit_code(MemoryTooSmall), message, signals)


def _exit_code(kind: type[Exception]) -> int:
    return next(code for base, code in EXIT_CODES if issubclass(kind, base))


def _prepare_process(command: str, *, is_own: bool) -> None:
    """Sets up memory, logging and signals for a command. `is_own`: the process exists only for this command."""
    # `keep_freed_memory` may restart the process.
    if is_own and command in ("quickstart", "train"):
        keep_freed_memory()
    # Print each warning of the library, such as one about MTP modules that draft badly, on one line.
    logging.basicConfig(level=logging.WARNING, format="mtpjax: %(message)s")
    # SIGTERM and SIGHUP raise SystemExit, so that conversions remove their unfinished folders, as after Ctrl-C.
    if is_own and command in ("convert", "export-mtp", "merge-mtp"):
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


def _parse(arguments: list[str]):
    """Parses the flags. Exits with an error if the help text cannot be written, as on a full disk."""
    parser = make_parser()
    arguments = check_command_line(arguments, parser)
    # argparse ignores write errors, so let it write to memory.
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            return parser.parse_args(arguments)
    except SystemExit:
        try:
            sys.stdout.write(printed.getvalue())
            sys.stdout.flush()
        except OSError as error:
            # Otherwise, the interpreter would flush stdout again at exit, and fail again.
            sys.stdout = None
            print(f"mtpjax: the output cannot be written: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        raise


def make_parser() -> CommandParser:
    """Makes the `mtpjax` parser with all subcommands."""
    # This runs without JAX, so that `--help` answers at once.
    parser = CommandParser(
        prog="mtpjax",
        description="Multi-token prediction in JAX: training, speculative decoding, conversion and serving. "
        "`mtpjax COMMAND --help` describes a command.",
        version=__version__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subcommands(title="commands", metavar="COMMAND", description=None)
    for module in MODULES:
        module.add_commands(commands)
    return parser


if __name__ == "__main__":
    main()
