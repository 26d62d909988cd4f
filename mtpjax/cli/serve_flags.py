"""The flags of `mtpjax serve`, with SGLang's names. Imports no JAX."""

from mtpjax.cli.common import add_decoding_model_flags
from mtpjax.cli.config_flags import DRAFT_FIELDS, LOOKUP_FIELDS, add_config_flags
from mtpjax.cli.disaggregation_flags import add_disaggregation_flags
from mtpjax.cli.drafter_flags import add_drafter_flags
from mtpjax.cli.expert_flags import add_expert_flags
from mtpjax.cli.help import command_parser
from mtpjax.cli.mesh_flags import add_mesh_flags

DEFAULT_HOST_GB = 4.0
KEY_VARIABLE, ADMIN_KEY_VARIABLE = "MTPJAX_API_KEY", "MTPJAX_ADMIN_API_KEY"


def make_parser():
    parser = command_parser(
        "Serve a model over HTTP, with OpenAI's routes /v1/completions and /v1/chat/completions, SGLang's /generate, "
        "and a page at / that shows a chat and the server's state. The flags have SGLang's names. By default, the "
        "server listens only on this machine (see --host). After SIGTERM it finishes the running requests and exits."
    )
    add_decoding_model_flags(parser)
    _add_model_flags(parser)
    _add_server_flags(parser)
    _add_startup_flags(parser)
    _add_batch_flags(parser)
    _add_cache_flags(parser)
    _add_draft_flags(parser)
    _add_mesh_flags(parser)
    add_expert_flags(parser)
    add_disaggregation_flags(parser)
    return parser


def _add_model_flags(parser) -> None:
    group = parser.flag_group("model")
    group.add_argument("--tokenizer-path", help="folder of the tokenizer (default: the model's)")
    group.add_argument("--chat-template", metavar="FILE", help="Jinja chat template (default: the model's)")
    group.add_argument("--context-length", type=int, help="maximum tokens in prompt plus answer (default: the model's)")
    add_config_flags(parser, ("kv_cache_dtype",))


def _add_server_flags(parser) -> None:
    group = parser.flag_group("server")
    add_listen_flags(group)
    group.add_argument("--served-model-name", help="the model's name for clients (default: the name of its folder)")
    group.add_argument(
        "--api-key",
        help="API key that requests must send as a bearer token; several keys are separated by commas. Unlike this "
        f"flag, the environment variable is hidden from other users of the machine (default: ${KEY_VARIABLE})",
    )
    group.add_argument(
        "--admin-api-key",
        help="API key for /flush_cache and for /abort_request with abort_all; several keys are separated by commas "
        f"(default: ${ADMIN_KEY_VARIABLE})",
    )
    group.add_argument(
        "--grammar-backend",
        choices=("llguidance", "none"),
        help="library for constrained output by JSON schema or regular expression (default: llguidance, if it is "
        "installed and supports the tokenizer)",
    )
    group.add_argument("--enable-metrics", action="store_true", help="serve metrics for Prometheus at /metrics")


def add_listen_flags(group) -> None:
    """Adds the flags of a listening server for address, log level and shutdown."""
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all addresses")
    group.add_argument("--port", type=int, default=30000, help="port to listen on; 0: any free port")
    levels = ("debug", "info", "warning", "error")
    group.add_argument("--log-level", default="info", choices=levels, metavar="LEVEL", help="lowest level to log")
    group.add_argument(
        "--drain-timeout", type=float, default=30.0, help="seconds for running requests to finish after SIGTERM"
    )


def _add_startup_flags(parser) -> None:
    group = parser.flag_group("startup")
    group.add_argument(
        "--wait-for-warm-up",
        action="store_true",
        help="become ready only when all programs are compiled (default: when one request can run; the other programs "
        "compile while the server runs)",
    )
    group.add_argument(
        "--skip-server-warmup", action="store_true", help="compile each program when a request first needs it"
    )
    group.add_argument(
        "--watchdog-timeout",
        type=float,
        default=300.0,
        help="seconds after which a hung device call ends the server; 0: never",
    )


def _add_batch_flags(parser) -> None:
    group = parser.flag_group("batching")
    group.add_argument("--max-running-requests", type=int, default=8, help="maximum number of running requests")
    group.add_argument(
        "--max-queued-requests",
        type=int,
        default=1024,
        help="maximum number of queued requests; further requests get status 429",
    )
    group.add_argument("--max-queue-seconds", type=float, help="maximum seconds in the queue (default: no limit)")
    group.add_argument(
        "--max-run-seconds", type=float, help="maximum seconds from arrival to the last token (default: no limit)"
    )
    group.add_argument("--chunked-prefill-size", type=int, help="prompt tokens per prefill call (default: 4 chunks)")
    group.add_argument(
        "--num-continuous-decode-steps",
        type=int,
        default=2,
        help="decoding rounds per device call; only 1 while requests are queued or being prefilled",
    )
    group.add_argument(
        "--precompile-bs-paddings",
        type=int,
        nargs="*",
        default=[],
        help="batch sizes to compile, as in SGLang-JAX (default: powers of four)",
    )


def _add_cache_flags(parser) -> None:
    group = parser.flag_group("memory and prefix cache")
    group.add_argument(
        "--mem-fraction-static", type=float, default=0.9, help="fraction of device memory for weights and KV cache"
    )
    group.add_argument(
        "--max-total-tokens",
        type=int,
        help="capacity of the KV cache in tokens (default: set by --mem-fraction-static; on a CPU at most 1 GiB)",
    )
    group.add_argument("--page-size", type=int, default=16, help="tokens per page of the KV cache")
    group.add_argument("--disable-radix-cache", action="store_true", help="do not share prefixes between requests")
    group.add_argument(
        "--max-mamba-cache-size",
        type=int,
        help="for models with linear attention: maximum number of recurrent states in the prefix cache; 0: do not "
        "share prefixes (default: 4 per running request)",
    )
    group.add_argument(
        "--enable-hierarchical-cache",
        action="store_true",
        help="move pages of the prefix cache to host memory when device memory is full (one device only)",
    )
    group.add_argument(
        "--hicache-size",
        type=float,
        help=f"GB of host memory for --enable-hierarchical-cache (default: {DEFAULT_HOST_GB:g})",
    )


def _add_draft_flags(parser) -> None:
    group = parser.flag_group("drafts")
    add_drafter_flags(parser)
    add_config_flags(parser, (*DRAFT_FIELDS, *LOOKUP_FIELDS), num_steps=None)
    group.add_argument(
        "--speculative-adaptive",
        action="store_true",
        help="choose the number of draft levels for each call, up to --num-steps, by the acceptance so far and the "
        "round times measured at startup; --acceptance auto then means sample",
    )
    group.add_argument(
        "--speculative-disable-by-batch-size",
        type=int,
        help="do not draft while at least this many requests decode, as in vLLM; --acceptance auto then means sample "
        "(default: always draft)",
    )
    group = parser.flag_group("acceptance")
    group.add_argument("--speculative-use-rejection-sampling", action="store_true", help="short for --acceptance token")
    group.add_argument("--speculative-use-block-verification", action="store_true", help="short for --acceptance block")
    group.add_argument("--allow-lossy", action="store_true", help="allow rules that change the text's distribution")


def _add_mesh_flags(parser) -> None:
    group = parser.flag_group("devices")
    group.add_argument("--tp-size", type=int, help="number of devices; equivalent to --mesh tensor=N (default: 1)")
    group.add_argument(
        "--dp-size",
        type=int,
        default=1,
        help="number of groups into which the --tp-size devices are divided; each group decodes different requests; "
        "equivalent to --mesh data=N,...",
    )
    group.add_argument("--enable-dp-attention", action="store_true", help="shard the requests; required with --dp-size")
    group.add_argument(
        "--ep-size",
        type=int,
        help="number of groups into which the --tp-size devices are divided; each group has different experts; "
        "equivalent to --mesh expert=N,... (default: --dp-size)",
    )
    add_config_flags(parser, ("allow_copies",))
    add_mesh_flags(parser)
