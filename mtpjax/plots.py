"""Pictures of what was measured, as PNG files."""

import itertools
import pathlib
from typing import Any

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#777777"  # Okabe and Ito's, told apart by all


def plot_quickstart(path: pathlib.Path, history: list[dict[str, Any]], rows) -> None:
    """Losses and agreement against time, and speed-up against depth (`rows`: quickstart's `DepthRow`s)."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(13, 4), layout="constrained")
    losses, agreement, speed = figure.subplots(1, 3)

    steps = [row for row in history if "bits" in row]
    evaluations = [row for row in history if "eval" in row]
    for depth in range(len(steps[0]["bits"]) if steps else 0):
        name = "trunk" if depth == 0 else f"draft {depth}"
        seconds = [row["seconds"] for row in steps]
        losses.plot(
            seconds, [row["bits"][depth] for row in steps], color=f"C{depth}", alpha=0.6, label=f"{name}, training"
        )
        held_out = [row["eval"]["bits_per_token"][depth] for row in evaluations]
        losses.plot(
            [row["seconds"] for row in evaluations], held_out, "o-", color=f"C{depth}", label=f"{name}, held out"
        )
    losses.set(title="loss", xlabel="seconds", ylabel="bits per byte", ylim=(1.5, 6))
    losses.legend(fontsize=8)

    depths = len(evaluations[0]["eval"]["agreement"])
    for depth in range(depths):
        seconds = [row["seconds"] for row in evaluations]
        values = [row["eval"]["agreement"][depth] for row in evaluations]
        agreement.plot(seconds, values, "o-", color=f"C{depth + 1}", label=f"draft {depth + 1}")
    agreement.set(title="drafts that agree with the trunk (held out)", xlabel="seconds", ylabel="share", ylim=(0, 1))
    agreement.legend(fontsize=8, loc="lower right")

    num_steps = [row.num_steps for row in rows]
    errors = [[row.ratio - row.interval[0] for row in rows], [row.interval[1] - row.ratio for row in rows]]
    errors = [[max(error, 0) for error in side] for side in errors]
    speed.errorbar(num_steps, [row.ratio for row in rows], errors, fmt="o-", capsize=4, label="measured / best plain")
    speed.plot(num_steps, [row.ideal for row in rows], "s--", color="C7", label="ideal, from measured costs")
    speed.plot(num_steps, [row.accept_length for row in rows], "^:", color="C2", label="accept length (costs nothing)")
    speed.axhline(1, color="black", linewidth=0.8)
    speed.set(title="speed-up against drafts per round", xlabel="drafts per round", ylabel="ratio", xticks=num_steps)
    speed.set_ylim(bottom=0.5)
    speed.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def plot_heatmap(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Ratio to plain decoding over depth and tree, a panel per batch size, temperature and rule (`cells.jsonl` rows).

    A panel holds the rules of chains and trees together unless two of them meet in one place.
    """
    import matplotlib.colors
    import matplotlib.figure
    import matplotlib.patches

    panels = _panels(rows)
    columns = max(len(group) for group in panels.values())
    depths = sorted({row["cell"]["num_steps"] for row in rows})
    trees = sorted({_tree(row) for row in rows})
    ratios = [row["ratio"]["value"] for row in rows]
    most = max(1.25, *ratios, *(1 / ratio for ratio in ratios))
    norm = matplotlib.colors.LogNorm(1 / most, most)  # 1 is the middle: white
    width, height = max(3.4, 1.5 * len(depths) + 1.6), max(2.2, 0.75 * len(trees) + 1.3)
    figure = matplotlib.figure.Figure(figsize=(width * columns + 1.2, height * len(panels) + 0.5), layout="constrained")
    axes = figure.subplots(len(panels), columns, squeeze=False)
    colours = matplotlib.colormaps["RdBu"].copy()
    colours.set_bad("#e8e8e8")
    image = None
    for line, (batch_size, group) in zip(axes, sorted(panels.items()), strict=True):
        for axis, part in itertools.zip_longest(line, group):
            if part is None:
                axis.set_axis_off()
                continue
            title, cells = part
            grid = {(_tree(row), row["cell"]["num_steps"]): row for row in cells}
            values = [
                [grid[tree, d]["ratio"]["value"] if (tree, d) in grid else float("nan") for d in depths]
                for tree in trees
            ]
            image = axis.imshow(values, cmap=colours, norm=norm, aspect="auto")
            best = max(cells, key=lambda row: row["ratio"]["value"])
            for (y, tree), (x, depth) in itertools.product(enumerate(trees), enumerate(depths)):
                if (tree, depth) not in grid:
                    axis.text(x, y, "–", ha="center", va="center", color=GREY)
                    continue
                row = grid[tree, depth]
                red, green, blue, _ = colours(norm(row["ratio"]["value"]))
                ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"
                text = f"{row['ratio']['value']:.2f}"
                axis.text(x, y - 0.13, text, ha="center", va="center", color=ink, fontsize=12, fontweight="bold")
                note = f"{row['accept_length']['value']:.2f} tokens/step" + _mark(row)
                axis.text(x, y + 0.2, note, ha="center", va="center", color=ink, fontsize=7.5)
                if row is best:
                    box = (x - 0.47, y - 0.46), 0.94, 0.92
                    axis.add_patch(matplotlib.patches.Rectangle(*box, fill=False, edgecolor="black", linewidth=2.5))
            axis.set_title(f"batch {batch_size}, {title}", fontsize=10)
            axis.set_xticks(range(len(depths)), [str(depth) for depth in depths])
            axis.set_yticks(range(len(trees)), [_tree_name(tree) for tree in trees])
            axis.set_xlabel("draft levels per round")
            axis.tick_params(length=0)
            axis.spines[:].set_visible(False)
    assert image is not None, "there is nothing to draw"
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    ticks = [tick for tick in (0.25, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 4) if 1 / most <= tick <= most]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    bar.set_label("speed over plain decoding")
    figure.suptitle("speed over plain decoding of the same batch; frame: the best of its panel", fontsize=10)
    figure.savefig(path, dpi=120)


def plot_pareto(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Accept length against what a round costs in plain steps, as measured: their quotient is the speed-up.

    A panel per batch size and temperature, with lines of equal speed-up; labelled is what nothing beats in both.
    """
    import matplotlib.figure
    import numpy as np

    groups: dict[tuple[int, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["cell"]["batch_size"], row["cell"]["temperature"]), []).append(row)
    batch_sizes, temperatures = sorted({key[0] for key in groups}), sorted({key[1] for key in groups})
    figure = matplotlib.figure.Figure(
        figsize=(5.2 * len(temperatures), 4.2 * len(batch_sizes) + 0.4), layout="constrained"
    )
    axes = figure.subplots(len(batch_sizes), len(temperatures), squeeze=False, sharex=True, sharey=True)
    points = {
        id(row): (row["accept_length"]["value"] / row["ratio"]["value"], row["accept_length"]["value"]) for row in rows
    }
    right = 1.08 * max(cost for cost, _ in points.values())
    top = 1.12 * max(row["accept_length"]["high"] for row in rows)
    left = min(1.0, 0.95 * min(cost for cost, _ in points.values()))
    breadths = sorted({row["cell"]["topk"] for row in rows})
    markers = dict(zip(breadths, itertools.cycle("os^DvP"), strict=False))
    colours = dict(zip(breadths, itertools.cycle((BLUE, ORANGE, GREEN, "#cc79a7", "#56b4e9")), strict=False))
    for (y, batch_size), (x, temperature) in itertools.product(enumerate(batch_sizes), enumerate(temperatures)):
        axis = axes[y][x]
        group = groups.get((batch_size, temperature))
        if group is None:
            axis.set_axis_off()
            continue
        axis.set(xlim=(left - 0.03 * (right - left), right), ylim=(0.9, top))
        line = np.array([0.0, right])
        for speed in (0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4):
            is_one = speed == 1
            axis.plot(
                line, speed * line, color="black" if is_one else "#bbbbbb", linewidth=1.2 if is_one else 0.8, zorder=0
            )
            place = (right, speed * right) if speed * right < top else (top / speed, top)
            if place[0] > left and place[1] > 0.95:
                at_top = speed * right >= top
                axis.annotate(
                    f"{speed:g}x",
                    place,
                    xytext=(0, 2) if at_top else (3, 0),
                    textcoords="offset points",
                    ha="center" if at_top else "left",
                    va="bottom" if at_top else "center",
                    fontsize=8,
                    color="black" if is_one else GREY,
                    annotation_clip=False,
                )
        for row in group:
            cost, length = points[id(row)]
            breadth, spread = row["cell"]["topk"], row["accept_length"]
            error = [[max(length - spread["low"], 0)], [max(spread["high"] - length, 0)]]
            axis.errorbar(cost, length, error, color=colours[breadth], alpha=0.35, linewidth=1, zorder=1)
            face = "white" if row["lossless"] == "lossy" else colours[breadth]
            axis.plot(
                cost, length, markers[breadth], color=colours[breadth], markerfacecolor=face, markersize=7, zorder=3
            )
        front = _frontier(group, points)
        axis.plot(
            *zip(*(points[id(row)] for row in front), strict=True), color=GREY, linewidth=1, linestyle="--", zorder=2
        )
        for row in front:
            cell = row["cell"]
            label = f"{cell['num_steps']}" + (
                f" x {cell['topk']}, {cell['num_nodes']} nodes" if cell["topk"] > 1 else " deep"
            )
            axis.annotate(
                label, points[id(row)], xytext=(-7, 5), textcoords="offset points", ha="right", va="bottom", fontsize=8
            )
        axis.set_title(f"batch {batch_size}, temperature {temperature:g}", fontsize=10, pad=16)
        axis.set_xlabel("cost of a round, in plain steps")
        axis.set_ylabel("accept length (tokens per round)")
        axis.tick_params(labelbottom=True, labelleft=True)
        axis.spines[["top", "right"]].set_visible(False)
    handles = [
        axes[0][0].plot([], [], markers[breadth], color=colours[breadth], label=f"topk {breadth}")[0]
        for breadth in breadths
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=120)


def _panels(rows: list[dict[str, Any]]) -> dict[int, list[tuple[str, list[dict[str, Any]]]]]:
    """Batch size -> (title, rows) of each panel."""
    groups: dict[tuple[int, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["cell"]["batch_size"], row["cell"]["temperature"]), []).append(row)
    panels: dict[int, list[tuple[str, list[dict[str, Any]]]]] = {}
    for (batch_size, temperature), group in sorted(groups.items()):
        places = {(_tree(row), row["cell"]["num_steps"]) for row in group}
        rules = list(dict.fromkeys(row["cell"]["acceptance"] for row in group))
        parts = {", ".join(rules): group}
        if len(places) < len(group):
            parts = {rule: [row for row in group if row["cell"]["acceptance"] == rule] for rule in rules}
        for name, part in parts.items():
            panels.setdefault(batch_size, []).append((f"temperature {temperature:g}\n{name}", part))
    return panels


def _tree(row: dict[str, Any]) -> tuple[int, int]:
    """topk, and the nodes of a tree; those of a chain follow from its depth, those of a whole tree too."""
    cell = row["cell"]
    whole = 1 + cell["topk"] + (cell["num_steps"] - 1) * cell["topk"] ** 2
    return cell["topk"], 0 if cell["topk"] == 1 or cell["num_nodes"] in (whole, 64) else cell["num_nodes"]


def _tree_name(tree: tuple[int, int]) -> str:
    topk, nodes = tree
    return "chain" if topk == 1 else f"topk {topk}" + (f"\n{nodes} nodes" if nodes else "")


def _mark(row: dict[str, Any]) -> str:
    return {"lossy": "\nlossy", "DIFFERS": "\nDIFFERS"}.get(row["lossless"], "")


def _frontier(group: list[dict[str, Any]], points: dict[int, tuple[float, float]]) -> list[dict[str, Any]]:
    """The rows to which none is both cheaper and longer, from cheap to dear."""
    front: list[dict[str, Any]] = []
    for row in sorted(group, key=lambda row: (points[id(row)][0], -points[id(row)][1])):
        if not front or points[id(row)][1] > points[id(front[-1])][1]:
            front.append(row)
    return front
