"""Times decoding on this GPU, compares it with the memory's limit, and times the verification of drafts.

    python -m experiments.gpu.bench_gpu
    python -m experiments.gpu.bench_gpu --models 8B --implementation triton
    python -m experiments.gpu.bench_gpu --quick               # a toy, on any machine: to see that it runs

The weights are random bfloat16, and the batch has one row. Plain decoding is the public call `generate()`, whose time
per token is (time for all tokens - time for 1) / (all - 1). All implementations run in rotation. The memory limit is
the time for the minimum number of bytes per round (`experiments/kernels/bytes_moved.py`) at the bandwidth of a large
copy, which is also measured. The cost of verifying four tokens is the time of that pass divided by the time of the
cheapest plain pass, and "outside passes" is the share of a round in which no pass runs. `experiments.gpu.bench_torch`
times PyTorch with the same shapes. The results are written after every rotation.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.common import RESULTS
from experiments.common.results import about, write
from experiments.kernels.bench_kernels import limits
from experiments.kernels.bytes_moved import LITE, Subject, least_of_all, round_of
from mtpjax import DecodeConfig, ModelConfig, MTPModel, generate, presets
from mtpjax.console import narrow_table
from mtpjax.decoding.capacity import min_rows_per_pass
from mtpjax.decoding.gpu_graph import OneGraph
from mtpjax.evaluation.round_costs import CostMeter
from mtpjax.evaluation.round_loops import TimingConditions
from mtpjax.evaluation.round_shapes import PLAIN_STEP, RoundCosts, chain_shape
from mtpjax.models.params import param_shapes

RESULT = RESULTS / "bench_gpu.json"
DENSE = {"num_mtp_modules": 1, "rope_theta": 500000.0, "max_position_embeddings": 8192}
MODELS = {
    "1B": ModelConfig(  # Llama-3.2-1B with its own head and one MTP module
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
    """Makes weights on the device, array by array. Matmul outputs are about as large as their inputs."""
    shapes = param_shapes(model.config, model.scan_layers)
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(
        tree, [_random_array(key, leaf.shape, dtype) for key, leaf in zip(keys, leaves, strict=True)]
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_array(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    if len(shape) < 2:
        return jnp.ones(shape, dtype)
    return (jax.random.normal(key, shape, dtype) * shape[-2] ** -0.5).astype(dtype)


def seconds_per_token(call, new_tokens: int) -> float:
    """Returns the seconds per token of `call(count)`, which generates `count` tokens."""
    took = []
    for count in (1, new_tokens):
        begin = time.perf_counter()
        call(count)
        took.append(time.perf_counter() - begin)
    return (took[1] - took[0]) / (new_tokens - 1)


def measure(config: ModelConfig, bandwidth: float, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures one model: seconds of a plain token and of a round's parts, by implementation.

    Args:
        config: the model.
        bandwidth: bytes per second of a large copy.
        options: the command's flags.

    Yields:
        The model's row after every rotation, with all measurements so far.
    """
    dtype = jnp.float32 if options.quick else jnp.bfloat16
    params = random_params(MTPModel(config), dtype)
    models = {name: MTPModel(config, implementation=name) for name in options.implementation}
    prompt = np.random.default_rng(0).integers(config.vocab_size, size=(1, options.prompt_length))
    _, shapes = round_of(Subject(config, options.prompt_length + options.new_tokens), 1, 0, "xla")
    row: dict[str, Any] = {"limit": sum(least_of_all(config, 1, 0, shapes)) / bandwidth}
    took: dict[str, list[float]] = {name: [] for name in models}

    def plain(model: MTPModel) -> float:
        def call(count: int) -> None:
            generate(params, prompt, model=model, config=DecodeConfig(max_new_tokens=count))

        return seconds_per_token(call, options.new_tokens)

    # 1. Time plain decoding with the public call. All implementations compile at the same time and then take turns.
    if not options.only_parts:
        begin = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor() as threads:
            list(threads.map(plain, models.values()))
        row["compile_seconds"] = time.perf_counter() - begin
        for _ in range(options.repeats):
            for name, model in models.items():
                took[name].append(plain(model))
            yield {**row, "seconds": took, "costs": {}, **_compared({})}
    # 2. Time the parts of a round.
    if options.only_plain:
        return
    meters = {
        name: CostMeter(
            params,
            model=model,
            shapes=(DRAFTS,),
            conditions=TimingConditions(
                1,
                options.prompt_length,
                options.prompt_length + 2 * options.new_tokens,
                min_rows_per_pass(model.config, 1, jax.default_backend()),
            ),
            time_full_rounds=not options.only_parts,
        )
        for name, model in models.items()
    }
    for _ in range(options.repeats):
        for meter in meters.values():
            meter.measure(repeats=1)
        costs = {name: meter.costs() for name, meter in meters.items()}
        yield {**row, "seconds": took, "costs": {name: of.to_json() for name, of in costs.items()}, **_compared(costs)}


def _compared(costs: Mapping[str, RoundCosts]) -> dict[str, dict[str, float]]:
    """Returns, by implementation, verify time over the cheapest plain pass, and the share of a round outside passes."""
    cheapest = min((of.plain for of in costs.values()), default=0.0)
    return {
        "verify": {name: of.verify[DRAFTS] / cheapest for name, of in costs.items()},
        "beside_passes": {
            name: 1 - of.parts[PLAIN_STEP] / of.round[PLAIN_STEP] for name, of in costs.items() if of.round
        },
    }


def print_table(console: Console, rows: list[dict[str, Any]]) -> None:
    """Prints a line for each model and implementation."""
    table = narrow_table()
    for heading in ("model", "kernels", "us / token", "of the limit", "verify 4", "outside passes"):
        table.add_column(heading, justify="right")
    for row in rows:
        for kernels, seconds in row["seconds"].items():
            taken = float(np.median(seconds)) if seconds else None
            table.add_row(
                row["model"],
                kernels,
                "-" if taken is None else f"{1e6 * taken:.0f}",
                "-" if taken is None else f"{row['limit'] / taken:.0%}",
                f"{row['verify'][kernels]:.2f}" if row["verify"] else "-",
                f"{row['beside_passes'][kernels]:.1%}" if row["beside_passes"] else "-",
            )
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Measures models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=["8B", "1B", "16B-A2.4B"], help="(default: %(default)s)"
    )
    parser.add_argument(
        "--implementation",
        nargs="+",
        default=["xla", "triton"],
        help="implementations of the kernels (default: %(default)s)",
    )
    parser.add_argument("--prompt-length", type=int, default=1792)
    parser.add_argument("--new-tokens", type=int, default=129, help="new tokens, at least 2 (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of measurements (default: %(default)s)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--only-plain", action="store_true", help="measure only plain decoding, which compiles a quarter as much"
    )
    only.add_argument("--only-parts", action="store_true", help="measure only the passes of a round, not whole rounds")
    parser.add_argument(
        "--loop-outside", action="store_true", help="no CUDA graph of the whole call, so the host runs the loop"
    )
    parser.add_argument("--quick", action="store_true", help="a toy with XLA alone, to check that the script runs")
    parser.add_argument("--output", type=pathlib.Path, default=None, help=f"default: {RESULT.name} in results/")
    options = parser.parse_args(argv)
    if options.new_tokens < 2 or options.prompt_length < 1 or options.repeats < 1:
        parser.error("--new-tokens must be at least 2, --prompt-length and --repeats at least 1")
    if not options.quick and jax.default_backend() != "gpu":
        print("this measures a GPU, and jax has none here; --quick runs anywhere", file=sys.stderr)
        return 3
    if options.loop_outside:
        OneGraph.__call__ = lambda self, *args, **kwargs: self.plain(*args, **kwargs)
    configs = {name: MODELS[name] for name in options.models}
    if options.quick:
        configs = {"tiny": presets["tiny"]}
        options.implementation, options.prompt_length, options.new_tokens, options.repeats = ["xla"], 16, 9, 1
    console = Console(highlight=False)
    bandwidth, _ = limits(2**24, 1024) if options.quick else limits()
    output = options.output or (None if options.quick else RESULT)
    found: dict[str, Any] = about(
        argv,
        device=jax.devices()[0].device_kind,
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        bytes_a_second=bandwidth,
        context=options.prompt_length + options.new_tokens // 2,
        shapes={name: dataclasses.asdict(config) for name, config in configs.items()},
    )
    rows: dict[str, dict[str, Any]] = {}
    for name, config in configs.items():
        for row in measure(config, bandwidth, options):
            rows[name] = {"model": name, **row}
            found["models"] = list(rows.values())
            write(output, found)
        for kernels, seconds in rows[name]["seconds"].items():
            if seconds:
                taken = float(np.median(seconds))
                share = rows[name]["limit"] / taken
                console.print(f"{name}, {kernels}: {1e6 * taken:.0f} us a token, {share:.0%} of the limit")
        jax.clear_caches()
    print_table(console, list(rows.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
