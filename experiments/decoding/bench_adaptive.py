"""Compares the adaptive draft depth with the best fixed depth, for several prompt sets and batch sizes.

    python -m experiments.decoding.bench_adaptive --model runs/quickstart [--quick]

Held-out prompts whose texts do not loop are sorted by accept length: the first half is the easy set, the second half
the hard set, and alternating prompts from both are the mixed set. For each batch size, the costs of rounds are profiled
first, and acceptance rates are measured on prompts that are in none of the three sets. Then plain decoding, every fixed
depth and the adaptive depth run in rotation on the same prompts, in one process.

Each cell has two ratios of the best fixed depth's time (depth 0 included) to the adaptive depth's time; 1.0 means that
they take the same time. One ratio is measured, with a 95 % interval over rounds. The other is computed from the number
of rounds that each depth took and the profiled cost of a round, so it has no timing noise.
"""

import argparse
import os
import pathlib
import sys
import time

import jax
import numpy as np
from rich.console import Console

from experiments.common.results import about, write
from mtpjax import DecodeConfig, load, speculative_generate
from mtpjax.ablation.cells import Settings
from mtpjax.ablation.workload import PROMPT_TOKENS, find_workload
from mtpjax.console import narrow_table
from mtpjax.evaluation import profile, profile_file
from mtpjax.evaluation.acceptance import measure_acceptance
from mtpjax.evaluation.intervals import estimate_from, resample
from mtpjax.evaluation.metrics import report, to_json
from mtpjax.evaluation.prompt_choice import PromptChoice
from mtpjax.evaluation.round_shapes import RoundCosts
from mtpjax.host import choose_num_threads, limit_threads, num_threads
from mtpjax.io.checkpoint_format import checkpoint_bytes

NEW_TOKENS = 128
LEAST_PROMPTS = 16  # per cell; decoded in several batches if the batch size is small
BATCHES, LARGEST_BATCHES = 8, 2  # per cell, and per cell of the largest batch size
RATE_PROMPTS = 32  # for measuring acceptance rates


def prompt_sets(path: str, params, model, count: int, num_steps: int):
    """Makes the three prompt sets, and measures acceptance rates on other prompts.

    Returns:
        `count` prompts for each of "easy", "hard" and "mixed", and rates as `profile_file.depth_settings` takes them.
    """
    # Use some prompts to measure acceptance rates, and the rest for the sets.
    settings = Settings(max_new_tokens=NEW_TOKENS)
    found = find_workload(
        pathlib.Path(path), model, params, settings, PromptChoice(count=2 * count + RATE_PROMPTS)
    ).prompts
    split = min(RATE_PROMPTS, len(found) // 2)
    others, pool = found[:split] or found, found[split:]
    pool = (2 * count * pool)[: 2 * count]  # repeat prompts if too few were found
    # Sort by accept length, measured with `num_steps` draft levels.
    config = DecodeConfig(max_new_tokens=NEW_TOKENS, num_steps=num_steps)
    decoded = speculative_generate(params, pool, model=model, config=config).stats
    order = np.argsort(-(decoded.accepted.sum(axis=1) / decoded.rounds))
    easy, hard = ([pool[index] for index in part] for part in (order[:count], order[count:]))
    mixed = [prompt for pair in zip(easy, hard, strict=True) for prompt in pair][:count]
    counted = measure_acceptance(params, others, model=model, config=config, batch_size=len(others))
    figures = to_json(report(counted, ["others"] * len(others)))["overall"]
    return {"easy": easy, "hard": hard, "mixed": mixed}, profile_file.usable_acceptance(figures)


def modelled_time(results, costs: tuple[float, ...]) -> float:
    """Adds up the costs of the batches' rounds. The longest row in a batch shows how many rounds it took at each depth.

    Args:
        results: one result per batch.
        costs: cost of a round at each depth.
    """
    total = 0.0
    for stats in (result.stats for result in results):
        row = int(stats.rounds.argmax())
        reached = np.concatenate([[stats.rounds[row]], stats.proposed[row]])  # rounds of at least each depth
        rounds = reached - np.append(reached[1:], 0)
        total += float(rounds @ np.array(costs[: len(rounds)]))
    return total


def measure_cell(params, model, batches, depths: dict, rounds: int) -> dict:
    """Measures one prompt set: the adaptive depth and all fixed depths in rotation.

    Args:
        params: parameters of `model`.
        model: the model.
        batches: the prompts, batch by batch.
        depths: `depth_costs` and `depth_rates` of `DecodeConfig`.
        rounds: number of measurements.

    Returns:
        The row of the result file.
    """
    costs = depths["depth_costs"]
    num_steps = len(costs) - 1
    configs = {str(depth): DecodeConfig(max_new_tokens=NEW_TOKENS, num_steps=depth) for depth in range(num_steps + 1)}
    configs["adaptive"] = DecodeConfig(
        max_new_tokens=NEW_TOKENS, num_steps=num_steps, depth_policy="adaptive", **depths
    )
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    results = {}
    # All configurations take turns, in alternating order. The first round only compiles.
    for number in range(rounds + 1):
        for name in configs if number % 2 else reversed(configs):
            begin = time.perf_counter()
            results[name] = [speculative_generate(params, rows, model=model, config=configs[name]) for rows in batches]
            if number:
                seconds[name].append(time.perf_counter() - begin)
    # The texts must be equal, and the best fixed depth is the one with the smallest median time.
    texts = [[result.rows() for result in of_batches] for of_batches in results.values()]
    median = {name: float(np.median(times)) for name, times in seconds.items()}
    modelled = {name: modelled_time(of_batches, costs) for name, of_batches in results.items()}
    fixed = [name for name in configs if name != "adaptive"]
    best = min(fixed, key=median.__getitem__)
    ratios = np.array(seconds[best]) / np.array(seconds["adaptive"])
    (drawn,) = resample(len(ratios))
    ratio = estimate_from(float(np.median(ratios)), np.median(ratios[drawn], axis=1))
    return {
        "batch": len(batches[0]),
        "prompts": len(batches) * len(batches[0]),
        **depths,
        "seconds": median,
        "accept_length": {
            name: float(np.mean([result.stats.accept_length for result in of_batches]))
            for name, of_batches in results.items()
        },
        "best_fixed": int(best),
        "ratio": ratio.value,
        "interval": [ratio.low, ratio.high],
        "to_plain": float(np.median(np.array(seconds["0"]) / np.array(seconds["adaptive"]))),
        "modelled_ratio": min(modelled[name] for name in fixed) / modelled["adaptive"],
        "identical": all(text == texts[0] for text in texts),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/quickstart", help="a checkpoint (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4, 16, 64], help="batch sizes to measure")
    parser.add_argument("--num-steps", type=int, default=3, help="largest depth (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="measurements per cell (default: %(default)s)")
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        help="XLA's threads; 1 also pins the process to one core; 0: one for a model below 16 MiB, else all",
    )
    parser.add_argument("--quick", action="store_true", help="one batch size and one level, to check that it runs")
    parser.add_argument("--output", type=pathlib.Path, default=None, help="JSON file to write")
    options = parser.parse_args(argv)
    batches, num_steps, rounds = (options.batch_size, options.num_steps, options.rounds)
    max_prompts = max(LARGEST_BATCHES * max(batches), LEAST_PROMPTS)
    if options.quick:
        batches, num_steps, rounds, max_prompts = [2], 1, 2, 4
    console = Console(highlight=False)
    limit_threads(options.threads or choose_num_threads(checkpoint_bytes(options.model)))
    # On two cores, JAX's thread and XLA's one thread wake each other, so both are pinned to one core.
    if num_threads() == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    model, params = load(options.model)
    sets, acceptance = prompt_sets(options.model, params, model, max_prompts, num_steps)
    description = about()
    rows = []
    table = narrow_table()
    for heading in ("batch", "prompts", "best fixed", "best / adaptive", "95 %", "modelled", "plain / adaptive"):
        table.add_column(heading, justify="right")
    for batch in batches:
        # Profile this batch size, then measure every prompt set with it.
        measured = profile.measure(
            params,
            model=model,
            config=DecodeConfig(num_steps=num_steps),
            conditions=profile.Conditions(
                (batch,), context=PROMPT_TOKENS + NEW_TOKENS // 2, repeats=2 if options.quick else 48
            ),
        )
        parts = [RoundCosts.from_json(stored) for stored in measured["batches"]]
        depths = profile_file.depth_settings(parts, acceptance, options.model, batch=batch, num_steps=num_steps)
        for name, prompts in sets.items():
            count = min(max(BATCHES * batch, LEAST_PROMPTS), max_prompts)
            groups = [prompts[begin : begin + batch] for begin in range(0, count - batch + 1, batch)]
            row = {"set": name, **measure_cell(params, model, groups, depths, rounds)}
            rows.append(row)
            if options.output is not None:  # after each cell, so that an interrupted run keeps its results
                write(options.output, {**description, "cells": rows})
            low, high = row["interval"]
            cells = (batch, name, row["best_fixed"], f"{row['ratio']:.2f}", f"{low:.2f}-{high:.2f}")
            table.add_row(*map(str, cells), f"{row['modelled_ratio']:.3f}", f"{row['to_plain']:.2f}")
            console.print(f"batch {batch} {name}: {row['ratio']:.2f} of the best fixed depth, {row['best_fixed']}")
        jax.clear_caches()
    console.print(table)
    identical = all(row["identical"] for row in rows)
    console.print(f"identical: {'yes' if identical else 'NO'}")
    return 0 if identical else 4


if __name__ == "__main__":
    sys.exit(main())
