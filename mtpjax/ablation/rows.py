"""Checks a line of `cells.jsonl` before reports and pictures read it."""

import dataclasses
import math
from typing import Any

from mtpjax.ablation.grid import Cell

NUMBERS = ("tokens_per_second", "plain_tokens_per_second", "ideal_ratio", "differing_rows", "compared_rows", "waited")
ESTIMATES = ("ratio", "accept_length", "accept_length_macro")
LEVELS = ("conditional", "survival")
STATES = ("lossy", "identical", "DIFFERS", "exact by rule")


def is_whole(row: dict[str, Any], cell: Cell) -> bool:
    """Returns whether a row of this cell holds everything that reports read: False if it was edited or damaged."""
    levels = [row.get(name) for name in LEVELS]
    costs = row.get("costs")
    return (
        row.get("cell") == dataclasses.asdict(cell)
        and all(_is_number(row.get(name)) for name in NUMBERS)
        and all(_is_estimate(row.get(name)) for name in ESTIMATES)
        and row["ratio"]["value"] > 0
        and min(row["tokens_per_second"], row["plain_tokens_per_second"]) >= 0
        and all(isinstance(rates, list) and len(rates) == cell.num_steps for rates in levels)
        # A level that no step reached has no rate.
        and all(_is_estimate(rate, can_lack=True) for rates in levels for rate in rates or ())
        and isinstance(costs, dict)
        and costs.keys() == {"plain", "verify", "parts"}
        and all(map(_is_number, costs.values()))
        and isinstance(row.get("categories"), dict)
        and all(_is_category(rates, cell) for rates in row["categories"].values())
        and row.get("lossless") in STATES
        and isinstance(row.get("problem"), str | None)
    )


def _is_category(rates: Any, cell: Cell) -> bool:
    return (
        isinstance(rates, dict)
        and _is_number(rates.get("prompts"))
        and _is_number(rates.get("ideal_ratio"))
        and _is_estimate(rates.get("accept_length"))
        and (rates.get("ratio") is None or _is_estimate(rates["ratio"]))
        and isinstance(rates.get("problem"), str | None)
        and isinstance(rates.get("survival"), list)
        and len(rates["survival"]) == cell.num_steps
        and all(_is_estimate(rate, can_lack=True) for rate in rates["survival"])
    )


def _is_estimate(value: Any, *, can_lack: bool = False) -> bool:
    if not isinstance(value, dict) or not value.keys() >= {"value", "low", "high"}:
        return False
    parts = [value[name] for name in ("value", "low", "high")]
    return all(map(_is_number, parts)) or (can_lack and parts[0] is None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
