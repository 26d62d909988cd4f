"""Measures in rounds. All cells run in rotation, and the rounds that other programs disturbed least are kept."""

import argparse
import statistics
from collections.abc import Callable
from typing import Any, TypeVar

from mtpjax.evaluation.trust import MAX_WAITING_SHARE

Cell = TypeVar("Cell")


def measure_rounds(
    sample: Callable[[Cell, int], dict[str, Any]], cells: list[Cell], repeats: int, *, max_rounds: float
) -> dict[Cell, list[dict[str, Any]]]:
    """Measures rounds until `repeats` are quiet, or `max_rounds` are measured, and keeps the quietest.

    Args:
        sample: measures a cell once; "waited" is the share of the time that it waited for a core.
        cells: the cells to measure in rotation.
        repeats: number of rounds to keep.
        max_rounds: maximum number of rounds to measure.

    Returns:
        The samples of each cell.
    """
    rounds: list[dict[Cell, dict[str, Any]]] = []
    quiet = 0
    while quiet < repeats and len(rounds) < max_rounds:
        order = cells if len(rounds) % 2 == 0 else cells[::-1]
        rounds.append({cell: sample(cell, len(rounds)) for cell in order})
        quiet += _disturbance(rounds[-1]) < MAX_WAITING_SHARE
    kept = sorted(rounds, key=_disturbance)[:repeats]
    return {cell: [samples[cell] for samples in kept] for cell in cells}


def _disturbance(samples: dict[Any, dict[str, Any]]) -> float:
    return max(sample["waited"] for sample in samples.values())


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def spread_text(values: dict[str, float] | None, form: str) -> str:
    """Returns `median (lowest..highest)`, or an empty string without values."""
    if values is None:
        return ""
    return f"{form.format(values['median'])} ({form.format(values['min'])}..{form.format(values['max'])})"


def count(text: str) -> int:
    """Parses an argument that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value
