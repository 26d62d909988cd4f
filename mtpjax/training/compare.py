"""Runs side by side: settings that differ, final losses and panels, from their folders alone."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from mtpjax.console import narrow_table
from mtpjax.training.log import METRICS, read_rows
from mtpjax.training.run_dir import SETTINGS, RunError


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run folder says."""

    name: str
    settings: dict[str, Any]  # dotted keys
    fingerprint: str
    history: list[dict[str, Any]]

    @property
    def last(self) -> dict[str, Any]:
        """The row of the newest evaluation."""
        return next(row for row in reversed(self.history) if "eval" in row)


def read_run(folder) -> Run:
    """Reads `run.json` and `metrics.jsonl`.

    Raises `RunError`, in one line, for a folder that holds no run, for a damaged one, and for a run that has not
    evaluated yet.
    """
    folder = pathlib.Path(folder)
    try:
        stored = json.loads((folder / SETTINGS).read_bytes())
        settings, fingerprint = _flat(stored["settings"]), str(stored["fingerprint"])
        history = read_rows(folder / METRICS)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{folder} holds no run: there is no {SETTINGS}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{folder / SETTINGS} is damaged: {type(error).__name__}: {error}") from error
    if not any("eval" in row for row in history):
        raise RunError(f"{folder} has not evaluated yet: {METRICS} holds {len(history)} rows and no panel")
    return Run(str(folder), settings, fingerprint, history)


def tables(runs: Sequence[Run]) -> Iterator[Any]:
    """`rich` tables: settings that differ, then figures of each run, and their difference to the first's."""
    names = _short_names(runs)
    different = narrow_table("settings that differ")
    different.add_column("setting", overflow="fold")
    for name in names:
        different.add_column(name, overflow="fold")
    rows = list(_different_settings(runs))
    for key, *values in rows:
        different.add_row(key, *values)
    yield different if rows else "the settings are the same"

    figures = narrow_table("at the last evaluation" + " (less the first run's)" * (len(runs) > 1))
    figures.add_column("", overflow="fold")
    for name in names:
        figures.add_column(name, justify="right", overflow="fold")
    found = [_figures(run) for run in runs]
    for key in dict.fromkeys(key for each in found for key in each):
        figures.add_row(key, *_cells([each.get(key) for each in found]))
    yield figures


def _figures(run: Run) -> dict[str, float]:
    """Name of a figure -> its value, in the order of the table."""
    panel, found = run.last["eval"], {"steps": run.last["step"], "seconds": run.last["seconds"]}
    for level, bits in enumerate(panel["bits_per_token"]):
        found["bits per token, " + (f"draft {level}" if level else "trunk")] = bits
    for name, title in (("agreement", "agreement"), ("survival", "survival"), ("overlap", "1 - TV")):
        found |= {f"{title}, level {level}": value for level, value in enumerate(panel.get(name, ()), start=1)}
    for category, kinds in panel.get("decoded", {}).items():
        for kind, row in kinds.items():
            place = kind if category == "overall" else f"{category}, {kind}"
            found[f"{place}: accept length"] = row["real"]
            found[f"{place}: predicted"] = row["predicted"]
            if category == "overall" and row["speed_up"] is not None:
                found[f"{place}: speed-up"] = row["speed_up"]
    return found


def _cells(values: Sequence[float | None]) -> Iterator[str]:
    first = values[0]
    for number, value in enumerate(values):
        if value is None:
            yield "-"
        elif isinstance(value, int) or value >= 1000:
            yield f"{value:,.0f}"
        else:
            yield f"{value:.3f}" + (f" ({value - first:+.3f})" if number and first is not None else "")


def _different_settings(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    for key in keys:
        values = [json.dumps(run.settings[key]) if key in run.settings else "-" for run in runs]
        if key != "output" and len(set(values)) > 1:
            yield key, *values
    if len({run.fingerprint for run in runs}) > 1:
        yield "data (fingerprint)", *(run.fingerprint[:8] for run in runs)


def _short_names(runs: Sequence[Run]) -> list[str]:
    """The folders' last parts, where they tell the runs apart."""
    last = [pathlib.Path(run.name).name for run in runs]
    return last if len(set(last)) == len(last) else [run.name for run in runs]


def _flat(values: dict[str, Any], place: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{place}{key}.") if isinstance(value, dict) and value else {f"{place}{key}": value}
    return flat
