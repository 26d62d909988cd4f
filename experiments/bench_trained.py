"""Measures the speed-up of MTP over plain decoding on this GPU, for a model trained on it, by batch size.

    python -m experiments.bench_trained --data DIRECTORY_OF_INSTALLED_PACKAGES
    python -m experiments.bench_trained --quick               # a tiny model and few updates, to see that it runs

Trains a dense model of 180 M parameters with one MTP module, recycled over three levels, on Python source text, in
bfloat16 with float32 parameters. Then plain decoding and every depth take turns on the same held-out prompts, in
bfloat16, at each batch size, with and without the kernels. The table compares the best depth with the fastest plain
decoding, and shows the published speed-ups of DeepSeek-R1 with its MTP module in SGLang on MI300X at the same batch
sizes (AMD's figures, for another model on another machine).
"""

import argparse
import datetime
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from mtpjax import DecodeConfig, ModelConfig, MTPModel, TrainConfig, init_params, load, presets, speculative_generate
from mtpjax.console import narrow_table
from mtpjax.data.packing import held_out_prompts
from mtpjax.io.checkpoint import save_model
from mtpjax.training.trainer import train

SHAPE = ModelConfig(
    vocab_size=512,  # bytes need 256
    hidden_size=1024,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=4,
    intermediate_size=2816,
    max_position_embeddings=2048,
    num_mtp_modules=1,
)
PUBLISHED = {1: 2.11, 2: 2.04, 4: 1.84, 8: 1.70, 16: 1.53, 32: 1.44, 64: 1.25}
DEPTHS = (1, 2, 3)
PROMPT_TOKENS, NEW_TOKENS = 128, 256


def settings(folder: pathlib.Path, options: argparse.Namespace) -> TrainConfig:
    """Saves new weights of `SHAPE` and returns the settings of a run that starts from them."""
    shape = presets["tiny"] if options.quick else SHAPE
    model = MTPModel(shape)
    save_model(folder / "new", model, init_params(model, jax.random.key(0)))
    size: dict[str, Any] = {"steps": 4, "batch_size": 2, "row_length": 64, "panel_prompts": 0}
    if not options.quick:
        size = {"steps": 10**6, "seconds": options.seconds, "dtype": "bfloat16", "batch_size": 64, "row_length": 512}
    return TrainConfig(
        init_from=str(folder / "new"),
        output=str(folder / "run"),
        data=options.data,
        num_depths=len(DEPTHS),
        learning_rate=1e-3,
        **size,
    )


def measure(params, models: dict[str, MTPModel], prompts: list[list[int]], rounds: int) -> dict:
    """Measures plain decoding (depth 0) and every depth with each implementation of the kernels, in turns.

    Returns:
        Seconds and accept lengths by `implementation/depth`, and the speed of the best depth over the fastest plain
        decoding.
    """
    most = next(iter(models.values())).config.max_position_embeddings
    new_tokens = min(NEW_TOKENS, most // 4)
    forms = {f"{name}/{depth}": (model, depth) for name, model in models.items() for depth in (0, *DEPTHS)}
    took: dict[str, list[float]] = {name: [] for name in forms}
    lengths = {}
    # All forms take turns, so that a disturbance of the machine affects all of them. The first round only compiles.
    for number in range(rounds + 1):
        for name, (model, depth) in forms.items():
            config = DecodeConfig(max_new_tokens=new_tokens, num_steps=depth)
            begin = time.perf_counter()
            result = speculative_generate(params, prompts, model=model, config=config)
            if number:
                took[name].append(time.perf_counter() - begin)
            lengths[name] = float(np.mean(result.stats.accept_length))
    median = {name: float(np.median(times)) for name, times in took.items()}
    plain, best = (
        min((name for name, (_, depth) in forms.items() if (depth > 0) == drafts), key=median.__getitem__)
        for drafts in (False, True)
    )
    # Compare the fastest form with drafts and the fastest one without, round by round.
    ratios = np.array(took[plain]) / np.array(took[best])
    return {
        "batch": len(prompts),
        "seconds": took,
        "accept_length": lengths,
        "plain": plain,
        "best": best,
        "ratio": float(np.median(ratios)),
        "range": [float(ratios.min()), float(ratios.max())],
        "tokens_a_second": {name: len(prompts) * new_tokens / time for name, time in median.items()},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=None, help="folder of .py files (default: the standard library)")
    parser.add_argument("--seconds", type=float, default=480, help="length of the training (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each depth (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, nargs="+", default=list(PUBLISHED), help="batch sizes to measure")
    parser.add_argument(
        "--implementation",
        nargs="+",
        default=["xla", "triton"],
        help="implementations of the kernels (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="tiny model and few updates, to see that it runs")
    parser.add_argument("--output", type=pathlib.Path, default=None, help="JSON file to write")
    options = parser.parse_args(argv)
    if min(options.batch_size) < 1:
        parser.error(f"batch sizes {options.batch_size} must be at least 1")
    if not options.quick and jax.default_backend() != "gpu":
        print("this benchmark needs a GPU and jax has none here; --quick runs anywhere", file=sys.stderr)
        return 3
    if options.quick:
        options.batch_size, options.rounds, options.implementation = [1, 2], 1, ["xla"]
    console = Console(highlight=False)
    # Train, then load the checkpoint in the dtype of decoding.
    with tempfile.TemporaryDirectory() as folder:
        result = train(settings(pathlib.Path(folder), options))
        model, params = load(result.path, dtype=None if options.quick else jnp.bfloat16)
    models = {name: model.clone(implementation=name) for name in options.implementation}
    prompts = held_out_prompts(
        result.held_out,
        count=max(options.batch_size),
        prompt_length=min(PROMPT_TOKENS, model.config.max_position_embeddings // 4),
        continuation_length=NEW_TOKENS,
        seed=0,
    )
    # Measure each batch size on the same held-out prompts.
    table = narrow_table()
    for heading in ("batch", "plain", "best", "accept length", "to plain", "range", "published"):
        table.add_column(heading, justify="right")
    rows = []
    for batch in options.batch_size:
        row = measure(params, models, prompts[:batch], options.rounds)
        rows.append(row)
        length, (low, high) = row["accept_length"][row["best"]], row["range"]
        cells = (batch, row["plain"], row["best"], f"{length:.2f}", f"{row['ratio']:.2f}", f"{low:.2f}-{high:.2f}")
        table.add_row(*map(str, cells), f"{PUBLISHED[batch]:.2f}" if batch in PUBLISHED else "-")
        console.print(f"batch {batch}: {row['ratio']:.2f} x {row['plain']} with {row['best']}")
    console.print(table)
    if options.output is not None:
        about = {"date": datetime.date.today().isoformat(), "device": jax.devices()[0].device_kind}
        about |= {"jax": jax.__version__, "argv": sys.argv[1:], "batches": rows}
        options.output.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
