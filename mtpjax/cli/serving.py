"""`mtpjax serve` and `mtpjax bench-serving`."""

from mtpjax.cli import serve
from mtpjax.cli.bench_serving import add_bench_serving, run_bench_serving


def add_commands(commands) -> None:
    """Adds the commands and their flags.

    Args:
        commands: the subcommands of the `mtpjax` parser.
    """
    text = "serve a model over HTTP, with OpenAI's and SGLang's routes"
    commands.add_subcommand("serve", serve.make_parser(), help=text)
    add_bench_serving(commands)


COMMANDS = {"serve": serve.run_serve, "bench-serving": run_bench_serving}
