"""Flags of `mtpjax serve` for prefill and decode on different machines, with SGLang's names where it has them."""

import os
import pathlib
from typing import Any

from mtpjax.cli.help import flag_group
from mtpjax.errors import UsageError

SECRET_VARIABLE = "MTPJAX_DISAGGREGATION_SECRET"


def add_disaggregation_flags(parser) -> None:
    group = flag_group(parser, "prefill and decode on different machines")
    group.add_argument(
        "--disaggregation-mode",
        metavar="MODE",
        choices=("null", "prefill", "decode"),
        help="prefill: also compute prompts for decode servers; decode: fetch the KV cache of prompts from a prefill "
        "server; null: neither (default)",
    )
    group.add_argument("--disaggregation-prefill-url", help="for a decode server: address of the prefill server")
    group.add_argument(
        "--disaggregation-transfer-backend",
        default="jax",
        choices=("jax", "http"),
        help="how the KV cache is sent: by jax.experimental.transfer, or in the prefill server's HTTP response",
    )
    group.add_argument(
        "--disaggregation-bootstrap-port",
        type=int,
        default=8998,
        help="port of the prefill server for the transfer backend jax; 0: a free one",
    )
    group.add_argument(
        "--disaggregation-secret-file",
        help=f"file with the secret that both servers share (default: ${SECRET_VARIABLE})",
    )
    group.add_argument(
        "--disaggregation-timeout",
        type=float,
        default=30.0,
        help="seconds that a request waits for its KV cache; then the decode server prefills the prompt itself",
    )


def disaggregation_settings(options) -> Any:
    """Returns the `DisaggregationSettings`; None for a server that does both.

    With a mode, this imports JAX, so the number of threads must be set before.

    Raises:
        UsageError: a flag is missing, or contradicts another.
        ValueError: the secret is too short.
        OSError: the secret's file cannot be read.
    """
    mode, url = options.disaggregation_mode, options.disaggregation_prefill_url
    if mode in (None, "null"):  # SGLang's default
        return None
    from mtpjax.serving.disaggregation.setup import DisaggregationSettings

    if options.disable_radix_cache:
        raise UsageError("--disaggregation-mode needs the prefix cache: remove --disable-radix-cache")
    if mode == "decode" and not (url or "").startswith(("http://", "https://")):
        raise UsageError("--disaggregation-mode decode needs --disaggregation-prefill-url http://HOST:PORT")
    if options.disaggregation_secret_file is not None:
        secret = pathlib.Path(options.disaggregation_secret_file).read_bytes().strip()
    else:
        secret = os.environ.get(SECRET_VARIABLE, "").encode()
    if not secret:
        raise UsageError(f"--disaggregation-mode needs --disaggregation-secret-file, or {SECRET_VARIABLE}")
    return DisaggregationSettings(
        prefill_url=url if mode == "decode" else None,
        secret=secret,
        backend=options.disaggregation_transfer_backend,
        host=options.host,
        port=options.disaggregation_bootstrap_port,
        timeout=options.disaggregation_timeout,
    )
