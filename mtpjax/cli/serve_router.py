"""`mtpjax serve-router`."""

from mtpjax.cli.help import command_parser, flag_group
from mtpjax.errors import UsageError, install_extra
from mtpjax.messages import count_of


def add_serve_router(commands) -> None:
    router = command_parser(
        "Pass requests on to several servers of the same model: each request to the server with the fewest running "
        "ones. Among equally busy servers, prompts with the same beginning go to the same one, whose prefix cache has "
        "it. Servers that do not answer are left out until they do. API keys are passed on; the servers check them."
    )
    group = flag_group(router, "servers")
    group.add_argument("--decode-urls", nargs="+", required=True, metavar="URL", help="addresses of the servers")
    group = flag_group(router, "router")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all of this machine's")
    group.add_argument("--port", type=int, default=30000, help="port to listen on; 0: a free one")
    group.add_argument(
        "--drain-timeout", type=float, default=30.0, help="seconds that running requests get after SIGTERM"
    )
    group.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        metavar="LEVEL",
        help="messages to show: debug, info, warning or error, and those that are worse",
    )
    commands.add_subcommand("serve-router", router, help="pass requests on to several servers")


def run_serve_router(options) -> int:
    import logging

    try:
        from mtpjax.serving.http_server import address_of, listen, run_app
        from mtpjax.serving.router import Router
    except ImportError as error:
        raise UsageError(f"{error.name} is missing: {install_extra('serve')}") from error
    logging.getLogger("mtpjax").setLevel(options.log_level.upper())
    router = Router(options.decode_urls)
    with listen(options.host, options.port) as listener:
        line = f"mtpjax serve-router: {count_of(len(router.upstreams), 'server')} behind {address_of(listener)}"
        # At a second Ctrl-C the connections are closed, which ends the requests.
        drain = lambda: router.drain(options.drain_timeout)
        run_app(router, listener, line, drain, lambda: None, has_lifespan=True, log_level="warning")
    return 0
