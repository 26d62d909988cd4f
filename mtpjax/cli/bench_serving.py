"""The flags of `mtpjax bench-serving`, with SGLang's names."""

import math

from mtpjax.cli.common import add_plot_formats_flag
from mtpjax.cli.help import command_parser
from mtpjax.serving.bench.backends import BACKENDS

DATASETS = ("random", "random-ids", "sharegpt", "spec-bench", "custom")


def add_bench_serving(commands) -> None:
    bench = command_parser(
        "Measure latency and throughput of a running server over HTTP, with the flags and the table of SGLang's "
        "benchmark. Token counts are the server's, because one chunk of a stream holds several tokens. The accept "
        "length is 1 + accepted drafts / verification passes, including the bonus token. --with-and-without-mtp "
        "compares runs with and without drafts at several concurrencies instead. The API key is read from "
        "MTPJAX_API_KEY, else OPENAI_API_KEY."
    )
    _add_server_flags(bench)
    _add_dataset_flags(bench)
    _add_traffic_flags(bench)
    _add_comparison_flags(bench)
    _add_output_flags(bench)
    commands.add_subcommand("bench-serving", bench, help="measure latency and throughput of a running server")


def run_bench_serving(options) -> int:
    from mtpjax.cli.bench_run import run_benchmark

    return run_benchmark(options)


def _add_server_flags(bench) -> None:
    group = bench.flag_group("server and requests")
    group.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        default="mtpjax",
        metavar="NAME",
        help="route: /generate (mtpjax, sglang), /v1/completions (openai, vllm) or /v1/chat/completions (openai-chat)",
    )
    group.add_argument("--base-url", help="the server's URL, in place of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="the server's address")
    group.add_argument("--port", type=int, default=30000, help="the server's port")
    group.add_argument("--served-model-name", help="the model's name (default: the first that the server lists)")
    group.add_argument("--header", nargs="+", default=[], metavar="KEY=VALUE", help="headers of every request")
    group.add_argument(
        "--extra-request-body",
        metavar="JSON",
        help='JSON object to merge into every body, such as \'{"sampling_params": {"temperature": 1.0}}\'',
    )
    group.add_argument("--disable-stream", action="store_true", help="request whole answers instead of streams")
    group.add_argument(
        "--disable-ignore-eos",
        action="store_true",
        help="let an answer end at an end-of-text token (default: generate all new tokens)",
    )


def _add_dataset_flags(bench) -> None:
    group = bench.flag_group("prompts")
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        default="random",
        metavar="NAME",
        help="random: tokens of common words; random-ids: any token ids; sharegpt: conversations in JSON or JSONL; "
        "spec-bench: JSONL of prompts with categories; custom: either, or a text file with a prompt per "
        "line, or per paragraph if it has blank lines",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="file of a data set that is not random")
    group.add_argument(
        "--categories", nargs="+", default=[], metavar="NAME", help="only these categories (default: all)"
    )
    group.add_argument("--num-prompts", type=int, default=64, help="requests per run, over all categories")
    group.add_argument(
        "--max-new-tokens",
        type=int,
        help="new tokens per request of a file (default: the length of the file's reply, else 256)",
    )
    group.add_argument("--random-input-len", type=int, default=1024, help="tokens of the longest random prompt")
    group.add_argument("--random-output-len", type=int, default=1024, help="maximum new tokens of a random prompt")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="shortest over longest length of random prompts and answers; 1: all are equal",
    )
    group.add_argument("--vocab-size", type=int, help="for random-ids: exclusive upper bound of token ids")
    group.add_argument("--seed", type=int, default=0, help="seed of prompts, lengths and times")


def _add_traffic_flags(bench) -> None:
    group = bench.flag_group("traffic")
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        help="requests per second, at random times (Poisson); inf: all at once",
    )
    group.add_argument("--max-concurrency", type=int, help="maximum number of requests in flight (default: no limit)")
    group.add_argument("--warmup-requests", type=int, default=1, help="requests before the measurement")


def _add_comparison_flags(bench) -> None:
    group = bench.flag_group("comparison with and without drafts")
    group.add_argument(
        "--with-and-without-mtp",
        action="store_true",
        help="send the same requests with and without drafts (`speculative: false` in the request), in turns",
    )
    group.add_argument(
        "--concurrencies",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32, 64],
        help="numbers of requests in flight to compare at",
    )
    group.add_argument("--repeats", type=int, default=3, help="pairs of runs per concurrency")
    group.add_argument(
        "--reference",
        action="store_true",
        help="also show AMD's published speed-ups of DeepSeek with MTP on MI300X: another model and machine",
    )


def _add_output_flags(bench) -> None:
    group = bench.flag_group("output")
    group.add_argument("--output-file", metavar="FILE", help="JSONL file that gets a line per run")
    group.add_argument("--output-details", action="store_true", help="write every request to --output-file too")
    group.add_argument("--tag", metavar="TEXT", help="text to write to --output-file too")
    group.add_argument(
        "--output",
        default="mtp_speedup",
        metavar="PATH",
        help="path, without a suffix, of the comparison's JSON, Markdown and pictures",
    )
    add_plot_formats_flag(bench)
