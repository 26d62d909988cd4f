"""How many tokens per second does the engine give on this GPU for 1 .. 64 simultaneous requests, with and without MTP?

    python -m experiments.bench_engine_gpu [--model 1B] [--output FILE]
    python -m experiments.bench_engine_gpu --quick     # a toy, on any machine: shows that it runs

Constructed bfloat16 weights of the model's shape: the head maps a token to its successor, and the module passes on the
newest token, so that trunk and module agree unless the blocks' outputs change a prediction. A search scales these
outputs until the accept length is near `--accept-length`. The default is the one that fits the published row of
speed-ups (`experiments.published_speedup`), which is printed beside the measured one. Each cell is the median over
turns, with and without drafts in turns.
"""

import argparse
import concurrent.futures
import datetime
import itertools
import json
import pathlib
import platform
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.bench_engine import make_requests, measure_throughput
from experiments.bench_gpu import MODELS, random_params
from mtpjax import DecodeConfig, MTPModel, speculative_generate
from mtpjax.atomic import write_text
from mtpjax.console import narrow_table
from mtpjax.evaluation.machine import describe_machine
from mtpjax.evaluation.small_models import small_config
from mtpjax.serving.bench.speedup import PUBLISHED
from mtpjax.serving.engine import Engine
from mtpjax.serving.programs import Features
from mtpjax.serving.sizes import EngineSettings

RESULT = pathlib.Path(__file__).parent / "results" / "bench_engine_gpu.json"
SCALES = (1e-3, 50.0)  # of the blocks' outputs; the accept length falls from its most to 1 between them
SEARCH_STEPS = 12


def successor_params(model: MTPModel, dtype) -> dict:
    """Makes weights on the device whose head maps each token to its successor in a random cycle."""
    params = random_params(model, dtype)
    V, D = params["embedding"].shape

    @jax.jit
    def embed(key):
        rows = jax.random.normal(key, (V, D), jnp.float32)
        order = jax.random.permutation(key, V)
        unit = rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
        head = jnp.zeros((D, V), dtype).at[:, jnp.roll(order, -1)].set(unit[order].T.astype(dtype))
        return rows.astype(dtype), head

    embedding, head = embed(jax.random.key(1))

    def pass_on(path, leaf):
        # A module's input projection passes on its first half, the embedding of the newest token.
        if path[-1].key == "project":
            return jnp.concatenate([jnp.eye(D, dtype=dtype), leaf[D:]])
        return leaf

    return {**jax.tree_util.tree_map_with_path(pass_on, params), "embedding": embedding, "head": head}


@jax.jit
def scale_blocks(params: dict, scale: jax.Array) -> dict:
    """Scales the output matrices of all blocks, and what a module takes from the hidden state."""

    def change(path, leaf):
        if path[-1].key == "project":
            D = leaf.shape[1]
            return jnp.concatenate([leaf[:D], (scale * leaf[D:]).astype(leaf.dtype)])
        return (scale * leaf).astype(leaf.dtype) if path[-1].key in ("output", "down") else leaf

    return jax.tree_util.tree_map_with_path(change, params)


def find_scale(params: dict, *, model: MTPModel, config: DecodeConfig, goal: float) -> tuple[dict, float]:
    """Searches for blocks' outputs with an accept length near `goal`; returns the weights and the scale."""
    prompts = np.random.default_rng(1).integers(0, model.config.vocab_size, (8, 16)).tolist()
    low, high = np.log(SCALES)
    middle = 0.0
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        scaled = scale_blocks(params, jnp.float32(np.exp(middle)))
        stats = speculative_generate(scaled, prompts, model=model, config=config).stats
        low, high = (middle, high) if stats.accept_length > goal else (low, middle)
    return scale_blocks(params, jnp.float32(np.exp(middle))), float(np.exp(middle))


def compile_plain(engine: Engine) -> int:
    """Compiles the programs of greedy requests, on all cores; returns how many."""
    executor = engine._executor
    sizes, features = executor.sizes, Features(plain=True)
    works = [
        executor._empty_prefill(executor._empty_batch(*shape))
        for shape in itertools.product(sizes.prefill_sizes, sizes.table_widths)
    ]
    for size, width, depth in itertools.product(sizes.batch_sizes, sizes.table_widths, sizes.depths):
        works.append(executor._advance(executor._empty_batch(size, width), features, depth, 0))
    with concurrent.futures.ThreadPoolExecutor(len(works)) as threads:
        list(threads.map(executor._compile, works))
    return len(works)


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


def main(argv: list[str] | None = None) -> int:
    """Measures one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1B")
    parser.add_argument("--num-steps", type=int, default=2, help="draft levels (default: %(default)s)")
    parser.add_argument("--accept-length", type=float, default=2.24, help="goal of the search (default: %(default)s)")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="of requests")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each cell (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="per request (default: %(default)s)")
    parser.add_argument("--implementation", default="auto", help="of the kernels (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a toy, on any machine: shows that it runs")
    parser.add_argument("--output", type=pathlib.Path, default=None, help=f"default: {RESULT.name} in results/")
    options = parser.parse_args(argv)
    if not options.quick and jax.default_backend() != "gpu":
        print("this measures a GPU, and jax has none here; --quick runs anywhere", file=sys.stderr)
        return 3
    console = Console(highlight=False)
    config, dtype, counts, prompt, output = MODELS[options.model], jnp.bfloat16, options.counts, 128, options.output
    if options.quick:
        config, dtype, counts, prompt = small_config("grouped", hidden_size=64), jnp.float32, [1, 4], 16
        options.new_tokens, options.turns = 16, 1
    else:
        output = output or RESULT
    model = MTPModel(config, implementation=options.implementation)
    decode = DecodeConfig(num_steps=options.num_steps, max_new_tokens=64)
    params, scale = find_scale(successor_params(model, dtype), model=model, config=decode, goal=options.accept_length)
    console.print(f"outputs of blocks x {scale:.3f}")
    settings = EngineSettings(
        num_slots=max(counts),
        max_length=prompt + options.new_tokens + 1,
        batch_sizes=tuple(sorted(counts)),
        prefill_tokens=8 * prompt,
        shares_prefixes=False,
    )
    engine = Engine(
        params, model=model, config=DecodeConfig(num_steps=options.num_steps, prefill_chunk=prompt), settings=settings
    )
    begin = time.perf_counter()
    count = compile_plain(engine)
    console.print(f"{count} programs compiled in {time.perf_counter() - begin:.0f} s")
    engine.start()
    about = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "machine": describe_machine(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "argv": sys.argv[1:] if argv is None else argv,
        "model": options.model,
        "block_scale": scale,
        "prompt_tokens": prompt,
        "new_tokens": options.new_tokens,
    }
    rows: list[dict] = []
    for count in counts:
        requests = make_requests(
            np.random.default_rng(count), [options.new_tokens] * count, engine.vocab_size, prompt_tokens=prompt
        )
        rows.append(measure_throughput(engine, requests, options.turns))
        console.print(json.dumps(rows[-1]), soft_wrap=True)
        if output is not None:
            write_text(output, json.dumps({**about, "rows": rows}, indent=1) + "\n")
    assert engine.close(timeout=60)
    print_table(console, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
