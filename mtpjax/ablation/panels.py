"""The layout of the panels in an ablation's pictures: one per batch size and temperature."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

Row = dict[str, Any]  # a line of cells.jsonl
Group = tuple[int, float]  # batch size and temperature


def group_by_batch_and_temperature(rows: Iterable[Row]) -> dict[Group, list[Row]]:
    """Groups rows by (batch size, temperature) in ascending order; the rows of a group keep their order."""
    groups: dict[Group, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["cell"]["batch_size"], row["cell"]["temperature"]), []).append(row)
    return dict(sorted(groups.items()))


def by_speed(row: Row) -> tuple[bool, float]:
    """Sorts rows: those that can be trusted first, each kind from fast to slow."""
    return bool(row["problem"]), -row["ratio"]["value"]


def list_drafters(rows: list[Row]) -> list[str]:
    """Lists the names of the drafters, in the order of the rows."""
    return list(dict.fromkeys(row["cell"]["drafter"] for row in rows))


def panel_rows(groups: dict[Group, list[Row]]) -> list[list[Group]]:
    """Lays out panels: a line per batch size and a column per temperature; with one temperature, up to three per line.

    A group that was not measured leaves its place empty.
    """
    batch_sizes, temperatures = sorted({key[0] for key in groups}), sorted({key[1] for key in groups})
    if len(temperatures) == 1:
        keys, width = list(groups), 2 if len(groups) == 4 else 3
        return [keys[begin : begin + width] for begin in range(0, len(keys), width)]
    return [[(batch_size, temperature) for temperature in temperatures] for batch_size in batch_sizes]


def panels(axes, layout: list[list[Group]], groups: dict[Group, list[Row]]) -> Iterator[tuple[Any, Group, list[Row]]]:
    """Yields the axis, the group and the rows of each panel of `panel_rows`, and removes unused axes."""
    for axis, key in itertools.zip_longest(axes.flat, itertools.chain(*layout)):
        if key in groups:
            yield axis, key, groups[key]
        else:
            axis.remove()
