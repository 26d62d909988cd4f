"""The flags of `mtpjax bench-serving`, with SGLang's names."""

import math

from mtpjax.cli.common import add_plot_formats_flag
from mtpjax.serving.bench.backends import BACKENDS

DATASETS = ("random", "random-ids", "sharegpt", "spec-bench", "custom")


def add_server_flags(bench) -> None:
    """Adds the flags that name the server, its route and what every request has."""
    bench.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        default="mtpjax",
        metavar="NAME",
        help="route: /generate (mtpjax, sglang), /v1/completions (openai, vllm) or /v1/chat/completions (openai-chat) "
        "(default: %(default)s)",
    )
    bench.add_argument("--base-url", default=None, help="the server's URL, in place of --host and --port")
    bench.add_argument("--host", default="127.0.0.1", help="the server's address (default: %(default)s)")
    bench.add_argument("--port", type=int, default=30000, help="the server's port (default: %(default)s)")
    bench.add_argument(
        "--served-model-name", default=None, help="name of the model (default: the first that the server lists)"
    )
    bench.add_argument("--header", nargs="+", default=[], metavar="KEY=VALUE", help="headers of every request")
    bench.add_argument(
        "--extra-request-body",
        default=None,
        metavar="JSON",
        help='JSON object that is added to every body, such as \'{"sampling_params": {"temperature": 1.0}}\'',
    )
    bench.add_argument("--disable-stream", action="store_true", help="ask for whole answers, not for streams")
    bench.add_argument(
        "--disable-ignore-eos",
        action="store_true",
        help="let answers end before their greatest length",
    )


def add_dataset_flags(bench) -> None:
    """Adds the flags that choose the prompts and their lengths."""
    bench.add_argument(
        "--dataset-name",
        choices=DATASETS,
        default="random",
        metavar="NAME",
        help="random: tokens of common words; random-ids: any token ids; sharegpt: conversations in JSON or JSONL; "
        "spec-bench: JSONL of prompts with categories; custom: either, or a text file with a prompt per paragraph "
        "(default: %(default)s)",
    )
    bench.add_argument("--dataset-path", default=None, metavar="FILE", help="file of a data set that is not random")
    bench.add_argument("--categories", nargs="+", default=[], help="only these categories (default: all)")
    bench.add_argument(
        "--num-prompts", type=int, default=64, help="requests per run, over all categories (default: %(default)s)"
    )
    bench.add_argument(
        "--max-new-tokens",
        type=int,
        default=None,
        help="per request of a file (default: as many as the file's reply has, or 256)",
    )
    bench.add_argument(
        "--random-input-len", type=int, default=1024, help="longest random prompt in tokens (default: %(default)s)"
    )
    bench.add_argument(
        "--random-output-len", type=int, default=1024, help="most new tokens of a random prompt (default: %(default)s)"
    )
    bench.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="shortest random length over the longest; 1: all are equal (default: %(default)s)",
    )
    bench.add_argument("--vocab-size", type=int, default=None, help="random-ids draws ids below this number")
    bench.add_argument("--seed", type=int, default=0, help="seed of prompts, lengths and times (default: %(default)s)")


def add_traffic_flags(bench) -> None:
    """Adds the flags that say when requests are sent and what is written."""
    bench.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        help="requests per second, at random times (Poisson); inf: all at once (default: %(default)s)",
    )
    bench.add_argument(
        "--max-concurrency", type=int, default=None, help="most requests that run at the same time (default: no limit)"
    )
    bench.add_argument(
        "--warmup-requests", type=int, default=1, help="requests before the measurement (default: %(default)s)"
    )
    bench.add_argument("--output-file", default=None, metavar="FILE", help="JSONL file that gets a line per run")
    bench.add_argument("--output-details", action="store_true", help="write every request to --output-file too")
    bench.add_argument("--tag", default=None, help="text to write to --output-file too")


def add_comparison_flags(bench) -> None:
    """Adds `--with-and-without-mtp` and its flags."""
    bench.add_argument(
        "--with-and-without-mtp",
        action="store_true",
        help="compare runs with those that ask for no drafts, by `speculative: false` in the request",
    )
    bench.add_argument(
        "--concurrencies",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32, 64],
        help="requests at the same time in the comparison",
    )
    bench.add_argument("--repeats", type=int, default=3, help="pairs of runs per concurrency (default: %(default)s)")
    bench.add_argument(
        "--output",
        default="mtp_speedup",
        help="path without suffix of the comparison's JSON, Markdown and pictures (default: %(default)s)",
    )
    add_plot_formats_flag(bench)
