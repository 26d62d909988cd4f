"""Which draft settings to use: a grid of cells, each measured in turns with plain decoding of the same batch.

A cell is one draft depth, tree, rule, temperature and batch size (`ablate_grid`; `ablate_bench` measures it,
`ablate_report` says what follows). Its line in `cells.jsonl` carries a fingerprint of all that it depends on, so that a
run that was ended goes on behind its last cell and changed settings are measured anew.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mtpjax.ablation.bench import Bench, Workload, find_workload
from mtpjax.ablation.grid import Cell, Settings, plan
from mtpjax.ablation.report import print_cells, recommendation, summary, to_csv
from mtpjax.atomic import write_text
from mtpjax.data.jsonl_writer import JsonlWriter
from mtpjax.evaluation.machine import machine
from mtpjax.evaluation.plots import plot_heatmap, plot_pareto
from mtpjax.host import num_threads
from mtpjax.io.checkpoint import load
from mtpjax.io.checkpoint_format import checkpoint_digest, find_checkpoint

VERSION = 4  # of a cell's line: another one is measured anew
CELLS_IN_MEMORY = 16  # compiled programs take memory mappings; a process has 65,530


def fingerprint(cell: Cell, settings: Settings, workload: Workload, about: dict[str, Any]) -> str:
    """A digest of all that a cell's figures depend on, but for chance."""
    content = {
        "version": VERSION,
        "cell": dataclasses.asdict(cell),
        "max_new_tokens": settings.max_new_tokens,
        "repeats": settings.repeats,
        "seed": settings.seed,
        "prompts": workload.prompts,
        "stop_token_ids": workload.stop_token_ids,
        "about": about,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def describe(path: pathlib.Path) -> dict[str, Any]:
    """Model, machine and versions: what other figures would need."""
    device = jax.devices()[0]
    return {
        "model": checkpoint_digest(path)[:16],
        "device": f"{device.device_kind}, threads: {num_threads()}" if device.platform == "cpu" else device.device_kind,
        "processor": machine()["cpu"] if hasattr(os, "sched_getaffinity") else platform.machine(),
        "jax": jax.__version__,
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


def run_cells(
    cells: list[Cell],
    bench: Bench,
    writer: JsonlWriter,
    about: dict[str, Any],
    *,
    say: Callable[[str], Any] = print,
) -> tuple[list[dict[str, Any]], bool]:
    """Measures what the file does not hold. Returns the rows there are, and whether they are all: not after Ctrl-C."""
    # Of two lines with the same fingerprint the newer one counts.
    known = {row["fingerprint"]: row for row in writer.resume(required=("fingerprint",))}
    prints = {cell: fingerprint(cell, bench.settings, bench.workload, about) for cell in cells}
    rows = {cell: known[prints[cell]] for cell in cells if prints[cell] in known}
    if rows:
        say(f"{len(rows)} of {len(cells)} cells are there already")
    waiting = bench.cells = [cell for cell in cells if cell not in rows]
    begin = time.perf_counter()
    try:
        for number, cell in enumerate(waiting, start=1):
            row = {"fingerprint": prints[cell], "about": about, **bench.measure(cell)}
            writer.append([row])
            rows[cell] = row
            left = (time.perf_counter() - begin) / number * (len(waiting) - number)
            say(f"{len(rows)}/{len(cells)} {cell.name}: {summary(row)}; {_minutes(left)} left")
            if number % CELLS_IN_MEMORY == 0:
                jax.clear_caches()
    except KeyboardInterrupt:
        pass
    return [rows[cell] for cell in cells if cell in rows], len(rows) == len(cells)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def run(
    model_path,
    output,
    settings: Settings,
    *,
    console,
    prompts: str | None = None,
    num_prompts: int = 12,
    categories: Sequence[str] = (),
    prompt_tokens: int | None = None,
    chat: bool = False,
) -> int:
    """Measures the grid, writes the results, prints them. Returns 4 if a text differs, 75 if it was ended before."""
    path = find_checkpoint(model_path)
    model, params = load(path)
    cells, reasons = plan(settings, model=model)
    for reason, count in reasons.items():
        console.print(f"left out: {reason} ({count} cells)", highlight=False)
    if not cells:
        raise ValueError("no combination of the settings is possible: the reasons are above")
    workload = find_workload(
        path,
        model,
        params,
        settings,
        prompts=prompts,
        num_prompts=num_prompts,
        categories=categories,
        prompt_tokens=prompt_tokens,
        chat=chat,
    )
    about = describe(path)
    output = pathlib.Path(output)
    output.mkdir(parents=True, exist_ok=True)
    console.print(f"{len(cells)} cells; {workload.source}", highlight=False, soft_wrap=True)
    bench = Bench(model, params, settings, workload)

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    # Every finished cell is a line that is on the disk before the next cell starts.
    with JsonlWriter(output / "cells.jsonl", allow_nan=False) as writer:
        rows, is_complete = run_cells(cells, bench, writer, about, say=say)
    if rows:
        print_cells(console, rows)
        text = recommendation(rows, reasons, workload, settings, about)
        write_text(output / "cells.csv", to_csv(rows))
        write_text(output / "recommendation.md", text)
        plot_heatmap(output / "heatmap.png", rows)
        plot_pareto(output / "pareto.png", rows)
        console.print(text.partition("\n## Measured")[0], highlight=False, soft_wrap=True, markup=False)
        console.print(f"wrote {output}/: cells.jsonl, cells.csv, heatmap.png, pareto.png, recommendation.md")
    if not is_complete:
        console.print(f"ended with {len(rows)} of {len(cells)} cells done: the same command goes on", soft_wrap=True)
        return 75
    return 4 if any(row["lossless"] == "DIFFERS" for row in rows) else 0
