"""`mtpjax bench-serving`, with SGLang's flags."""

import math

from mtpjax.cli.common import add_plot_formats_flag, check_minimums
from mtpjax.cli.help import command_parser
from mtpjax.serving.bench.backends import BACKENDS

DATASETS = ("random", "random-ids", "sharegpt", "spec-bench", "custom")


def add_commands(commands) -> None:
    bench = command_parser(
        "Measure latency and throughput of a running server over HTTP, with the flags and output of SGLang's "
        "bench_serving. Token counts come from the server, because a chunk of a stream can have several tokens. The "
        "accept length is 1 + accepted drafts / verification passes. --with-and-without-mtp compares runs with and "
        "without drafts at several concurrencies instead. The API key is read from MTPJAX_API_KEY or OPENAI_API_KEY."
    )
    _add_request_flags(bench)
    _add_measurement_flags(bench)
    commands.add_subcommand("bench-serving", bench, help="measure latency and throughput of a running server")


def _bench_serving(options) -> int:
    from mtpjax.cli.bench_run import run_benchmark

    check_minimums(options, num_prompts=1, repeats=1, max_concurrency=1, max_new_tokens=1, warmup_requests=0)
    return run_benchmark(options)


def _add_request_flags(bench) -> None:
    group = bench.flag_group("server and requests")
    group.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        default="mtpjax",
        metavar="NAME",
        help="mtpjax or sglang (/generate), openai or vllm (/v1/completions), or openai-chat (/v1/chat/completions)",
    )
    group.add_argument("--base-url", help="URL of the server, instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="address of the server")
    group.add_argument("--port", type=int, default=30000, help="port of the server")
    group.add_argument("--served-model-name", help="model name (default: the first one that the server lists)")
    group.add_argument("--header", nargs="+", default=[], metavar="KEY=VALUE", help="HTTP headers for every request")
    group.add_argument(
        "--extra-request-body",
        metavar="JSON",
        help='JSON object to merge into every request, such as \'{"sampling_params": {"temperature": 1.0}}\'',
    )
    group.add_argument("--disable-stream", action="store_true", help="do not stream the answers")
    group.add_argument("--disable-ignore-eos", action="store_true", help="let answers end at an end-of-text token")
    group = bench.flag_group("prompts")
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        default="random",
        metavar="NAME",
        help="random: tokens of common words; random-ids: arbitrary token ids; sharegpt: conversations in JSON or "
        "JSONL; spec-bench: JSONL of prompts with categories; custom: a file in the format of sharegpt or spec-bench, "
        "or a text file with one prompt per line (one per paragraph if the file has blank lines)",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="file with the dataset (not for random datasets)")
    group.add_argument("--categories", nargs="+", default=[], metavar="NAME", help="categories to use (default: all)")
    group.add_argument("--num-prompts", type=int, default=64, help="number of requests per run, over all categories")
    group.add_argument(
        "--max-new-tokens",
        type=int,
        help="new tokens per request, for prompts from a file (default: the length of the file's answer, else 256)",
    )
    group.add_argument("--random-input-len", type=int, default=1024, help="maximum length of random prompts, in tokens")
    group.add_argument("--random-output-len", type=int, default=1024, help="maximum new tokens for random prompts")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="ratio of minimum to maximum length, for random prompts and answers; with 1, all lengths are equal",
    )
    group.add_argument("--vocab-size", type=int, help="for random-ids: size of the vocabulary")
    group.add_argument("--seed", type=int, default=0, help="random seed for prompts, lengths and arrival times")


def _add_measurement_flags(bench) -> None:
    group = bench.flag_group("traffic")
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        help="requests per second, as a Poisson process; inf: all at once",
    )
    group.add_argument("--max-concurrency", type=int, help="maximum number of requests in flight (default: no limit)")
    group.add_argument("--warmup-requests", type=int, default=1, help="requests to send before the measurement")
    group = bench.flag_group("comparison with and without drafts")
    group.add_argument(
        "--with-and-without-mtp",
        action="store_true",
        help="send the same requests in alternating runs with drafts and without (`speculative: false`)",
    )
    group.add_argument(
        "--concurrencies",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32, 64],
        help="numbers of concurrent requests to compare",
    )
    group.add_argument("--repeats", type=int, default=3, help="pairs of runs per concurrency")
    group.add_argument(
        "--reference",
        action="store_true",
        help="also show AMD's published speedups for DeepSeek with MTP on MI300X (a different model and machine)",
    )
    group = bench.flag_group("output")
    group.add_argument("--output-file", metavar="FILE", help="JSONL file to which each run appends a line")
    group.add_argument("--output-details", action="store_true", help="also write every request to --output-file")
    group.add_argument("--tag", metavar="TEXT", help="label to write to --output-file")
    group.add_argument(
        "--output",
        default="mtp_speedup",
        metavar="PATH",
        help="path, without a suffix, for the comparison's JSON, Markdown and plots",
    )
    add_plot_formats_flag(bench)


COMMANDS = {"bench-serving": _bench_serving}
