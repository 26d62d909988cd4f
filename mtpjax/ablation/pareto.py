"""The Pareto plot of an ablation: accept length against the cost of a round."""

import itertools
from collections.abc import Sequence
from typing import Any

from mtpjax.ablation.panels import Row, group_by_batch_and_temperature, list_drafters, panel_rows, panels
from mtpjax.evaluation.plot_style import DEFAULT_FORMATS, GREY, colour, picture, picture_paths

MARKERS = "os^DvP"  # of topk, from the smallest


def plot_pareto(path, rows: list[Row], formats: Sequence[str] = DEFAULT_FORMATS) -> None:
    """Plots accept length against the measured cost of a round in plain steps; their quotient is the speed-up.

    Each panel has lines of equal speed-up. Labels mark the Pareto frontier: settings that no other setting beats in
    both cost and accept length.

    Args:
        path: the picture, as in `plot_style.picture_paths`.
        rows: the rows of `cells.jsonl` of `mtpjax ablate`; each batch size and temperature gets a panel.
        formats: formats of a path without suffix.
    """
    if not picture_paths(path, formats):
        return
    groups = group_by_batch_and_temperature(rows)
    layout = panel_rows(groups)
    # A disturbed measurement can give a ratio that is not positive, from which no cost follows.
    rows = [row for row in rows if row["ratio"]["value"] > 0]
    groups = {key: [row for row in group if row["ratio"]["value"] > 0] for key, group in groups.items()}
    with picture(path, (5.2 * len(layout[0]), 4.2 * len(layout) + 0.4), formats) as figure:
        _draw(figure, rows, groups, layout)


def _draw(figure, rows: list[Row], groups, layout) -> None:
    axes = figure.subplots(len(layout), len(layout[0]), squeeze=False)
    axis_of_group = {}
    # All panels share their limits, so that they can be compared. The cost follows from the measured ratio.
    costs = [_cost_and_length(row)[0] for row in rows]
    xlim = 0.72 * min((1.0, *costs)), 1.15 * max((1.2, *costs))
    ylim = 0.9, 1.1 * max((1.2, *(row["accept_length"]["high"] for row in rows)))
    # A marker per topk, and a colour per drafter; with one drafter, the colour shows topk too.
    topks, drafters = sorted({row["cell"]["topk"] for row in rows}), list_drafters(rows)
    markers = dict(zip(topks, itertools.cycle(MARKERS), strict=False))

    def colour_of(cell: dict[str, Any]) -> str:
        return colour(drafters.index(cell["drafter"]) if len(drafters) > 1 else topks.index(cell["topk"]))

    for axis, key, group in panels(axes, layout, groups):
        # 1. The background: lines of equal speed-up, and plain decoding at cost 1 and accept length 1.
        (batch_size, temperature), axis_of_group[key] = key, axis
        axis.set(xscale="log", yscale="log", xlim=xlim, ylim=ylim)
        _draw_speed_up_lines(axis, xlim, ylim)
        axis.plot(1, 1, "*", color="black", markersize=11, zorder=3)
        # 2. A point per setting with its interval; hollow markers are lossy rules.
        for row in group:
            (cost, length), spread, cell = _cost_and_length(row), row["accept_length"], row["cell"]
            error = [[max(length - spread["low"], 0)], [max(spread["high"] - length, 0)]]
            axis.errorbar(cost, length, error, color=colour_of(cell), alpha=0.35, linewidth=1, zorder=1)
            style = {"color": colour_of(cell), "markersize": 7, "zorder": 3}
            face = "white" if row["lossless"] == "lossy" else style["color"]
            axis.plot(cost, length, markers[cell["topk"]], markerfacecolor=face, **style)
        # 3. The frontier, from plain decoding on.
        frontier = [(1.0, 1.0)] + [_cost_and_length(row) for row in _frontier(group)]
        axis.plot(*zip(*frontier, strict=True), color=GREY, linewidth=1, linestyle="--", zorder=2)
        axis.set_title(f"batch {batch_size}, temperature {temperature:g}", fontsize=10, pad=16)
        axis.set_xlabel("cost of a round, in plain steps")
        axis.set_ylabel("accept length (tokens per round)")
        ticks = (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
        for limits, set_ticks in ((xlim, axis.set_xticks), (ylim, axis.set_yticks)):
            shown = [tick for tick in ticks if limits[0] <= tick <= limits[1]]
            set_ticks(shown, [f"{tick:g}" for tick in shown])
        axis.minorticks_off()
    # One legend for all panels.
    many = len(drafters) > 1
    named = [("o", colour(number), name) for number, name in enumerate(drafters)] if many else []
    named += [
        (markers[topk], GREY if many else colour(number), f"topk {topk}")
        for number, topk in enumerate(topks)
        if not many or len(topks) > 1
    ]
    handles = [axes[0][0].plot([], [], marker, color=own, label=name)[0] for marker, own, name in named]
    handles.append(axes[0][0].plot([], [], "*", color="black", markersize=11, label="plain")[0])
    if any(row["lossless"] == "lossy" for row in rows):
        handles.append(axes[0][0].plot([], [], "o", color=GREY, markerfacecolor="white", label="lossy")[0])
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    # Labels avoid each other in pixels, so they come last, when the layout is final.
    figure.draw_without_rendering()
    for key, group in groups.items():
        _label_frontier(axis_of_group[key], group, has_names=many)


def _draw_speed_up_lines(axis, xlim, ylim) -> None:
    """Draws lines of equal speed-up, each labelled where it leaves the panel."""
    for speed in (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4):
        # A line `length = speed * cost` leaves through the top or the right side. Skip lines outside the panel.
        at_top = speed * xlim[1] >= ylim[1]
        end = (ylim[1] / speed, ylim[1]) if at_top else (xlim[1], speed * xlim[1])
        if end[0] <= xlim[0] or end[1] <= ylim[0]:
            continue
        grey, width = ("black", 1.2) if speed == 1 else ("#bbbbbb", 0.8)
        axis.plot([xlim[0], end[0]], [speed * xlim[0], end[1]], color=grey, linewidth=width, zorder=0)
        axis.annotate(
            f"{speed:g}x",
            end,
            xytext=(0, 2) if at_top else (3, 0),
            textcoords="offset points",
            ha="center" if at_top else "left",
            va="bottom" if at_top else "center",
            fontsize=8,
            color="black" if speed == 1 else GREY,
        )


def _label_frontier(axis, group: list[dict[str, Any]], *, has_names: bool) -> None:
    """Labels the frontier's points, longest accept length first, where no label covers a point or another label."""
    points = [axis.transData.transform(_cost_and_length(row)) for row in group]
    label_boxes: list[Any] = []
    for row in reversed(_frontier(group)):
        cell = row["cell"]
        text = f"{cell['drafter']}, " if has_names else ""
        text += f"depth {cell['num_steps']}" + (f", {cell['num_nodes']} nodes" if cell["topk"] > 1 else "")
        # Name the rule only where several settings differ in nothing else.
        same_shape = [other for other in group if _round_shape(other) == _round_shape(row)]
        text += f", {cell['acceptance']}" if len(same_shape) > 1 else ""
        # Try six places around the point, and keep the first that covers nothing and stays inside the panel.
        for x, y in ((-7, 4), (7, -4), (-7, -4), (7, 4), (-9, 16), (9, -16)):
            label = axis.annotate(
                text,
                _cost_and_length(row),
                xytext=(x, y),
                textcoords="offset points",
                ha="right" if x < 0 else "left",
                va="bottom" if y > 0 else "top",
                fontsize=8,
                zorder=4,
                bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1},
            )
            label.set_in_layout(False)
            box = label.get_window_extent()
            covers = any(box.overlaps(other) for other in label_boxes) or any(box.contains(*point) for point in points)
            if not covers and axis.bbox.x0 <= box.x0 and box.x1 <= axis.bbox.x1:
                label_boxes.append(box)
                break
            label.remove()


def _round_shape(row: dict[str, Any]) -> tuple[str, int, int, int]:
    """Returns the drafter of a row, and the shape of its rounds: depth, topk and nodes."""
    return tuple(row["cell"][name] for name in ("drafter", "num_steps", "topk", "num_nodes"))


def _cost_and_length(row: dict[str, Any]) -> tuple[float, float]:
    """Returns a round's cost in plain steps, and its accept length."""
    length = row["accept_length"]["value"]
    return length / row["ratio"]["value"], length


def _frontier(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the Pareto frontier from cheap to expensive: no row is both cheaper and longer."""
    frontier: list[dict[str, Any]] = []
    for row in sorted(group, key=lambda row: (_cost_and_length(row)[0], -_cost_and_length(row)[1])):
        if not frontier or _cost_and_length(row)[1] > _cost_and_length(frontier[-1])[1]:
            frontier.append(row)
    return frontier
