"""Computes the numbers of a benchmark run under SGLang's names, and formats them as a table."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtpjax.serving.bench.outcome import Outcome

WIDTH = 50  # columns of SGLang's table
MAX_CLIENT_CPU_SHARE = 0.8  # share of one core, above which the client itself delays what it measures
PERCENTILES = (90, 95, 99)
LATENCIES = {
    "e2e_latency": ("End-to-End Latency", "E2E Latency"),
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-Token Latency", "ITL"),
}


def summarize(outcomes: Sequence[Outcome], counts: tuple[float, float] | None = None) -> dict[str, Any]:
    """Computes the numbers of a run, under SGLang's names. Undefined numbers are None.

    Args:
        outcomes: the requests that ended, including failed ones.
        counts: the server's verification passes and accepted drafts during the run, for servers that do not report
            them per request; None if unknown.
    """
    done = [outcome for outcome in outcomes if not outcome.error]
    # The run starts with its first request and ends with its last token.
    begin = min((outcome.sent for outcome in outcomes), default=0.0)
    duration = max((outcome.arrivals[-1][0] for outcome in done), default=begin) - begin
    # Prompts of token ids are counted here; texts are counted by the server.
    num_input = sum(_num_prompt_tokens(outcome) for outcome in done)
    num_output = sum(outcome.num_new_tokens for outcome in done)
    latencies = {
        "e2e_latency": [outcome.latency for outcome in done],
        "ttft": [outcome.time_to_first_token for outcome in done],
        # A request with only one token has no time per token after the first.
        "tpot": [
            (outcome.latency - outcome.time_to_first_token) / (outcome.num_new_tokens - 1)
            for outcome in done
            if outcome.num_new_tokens > 1
        ],
        "itl": [latency for outcome in done for latency in outcome.inter_token_latencies],
    }
    rates = {
        "request_throughput": len(done),
        "input_throughput": num_input,
        "output_throughput": num_output,
        "total_throughput": num_input + num_output,
        "concurrency": sum(latencies["e2e_latency"]),  # mean number of running requests
    }
    statistics: dict[str, float | None] = {}
    for name, seconds in latencies.items():
        statistics |= _statistics(name, seconds)
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        **{name: amount / duration if duration else None for name, amount in rates.items()},
        "max_output_tokens_per_s": _peak_throughput(done, begin, duration),
        "max_concurrent_requests": _peak_requests(done),
        "accept_length": _accept_length(done, counts),
        "accept_length_by_category": _by_category(done),
        **statistics,
    }


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Returns the arrays for `--output-details` under SGLang's names, with an entry per request in completion order."""
    return {
        "input_lens": [_num_prompt_tokens(outcome) for outcome in outcomes],
        "output_lens": [outcome.num_new_tokens for outcome in outcomes],
        "ttfts": [outcome.time_to_first_token if outcome.arrivals else None for outcome in outcomes],
        "itls": [outcome.inter_token_latencies for outcome in outcomes],
        "accept_lengths": [outcome.accept_length for outcome in outcomes],
        "categories": [outcome.request.category for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "request_errors": [outcome.error for outcome in outcomes],
    }


def is_client_busy(summary: dict[str, Any]) -> bool:
    """Returns whether the client took so much CPU time that it measured its own delays."""
    return summary.get("client_cpu_share", 0.0) > MAX_CLIENT_CPU_SHARE


def _num_prompt_tokens(outcome: Outcome) -> int:
    prompt = outcome.request.prompt
    return outcome.num_prompt_tokens if isinstance(prompt, str) else len(prompt)


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Returns mean, median, deviation, percentiles and maximum in milliseconds, each None if there are no values."""
    values = 1e3 * np.asarray(seconds if seconds else [math.nan])
    numbers = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    numbers |= {f"p{percent}": np.percentile(values, percent) for percent in PERCENTILES}
    numbers |= {"max": values.max()}
    return {f"{kind}_{name}_ms": None if np.isnan(value) else float(value) for kind, value in numbers.items()}


def _accept_length(done: Sequence[Outcome], counts: tuple[float, float] | None) -> float | None:
    # Weight each request's accept length by its passes, which gives the accept length over all passes.
    known = [(outcome.accept_length, outcome.num_verify_steps) for outcome in done if outcome.num_verify_steps]
    told = [(length, steps) for length, steps in known if length is not None]
    if told:
        return sum(length * steps for length, steps in told) / sum(steps for _, steps in told)
    return 1 + counts[1] / counts[0] if counts is not None and counts[0] > 0 else None


def _by_category(done: Sequence[Outcome]) -> dict[str, float | None]:
    """Returns the accept length per category of prompts, if there are several; None if requests do not report it."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in done:
        groups.setdefault(outcome.request.category, []).append(outcome)
    return {name: _accept_length(groups[name], None) for name in sorted(groups)} if len(groups) > 1 else {}


def _peak_throughput(done: Sequence[Outcome], begin: float, duration: float) -> float | None:
    """Returns the maximum tokens per second in any window of at least one second, or None for a run without tokens."""
    if not duration:
        return None
    # Divide the run into windows of equal length. The mean of the run is the mean of its windows, so the highest window
    # cannot be below it. A short run is a single window.
    num_windows = max(int(duration), 1)
    tokens: Counter[int] = Counter()
    for outcome in done:
        before = 0
        for now, count in outcome.arrivals:
            window = int((now - begin) / duration * num_windows)
            tokens[min(window, num_windows - 1)] += count - before
            before = count
    return max(tokens.values()) * num_windows / duration


def _peak_requests(done: Sequence[Outcome]) -> int:
    # At the same moment, ends sort before starts.
    changes = sorted(change for each in done for change in ((each.sent, 1), (each.sent + each.latency, -1)))
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


def format_table(settings: dict[str, Any], summary: dict[str, Any]) -> str:
    """Formats a run as SGLang's benchmark prints it, so that scripts can read both, in lines of at most 50 columns."""
    # The labels and their order match SGLang's benchmark.
    limit = settings["max_concurrency"]
    rows = [
        ("Backend", settings["backend"]),
        ("Traffic request rate", settings["request_rate"]),
        ("Max request concurrency", limit if limit is not None else "not set"),
        ("Successful requests", summary["completed"]),
        ("Failed requests", summary["failed"]),
        ("Benchmark duration (s)", summary["duration"]),
        ("Total input tokens", summary["total_input_tokens"]),
        ("Total generated tokens", summary["total_output_tokens"]),
        ("Request throughput (req/s)", summary["request_throughput"]),
        ("Input token throughput (tok/s)", summary["input_throughput"]),
        ("Output token throughput (tok/s)", summary["output_throughput"]),
        ("Peak output token throughput (tok/s)", summary["max_output_tokens_per_s"]),
        ("Peak concurrent requests", summary["max_concurrent_requests"]),
        ("Total token throughput (tok/s)", summary["total_throughput"]),
        ("Concurrency", summary["concurrency"]),
        ("Accept length", summary["accept_length"]),
        *((f"Accept length, {name}", value) for name, value in summary["accept_length_by_category"].items()),
    ]
    lines = [" Serving Benchmark Result ".center(WIDTH, "="), *(_row(*row) for row in rows)]
    # A section for each kind of latency.
    for name, (title, short) in LATENCIES.items():
        lines.append(title.center(WIDTH, "-"))
        kinds = {"mean": "Mean", "median": "Median", **{f"p{percent}": f"P{percent}" for percent in PERCENTILES}}
        kinds |= {"max": "Max"} if name == "itl" else {}
        lines += [_row(f"{shown} {short} (ms)", summary[f"{kind}_{name}_ms"]) for kind, shown in kinds.items()]
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def _row(name: str, value: Any) -> str:
    shown = "n/a" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name + ':':<40} {shown}"
