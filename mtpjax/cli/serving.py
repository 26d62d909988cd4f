"""`mtpjax serve` and `mtpjax serve-router`."""

from mtpjax.cli import serve, serve_flags
from mtpjax.cli.serve_router import add_serve_router, run_serve_router


def add_commands(commands) -> None:
    text = "serve a model over HTTP, with OpenAI's and SGLang's routes"
    commands.add_subcommand("serve", serve_flags.make_parser(), help=text)
    add_serve_router(commands)


COMMANDS = {"serve": serve.run_serve, "serve-router": run_serve_router}
