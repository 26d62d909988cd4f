"""Runs `mtpjax bench-serving`, which measures a server once, or compares it with and without drafts."""

import asyncio
import datetime
import json
import math
import os
import pathlib
import sys
from collections import Counter
from collections.abc import Mapping

import rich.console

from mtpjax.atomic import check_output_file
from mtpjax.console import print_parts, progress_bar
from mtpjax.data.jsonl_writer import JsonlWriter
from mtpjax.errors import INTERRUPTED, UsageError, printable
from mtpjax.evaluation.machine import describe_machine
from mtpjax.evaluation.plot_style import picture_paths
from mtpjax.messages import count_of, require
from mtpjax.serving.bench.backends import BACKENDS, BenchRequest
from mtpjax.serving.bench.client import Client
from mtpjax.serving.bench.outcome import Outcome
from mtpjax.serving.bench.requests import file_requests, word_requests
from mtpjax.serving.bench.sending import measure, run_until_interrupted
from mtpjax.serving.bench.speedup import PUBLISHED, WITHOUT_DRAFTS, Run, compare, speedups
from mtpjax.serving.bench.speedup_report import notes, rows_verdict, speedup_table, write_report
from mtpjax.serving.bench.summary import details, format_table, is_client_busy, summarize
from mtpjax.serving.bench.workload import RandomLengths, arrival_times, random_requests
from mtpjax.version import __version__


def run_benchmark(options) -> int:
    """Checks every setting, then measures the server. Returns the exit code: 1 if every request failed."""
    if options.dataset_name.startswith("random") and not BACKENDS[options.backend].accepts_tokens:
        raise UsageError(f"--backend {options.backend} does not accept token ids as prompts: use --dataset-path FILE")
    lengths = RandomLengths(options.random_input_len, options.random_output_len, options.random_range_ratio)
    arrival_times(1, options.request_rate, seed=options.seed)
    for path in (options.output_file, f"{options.output}.json" if options.with_and_without_mtp else None):
        if path is not None:
            check_output_file(path)
    return run_until_interrupted(_connect_and_run(options, lengths))


async def _connect_and_run(options, lengths) -> int:
    # An IPv6 address needs brackets in a URL.
    host = f"[{options.host}]" if ":" in options.host else options.host
    client = Client(
        options.base_url or f"http://{host}:{options.port}",
        BACKENDS[options.backend],
        model=options.served_model_name or "",
        headers=_headers(options.header),
        stream=not options.disable_stream,
        ignore_eos=not options.disable_ignore_eos,
        extra_body=_json_object(options.extra_request_body),
    )
    async with client:
        requests = await _make_requests(options, client, lengths)
        if len(requests) < options.num_prompts:
            print(f"{options.dataset_path} has only {count_of(len(requests), 'prompt')}", file=sys.stderr)
        if options.with_and_without_mtp:
            picture_paths(options.output, options.plot_formats)  # raises or warns early
            if max(options.concurrencies) > len(requests) or min(options.concurrencies) < 1:
                limit = f"{len(requests)}, the number of requests (--num-prompts)"
                given = " ".join(map(str, options.concurrencies))
                raise UsageError(f"--concurrencies must be within 1..{limit}, got {given}")
        # Warm up the connections and the server's programs.
        for request in requests[: options.warmup_requests]:
            for extra in ({}, WITHOUT_DRAFTS) if options.with_and_without_mtp else ({},):
                await client.send(request, extra)
        return await (_compare if options.with_and_without_mtp else _run_once)(options, client, requests)


async def _make_requests(options, client: Client, lengths: RandomLengths) -> list[BenchRequest]:
    name, count, seed = options.dataset_name, options.num_prompts, options.seed
    if name == "random":
        return await word_requests(client, count, lengths, seed=seed)
    if name == "random-ids":
        if (options.vocab_size or 0) < 1:
            raise UsageError("--dataset-name random-ids needs --vocab-size, which must be at least 1")
        return random_requests(range(options.vocab_size), count, lengths, seed=seed)
    require(options.dataset_path is not None, f"--dataset-name {name} needs --dataset-path")
    limits = {"max_new_tokens": options.max_new_tokens, "categories": options.categories}
    return await file_requests(client, options.dataset_path, count, **limits, seed=seed)


async def _run_once(options, client, requests) -> int:
    outcomes: list[Outcome] = []
    interrupted = False
    with progress_bar() as bar:
        task = bar.add_task("requests", total=len(requests))
        try:
            summary = await measure(
                client,
                requests,
                outcomes,
                times=arrival_times(len(requests), options.request_rate, seed=options.seed),
                max_concurrency=options.max_concurrency,
                progress=lambda: bar.advance(task),
            )
        # After Ctrl-C, the finished requests still count.
        except asyncio.CancelledError:
            interrupted, summary = True, summarize(outcomes)
    settings = _settings(options, client)
    if options.output_file is not None:
        _append(options.output_file, settings, summary, details(outcomes) if options.output_details else {})
    print(format_table(settings, summary))
    if is_client_busy(summary):
        print("the client was overloaded: the measured latencies are too long", file=sys.stderr)
    _print_errors(summary["errors"])
    if interrupted:
        print(f"interrupted after {len(outcomes)} of {count_of(len(requests), 'request')}", file=sys.stderr)
        return INTERRUPTED
    return 0 if summary["completed"] else 1


async def _compare(options, client, requests) -> int:
    runs: list[Run] = []
    interrupted, num_runs = False, 2 * options.repeats * len(options.concurrencies)
    # Both runs of a pair send the same prompts, so the second run would find them in the prefix cache.
    emptied = await client.flush_cache()
    settings = _settings(options, client)
    settings["prefix_cache"] = "emptied before each run" if emptied else "not emptied: no POST /flush_cache"
    with progress_bar() as bar:
        task = bar.add_task("requests", total=num_runs * len(requests))

        def report_progress(run: Run | None) -> None:
            if run is None:
                bar.advance(task)
                return
            # Print a line per run, even if the output is a log. --output-file keeps the results of long comparisons.
            side = "with MTP" if run.speculative else "without"
            speed = f"{run.summary['output_throughput'] or 0:.1f} tokens/s"
            bar.console.print(f"run {len(runs)} of {num_runs}: {run.concurrency} at once, {side}: {speed}")
            if options.output_file is not None:
                row = {"max_concurrency": run.concurrency, "speculative": run.speculative, "repeat": run.repeat}
                _append(options.output_file, {**settings, **row}, run.summary)

        try:
            await compare(
                client,
                requests,
                runs,
                concurrencies=options.concurrencies,
                repeats=options.repeats,
                progress=report_progress,
            )
        except asyncio.CancelledError:
            interrupted = True
    # Report the pairs that are complete, even if Ctrl-C ended the comparison.
    _print_errors(sum((Counter(run.summary["errors"]) for run in runs), Counter()))
    if rows := speedups(runs):
        # Published speedups, which come from a different machine, are shown only on request.
        reference = PUBLISHED if options.reference else {}
        files = write_report(options.output, rows, runs, settings, options.plot_formats, reference)
        console = rich.console.Console()
        print_parts(console, [rows_verdict(rows), speedup_table(rows, reference)])
        for note in (*notes(rows, reference), f"prefix cache: {settings['prefix_cache']}"):
            console.print(f"- {note}", highlight=False, markup=False)
        print(f"wrote {' and '.join(printable(file) for file in files)}", file=sys.stderr)
    if interrupted:
        print(f"interrupted after {len(runs)} of {count_of(num_runs, 'run')}", file=sys.stderr)
        return INTERRUPTED
    return 0 if rows else 1


def _settings(options, client) -> dict:
    """Describes a measurement. The description is stored with the result."""
    names = ("backend", "dataset_name", "dataset_path", "num_prompts", "max_new_tokens", "random_input_len")
    names += ("random_output_len", "random_range_ratio", "max_concurrency", "seed", "tag", "extra_request_body")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "url": client.url,
        "model": client.model,
        **{name: getattr(options, name) for name in names},
        # JSON has no infinite numbers.
        "request_rate": options.request_rate if math.isfinite(options.request_rate) else "inf",
        **{f"client_{name}": value for name, value in describe_machine().items()},
        "mtpjax": __version__,
    }


def _append(path: str, *parts: dict) -> None:
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    with JsonlWriter(path, allow_nan=False) as writer:
        writer.resume()
        writer.append([{key: value for part in parts for key, value in part.items()}])


def _print_errors(errors: Mapping[str, int]) -> None:
    for message, count in errors.items():
        print(f"{count_of(count, 'request')} failed: {message}", file=sys.stderr)


def _headers(pairs: list[str]) -> dict[str, str]:
    key = os.environ.get("MTPJAX_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise UsageError(f"--header takes KEY=VALUE, not '{pair}'")
        headers[name] = value
    return headers


def _json_object(text: str | None) -> dict:
    try:
        value = json.loads("{}" if text is None else text)
    except ValueError as error:
        raise UsageError(f"--extra-request-body is not JSON: {error}") from error
    require(isinstance(value, dict), f"--extra-request-body must be a JSON object, not {text}")
    return value
