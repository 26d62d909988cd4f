"""The flags of `mtpjax serve`, by SGLang's names. Imports no JAX."""

from mtpjax.cli.common import add_implementation_flag, add_model_path_flag
from mtpjax.cli.config_flags import DRAFT_FIELDS, LOOKUP_FIELDS, add_config_flags
from mtpjax.cli.disaggregation_flags import add_disaggregation_flags
from mtpjax.cli.drafter_flags import add_drafter_flags
from mtpjax.cli.expert_flags import add_expert_flags
from mtpjax.cli.help import command_parser, flag_group
from mtpjax.cli.mesh_flags import add_mesh_flags
from mtpjax.cli.serve_settings import ADMIN_KEY_VARIABLE, DEFAULT_HOST_GB, KEY_VARIABLE


def make_parser():
    """Makes the command's parser."""
    parser = command_parser(
        "Serve a model over HTTP: OpenAI's routes /v1/completions and /v1/chat/completions, SGLang's /generate, and a "
        "page with a chat and the server's state at /. Flags have SGLang's names. Only this machine can reach it, "
        "unless --host says otherwise. After SIGTERM running requests end, and then the server."
    )
    add_model_path_flag(parser)
    add_implementation_flag(parser)
    _add_model_flags(parser)
    _add_server_flags(parser)
    _add_start_and_end_flags(parser)
    _add_batch_flags(parser)
    _add_cache_flags(parser)
    _add_draft_flags(parser)
    _add_acceptance_flags(parser)
    _add_mesh_flags(parser)
    add_expert_flags(parser)
    add_disaggregation_flags(parser)
    return parser


def _add_model_flags(parser) -> None:
    group = flag_group(parser, "model")
    group.add_argument("--tokenizer-path", default=None, help="folder of the tokenizer (default: the model's)")
    group.add_argument(
        "--chat-template", default=None, metavar="FILE", help="file of a Jinja chat template (default: the model's)"
    )
    group.add_argument(
        "--context-length", type=int, default=None, help="most tokens of a prompt and its answer (default: the model's)"
    )
    add_config_flags(parser, ("kv_cache_dtype",))


def _add_server_flags(parser) -> None:
    group = flag_group(parser, "server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all of this machine's")
    group.add_argument("--port", type=int, default=30000, help="port to listen on; 0: a free one")
    group.add_argument(
        "--served-model-name", default=None, help="the model's name for clients (default: the name of its folder)"
    )
    group.add_argument(
        "--api-key",
        default=None,
        help=f"requests need this key as bearer token; several are separated by commas (default: ${KEY_VARIABLE}, "
        "which other users of the machine cannot see)",
    )
    group.add_argument(
        "--admin-api-key",
        default=None,
        help="requests that change the server for everybody (/flush_cache, /abort_request for all) need this key; "
        f"several are separated by commas (default: ${ADMIN_KEY_VARIABLE})",
    )
    group.add_argument(
        "--grammar-backend",
        default=None,
        choices=("llguidance", "none"),
        help="compiler of requests' JSON schemas and regular expressions (default: llguidance, if it is installed "
        "and supports the tokenizer)",
    )
    group.add_argument("--enable-metrics", action="store_true", help="answer /metrics, for Prometheus")
    group.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        metavar="LEVEL",
        help="messages to show: debug, info, warning or error, and those that are worse",
    )


def _add_start_and_end_flags(parser) -> None:
    group = flag_group(parser, "start and end")
    group.add_argument(
        "--wait-for-warm-up",
        action="store_true",
        help="be ready when all programs are compiled (default: when one request can run; the other programs are "
        "compiled meanwhile)",
    )
    group.add_argument("--skip-server-warmup", action="store_true", help="compile each program at its first use")
    group.add_argument(
        "--watchdog-timeout",
        type=float,
        default=300.0,
        help="end the server after a call of this many seconds; 0: never",
    )
    group.add_argument(
        "--drain-timeout", type=float, default=30.0, help="seconds that running requests get after SIGTERM"
    )


def _add_batch_flags(parser) -> None:
    group = flag_group(parser, "batching")
    group.add_argument("--max-running-requests", type=int, default=8, help="requests that run at the same time")
    group.add_argument("--max-queued-requests", type=int, default=1024, help="requests that may wait; others get 429")
    group.add_argument(
        "--max-queue-seconds", type=float, default=None, help="longest wait of a request (default: no limit)"
    )
    group.add_argument(
        "--max-run-seconds",
        type=float,
        default=None,
        help="longest time from a request's arrival to its end (default: no limit)",
    )
    group.add_argument(
        "--chunked-prefill-size", type=int, default=None, help="prompt tokens per call (default: 4 chunks of a prompt)"
    )
    group.add_argument(
        "--num-continuous-decode-steps",
        type=int,
        default=2,
        help="decoding rounds per call while no request waits; otherwise a call has one round",
    )
    group.add_argument(
        "--precompile-bs-paddings",
        type=int,
        nargs="*",
        default=[],
        help="batch sizes to compile programs for, as in SGLang-JAX (default: powers of four)",
    )


def _add_cache_flags(parser) -> None:
    group = flag_group(parser, "memory and prefix cache")
    group.add_argument(
        "--mem-fraction-static",
        type=float,
        default=0.9,
        help="share of device memory for weights and KV cache",
    )
    group.add_argument(
        "--max-total-tokens",
        type=int,
        default=None,
        help="tokens that the KV cache holds (default: by --mem-fraction-static; on a CPU at most 1 GiB)",
    )
    group.add_argument("--page-size", type=int, default=16, help="tokens per page of the KV cache")
    group.add_argument("--disable-radix-cache", action="store_true", help="share no prefixes between requests")
    group.add_argument(
        "--max-mamba-cache-size",
        type=int,
        default=None,
        help="for models with linear attention: recurrent states that the prefix cache keeps on the device; 0: such "
        "models share no prefixes (default: four per running request)",
    )
    group.add_argument(
        "--enable-hierarchical-cache",
        action="store_true",
        help="move pages of the prefix cache to host memory when the device's is full (one device only)",
    )
    group.add_argument(
        "--hicache-size",
        type=float,
        default=None,
        help=f"GB of host memory for --enable-hierarchical-cache (default: {DEFAULT_HOST_GB:g})",
    )


def _add_draft_flags(parser) -> None:
    group = flag_group(parser, "drafts")
    add_drafter_flags(parser)
    add_config_flags(parser, (*DRAFT_FIELDS, *LOOKUP_FIELDS), num_steps=None)
    group.add_argument(
        "--speculative-adaptive",
        action="store_true",
        help="choose the draft levels of each call, at most --num-steps, by acceptance and by the cost of a round, "
        "which is measured at the start; --acceptance auto is then sample",
    )
    group.add_argument(
        "--speculative-disable-by-batch-size",
        type=int,
        default=None,
        help="draft nothing while at least this many requests decode, as in vLLM; --acceptance auto is then sample "
        "(default: always draft)",
    )


def _add_acceptance_flags(parser) -> None:
    group = flag_group(parser, "acceptance")
    group.add_argument("--speculative-use-rejection-sampling", action="store_true", help="short for --acceptance token")
    group.add_argument("--speculative-use-block-verification", action="store_true", help="short for --acceptance block")
    group.add_argument("--allow-lossy", action="store_true", help="allow rules that change the text's distribution")


def _add_mesh_flags(parser) -> None:
    group = flag_group(parser, "devices")
    group.add_argument("--tp-size", type=int, default=None, help="devices; the same as --mesh tensor=N (default: 1)")
    group.add_argument(
        "--dp-size",
        type=int,
        default=1,
        help="parts of --tp-size that decode requests of their own; the same as --mesh data=N,...",
    )
    group.add_argument("--enable-dp-attention", action="store_true", help="split the requests over --dp-size")
    group.add_argument(
        "--ep-size",
        type=int,
        default=None,
        help="parts of --tp-size with experts of their own; the same as --mesh expert=N,... (default: --dp-size)",
    )
    add_mesh_flags(parser)
