"""Pictures of measurements, in the style of `plot_style`."""

from collections.abc import Sequence
from typing import Any

from mtpjax.evaluation.plot_style import COLOURS, DEFAULT_FORMATS, GREY, colour, level_colour, picture, picture_paths


def plot_quickstart(path, history: list[dict[str, Any]], rows, formats: Sequence[str] = DEFAULT_FORMATS) -> None:
    """Plots the results of `mtpjax quickstart`: loss and agreement against time, and speed-up against depth.

    Args:
        path: the picture, as in `plot_style.picture_paths`.
        history: the records of the training log, of steps and of evaluations.
        rows: a `DepthResult` of `mtpjax.training.quickstart` per depth.
        formats: formats of a path without suffix.
    """
    if not picture_paths(path, formats):
        return
    with picture(path, (13, 4), formats) as figure:
        _draw_quickstart(figure, history, rows)


def _draw_quickstart(figure, history: list[dict[str, Any]], rows) -> None:
    losses, agreement, speed = figure.subplots(1, 3)

    # 1. Loss of the trunk and of each draft level: lines for training, points for held-out text.
    steps = [row for row in history if "bits" in row]
    evaluations = [row for row in history if "eval" in row]
    for depth in range(len(steps[0]["bits"]) if steps else 0):
        name = "trunk" if depth == 0 else f"draft {depth}"
        seconds = [row["seconds"] for row in steps]
        look = {"color": level_colour(depth)}
        losses.plot(seconds, [row["bits"][depth] for row in steps], alpha=0.4, label=f"{name}, training", **look)
        held_out = [row["eval"]["bits_per_token"][depth] for row in evaluations]
        losses.plot([row["seconds"] for row in evaluations], held_out, "o-", label=f"{name}, held out", **look)
    losses.set(title="loss", xlabel="seconds", ylabel="bits per byte", ylim=(1.5, 6))
    losses.legend()

    # 2. The share of drafts that agree with the trunk, per level.
    depths = len(evaluations[0]["eval"]["agreement"])
    for depth in range(depths):
        seconds = [row["seconds"] for row in evaluations]
        values = [row["eval"]["agreement"][depth] for row in evaluations]
        agreement.plot(seconds, values, "o-", color=level_colour(depth + 1), label=f"draft {depth + 1}")
    agreement.set(title="drafts that agree with the trunk (held out)", xlabel="seconds", ylabel="share", ylim=(0, 1))
    agreement.legend(loc="lower right")

    # 3. Measured speed-up with intervals, beside the ideal from measured costs and the limit of free drafts.
    num_steps = [row.num_steps for row in rows]
    errors = [[row.ratio - row.interval[0] for row in rows], [row.interval[1] - row.ratio for row in rows]]
    errors = [[max(error, 0) for error in side] for side in errors]
    ratios, lengths = [row.ratio for row in rows], [row.accept_length for row in rows]
    speed.errorbar(num_steps, ratios, errors, fmt="o-", color=colour(0), label="measured / best plain (95 %)")
    speed.plot(num_steps, [row.ideal for row in rows], "s--", color=GREY, label="ideal, from measured costs")
    speed.plot(num_steps, lengths, "^:", color=colour(2), label="accept length (if drafts were free)")
    speed.axhline(1, color="black", linewidth=0.8)
    speed.set(title="speed-up against drafts per round", xlabel="drafts per round", ylabel="ratio", xticks=num_steps)
    speed.set_ylim(bottom=0.5)
    speed.legend()


def plot_objectives(path, settings: dict[str, dict[str, Any]], formats: Sequence[str] = DEFAULT_FORMATS) -> None:
    """Plots accept lengths of training objectives at each temperature, and survival by level.

    Args:
        path: the picture, as in `plot_style.picture_paths`.
        settings: results of `experiments.objectives` by setting and temperature.
        formats: formats of a path without suffix.
    """
    if not picture_paths(path, formats):
        return
    with picture(path, (13, 0.45 * len(settings) + 2.2), formats) as figure:
        _draw_objectives(figure, settings)


def _draw_objectives(figure, settings: dict[str, dict[str, Any]]) -> None:
    temperatures = list(next(iter(settings.values())))
    axes = figure.subplots(1, 1 + len(temperatures))
    for number, temperature in enumerate(temperatures):
        for index, (name, columns) in enumerate(settings.items()):
            # Left panel: the accept length with its interval, and a tick per seed.
            row = columns[temperature]
            value, low, high = (row["accept_length"][key] for key in ("value", "low", "high"))
            colour, height = COLOURS[number], index + 0.2 * number - 0.1
            axes[0].errorbar(value, height, xerr=[[value - low], [high - value]], fmt="o", color=colour)
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
    axes[0].legend(loc="best")
    axes[-1].legend(fontsize=7)


def plot_acceptance(path, metrics: dict[str, dict[str, Any]], formats: Sequence[str] = DEFAULT_FORMATS) -> None:
    """Plots the results of `mtpjax eval acceptance`: accept lengths by category, and survival by level.

    Args:
        path: the picture, as in `plot_style.picture_paths`.
        metrics: the result of `mtpjax.evaluation.metrics.report`.
        formats: formats of a path without suffix.
    """
    if not picture_paths(path, formats):
        return
    with picture(path, (11, max(3.2, 0.35 * len(metrics) + 1.4)), formats) as figure:
        lengths, survival = figure.subplots(1, 2)
        # Left: decoded accept lengths with their intervals, the one over all prompts at the top; crosses are predicted.
        for place, row in enumerate(metrics.values()):
            length, predicted = row["decoded"]["accept_length"], row["predicted"]["accept_length"].value
            sides = [[max(length.value - length.low, 0)], [max(length.high - length.value, 0)]]
            lengths.errorbar(length.value, place, xerr=sides, fmt="o", color=colour(0))
            lengths.plot(predicted, place, "x", color=colour(1), markersize=7)
        lengths.plot([], [], "o", color=colour(0), label="decoded, 95 % over prompts")
        lengths.plot([], [], "x", color=colour(1), markersize=7, label="predicted")
        # Category names may hold signs that matplotlib would read as formulas.
        lengths.set_yticks(range(len(metrics)), [name.replace("$", r"\$") for name in metrics])
        lengths.invert_yaxis()
        lengths.set(title="accept length", xlabel="tokens per round")
        lengths.legend(loc="best")
        # Right: the share of rounds that accepted each level, over all prompts.
        overall = metrics["overall"]
        for number, (name, rates) in enumerate(
            (("decoded", overall["decoded"]), ("teacher-forced", overall["teacher_forced"]))
        ):
            values = rates["survival"]
            levels = [level + 0.05 * number for level in range(1, len(values) + 1)]
            below = [max(rate.value - rate.low, 0) for rate in values]
            above = [max(rate.high - rate.value, 0) for rate in values]
            look = {"fmt": "o-", "color": colour(number), "label": name}
            survival.errorbar(levels, [rate.value for rate in values], [below, above], **look)
        survival.set(title="survival, all prompts (95 %)", xlabel="draft level", ylabel="share", ylim=(0, 1))
        survival.set_xticks(range(1, len(overall["decoded"]["survival"]) + 1))
        survival.legend()
