"""Draws the plot that compares drafters by the share of rounds that accept at least k drafts, for each k."""

from collections.abc import Sequence
from typing import Any

from mtpjax.ablation.cells import Row, format_interval, list_drafters
from mtpjax.ablation.panels import Panels
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
    """Plots the share of rounds that accept at least k drafts against k, for the deepest chain of each drafter."""
    panels, drafters = Panels.of(rows), list_drafters(rows)
    # All panels share the same limits, so that they can be compared.
    depth = max(row["cell"]["num_steps"] for row in rows)
    limits = share_limits(rate["value"] for row in rows for rate in row["survival"] if rate["value"] is not None)

    def draw(figure):
        for axis, _, group in panels.draw(figure):
            # A drafter has the same colour in all panels, even if some panels have no cell for it.
            for number, drafter in enumerate(drafters):
                row = deepest(row for row in group if row["cell"]["drafter"] == drafter)
                if row is not None:
                    _draw_survival(axis, row, number, 0.05 * (number - (len(drafters) - 1) / 2))
            axis.set(xlabel="draft position k", xlim=(0.6, depth + 0.4), xticks=range(1, depth + 1))
            axis.set(ylabel="share of rounds that accept k drafts", ylim=limits)
            legend_below(axis, title="drafter: accept length (95 %)")

    draw_picture(path, panels.size(4.4, 3.0 + 0.2 * len(drafters)), draw, formats, title=title)


def deepest(rows) -> Row | None:
    """Picks the deepest chain under an exact rule, or else the deepest tree. Returns None if no row is exact."""
    # A lossy rule accepts drafts that the trunk would not have generated, so its rates do not measure the drafter.
    exact = [row for row in rows if row["lossless"] != "lossy"]
    return max(exact, key=lambda row: (row["cell"]["topk"] == 1, row["cell"]["num_steps"]), default=None)


def _draw_survival(axis, row: dict[str, Any], number: int, shift: float) -> None:
    """Draws a row's survival rates with their intervals, shifted sideways so that bars do not overlap."""
    known = [(k, rate) for k, rate in enumerate(row["survival"], start=1) if rate["value"] is not None]
    cell = row["cell"]
    tree = "" if cell["topk"] == 1 else f", topk {cell['topk']}"
    label = f"{shorten(cell['drafter'])}{tree}: {format_interval(row['accept_length'])}"
    places = [k + shift for k, _ in known]
    estimates = ((rate["value"], rate["low"], rate["high"]) for _, rate in known)
    plot_estimates(axis, places, estimates, label=plain_text(label), **line_style(number))
