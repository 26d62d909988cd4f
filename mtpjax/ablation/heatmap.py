"""Draws the heat map of an ablation's speed-ups over plain decoding, by depth, drafter, tree and rule."""

import functools
import itertools
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from mtpjax.ablation.advice import advise
from mtpjax.ablation.cells import Row, list_drafters
from mtpjax.ablation.panels import Panels
from mtpjax.evaluation.plot_style import DEFAULT_FORMATS, GREY, draw_picture, plain_text, shorten
from mtpjax.evaluation.trust import mark as problem_mark

# Ratios to label on the colour bar, if they are in its range.
TICKS = (0.25, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 4)


class Line(NamedTuple):
    """The settings that one line of cells in a panel represents."""

    drafter: int  # index in `list_drafters`
    topk: int
    num_nodes: int  # 0 for chains and complete trees, whose size follows from the depth
    rule: str


def plot_heatmap(path, rows: list[Row], formats: Sequence[str] = DEFAULT_FORMATS, *, title: str = "") -> None:
    """Plots speed-ups by depth, drafter, tree and rule, with intervals and a panel per batch size and temperature."""
    panels, drafters = Panels.of(rows), list_drafters(rows)
    depths = sorted({row["cell"]["num_steps"] for row in rows})
    trees = {key: sorted({_line(row, drafters) for row in group}) for key, group in panels.groups.items()}
    # The size of a panel depends on the numbers of depths and lines, and on the length of the drafter names beside it.
    longest = max(len(shorten(name)) for name in drafters) if len(drafters) > 1 else 0
    width = max(2.8, 1.15 * len(depths) + max(1.2, 0.3 + 0.085 * longest))
    width, height = panels.size(width, max(2.0, 0.7 * max(map(len, trees.values())) + 1.0))
    draw = functools.partial(_draw, rows=rows, panels=panels, depths=depths, trees=trees, drafters=drafters)
    draw_picture(path, (max(6.0, width + 1.2), height), draw, formats, title=title)


def _draw(figure, rows: list[Row], panels: Panels, *, depths, trees, drafters) -> None:
    import matplotlib
    import matplotlib.colors

    # All panels share one logarithmic colour scale, symmetric about 1, so that white means as fast as plain decoding.
    # Only trusted measurements have a colour.
    ratios = [row["ratio"]["value"] for row in rows if not row["problem"]]
    max_ratio = max([1.5, *ratios, *(1 / ratio for ratio in ratios)])
    norm = matplotlib.colors.LogNorm(1 / max_ratio, max_ratio)
    colours = matplotlib.colormaps["RdBu"].with_extremes(bad="#eeeeee")
    for axis, key, group in panels.draw(figure):
        _draw_panel(axis, group, depths=depths, trees=trees[key], drafters=drafters, colours=colours, norm=norm)
    # Label the colour bar with the ratios inside its range.
    bar = figure.colorbar(
        figure.axes[0].images[0], ax=figure.axes, shrink=min(0.8, 2.4 / len(panels.layout)), aspect=25, pad=0.02
    )
    ticks = [tick for tick in TICKS if 1 / max_ratio <= tick <= max_ratio]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    bar.set_label("speed-up")
    # Add a note below the panels that explains the cells.
    note = "cells: speed-up over plain decoding with its 95 % interval, and accept length; frame: the recommended one"
    note += "; question mark on grey: cannot be trusted" * any(row["problem"] for row in rows)
    figure.supxlabel("\n".join(textwrap.wrap(note, int(14 * figure.get_figwidth()))), fontsize=9)


def _draw_panel(axis, rows, *, depths, trees, drafters, colours, norm) -> None:
    import matplotlib.patches

    grid = {(_line(row, drafters), row["cell"]["num_steps"]): row for row in rows}
    [advice] = advise(rows)
    # Combinations without a trusted measurement are nan, which the colour map shows in grey.
    trusted = {place: row["ratio"]["value"] for place, row in grid.items() if not row["problem"]}
    values = [[trusted.get((tree, depth), float("nan")) for depth in depths] for tree in trees]
    axis.imshow(values, cmap=colours, norm=norm, aspect="auto")
    axis.grid(visible=False)
    for (y, tree), (x, depth) in itertools.product(enumerate(trees), enumerate(depths)):
        row = grid.get((tree, depth))
        if row is None:
            axis.text(x, y, "–", ha="center", va="center", color=GREY)
            continue
        # Each cell shows its ratio, interval and accept length, in white or black depending on the cell's luminance.
        red, green, blue, _ = colours(norm(trusted.get((tree, depth), float("nan"))))
        style = {"ha": "center", "color": "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"}
        for text, height, size in zip(cell_texts(row), (-0.16, 0.1, 0.31), (12, 8, 8), strict=True):
            weight = "bold" if size > 8 else "normal"
            axis.text(x, y + height, text, va="center", fontsize=size, fontweight=weight, **style)
        if row is advice.best:
            # A black frame on a wider white one is visible on light and dark cells.
            for colour, width in (("white", 5.0), ("black", 2.5)):
                frame = matplotlib.patches.Rectangle((x - 0.465, y - 0.44), 0.93, 0.88, fill=False)
                frame.set(edgecolor=colour, linewidth=width)
                axis.add_patch(frame)
    axis.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axis.set_yticks(range(len(trees)), [_line_label(tree, drafters) for tree in trees])
    axis.set_xlabel("draft levels per round")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def cell_texts(row: Row) -> tuple[str, str, str]:
    """Returns a cell's lines of text, with the ratio to plain decoding (? if untrusted), interval and accept length."""
    ratio, length = row["ratio"], row["accept_length"]["value"]
    mark = ", DIFFERS" if row["lossless"] == "DIFFERS" else ""
    return (
        f"{ratio['value']:.2f}{problem_mark(row['problem'])}",
        f"{ratio['low']:.2f}-{ratio['high']:.2f}",
        f"{length:.2f} tok/round{mark}",
    )


def _line(row: dict[str, Any], drafters: list[str]) -> Line:
    # 64 is the default cap on `num_draft_tokens`.
    cell = row["cell"]
    complete_size = 1 + cell["topk"] + (cell["num_steps"] - 1) * cell["topk"] ** 2
    nodes = 0 if cell["topk"] == 1 or cell["num_nodes"] in (complete_size, 64) else cell["num_nodes"]
    rule = cell["acceptance"] + " (lossy)" * (row["lossless"] == "lossy")
    return Line(drafters.index(cell["drafter"]), cell["topk"], nodes, rule)


def _line_label(line: Line, drafters: list[str]) -> str:
    """Returns the label of a line in the heat map, which includes the drafter if there are several drafters."""
    tree = "chain" if line.topk == 1 else f"topk {line.topk}"
    tree += f", {line.num_nodes} nodes" if line.num_nodes else ""
    return (f"{plain_text(shorten(drafters[line.drafter]))}\n" if len(drafters) > 1 else "") + f"{tree}\n{line.rule}"
