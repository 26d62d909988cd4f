"""Compares the settings, final losses and acceptance of several runs side by side. Reads only the run folders."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from mtpjax.console import narrow_table, split_columns
from mtpjax.evaluation.trust import mark, verdict
from mtpjax.training.log import read_metrics
from mtpjax.training.run_dir import METRICS_FILE, RunError, read_run_file
from mtpjax.training.yaml_config import flatten_settings


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The settings and metrics in a run folder.

    Attributes:
        name: path of the folder.
        settings: settings by dotted key, such as "objective.warmup".
        fingerprint: digest of the training data.
        history: rows of `metrics.jsonl`, oldest first.
    """

    name: str
    settings: dict[str, Any]
    fingerprint: str
    history: list[dict[str, Any]]

    @property
    def last_evaluation(self) -> dict[str, Any]:
        """The row of the newest evaluation."""
        return next(row for row in reversed(self.history) if "eval" in row)


def read_run(folder) -> RunRecord:
    """Reads `run.json` and `metrics.jsonl` from a run folder.

    Raises:
        RunError: the folder is not a run folder, is damaged, or has no evaluation yet.
    """
    folder = pathlib.Path(folder)
    settings, fingerprint = read_run_file(folder, "fingerprint")
    try:
        history = read_metrics(folder / METRICS_FILE)
    except (OSError, ValueError) as error:
        raise RunError(f"{folder / METRICS_FILE} is damaged: {error}") from error
    # The comparison shows the last evaluation, so there must be at least one.
    if not any("eval" in row for row in history):
        raise RunError(f"{folder} has no evaluation yet: {METRICS_FILE} holds {len(history)} rows and no panel")
    return RunRecord(str(folder), flatten_settings(settings), fingerprint, history)


def tables(runs: Sequence[RunRecord], width: int = 80) -> Iterator[Any]:
    """Builds the comparison for the terminal.

    Args:
        runs: the runs; the first one is the baseline.

    Yields:
        First a `rich` table of the settings that differ, or a sentence if none differ; then lines that say which
        speed-ups can be trusted and why the others cannot; then a table of the metrics at each run's last evaluation,
        with their differences from the first run.
    """
    names = short_names(runs)
    # Add one row for each setting whose value is not the same in all runs.
    settings_table = narrow_table("settings that differ")
    settings_table.add_column("setting", overflow="fold")
    for name in names:
        settings_table.add_column(name, overflow="fold")
    rows = list(_different_settings(runs))
    for key, *values in rows:
        settings_table.add_row(key, *values)
    yield from split_columns(settings_table, width) if rows else ("the settings are the same",)

    # Never present an untrusted speed-up as a result.
    timed = [(name, kind, row) for name, run in zip(names, runs, strict=True) for kind, row in _timed(run).items()]
    if timed:
        yield verdict([row.get("problem") for _, _, row in timed], max(row.get("waited") or 0.0 for _, _, row in timed))
    yield from (f"{name}, {kind}: {row['problem']}" for name, kind, row in timed if row.get("problem"))
    # Add one row for each metric that any run has. Runs with fewer draft levels or prompt categories show "-".
    metrics_table = narrow_table("at the last evaluation" + " (difference from the first run)" * (len(runs) > 1))
    metrics_table.add_column("", overflow="fold")
    for name in names:
        metrics_table.add_column(name, justify="right", overflow="fold")
    found = [_metrics(run) for run in runs]
    for key in dict.fromkeys(key for each in found for key in each):
        metrics_table.add_row(key, *_format_cells([each.get(key) for each in found]))
    for kind in dict.fromkeys(kind for _, kind, _ in timed):
        rows = [_timed(run).get(kind, {}) for run in runs]
        cells = _format_cells([row.get("speed_up") for row in rows], [row.get("problem") for row in rows])
        metrics_table.add_row(f"{kind}: speed-up", *cells)
    yield from split_columns(metrics_table, width)


def _timed(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Returns a run's last decoded metrics over all prompts, by kind, for the kinds that have a speed-up."""
    kinds = run.last_evaluation["eval"].get("decoded", {}).get("overall", {})
    return {kind: row for kind, row in kinds.items() if row["speed_up"] is not None}


def _metrics(run: RunRecord) -> dict[str, float]:
    """Returns the metrics of a run's last evaluation by name, in the order of the table."""
    last = run.last_evaluation
    panel, found = last["eval"], {"updates": last["step"], "seconds": last["seconds"]}
    # Add the teacher-forced losses of the trunk (level 0) and of each draft level, then the rates of each level.
    for level, bits in enumerate(panel["bits_per_token"]):
        found["bits per token, " + (f"draft {level}" if level else "trunk")] = bits
    for name, title in (("agreement", "agreement"), ("survival", "survival"), ("overlap", "1 - TV")):
        found |= {f"{title}, level {level}": value for level, value in enumerate(panel.get(name, ()), start=1)}
    # Add the decoded accept lengths per prompt category, greedy and sampled.
    for category, kinds in panel.get("decoded", {}).items():
        for kind, row in kinds.items():
            place = kind if category == "overall" else f"{category}, {kind}"
            found[f"{place}: accept length"] = row["real"]
            found[f"{place}: predicted"] = row["predicted"]
    return found


def _format_cells(values: Sequence[float | None], problems: Sequence[str | None] = ()) -> Iterator[str]:
    first = values[0]
    # Counts have no decimals; rates and lengths also show their difference from the first run. A number that cannot be
    # trusted has a mark and no difference.
    for number, value in enumerate(values):
        if value is None:
            yield "-"
        elif problems and (problems[number] or problems[0]):
            yield f"{value:.3f}{mark(problems[number])}"
        elif isinstance(value, int) or value >= 1000:
            yield f"{value:,.0f}"
        else:
            yield f"{value:.3f}" + (f" ({value - first:+.3f})" if number and first is not None else "")


def _different_settings(runs: Sequence[RunRecord]) -> Iterator[tuple[str, ...]]:
    # Compare as JSON, in the order of the settings. The output folder always differs and is left out.
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    for key in keys:
        values = [json.dumps(run.settings[key]) if key in run.settings else "-" for run in runs]
        if key != "output" and len(set(values)) > 1:
            yield key, *values
    # Equal settings can read different data, for example after files in the data folder changed.
    if len({run.fingerprint for run in runs}) > 1:
        yield "data (fingerprint)", *(run.fingerprint[:8] for run in runs)


def short_names(runs: Sequence[RunRecord]) -> list[str]:
    """Returns the names of runs in tables and plots, which are folder names or, if these are not unique, full paths."""
    last = [pathlib.Path(run.name).name for run in runs]
    return last if len(set(last)) == len(last) else [run.name for run in runs]
