"""The picture that compares drafters: the drafts that survive up to each position, by drafter."""

from collections.abc import Sequence
from typing import Any

from mtpjax.ablation.cells import Row, group_by_batch_and_temperature, list_drafters
from mtpjax.ablation.panels import panel_rows, panels
from mtpjax.evaluation.plot_style import (
    DEFAULT_FORMATS,
    draw_picture,
    legend_below,
    line_style,
    plain_text,
    plot_estimates,
    share_limits,
    shorten,
)


def plot_positions(path, rows: list[Row], formats: Sequence[str] = DEFAULT_FORMATS, *, title: str = "") -> None:
    """Plots which share of the rounds accepts at least k drafts, by k, for the deepest chain of each drafter."""
    drafters = list_drafters(rows)
    groups = group_by_batch_and_temperature(rows)
    layout = panel_rows(groups)
    # All panels share their limits, so that they can be compared.
    depth = max(row["cell"]["num_steps"] for row in rows)
    limits = share_limits(rate["value"] for row in rows for rate in row["survival"] if rate["value"] is not None)
    size = (4.4 * len(layout[0]), (3.0 + 0.2 * len(drafters)) * len(layout) + 0.4)

    def draw(figure):
        axes = figure.subplots(len(layout), len(layout[0]), squeeze=False)
        for axis, (batch_size, temperature), group in panels(axes, layout, groups):
            # A drafter keeps its colour in all panels, also where it has no cell.
            for number, drafter in enumerate(drafters):
                row = deepest(row for row in group if row["cell"]["drafter"] == drafter)
                if row is not None:
                    _draw_survival(axis, row, number, 0.05 * (number - (len(drafters) - 1) / 2))
            axis.set_title(f"batch {batch_size}, temperature {temperature:g}")
            axis.set_xlabel("draft position k")
            axis.set_ylabel("share of rounds that accept k drafts")
            axis.set_ylim(limits)
            axis.set(xlim=(0.6, depth + 0.4), xticks=range(1, depth + 1))
            legend_below(axis, title="drafter: accept length (95 %)")

    draw_picture(path, size, draw, formats, title=title)


def deepest(rows) -> Row | None:
    """Picks the deepest chain of an exact rule, else the deepest tree; None if no row is exact."""
    # A lossy rule accepts drafts that the trunk would not have written, so its rates are no measure of the drafter.
    exact = [row for row in rows if row["lossless"] != "lossy"]
    return max(exact, key=lambda row: (row["cell"]["topk"] == 1, row["cell"]["num_steps"]), default=None)


def _draw_survival(axis, row: dict[str, Any], number: int, shift: float) -> None:
    """Draws the survival rates of a row with their intervals, shifted sideways, so that bars do not overlap."""
    known = [(k, rate) for k, rate in enumerate(row["survival"], start=1) if rate["value"] is not None]
    cell, length = row["cell"], row["accept_length"]
    tree = "" if cell["topk"] == 1 else f", topk {cell['topk']}"
    label = f"{shorten(cell['drafter'])}{tree}: {length['value']:.2f} ({length['low']:.2f}-{length['high']:.2f})"
    places = [k + shift for k, _ in known]
    estimates = ((rate["value"], rate["low"], rate["high"]) for _, rate in known)
    plot_estimates(axis, places, estimates, label=plain_text(label), **line_style(number))
