"""`mtpjax bench-serving`."""

from mtpjax.cli.bench_serving import add_bench_serving, run_bench_serving


def add_commands(commands) -> None:
    """Adds the commands and their flags.

    Args:
        commands: the subcommands of the `mtpjax` parser.
    """
    add_bench_serving(commands)


COMMANDS = {"bench-serving": run_bench_serving}
