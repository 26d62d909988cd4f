"""`mtpjax serve-router`."""

from mtpjax.cli.help import command_parser
from mtpjax.cli.serve_flags import add_listen_flags
from mtpjax.errors import UsageError, install_extra
from mtpjax.messages import count_of


def add_serve_router(commands) -> None:
    router = command_parser(
        "Distribute requests over several servers of the same model, each to the server with the fewest running ones. "
        "Among equally busy servers, prompts with the same beginning go to the same server, to reuse its prefix cache. "
        "Servers that do not answer get no requests until they do. The servers check API keys, which the router "
        "forwards."
    )
    group = router.flag_group("servers")
    group.add_argument("--decode-urls", nargs="+", required=True, metavar="URL", help="addresses of the servers")
    add_listen_flags(router.flag_group("router"))
    commands.add_subcommand("serve-router", router, help="route requests to several servers")


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
        line = f"mtpjax serve-router: {address_of(listener)} routes to {count_of(len(router.upstreams), 'server')}"
        # At a second Ctrl-C the connections are closed, which ends the requests.
        drain = lambda: router.drain(options.drain_timeout)
        run_app(router, listener, line, drain, lambda: None, has_lifespan=True)
    return 0
