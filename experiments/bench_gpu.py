"""How near to the memory's limit is decoding on this GPU, what does verifying drafts cost, and how fast is PyTorch?

    python -m experiments.bench_gpu                       # the dense models beside PyTorch need the extra `bench`
    python -m experiments.bench_gpu --models 8B --implementation triton
    python -m experiments.bench_gpu --quick               # a toy, on any machine: to see that it runs

Random bfloat16 weights, one row. Plain decoding is the public call of either side, `generate()`: (time for all tokens -
time for 1) / (all - 1), PyTorch's being transformers with a static cache and a compiled forward pass, over weights of
the same shapes, in a process of its own. All take turns, round after round. The memory's limit is the least bytes of a
round (`experiments/bytes_moved.py`) at the bandwidth of a large copy, measured here. What verifying four tokens costs
is that pass over the cheapest plain one, and "beside passes" is the share of a round that no pass takes.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import importlib.util
import json
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.bench_kernels import limits
from experiments.bytes_moved import LITE, Subject, least_of_all, round_of
from mtpjax import DecodeConfig, ModelConfig, MTPModel, generate, presets
from mtpjax.console import narrow_table
from mtpjax.decoding.capacity import min_rows_per_pass
from mtpjax.decoding.gpu_graph import OneGraph
from mtpjax.evaluation.round_costs import CostMeter
from mtpjax.evaluation.round_loops import PLAIN_STEP, chain_shape
from mtpjax.models.params import param_shapes

RESULT = pathlib.Path(__file__).parent / "results" / "bench_gpu.json"
DENSE = {"num_mtp_modules": 1, "rope_theta": 500000.0, "max_position_embeddings": 8192}
MODELS = {
    "1B": ModelConfig(  # as Llama-3.2-1B, with a head of its own, and one MTP module
        vocab_size=128256,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        **DENSE,
    ),
    "8B": ModelConfig(  # as Llama-3.1-8B
        vocab_size=128256,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        **DENSE,
    ),
    "16B-A2.4B": LITE,
}
DRAFTS = chain_shape(3)


def random_params(model: MTPModel, dtype) -> dict:
    """Made on the device, array by array; the sums of a product are about as large as its input."""

    def make(key, leaf):
        if len(leaf.shape) < 2:
            return jnp.ones(leaf.shape, dtype)
        scale = leaf.shape[-2] ** -0.5
        return jax.jit(lambda key: (jax.random.normal(key, leaf.shape, dtype) * scale).astype(dtype))(key)

    shapes = param_shapes(model.config, model.scan_layers)
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(tree, [make(key, leaf) for key, leaf in zip(keys, leaves, strict=True)])


def seconds_per_token(call, new_tokens: int) -> float:
    """By `call(count)`, which takes what it takes to make so many tokens."""
    took = []
    for count in (1, new_tokens):
        begin = time.perf_counter()
        call(count)
        took.append(time.perf_counter() - begin)
    return (took[1] - took[0]) / (new_tokens - 1)


def torch_child(config: ModelConfig, prompt_length: int, new_tokens: int, connection) -> None:
    """PyTorch's side: answers each request with the seconds of a token, or first with why there are none."""
    try:
        import torch
        import transformers

        torch.set_default_dtype(torch.bfloat16)
        shape = {
            name: getattr(config, name)
            for name in (
                "vocab_size",
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "intermediate_size",
                "max_position_embeddings",
            )
        }
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
            ids = torch.randint(config.vocab_size, (1, prompt_length))
        compiled = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

        def forward(*arguments, **options):
            # The next run of the graph may overwrite the outputs of the one before.
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(*arguments, **options)

        model.forward = forward

        def call(count: int) -> None:
            model.generate(
                ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, cache_implementation="static"
            )
            torch.cuda.synchronize()

        with torch.inference_mode():
            seconds_per_token(call, new_tokens)  # compiles
            connection.send(None)
            while connection.recv():
                connection.send(seconds_per_token(call, new_tokens))
    except Exception as reason:  # what is missing is told, not raised where nobody reads it
        connection.send(f"{type(reason).__name__}: {reason}".splitlines()[0])


class Torch:
    """`torch_child` in a process of its own; a context."""

    def __init__(self, *arguments):
        context = multiprocessing.get_context("spawn")  # a forked process would have this one's GPU
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=torch_child, args=(*arguments, theirs), daemon=True)

    def __enter__(self) -> "Torch":
        self._process.start()
        self.failure: str | None = None
        return self

    def wait(self) -> None:
        """Waits until it has compiled, or has failed."""
        self.failure = self._connection.recv()

    def seconds(self) -> float:
        self._connection.send(True)
        answer = self._connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def __exit__(self, *_) -> None:
        if self.failure is None:
            self._connection.send(False)
        self._process.join(10)
        self._process.kill()


def measure(config: ModelConfig, bandwidth: float, options: argparse.Namespace) -> dict[str, Any]:
    """One model: seconds of a plain token by engine, and of a round's parts by implementation."""
    dtype = jnp.float32 if options.quick else jnp.bfloat16
    params = random_params(MTPModel(config), dtype)
    models = {name: MTPModel(config, implementation=name) for name in options.implementation}
    prompt = np.random.default_rng(0).integers(config.vocab_size, size=(1, options.prompt_length))
    meters = {
        name: CostMeter(
            params,
            model=model,
            shapes=(DRAFTS,),
            context=options.prompt_length,
            capacity=options.prompt_length + 2 * options.new_tokens,
            min_rows=min_rows_per_pass(model, 1, jax.default_backend()),
            time_full_rounds=True,
        )
        for name, model in models.items()
        if not options.only_plain
    }

    def plain(model):
        def call(count: int) -> None:
            generate(params, prompt, model=model, config=DecodeConfig(max_new_tokens=count))

        return lambda: seconds_per_token(call, options.new_tokens)

    calls = {name: plain(model) for name, model in models.items()}
    took: dict[str, list[float]] = {name: [] for name in calls}
    with Torch(config, options.prompt_length, options.new_tokens) if options.torch else _Nobody() as torch:
        # Both sides compile at the same time.
        with concurrent.futures.ThreadPoolExecutor() as threads:
            list(threads.map(lambda call: call(), calls.values()))
        torch.wait()
        if torch.failure is None:
            calls["torch"], took["torch"] = torch.seconds, []
        for _ in range(options.repeats):
            for name, call in calls.items():
                took[name].append(call())
            for meter in meters.values():
                meter.measure(repeats=1)
        failure = torch.failure
    _, shapes = round_of(Subject(config, options.prompt_length + options.new_tokens), 1, 0, "xla")
    return {
        "limit": sum(least_of_all(config, 1, 0, shapes)) / bandwidth,
        "seconds": took,
        "costs": {name: meter.costs().to_json() for name, meter in meters.items()},
        "torch_failed": failure,
        **_compared(took, models, {name: meter.costs() for name, meter in meters.items()}),
    }


class _Nobody:
    """In place of PyTorch."""

    failure = "not asked for"

    def wait(self) -> None:
        pass

    def seconds(self) -> float:
        raise NotImplementedError

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass


def _compared(took: dict[str, list[float]], names: Iterable[str], costs) -> dict[str, Any]:
    """By implementation: a verifying pass over the cheapest plain one, what no pass takes, PyTorch over this."""
    torch = np.array(took.get("torch", []))
    return {
        "verify": {name: of.verify[DRAFTS] / min(each.plain for each in costs.values()) for name, of in costs.items()},
        "beside_passes": {name: 1 - of.parts[PLAIN_STEP] / of.round[PLAIN_STEP] for name, of in costs.items()},
        "torch_over": {name: float(np.median(torch / np.array(took[name]))) for name in names if len(torch)},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--implementation", nargs="+", default=["xla", "triton"], help="of the kernels (default: %(default)s)"
    )
    parser.add_argument("--prompt-length", type=int, default=1792)
    parser.add_argument("--new-tokens", type=int, default=129, help="at least 2 (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of measurements (default: %(default)s)")
    parser.add_argument("--only-plain", action="store_true", help="plain decoding alone: compiles a quarter as much")
    parser.add_argument(
        "--loop-outside", action="store_true", help="without the CUDA graph of the whole call: the host runs the loop"
    )
    parser.add_argument("--quick", action="store_true", help="a toy, with XLA alone: to see that it runs")
    parser.add_argument("--output", type=pathlib.Path, default=None, help=f"default: {RESULT.name} in results/")
    options = parser.parse_args(argv)
    if options.new_tokens < 2 or options.prompt_length < 1 or options.repeats < 1:
        parser.error("--new-tokens must be at least 2, --prompt-length and --repeats at least 1")
    if not options.quick and jax.default_backend() != "gpu":
        print("this measures a GPU, and jax has none here; --quick runs anywhere", file=sys.stderr)
        return 3
    if options.loop_outside:
        OneGraph.__call__ = lambda self, *args, **kwargs: self.plain(*args, **kwargs)
    options.torch = not options.quick and importlib.util.find_spec("transformers") is not None
    configs = {name: MODELS[name] for name in options.models}
    if options.quick:
        configs = {"tiny": presets["tiny"]}
        options.implementation, options.prompt_length, options.new_tokens, options.repeats = ["xla"], 16, 9, 1
    console = Console(highlight=False)
    bandwidth, _ = limits(2**24, 1024) if options.quick else limits()
    table = narrow_table()
    for heading in ("model", "kernels", "us / token", "of the limit", "verify 4", "beside passes", "PyTorch / mtpjax"):
        table.add_column(heading, justify="right")
    output = options.output or (None if options.quick else RESULT)
    about = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "argv": sys.argv[1:],
        "bytes_a_second": bandwidth,
        "context": options.prompt_length + options.new_tokens // 2,
        "shapes": {name: dataclasses.asdict(config) for name, config in configs.items()},
    }
    rows = []
    asked = options.torch
    for name, config in configs.items():
        options.torch = asked and not config.is_moe and config.attention == "grouped"
        row = {"model": name, **measure(config, bandwidth, options)}
        rows.append(row)
        for kernels in options.implementation:
            taken = float(np.median(row["seconds"][kernels]))
            beside = row["torch_over"].get(kernels)
            table.add_row(
                name,
                kernels,
                f"{1e6 * taken:.0f}",
                f"{row['limit'] / taken:.0%}",
                f"{row['verify'][kernels]:.2f}" if row["verify"] else "-",
                f"{row['beside_passes'][kernels]:.1%}" if row["verify"] else "-",
                "-" if beside is None else f"{beside:.2f}",
            )
            console.print(f"{name}, {kernels}: {1e6 * taken:.0f} us a token, {row['limit'] / taken:.0%} of the limit")
        # Keep each model's figures before the next one begins.
        if output is not None:
            output.write_text(json.dumps({**about, "models": rows}, indent=1) + "\n")
        jax.clear_caches()
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
