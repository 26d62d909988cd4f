"""Runs an ablation, which measures a grid of cells and alternates each with plain decoding of the same batch.

A cell is a combination of drafter, draft depth, tree, rule, temperature and batch size. `drafters` loads the drafters,
`grid` lists the cells, `bench` measures them, and `report` writes the advice. A cell's line in `cells.jsonl` includes a
fingerprint of everything that its results depend on, including the drafter's parameters. A stopped run therefore
continues after its last cell, and cells whose settings or drafters changed are measured again.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from mtpjax.ablation.bench import Bench
from mtpjax.ablation.cells import Cell, Settings
from mtpjax.ablation.drafters import MTP, AblatedDrafter, load_methods
from mtpjax.ablation.grid import list_cells
from mtpjax.ablation.heatmap import plot_heatmap
from mtpjax.ablation.pareto import plot_pareto
from mtpjax.ablation.positions import plot_positions
from mtpjax.ablation.report import format_recommendation, format_summary, print_cells, to_csv
from mtpjax.ablation.workload import Workload, find_workload
from mtpjax.atomic import write_text
from mtpjax.data.jsonl_writer import JsonlWriter
from mtpjax.drafters.method import Reading
from mtpjax.evaluation.machine import describe_machine
from mtpjax.evaluation.plot_style import DEFAULT_FORMATS, picture_paths
from mtpjax.evaluation.prompt_choice import PromptChoice
from mtpjax.evaluation.trust import can_pass
from mtpjax.host import num_threads
from mtpjax.io.checkpoint import load
from mtpjax.io.checkpoint_format import checkpoint_digest, find_checkpoint
from mtpjax.messages import count_of
from mtpjax.models.config import Implementation
from mtpjax.models.model import MTPModel
from mtpjax.program_memory import free_programs_if_full

CELL_VERSION = 8  # format of a cell's line; cells whose line has a different version are measured again


def fingerprint(
    cell: Cell, settings: Settings, workload: Workload, environment: dict[str, Any], method: AblatedDrafter = MTP
) -> str:
    """Computes a digest of everything that a cell's results depend on, except chance."""
    content = {"version": CELL_VERSION, "cell": dataclasses.asdict(cell)}
    content |= {"drafter": method.digest, "about": environment}
    content |= {name: getattr(settings, name) for name in ("max_new_tokens", "repeats", "seed")}
    content |= {name: getattr(workload, name) for name in ("prompts", "stop_token_ids", "categories")}
    return _digest(content)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def seal(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with its digest, from which a later run detects that the line was edited or damaged."""
    # A row that was read back already has a digest, which is not part of the content.
    content = {name: value for name, value in row.items() if name != "digest"}
    return content | {"digest": _digest(content)}


def describe_environment(
    path: pathlib.Path, model_type: str | None = None, implementation: Implementation = "auto"
) -> dict[str, Any]:
    """Describes the model, machine and versions that the results depend on."""
    device = jax.devices()[0]
    return {
        "model": checkpoint_digest(path)[:16] + (f" as {model_type}" if model_type else ""),
        "device": f"{device.device_kind}, threads: {num_threads()}" if device.platform == "cpu" else device.device_kind,
        "processor": describe_machine()["cpu"],
        "jax": jax.__version__,
        "flags": os.environ.get("XLA_FLAGS", ""),
        **({} if implementation == "auto" else {"implementation": implementation}),
    }


def run_cells(
    cells: list[Cell],
    bench: Bench,
    writer: JsonlWriter,
    environment: dict[str, Any],
    *,
    log: Callable[[str], Any] = print,
) -> tuple[list[dict[str, Any]], bool]:
    """Measures the cells that are not yet in `cells.jsonl`, the file that `writer` has open.

    Returns:
        The measured rows in the order of `cells`, and whether the run finished, which it does not after Ctrl-C.
    """
    # If two lines have the same fingerprint, the newer one counts.
    known_rows = {row["fingerprint"]: row for row in writer.resume(required=("fingerprint",))}
    about = (bench.settings, bench.workload, environment)
    fingerprints = {cell: fingerprint(cell, *about, bench.method(cell)) for cell in cells}
    rows = {cell: known_rows[fingerprints[cell]] for cell in cells if fingerprints[cell] in known_rows}
    # A fingerprint covers the settings, but not the rest of the line, which may have been edited.
    for cell in [cell for cell, row in rows.items() if row != seal(row)]:
        log(f"{cell.name}: its line in {writer.path} is damaged; measuring again")
        del rows[cell]
    if rows:
        log(f"already measured: {len(rows)} of {count_of(len(cells), 'cell')}")
    # Measure the other cells. Each row is written to disk before the next cell starts.
    # Cells that other programs disturbed are measured again, after the cells that have no row yet.
    disturbed = [cell for cell, row in rows.items() if can_pass(row["problem"])]
    if disturbed:
        log(f"measuring again, because they could not be trusted: {count_of(len(disturbed), 'cell')}")
    remaining = bench.cells = [*(cell for cell in cells if cell not in rows), *disturbed]
    begin, num_measured = time.perf_counter(), 0
    try:
        for number, cell in enumerate(remaining, start=1):
            row = seal({"fingerprint": fingerprints[cell], "about": environment, **bench.measure(cell)})
            writer.append([row])
            rows[cell] = row
            # Estimate the time left by assuming that the remaining cells take as long as the measured ones.
            left = (time.perf_counter() - begin) / number * (len(remaining) - number)
            num_measured, done = number, len(cells) - len(remaining) + number
            log(f"{done}/{len(cells)} {cell.name}: {format_summary(row)}; {_format_duration(left)} left")
            free_programs_if_full()
    except KeyboardInterrupt:
        pass
    return [rows[cell] for cell in cells if cell in rows], num_measured == len(remaining)


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class Subject(NamedTuple):
    """A loaded model, and the drafters that an ablation compares on it."""

    name: str  # name of the model's folder, for titles
    path: pathlib.Path
    model: MTPModel
    params: dict
    methods: tuple[AblatedDrafter, ...]
    environment: dict[str, Any]  # from `describe_environment`


def load_subject(
    model_path,
    drafters: Sequence[str],
    *,
    model_type: str | None = None,
    implementation: Implementation = "auto",
    reading: Reading | None = None,
) -> Subject:
    """Loads a model and all drafters. Errors in their files are raised here, before anything is measured.

    Raises:
        ValueError: a drafter is for a different model.
        CheckpointError: files are damaged, missing or not supported.
    """
    path = find_checkpoint(model_path)
    model, params = load(path, model_type=model_type, implementation=implementation)
    methods = load_methods(drafters, model=model, model_path=model_path, **(reading or {}))
    environment = describe_environment(path, model_type, implementation)
    return Subject(pathlib.Path(model_path).name, path, model, params, methods, environment)


def run(
    subject: Subject,
    settings: Settings,
    prompts: PromptChoice,
    output: pathlib.Path,
    *,
    console,
    plot_formats: Sequence[str] = DEFAULT_FORMATS,
) -> int:
    """Measures the grid, writes the results to the folder `output` and prints them.

    Returns:
        The exit status: 4 if a text differs from plain decoding, 75 if the run was stopped early, or 0 otherwise.

    Raises:
        ValueError: no combination of the settings is possible, or the prompts do not fit the model.
    """

    def log(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    path, model, params, methods, environment = subject[1:]
    # List the cells, and print why combinations were left out.
    cells, reasons = list_cells(settings, model=model, methods=methods)
    for reason, count in reasons.items():
        console.print(f"left out: {reason} ({count_of(count, 'cell')})", highlight=False)
    if not cells:
        raise ValueError("no combination of the settings is possible: the reasons are above")
    # Choose the prompts, which are the same for all cells.
    workload = find_workload(path, model, params, settings, prompts)
    output.mkdir(parents=True, exist_ok=True)
    log(f"{count_of(len(cells), 'cell')}; {workload.source}")
    bench = Bench(model, params, settings, workload, methods=methods)
    # `run_cells` writes each finished cell to disk before the next one starts.
    with JsonlWriter(output / "cells.jsonl", allow_nan=False) as writer:
        rows, is_complete = run_cells(cells, bench, writer, environment, log=log)
    # Report what was measured, even if the run was stopped early.
    if rows:
        text = format_recommendation(rows, reasons, workload, settings, environment, methods)
        title = f"Ablation of {subject.name}, {workload.source}\n{environment['device']}, {environment['processor']}"
        _report(output, rows, text, plot_formats, title=title, console=console)
    if not is_complete:
        console.print(
            f"stopped after {len(rows)} of {count_of(len(cells), 'cell')}: run it again to continue", soft_wrap=True
        )
        return 75
    return 4 if any(row["lossless"] == "DIFFERS" for row in rows) else 0


def _report(output: pathlib.Path, rows: list[dict[str, Any]], text: str, plot_formats, *, title: str, console):
    """Prints the measured cells, and writes the table, the recommendation, and the plots with this title."""
    print_cells(console, rows)
    write_text(output / "cells.csv", to_csv(rows))
    write_text(output / "recommendation.md", text)
    plots = {"heatmap": plot_heatmap, "pareto": plot_pareto}
    if len({row["cell"]["drafter"] for row in rows}) > 1:
        plots["positions"] = plot_positions
    for name, plot in plots.items():
        plot(output / name, rows, plot_formats, title=title)
    # The wide drafter tables are only in the file.
    printed = re.split(r"\n## (?:Drafters|Categories|Training|Measured)", text)[0]
    console.print(printed, highlight=False, soft_wrap=True, markup=False)
    files = ["cells.jsonl", "cells.csv", "recommendation.md"]
    files += [file.name for name in plots for file in picture_paths(output / name, plot_formats)]
    console.print(f"wrote {output}/: {', '.join(files)}", soft_wrap=True)
