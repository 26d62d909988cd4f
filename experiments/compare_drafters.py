"""Which drafter drafts best on one trunk: an MTP module, EAGLE-3, Medusa, DFlash or DSpark?

    python -m experiments.compare_drafters [--quick] [--methods dflash dspark] [--time-again]

One trunk is trained on the standard library, as that of `mtpjax quickstart`, or `--model` names one of bytes. Each
method trains a new drafter on it, frozen, with the same updates on the same rows and the same objective (KL to the
trunk, levels weighted by 0.8), from several seeds. Each then drafts chains of the same depth for the same held-out
prompts: greedily, and sampled at temperature 1 with block verification. DFlash and DSpark have five layers, as
published, and train on a block behind every token; the others have one layer. DSpark also trains its confidence head,
which decoding here does not use.

A cell (method and seed) that is complete is not computed again, and a run that was killed resumes. `--time-again` only
times the drafters of complete cells again, on a machine that is quiet now.

    accept length     tokens per round with the bonus token; 95 % over prompts
    position k        share of rounds that accepted at least k drafts, at temperature 0
    seconds / update    of a training update, the trunk's pass included; the median
    round             duration of a round in plain rounds, at batch 1 and temperature 0
    speed-up          over plain decoding, in the same calls
    ideal             that speed-up if drafting and accepting cost nothing: accept length over the trunk's pass over
                      all drafts, in plain rounds
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from experiments.objectives import train_trunk
from mtpjax import DecodeConfig, MTPModel, Objective, TrainConfig, load, load_drafter
from mtpjax.ablation.bench import Settings, find_workload
from mtpjax.atomic import write_text
from mtpjax.console import narrow_table
from mtpjax.decoding.drafter import Drafter
from mtpjax.drafters.load import DRAFTER_FOLDER
from mtpjax.evaluation.acceptance import sampling_arguments
from mtpjax.evaluation.machine import Stopwatch, describe_machine
from mtpjax.evaluation.metrics import estimate
from mtpjax.evaluation.plot_style import COLOURS, picture
from mtpjax.inference.generate import generate, speculative_generate
from mtpjax.training.cost import seconds_per_update
from mtpjax.training.trainer import TrainResult, train

LEVELS = 4
TEMPERATURES = (0.0, 1.0)
OBJECTIVE = Objective(mix={"kl": 1.0}, depth_weights="decayed", depth_decay=0.8)
METHODS: dict[str, dict[str, Any]] = {  # another drafter joins with a row of its own
    "mtp": {"trains": "modules"},
    "eagle3": {"drafter": "eagle3"},
    "medusa": {"drafter": "medusa"},
    "dflash": {"drafter": "dflash"},
    "dspark": {"drafter": "dspark"},
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Updates of a drafter, new tokens of a text, and prompts and turns of the timing."""

    steps: int
    new_tokens: int = 128
    timed_prompts: int = 4
    timings: int = 5


class Trained(NamedTuple):
    """What decoding with a trained drafter needs."""

    model: MTPModel
    params: dict[str, Any]
    drafter: Drafter | str
    draft_params: Any


def run_folder(folder: pathlib.Path, method: str, seed: int, steps: int) -> pathlib.Path:
    """Returns the folder of a drafter's run."""
    return folder / f"{method}-{seed}-{steps}"


def load_trained(output: pathlib.Path, trunk: pathlib.Path) -> Trained:
    """Loads the drafter of a complete run: MTP modules with their trunk, or a drafter beside it."""
    if not (output / DRAFTER_FOLDER).is_dir():
        return Trained(*load_model(output), "mtp", None)
    model, params = load_model(trunk)
    return Trained(model, params, *load_drafter(output, model=model))


def load_model(path: pathlib.Path) -> tuple[MTPModel, dict[str, Any]]:
    """Loads a model of bytes."""
    model, params = load(path)
    if not isinstance(model, MTPModel) or model.config.vocab_size != 256:
        raise SystemExit(f"{path} is not a model of bytes")
    return model, params


def train_drafter(output: pathlib.Path, trunk: pathlib.Path, method: str, seed: int, *, steps: int) -> TrainResult:
    """Trains one drafter, or continues its run."""
    config = TrainConfig(
        init_from=str(trunk), steps=steps, batch_size=8, seed=seed, log_every=max(1, min(20, steps // 4)),
        num_depths=LEVELS, extra_tokens=LEVELS + 1, mtp_loss_scale=1.0, mtp_loss_scale_final=1.0, objective=OBJECTIVE,
        panel_prompts=0, plot_formats=(), output=str(output), **METHODS[method],
    )  # fmt: skip
    return train(config, resume=(output / "run.json").exists(), evaluations=1)


def time_decoding(trained: Trained, config: DecodeConfig, prompts: list[list[int]], timings: int) -> dict[str, float]:
    """Times plain decoding, plain decoding as wide as verification, and decoding with drafts, in turns."""
    model, params = trained.model, trained.params
    plain = DecodeConfig(max_new_tokens=config.max_new_tokens, num_steps=0)
    wide = dataclasses.replace(plain, min_rows=config.num_nodes)
    calls: dict[str, Callable[[list[list[int]]], Any]] = {
        "plain": lambda rows: generate(params, rows, model=model, config=plain),
        "wide": lambda rows: generate(params, rows, model=model, config=wide),
        "drafts": lambda rows: speculative_generate(
            params, rows, model=model, config=config, draft_params=trained.draft_params
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    tokens, rounds = 0, 0
    for timing in range(timings + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            results = [call([prompt]) for prompt in prompts]
            # The first turn compiles.
            if timing:
                seconds[name].append(time.perf_counter() - begin)
            if name == "drafts":
                tokens = sum(len(row) for result in results for row in result.rows())
                rounds = sum(int(result.stats.rounds.sum()) for result in results)
    of = {name: float(np.median(times)) for name, times in seconds.items()}
    return {
        "plain_step_seconds": of["plain"] / tokens,
        "verify_steps": of["wide"] / of["plain"],
        "round_steps": of["drafts"] / rounds / (of["plain"] / tokens),
        "speed_up": of["plain"] / of["drafts"],
    }


def measure_cell(
    folder: pathlib.Path,
    trunk: pathlib.Path,
    prompts: list[list[int]],
    method: str,
    seed: int,
    sizes: Sizes,
    *,
    time_again: bool = False,
) -> dict[str, Any]:
    """Trains a drafter and decodes with it, unless the cell's file has the figures of the same settings."""
    file = folder / "cells" / f"{method}-{seed}-{sizes.steps}.json"
    settings = {"prompts": prompts, "levels": LEVELS, **dataclasses.asdict(sizes)}
    stored: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    is_complete, output = stored.get("settings") == settings, run_folder(folder, method, seed, sizes.steps)
    if is_complete and not time_again:
        return stored
    if time_again and not is_complete:
        raise SystemExit(f"{method}, seed {seed}, has no complete cell: run without --time-again first")
    if is_complete:
        cell, trained = stored, load_trained(output, trunk)
    else:
        result = train_drafter(output, trunk, method, seed, steps=sizes.steps)
        trained = Trained(result.model, result.params, result.drafter or "mtp", result.draft_params)
        cell = {"settings": settings, "train_seconds_per_step": seconds_per_update(result.history)}
    config = DecodeConfig(max_new_tokens=sizes.new_tokens, num_steps=LEVELS, drafter=trained.drafter)
    if not is_complete:
        cell["counts"] = count_accepted(trained, config, prompts)
    stopwatch = Stopwatch()
    timed = time_decoding(trained, config, prompts[: sizes.timed_prompts], sizes.timings)
    cell["timed"] = timed | {"waited": stopwatch.waited_share()}
    file.parent.mkdir(exist_ok=True)
    write_text(file, json.dumps(cell) + "\n")
    return cell


def count_accepted(trained: Trained, config: DecodeConfig, prompts: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Decodes the prompts at each temperature; returns rounds and accepted drafts of each."""
    counts = {}
    for temperature in TEMPERATURES:
        asked = sampling_arguments(temperature, list(range(len(prompts))))
        arguments = {"model": trained.model, "config": config, "draft_params": trained.draft_params, **asked}
        stats = speculative_generate(trained.params, prompts, **arguments).stats
        counts[f"{temperature:g}"] = {"rounds": stats.rounds.tolist(), "accepted": stats.accepted.tolist()}
    return counts


def figures(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the seeds of a method; prompts are what is resampled, times are medians over seeds."""
    found: dict[str, Any] = {}
    for temperature in (f"{each:g}" for each in TEMPERATURES):
        rounds = np.array([cell["counts"][temperature]["rounds"] for cell in cells])
        accepted = np.array([cell["counts"][temperature]["accepted"] for cell in cells])
        per_prompt = rounds.sum(axis=0)[:, None]
        (length,) = estimate(accepted.sum(axis=(0, 2))[:, None], per_prompt, offset=1.0)
        found[temperature] = {
            "accept_length": length.to_dict(),
            "of_seeds": (1 + accepted.sum(axis=(1, 2)) / rounds.sum(axis=1)).tolist(),
            "survival": [rate.to_dict() for rate in estimate(accepted.sum(axis=0), per_prompt)],
        }
    timed = {name: float(np.median([cell["timed"][name] for cell in cells])) for name in cells[0]["timed"]}
    timed["ideal"] = found["0"]["accept_length"]["value"] / timed["verify_steps"]
    seconds = float(np.median([cell["train_seconds_per_step"] for cell in cells]))
    return {"temperatures": found, "timed": timed, "train_seconds_per_step": seconds}


def print_tables(console: Console, methods: dict[str, dict[str, Any]]) -> None:
    """Prints accept lengths with acceptance by position, and then the costs."""
    levels = max(len(found["temperatures"]["0"]["survival"]) for found in methods.values())
    lengths = narrow_table(f"chains of {levels} drafts: accept length (95 %), and acceptance by position at T 0")
    for heading in ("method", *(f"T {each:g}" for each in TEMPERATURES), *map(str, range(1, levels + 1))):
        lengths.add_column(heading, justify="left" if heading == "method" else "right")
    costs = narrow_table("training and rounds at batch 1, temperature 0; rounds in plain rounds")
    for heading in ("method", "seconds / update", "round", "speed-up", "ideal", "waited"):
        costs.add_column(heading, justify="left" if heading == "method" else "right")
    for name, found in methods.items():
        each = [row["accept_length"] for row in found["temperatures"].values()]
        survival = (f"{rate['value']:.2f}" for rate in found["temperatures"]["0"]["survival"])
        lengths.add_row(name, *(f"{row['value']:.2f} {row['low']:.2f}-{row['high']:.2f}" for row in each), *survival)
        timed = found["timed"]
        numbers = (timed["round_steps"], timed["speed_up"], timed["ideal"], timed["waited"])
        costs.add_row(name, f"{found['train_seconds_per_step']:.3f}", *(f"{number:.2f}" for number in numbers))
    console.print(lengths)
    console.print(costs)


def plot(path: pathlib.Path, methods: dict[str, dict[str, Any]]) -> None:
    """Plots accept lengths, survival by position, and the speed-up beside its ideal."""
    with picture(path, (13, 3.6), ("png",)) as figure:
        length, survival, speed = figure.subplots(1, 3)
        for index, (name, found) in enumerate(methods.items()):
            for number, (temperature, row) in enumerate(found["temperatures"].items()):
                value, low, high = (row["accept_length"][key] for key in ("value", "low", "high"))
                style = {"color": COLOURS[index], "fmt": "os"[number]}
                length.errorbar(index + 0.2 * number, value, yerr=[[value - low], [high - value]], **style)
                length.plot([index + 0.2 * number] * len(row["of_seeds"]), row["of_seeds"], "_", color=COLOURS[index])
                if temperature == "0":
                    rates = [rate["value"] for rate in row["survival"]]
                    survival.plot(range(1, len(rates) + 1), rates, marker="o", color=COLOURS[index], label=name)
            speed.bar(index, found["timed"]["speed_up"], 0.5, color=COLOURS[index])
            speed.plot([index - 0.3, index + 0.3], [found["timed"]["ideal"]] * 2, "k--")
        for axes in (length, speed):
            axes.set_xticks(range(len(methods)), list(methods))
        length.set(title="accept length (dots T 0, squares T 1)", ylabel="tokens per round; 95 % over prompts")
        survival.set(title="acceptance by position, temperature 0", xlabel="position", ylim=(0, 1))
        survival.xaxis.get_major_locator().set_params(integer=True)
        survival.legend()
        speed.set(title="speed-up at batch 1 (dashed: drafts for free)", ylabel="over plain decoding")


def measure(
    folder: pathlib.Path,
    console: Console,
    trunk: pathlib.Path,
    sizes: Sizes,
    *,
    methods: list[str],
    seeds: int,
    count: int,
    time_again: bool,
) -> dict[str, Any]:
    """Returns `{"prompts": their number, "methods": {method: figures}}`."""
    model, params = load_model(trunk)
    settings = Settings(max_new_tokens=sizes.new_tokens)
    prompts = find_workload(trunk, model, params, settings, num_prompts=count).prompts
    cells: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for seed in range(seeds):
        for method, found in cells.items():
            found.append(measure_cell(folder, trunk, prompts, method, seed, sizes, time_again=time_again))
            lengths = figures(found[-1:])["temperatures"].values()
            text = " and ".join(f"{row['accept_length']['value']:.3f}" for row in lengths)
            console.print(f"{method}, seed {seed}: accept length {text} at temperature 0 and 1")
    return {"prompts": len(prompts), "methods": {method: figures(found) for method, found in cells.items()}}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=None, help="trunk of bytes (default: trains one)")
    parser.add_argument("--trunk-steps", type=int, default=1000, help="updates of the trunk (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="updates of each drafter (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="drafters of each method (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="(default: all)")
    parser.add_argument("--time-again", action="store_true", help="only time the drafters of complete cells again")
    parser.add_argument("--quick", action="store_true", help="a few updates of each: to see that it runs")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/compare_drafters"), help="runs")
    parser.add_argument("--output", type=pathlib.Path, default=None, help="JSON file; a picture beside it")
    options = parser.parse_args(argv)
    trunk_steps, seeds, count, sizes = options.trunk_steps, options.seeds, options.prompts, Sizes(options.steps)
    if options.quick:
        trunk_steps, seeds, count, sizes = 4, 1, 2, Sizes(4, new_tokens=16, timed_prompts=1, timings=1)
    console = Console(highlight=False)
    options.folder.mkdir(parents=True, exist_ok=True)
    trunk = options.model or train_trunk(options.folder, steps=trunk_steps, preset="tiny")
    chosen = {"methods": options.methods, "time_again": options.time_again}
    result = measure(options.folder, console, trunk, sizes, seeds=seeds, count=count, **chosen)
    print_tables(console, result["methods"])
    if options.output is not None:
        about = {"date": datetime.date.today().isoformat(), "machine": describe_machine(), "argv": sys.argv[1:]}
        options.output.write_text(json.dumps({**about, **result}, indent=1) + "\n")
        plot(options.output.with_suffix(".png"), result["methods"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
