"""Plots measurements as PNG files. matplotlib is imported inside the functions, since it takes long to load."""

import itertools
import pathlib
from typing import Any

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
GREY = "#777777"


def plot_quickstart(path: pathlib.Path, history: list[dict[str, Any]], rows) -> None:
    """Plots the results of `mtpjax quickstart`: loss and agreement against time, and speed-up against depth.

    Args:
        path: the PNG file.
        history: the records of the training log, of steps and of evaluations.
        rows: a `DepthResult` of `mtpjax.training.quickstart` per depth.
    """
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(13, 4), layout="constrained")
    losses, agreement, speed = figure.subplots(1, 3)

    # 1. Loss of the trunk and of each draft level: lines for training, points for held-out text.
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

    # 2. The share of drafts that agree with the trunk, per level.
    depths = len(evaluations[0]["eval"]["agreement"])
    for depth in range(depths):
        seconds = [row["seconds"] for row in evaluations]
        values = [row["eval"]["agreement"][depth] for row in evaluations]
        agreement.plot(seconds, values, "o-", color=f"C{depth + 1}", label=f"draft {depth + 1}")
    agreement.set(title="drafts that agree with the trunk (held out)", xlabel="seconds", ylabel="share", ylim=(0, 1))
    agreement.legend(fontsize=8, loc="lower right")

    # 3. Measured speed-up with intervals, beside the ideal from measured costs and the limit of free drafts.
    num_steps = [row.num_steps for row in rows]
    errors = [[row.ratio - row.interval[0] for row in rows], [row.interval[1] - row.ratio for row in rows]]
    errors = [[max(error, 0) for error in side] for side in errors]
    speed.errorbar(num_steps, [row.ratio for row in rows], errors, fmt="o-", capsize=4, label="measured / best plain")
    speed.plot(num_steps, [row.ideal for row in rows], "s--", color="C7", label="ideal, from measured costs")
    speed.plot(
        num_steps, [row.accept_length for row in rows], "^:", color="C2", label="accept length (if drafts were free)"
    )
    speed.axhline(1, color="black", linewidth=0.8)
    speed.set(title="speed-up against drafts per round", xlabel="drafts per round", ylabel="ratio", xticks=num_steps)
    speed.set_ylim(bottom=0.5)
    speed.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def plot_objectives(path: pathlib.Path, settings: dict[str, dict[str, Any]]) -> None:
    """Plots accept lengths of training objectives at each temperature, and survival by level.

    Args:
        path: the PNG file.
        settings: results of `experiments.objectives` by setting and temperature.
    """
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(13, 0.45 * len(settings) + 2.2), layout="constrained")
    temperatures = list(next(iter(settings.values())))
    axes = figure.subplots(1, 1 + len(temperatures))
    for number, temperature in enumerate(temperatures):
        for index, (name, columns) in enumerate(settings.items()):
            # Left panel: the accept length with its interval, and a tick per seed.
            row = columns[temperature]
            value, low, high = (row["accept_length"][key] for key in ("value", "low", "high"))
            colour, height = COLOURS[number], index + 0.2 * number - 0.1
            axes[0].errorbar(value, height, xerr=[[value - low], [high - value]], fmt="o", color=colour, capsize=3)
            axes[0].plot(row["of_seeds"], [height] * len(row["of_seeds"]), "|", color=colour, markersize=9)
            # The other panels, one per temperature: survival by level, a line per setting.
            line = axes[1 + number]
            survival = [rate["value"] for rate in row["survival"]]
            style = {"color": COLOURS[index % len(COLOURS)], "linestyle": "-" if index < len(COLOURS) else "--"}
            line.plot(range(1, len(survival) + 1), survival, marker="o", markersize=3, label=name, **style)
            line.set(title=f"survival, temperature {temperature}", xlabel="level", ylim=(0, 1))
            line.set_xticks(range(1, len(survival) + 1))
        axes[0].plot([], [], "o", color=COLOURS[number], label=f"temperature {temperature}")
    axes[0].set_yticks(range(len(settings)), list(settings))
    axes[0].invert_yaxis()
    axes[0].set(title="accept length (ticks: seeds)", xlabel="tokens per round; 95 % over prompts")
    axes[0].grid(axis="x", alpha=0.3)
    axes[0].legend(fontsize=8, loc="upper right")
    axes[-1].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def plot_heatmap(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Plots a heat map of the speed-up over plain decoding, by depth and by tree and rule.

    Args:
        path: the PNG file.
        rows: the rows of `cells.jsonl` of `mtpjax ablate`; each batch size and temperature gets a panel.
    """
    import matplotlib.colors
    import matplotlib.figure

    groups = _group_by_batch_and_temperature(rows)
    depths = sorted({row["cell"]["num_steps"] for row in rows})
    trees = {key: sorted({_tree_key(row) for row in group}) for key, group in groups.items()}
    panel_rows = _panel_rows(groups)
    # All panels share one logarithmic colour scale, symmetric about 1, so that white means as fast as plain decoding.
    ratios = [row["ratio"]["value"] for row in rows]
    max_ratio = max(1.25, *ratios, *(1 / ratio for ratio in ratios))
    norm = matplotlib.colors.LogNorm(1 / max_ratio, max_ratio)
    # A panel grows with its numbers of depths and trees.
    width, height = max(2.8, 1.05 * len(depths) + 1.2), max(2.0, 0.7 * max(map(len, trees.values())) + 1.0)
    size = (width * len(panel_rows[0]) + 1.0, height * len(panel_rows) + 0.4)
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panel_rows), len(panel_rows[0]), squeeze=False)
    colours = matplotlib.colormaps["RdBu"].with_extremes(bad="#eeeeee")
    for axis, key in itertools.zip_longest(axes.flat, itertools.chain(*panel_rows)):
        if key in groups:
            style = {"depths": depths, "trees": trees[key], "colours": colours, "norm": norm}
            _draw_panel(axis, f"batch {key[0]}, temperature {key[1]:g}", groups[key], **style)
        else:
            axis.set_axis_off()
    # Label the colour bar with the round ratios inside its range.
    bar = figure.colorbar(axes[0][0].images[0], ax=axes, shrink=min(0.8, 2.4 / len(panel_rows)), aspect=25, pad=0.02)
    ticks = [tick for tick in (0.25, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 4) if 1 / max_ratio <= tick <= max_ratio]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    figure.suptitle(
        "speed-up over plain decoding of the same batch; a frame marks the best cell of a panel", fontsize=10
    )
    figure.savefig(path, dpi=120)


def _draw_panel(axis, title: str, rows, *, depths, trees, colours, norm) -> None:
    """Draws one panel of the heat map."""
    import matplotlib.patches

    grid = {(_tree_key(row), row["cell"]["num_steps"]): row for row in rows}
    best = max(rows, key=lambda row: row["ratio"]["value"])
    # Combinations that were not measured are nan, which the colour map shows in grey.
    values = [[grid[t, d]["ratio"]["value"] if (t, d) in grid else float("nan") for d in depths] for t in trees]
    axis.imshow(values, cmap=colours, norm=norm, aspect="auto")
    for (y, tree), (x, depth) in itertools.product(enumerate(trees), enumerate(depths)):
        row = grid.get((tree, depth))
        if row is None:
            axis.text(x, y, "–", ha="center", va="center", color=GREY)
            continue
        # Each cell shows its ratio and accept length, in white or black, whichever contrasts with the cell's luminance.
        red, green, blue, _ = colours(norm(row["ratio"]["value"]))
        style = {"ha": "center", "color": "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"}
        axis.text(x, y, f"{row['ratio']['value']:.2f}", va="bottom", fontsize=12, fontweight="bold", **style)
        mark = ", DIFFERS" if row["lossless"] == "DIFFERS" else ""
        axis.text(x, y + 0.08, f"{row['accept_length']['value']:.2f} tok/step{mark}", va="top", fontsize=7, **style)
        if row is best:
            # A black frame on a wider white one is visible on light and dark cells.
            for colour, width in (("white", 5.0), ("black", 2.5)):
                frame = matplotlib.patches.Rectangle((x - 0.465, y - 0.44), 0.93, 0.88, fill=False)
                frame.set(edgecolor=colour, linewidth=width)
                axis.add_patch(frame)
    axis.set_title(title, fontsize=9)
    axis.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axis.set_yticks(range(len(trees)), [_tree_label(tree) for tree in trees])
    axis.set_xlabel("draft levels per round", fontsize=9)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def plot_pareto(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Plots accept length against the measured cost of a round in plain steps; their quotient is the speed-up.

    Each panel has lines of equal speed-up. Labels mark the Pareto frontier: settings that no other setting beats in
    both cost and accept length.

    Args:
        path: the PNG file.
        rows: the rows of `cells.jsonl` of `mtpjax ablate`; each batch size and temperature gets a panel.
    """
    import matplotlib.figure

    groups = _group_by_batch_and_temperature(rows)
    panel_rows = _panel_rows(groups)
    figure = matplotlib.figure.Figure(
        figsize=(5.2 * len(panel_rows[0]), 4.2 * len(panel_rows) + 0.4), layout="constrained"
    )
    axes = figure.subplots(len(panel_rows), len(panel_rows[0]), squeeze=False)
    axis_of_group = {}
    # All panels share their limits, so that they can be compared. The cost follows from the measured ratio.
    lengths = [row["accept_length"] for row in rows]
    costs = [row["accept_length"]["value"] / row["ratio"]["value"] for row in rows]
    xlim = 0.72 * min(1.0, *costs), 1.15 * max(1.2, *costs)
    ylim = 0.9, 1.1 * max(1.2, *(length["high"] for length in lengths))
    # A marker and colour per topk.
    topks = sorted({row["cell"]["topk"] for row in rows})
    styles = dict(zip(topks, itertools.cycle(zip("os^DvP", COLOURS, strict=True)), strict=False))
    for axis, key in itertools.zip_longest(axes.flat, itertools.chain(*panel_rows)):
        group = groups.get(key)
        if group is None:
            axis.set_axis_off()
            continue
        # 1. The background: lines of equal speed-up, and plain decoding at cost 1 and accept length 1.
        (batch_size, temperature), axis_of_group[key] = key, axis
        axis.set(xscale="log", yscale="log", xlim=xlim, ylim=ylim)
        _draw_speed_up_lines(axis, xlim, ylim)
        axis.plot(1, 1, "*", color="black", markersize=11, zorder=3)
        # 2. A point per setting with its interval; hollow markers are lossy rules.
        for row in group:
            (cost, length), spread, (marker, colour) = (
                _cost_and_length(row),
                row["accept_length"],
                styles[row["cell"]["topk"]],
            )
            error = [[max(length - spread["low"], 0)], [max(spread["high"] - length, 0)]]
            axis.errorbar(cost, length, error, color=colour, alpha=0.35, linewidth=1, zorder=1)
            face = "white" if row["lossless"] == "lossy" else colour
            axis.plot(cost, length, marker, color=colour, markerfacecolor=face, markersize=7, zorder=3)
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
        axis.spines[["top", "right"]].set_visible(False)
    # One legend for all panels.
    handles = [
        axes[0][0].plot([], [], marker, color=colour, label=f"topk {topk}")[0]
        for topk, (marker, colour) in styles.items()
    ]
    handles.append(axes[0][0].plot([], [], "*", color="black", markersize=11, label="plain")[0])
    if any(row["lossless"] == "lossy" for row in rows):
        handles.append(axes[0][0].plot([], [], "o", color=GREY, markerfacecolor="white", label="lossy")[0])
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    # Labels avoid each other in pixels, so they come last, when the layout is final.
    figure.draw_without_rendering()
    for key, group in groups.items():
        _label_frontier(axis_of_group[key], group)
    figure.savefig(path, dpi=120)


def _draw_speed_up_lines(axis, xlim, ylim) -> None:
    """Draws lines of equal speed-up, each labelled where it leaves the panel."""
    for speed in (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4):
        # A line `length = speed * cost` leaves through the top or the right side. Skip lines outside the panel.
        at_top = speed * xlim[1] >= ylim[1]
        end = (ylim[1] / speed, ylim[1]) if at_top else (xlim[1], speed * xlim[1])
        if end[0] <= xlim[0] or end[1] <= ylim[0]:
            continue
        colour, width = ("black", 1.2) if speed == 1 else ("#bbbbbb", 0.8)
        axis.plot([xlim[0], end[0]], [speed * xlim[0], end[1]], color=colour, linewidth=width, zorder=0)
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


def _label_frontier(axis, group: list[dict[str, Any]]) -> None:
    """Labels the frontier's points, longest accept length first, where no label covers a point or another label."""
    points = [axis.transData.transform(_cost_and_length(row)) for row in group]
    label_boxes: list[Any] = []
    for row in reversed(_frontier(group)):
        cell = row["cell"]
        text = f"depth {cell['num_steps']}" + (f", {cell['num_nodes']} nodes" if cell["topk"] > 1 else "")
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


def _group_by_batch_and_temperature(rows: list[dict[str, Any]]) -> dict[tuple[int, float], list[dict[str, Any]]]:
    """Groups rows by (batch size, temperature), in ascending order."""
    groups: dict[tuple[int, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["cell"]["batch_size"], row["cell"]["temperature"]), []).append(row)
    return dict(sorted(groups.items()))


def _panel_rows(groups) -> list[list[tuple[int, float]]]:
    """Lays out panels: a line per batch size and a column per temperature; with one temperature, three per line."""
    batch_sizes, temperatures = sorted({key[0] for key in groups}), sorted({key[1] for key in groups})
    if len(temperatures) == 1:
        return _split(list(groups), 3)
    return [[(batch_size, temperature) for temperature in temperatures] for batch_size in batch_sizes]


def _split(values: list, size: int) -> list[list]:
    """Splits a list into lists of at most `size` values."""
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


def _tree_key(row: dict[str, Any]) -> tuple[int, int, str]:
    """Returns topk, nodes and rule of a row: the key of a line of the heat map.

    Nodes are 0 for chains and complete trees, whose size follows from the depth.
    """
    # 64 is the default cap of `num_draft_tokens`.
    cell = row["cell"]
    complete_size = 1 + cell["topk"] + (cell["num_steps"] - 1) * cell["topk"] ** 2
    nodes = 0 if cell["topk"] == 1 or cell["num_nodes"] in (complete_size, 64) else cell["num_nodes"]
    return cell["topk"], nodes, cell["acceptance"] + " (lossy)" * (row["lossless"] == "lossy")


def _tree_label(tree: tuple[int, int, str]) -> str:
    """Names a line of the heat map."""
    topk, nodes, rule = tree
    return ("chain" if topk == 1 else f"topk {topk}") + (f", {nodes} nodes" if nodes else "") + f"\n{rule}"


def _round_shape(row: dict[str, Any]) -> tuple[int, int, int]:
    """Returns the shape of a row's rounds: depth, topk and nodes."""
    return row["cell"]["num_steps"], row["cell"]["topk"], row["cell"]["num_nodes"]


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
