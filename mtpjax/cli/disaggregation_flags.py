"""Flags of `mtpjax serve` for prefill and decode on different machines, with SGLang's names where they exist."""

SECRET_VARIABLE = "MTPJAX_DISAGGREGATION_SECRET"


def add_disaggregation_flags(parser) -> None:
    group = parser.flag_group("prefill and decode on different machines")
    group.add_argument(
        "--disaggregation-mode",
        metavar="MODE",
        choices=("null", "prefill", "decode"),
        help="prefill: also compute prompts for decode servers; decode: fetch the KV cache of prompts from a prefill "
        "server (default: one server does both)",
    )
    group.add_argument("--disaggregation-prefill-url", help="for a decode server: address of the prefill server")
    group.add_argument(
        "--disaggregation-transfer-backend",
        default="jax",
        choices=("jax", "http"),
        help="send the KV cache by jax.experimental.transfer, or in the prefill server's HTTP response",
    )
    group.add_argument(
        "--disaggregation-bootstrap-port",
        type=int,
        default=8998,
        help="the prefill server's port for the jax transfer backend; 0: any free port",
    )
    group.add_argument(
        "--disaggregation-secret-file",
        help=f"file with the secret that both servers share (default: ${SECRET_VARIABLE})",
    )
    group.add_argument(
        "--disaggregation-timeout",
        type=float,
        default=30.0,
        help="seconds that a request waits for its KV cache before the decode server prefills the prompt itself",
    )
