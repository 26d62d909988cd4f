"""Lays out an ablation's plots with one panel per batch size and temperature."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from mtpjax.ablation.cells import Group, Row, group_by_batch_and_temperature


def panel_rows(groups: dict[Group, list[Row]]) -> list[list[Group]]:
    """Lays out panels with a row per batch size and a column per temperature.

    A group that was not measured leaves a gap. With only one temperature, each row has up to three panels instead.
    """
    batch_sizes, temperatures = sorted({key[0] for key in groups}), sorted({key[1] for key in groups})
    if len(temperatures) == 1:
        keys, width = list(groups), 2 if len(groups) == 4 else 3
        return [keys[begin : begin + width] for begin in range(0, len(keys), width)]
    return [[(batch_size, temperature) for temperature in temperatures] for batch_size in batch_sizes]


class Panels(NamedTuple):
    """The panels of a plot."""

    groups: dict[Group, list[Row]]  # the rows in each panel
    layout: list[list[Group]]  # from `panel_rows`

    @classmethod
    def of(cls, rows: list[Row]) -> "Panels":
        groups = group_by_batch_and_temperature(rows)
        return cls(groups, panel_rows(groups))

    def size(self, width: float, height: float) -> tuple[float, float]:
        """Returns the figure size in inches for panels of this size."""
        return width * len(self.layout[0]), height * len(self.layout) + 0.4

    def draw(self, figure) -> Iterator[tuple[Any, Group, list[Row]]]:
        """Adds the panels to a figure, and yields each panel's axis, group and rows. Removes unused axes."""
        axes = figure.subplots(len(self.layout), len(self.layout[0]), squeeze=False)
        for axis, key in itertools.zip_longest(axes.flat, itertools.chain(*self.layout)):
            if key in self.groups:
                axis.set_title(f"batch {key[0]}, temperature {key[1]:g}")
                yield axis, key, self.groups[key]
            else:
                axis.remove()
