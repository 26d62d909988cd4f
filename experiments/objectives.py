"""Which objective, layout and weights make a recycled MTP module draft best?

    python -m experiments.objectives [--quick]

One trunk without modules is trained once, on the standard library. Then a module is trained on it, frozen, by each
setting below, with the same updates on the same rows, from several seeds (which decide how the module begins and the
order of the rows). Each is decoded with on held-out prompts whose plain texts do not loop: greedily, and sampled at
temperature 1 with block verification. A run that is complete is not trained again.

Survival at level k is the share of rounds whose first k drafts were all accepted. Intervals are 95 %, over prompts; of
the differences to the first setting they pair the same prompts and seeds.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import sys
from typing import Any

import numpy as np
from rich.console import Console

from mtpjax import DecodeConfig, MTPModel, Objective, TrainConfig, load
from mtpjax.ablation.bench import Settings, find_workload
from mtpjax.console import narrow_table
from mtpjax.evaluation.acceptance import sampling_arguments
from mtpjax.evaluation.intervals import estimate_from, resample
from mtpjax.evaluation.machine import describe_machine
from mtpjax.evaluation.metrics import estimate
from mtpjax.evaluation.plots import plot_objectives
from mtpjax.inference.generate import speculative_generate
from mtpjax.io import checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.models.params import is_of_modules
from mtpjax.training.trainer import train

LEVELS = 4
NEW_TOKENS = 128
TEMPERATURES = (0.0, 1.0)
CE = Objective(mix={"cross_entropy": 1.0})
LK = {"start": {"kl": 1.0}, "warmup": 0.2}  # as published: from KL to what decides acceptance
SETTINGS: dict[str, dict[str, Any]] = {  # the first is what the others are compared with
    "CE, ttt": {"objective": CE},
    "CE, 1 level, recycled naively": {"num_depths": 1, "objective": CE},
    "CE, stream": {"attention_layout": "stream", "objective": CE},
    "CE, ttt, weights decayed": {"objective": dataclasses.replace(CE, depth_weights="decayed")},
    "KL, ttt": {"objective": Objective(mix={"kl": 1.0})},
    "LK hybrid, ttt": {"objective": Objective(mix={"lk_hybrid": 1.0}, **LK)},
    "end-to-end TV, ttt": {"objective": Objective(mix={"end_to_end_tv": 1.0}, **LK)},
}


def train_trunk(folder: pathlib.Path, *, steps: int, preset: str) -> pathlib.Path:
    """A checkpoint of `preset` without its modules, trained once."""
    path = folder / "trunk"
    if not checkpoint.is_checkpoint(path):
        config = TrainConfig(
            preset=preset, num_depths=0, steps=steps, output=str(folder / "trunk-run"), panel_prompts=0
        )
        result = train(config, overwrite=True)
        kept = {name: leaf for name, leaf in result.params.items() if not is_of_modules(name)}
        model = MTPModel(dataclasses.replace(result.model.config, num_mtp_modules=0))
        checkpoint.save_model(path, model, kept, metadata=CheckpointReader(result.path, verify=False).metadata)
    return path


def train_module(folder: pathlib.Path, trunk: pathlib.Path, name: str, seed: int, *, steps: int) -> pathlib.Path:
    """The checkpoint of one setting and seed."""
    settings = {"num_depths": LEVELS, "extra_tokens": LEVELS + 1, **SETTINGS[name]}
    output = folder / f"{name.replace(' ', '-').replace(',', '')}-{seed}"
    config = TrainConfig(
        init_from=str(trunk), trains="modules", steps=steps, batch_size=8, seed=seed, log_every=100,
        mtp_loss_scale=1.0, mtp_loss_scale_final=1.0, panel_prompts=0,
        output=str(output), **settings,
    )  # fmt: skip
    if not checkpoint.is_checkpoint(output / "checkpoint"):
        train(config, overwrite=True, panel_depths=LEVELS, evaluations=1)
    return output / "checkpoint"


def decode(path: pathlib.Path, prompts: list[list[int]], temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Rounds `[P]` and accepted drafts by level `[P, LEVELS]`."""
    model, params = load(path)
    config = DecodeConfig(max_new_tokens=NEW_TOKENS, num_steps=LEVELS)
    asked = sampling_arguments(temperature, list(range(len(prompts))))
    stats = speculative_generate(params, prompts, model=model, config=config, **asked).stats
    return stats.rounds, stats.accepted


def figures(steps: np.ndarray, accepted: np.ndarray, base: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    """Those of rounds `[seeds, P]` and accepted drafts `[seeds, P, LEVELS]`; prompts are what is resampled."""
    rounds = steps.sum(axis=0)[:, None]
    (length,) = estimate(accepted.sum(axis=(0, 2))[:, None], rounds, offset=1.0)
    (drawn,) = resample(steps.shape[1])

    def lengths(steps, accepted):
        return 1 + accepted.sum(axis=(0, 2))[drawn].sum(axis=1) / steps.sum(axis=0)[drawn].sum(axis=1)

    gain = lengths(steps, accepted) / lengths(*base)
    whole = (1 + accepted.sum() / steps.sum()) / (1 + base[1].sum() / base[0].sum())
    return {
        "accept_length": length.to_dict(),
        "of_seeds": (1 + accepted.sum(axis=(1, 2)) / steps.sum(axis=1)).tolist(),
        "survival": [rate.to_dict() for rate in estimate(accepted.sum(axis=0), rounds)],
        "over_first": estimate_from(whole, gain).to_dict(),
    }


def measure(
    folder: pathlib.Path, console: Console, *, preset: str, trunk_steps: int, steps: int, seeds: int, count: int
) -> dict[str, Any]:
    """`{"prompts": how many, "settings": {name: {temperature: figures}}}`."""
    trunk = train_trunk(folder, steps=trunk_steps, preset=preset)
    model, params = load(trunk)
    prompts = find_workload(trunk, model, params, Settings(max_new_tokens=NEW_TOKENS), num_prompts=count).prompts
    found: dict[str, list] = {name: [] for name in SETTINGS}
    for seed in range(seeds):
        for name in SETTINGS:
            path = train_module(folder, trunk, name, seed, steps=steps)
            found[name].append([decode(path, prompts, temperature) for temperature in TEMPERATURES])
            lengths = " and ".join(f"{1 + accepted.sum() / rounds.sum():.3f}" for rounds, accepted in found[name][-1])
            console.print(f"{name}, seed {seed}: accept length {lengths} at temperature 0 and 1")

    def counts(name: str, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Of every seed at one temperature: rounds `[seeds, P]`, accepted drafts `[seeds, P, LEVELS]`."""
        rounds, accepted = zip(*(row[number] for row in found[name]), strict=True)
        return np.stack(rounds), np.stack(accepted)

    first = next(iter(SETTINGS))
    settings = {
        name: {
            f"{temperature:g}": figures(*counts(name, number), base=counts(first, number))
            for number, temperature in enumerate(TEMPERATURES)
        }
        for name in SETTINGS
    }
    return {"prompts": len(prompts), "settings": settings}


def print_tables(console: Console, settings: dict[str, dict[str, Any]]) -> None:
    for temperature in map("{:g}".format, TEMPERATURES):
        table = narrow_table(f"temperature {temperature}: survival by level, accept length (95 %)")
        for heading in ("setting", *map(str, range(1, LEVELS + 1)), "accept length", "over the first"):
            table.add_column(heading, justify="left" if heading == "setting" else "right")
        for name, columns in settings.items():
            row = columns[temperature]
            length, gain = row["accept_length"], row["over_first"]
            table.add_row(
                name,
                *(f"{rate['value']:.2f}" for rate in row["survival"]),
                f"{length['value']:.2f} {length['low']:.2f}-{length['high']:.2f}",
                f"{gain['value']:.3f} {gain['low']:.3f}-{gain['high']:.3f}",
            )
        console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny", help="architecture, of bytes (default: %(default)s)")
    parser.add_argument("--trunk-steps", type=int, default=1000, help="updates of the trunk (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="updates of each module (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="modules of each setting (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few updates of each: to see that it runs")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/objectives"), help="runs")
    parser.add_argument(
        "--output", type=pathlib.Path, default=None, help="JSON file of the figures; a picture beside it"
    )
    options = parser.parse_args(argv)
    trunk_steps, steps, seeds, count = options.trunk_steps, options.steps, options.seeds, options.prompts
    if options.quick:
        trunk_steps, steps, seeds, count = 4, 4, 1, 4
    console = Console(highlight=False)
    result = measure(
        options.folder, console, preset=options.preset, trunk_steps=trunk_steps, steps=steps, seeds=seeds, count=count
    )
    print_tables(console, result["settings"])
    if options.output is not None:
        about = {"date": datetime.date.today().isoformat(), "machine": describe_machine(), "argv": sys.argv[1:]}
        options.output.write_text(json.dumps({**about, **result}, indent=1) + "\n")
        plot_objectives(options.output.with_suffix(".png"), result["settings"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
