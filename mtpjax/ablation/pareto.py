"""Draws the Pareto plot of an ablation, which shows accept length against the cost of a round."""

import math
from collections.abc import Sequence
from typing import Any

from mtpjax.ablation.cells import Row, list_drafters, round_cost
from mtpjax.ablation.panels import Panels
from mtpjax.evaluation.plot_style import (
    COLOURS,
    DEFAULT_FORMATS,
    GREY,
    UNTRUSTED,
    draw_picture,
    legend_columns,
    legend_key,
    line_style,
    plain_text,
    plot_estimates,
    shorten,
)
from mtpjax.evaluation.trust import is_impossible

LINE = "#bbbbbb"  # colour of the lines of equal speed-up


def plot_pareto(path, rows: list[Row], formats: Sequence[str] = DEFAULT_FORMATS, *, title: str = "") -> None:
    """Plots accept length against the measured cost of a round in plain rounds. Their quotient is the speed-up.

    Each batch size and temperature has a panel with lines of equal speed-up. Labels mark the Pareto frontier: settings
    that no other setting beats in both cost and accept length.
    """
    panels = Panels.of(rows)
    # Leave out rows with an impossible ratio, because their cost is impossible too.
    rows = [row for row in rows if not is_impossible(row["problem"])]
    shown = {key: [row for row in of if not is_impossible(row["problem"])] for key, of in panels.groups.items()}
    draw = lambda figure: _draw(figure, rows, panels._replace(groups=shown))
    draw_picture(path, panels.size(5.2, 4.2), draw, formats, title=title)


def _draw(figure, rows: list[Row], panels: Panels) -> None:
    axis_of_group = {}
    # All panels share the same limits, so that they can be compared. The cost is computed from the measured ratio.
    costs = [_cost_and_length(row)[0] for row in rows]
    xlim = 0.72 * min((1.0, *costs)), 1.15 * max((1.2, *costs))
    ylim = 0.9, 1.1 * max((1.2, *(row["accept_length"]["high"] for row in rows)))
    topks, drafters = sorted({row["cell"]["topk"] for row in rows}), list_drafters(rows)
    many = len(drafters) > 1

    def look_of(cell: dict[str, Any]) -> dict[str, Any]:
        # With one drafter, colour and marker show topk. With several drafters, they show the drafter, except that the
        # marker shows topk if topk has several values. Drafters after the sixth have a black edge.
        own, tree = drafters.index(cell["drafter"]), topks.index(cell["topk"])
        style = line_style(own if many else tree)
        marker = line_style(tree)["marker"] if len(topks) > 1 else style["marker"]
        edge = "black" if many and own >= len(COLOURS) else style["color"]
        return {"color": style["color"], "marker": marker, "markeredgecolor": edge, "markersize": 7, "linestyle": ""}

    for axis, key, group in panels.draw(figure):
        # 1. Draw the lines of equal speed-up, and plain decoding at cost 1 and accept length 1.
        axis_of_group[key] = axis
        axis.set(xscale="log", yscale="log", xlim=xlim, ylim=ylim)
        _draw_speed_up_lines(axis, xlim, ylim)
        axis.plot(1, 1, "*", color="black", markersize=11, zorder=3)
        # 2. Draw each setting as a point with an interval; lossy rules have hollow markers. Measurements that cannot be
        # trusted are grey question marks, and are not part of the frontier.
        for row in group:
            if row["problem"]:
                axis.plot(*_cost_and_length(row), **UNTRUSTED, zorder=3)
                continue
            (cost, length), spread, look = _cost_and_length(row), row["accept_length"], look_of(row["cell"])
            face = "white" if row["lossless"] == "lossy" else look["color"]
            estimate = (length, spread["low"], spread["high"])
            plot_estimates(axis, [cost], [estimate], markerfacecolor=face, zorder=3, **look)
        # 3. Draw the frontier, starting at plain decoding.
        frontier = [(1.0, 1.0)] + [_cost_and_length(row) for row in _frontier(group)]
        axis.plot(*zip(*frontier, strict=True), color=GREY, linewidth=1, linestyle="--", zorder=2)
        axis.set_title(axis.get_title(), pad=16)
        axis.set_xlabel("cost of a round, in plain rounds")
        axis.set_ylabel("accept length (tokens per round)")
        ticks = (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
        for limits, set_ticks in ((xlim, axis.set_xticks), (ylim, axis.set_yticks)):
            shown = [tick for tick in ticks if limits[0] <= tick <= limits[1]]
            set_ticks(shown, [f"{tick:g}" for tick in shown])
        axis.minorticks_off()
    # One legend for all panels.
    shown = [{"drafter": name, "topk": topks[0]} for name in drafters] if many else []
    keys = [legend_key(shorten(cell["drafter"]), **look_of(cell)) for cell in shown]
    for topk in topks if len(topks) > 1 or not many else ():
        look = look_of({"drafter": drafters[0], "topk": topk})
        keys.append(legend_key(f"topk {topk}", **(look | {"color": GREY, "markeredgecolor": GREY} if many else look)))
    keys.append(legend_key("plain decoding", marker="*", color="black", markersize=11, linestyle=""))
    if any(row["lossless"] == "lossy" for row in rows):
        keys.append(legend_key("lossy", marker="o", markerfacecolor="white", linestyle=""))
    if any(row["problem"] for row in rows):
        keys.append(legend_key("cannot be trusted", **UNTRUSTED))
    keys += [legend_key("Pareto frontier", linestyle="--"), legend_key("equal speed-up", color=LINE, linewidth=0.8)]
    num_columns = legend_columns([str(each.get_label()) for each in keys], figure.get_figwidth())
    figure.legend(handles=keys, loc="outside lower center", ncols=num_columns)
    # Place the labels last, when the layout is final, because overlaps are computed in pixels.
    figure.draw_without_rendering()
    for key, group in panels.groups.items():
        _label_frontier(axis_of_group[key], group, has_names=many)


def _draw_speed_up_lines(axis, xlim, ylim) -> None:
    """Draws lines of equal speed-up, each labelled where it leaves the panel."""
    # Leave out lines that are too close to earlier ones, because their labels would touch.
    speeds: list[float] = []
    for speed in (1, 2, 0.5, 4, 0.25, 3, 1.5, 0.75, 1.25):
        gaps = [abs(math.log(speed / other)) / math.log(xlim[1] / xlim[0]) for other in speeds]
        speeds += [speed] * (min(gaps, default=1) > 0.1)
    for speed in speeds:
        # The line `length = speed * cost` leaves the panel at the top or on the right. Skip lines outside the panel.
        at_top = speed * xlim[1] >= ylim[1]
        end = (ylim[1] / speed, ylim[1]) if at_top else (xlim[1], speed * xlim[1])
        if end[0] <= xlim[0] or end[1] <= ylim[0]:
            continue
        grey, width = ("black", 1.2) if speed == 1 else (LINE, 0.8)
        axis.plot([xlim[0], end[0]], [speed * xlim[0], end[1]], color=grey, linewidth=width, zorder=0)
        place = {"xytext": (0, 2), "ha": "center", "va": "bottom"}
        place = place if at_top else {"xytext": (3, 0), "ha": "left", "va": "center"}
        look = {"textcoords": "offset points", "fontsize": 8, "color": "black" if speed == 1 else GREY}
        axis.annotate(f"{speed:g}x", end, **place, **look)


def _label_frontier(axis, group: list[dict[str, Any]], *, has_names: bool) -> None:
    """Labels the frontier's points, longest accept length first, unless a label would cover a point or other label."""
    points = [axis.transData.transform(_cost_and_length(row)) for row in group]
    label_boxes: list[Any] = []
    look = {"textcoords": "offset points", "fontsize": 8, "zorder": 4}
    look |= {"bbox": {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1}}
    for row in reversed(_frontier(group)):
        cell = row["cell"]
        text = plain_text(f"{shorten(cell['drafter'], 16)}, ") if has_names else ""
        text += f"depth {cell['num_steps']}" + (f", {cell['num_nodes']} nodes" if cell["topk"] > 1 else "")
        # Add the rule only if another setting differs in nothing but the rule.
        same_shape = [other for other in group if _round_shape(other) == _round_shape(row)]
        text += f", {cell['acceptance']}" if len(same_shape) > 1 else ""
        # Try six positions around the point, and use the first at which the label covers nothing and fits the panel.
        for x, y in ((-7, 4), (7, -4), (-7, -4), (7, 4), (-9, 16), (9, -16)):
            place = {"xytext": (x, y), "ha": "right" if x < 0 else "left", "va": "bottom" if y > 0 else "top"}
            label = axis.annotate(text, _cost_and_length(row), **place, **look)
            label.set_in_layout(False)
            box = label.get_window_extent()
            covers = any(box.overlaps(other) for other in label_boxes) or any(box.contains(*point) for point in points)
            if not covers and axis.bbox.x0 <= box.x0 and box.x1 <= axis.bbox.x1:
                label_boxes.append(box)
                break
            label.remove()


def _round_shape(row: dict[str, Any]) -> tuple[str, int, int, int]:
    return tuple(row["cell"][name] for name in ("drafter", "num_steps", "topk", "num_nodes"))


def _cost_and_length(row: dict[str, Any]) -> tuple[float, float]:
    """Returns a round's cost in plain rounds, and its accept length."""
    return round_cost(row), row["accept_length"]["value"]


def _frontier(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the trusted rows that no other row beats in both cost and accept length, cheapest first."""
    frontier: list[dict[str, Any]] = []
    trusted = [row for row in group if not row["problem"]]
    for row in sorted(trusted, key=lambda row: (_cost_and_length(row)[0], -_cost_and_length(row)[1])):
        if not frontier or _cost_and_length(row)[1] > _cost_and_length(frontier[-1])[1]:
            frontier.append(row)
    return frontier
