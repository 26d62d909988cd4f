"""Plots of measurements, in the style of `plot_style`."""

from collections.abc import Sequence
from typing import Any

from mtpjax.evaluation.intervals import Estimate
from mtpjax.evaluation.plot_style import (
    DEFAULT_FORMATS,
    GREY,
    UNTRUSTED,
    colour,
    draw_picture,
    legend_below,
    level_colour,
    line_style,
    plain_text,
    plot_estimates,
    share_limits,
    shorten,
)
from mtpjax.evaluation.trust import is_impossible


def plot_quickstart(
    path, history: list[dict[str, Any]], rows, formats: Sequence[str] = DEFAULT_FORMATS, *, title: str = ""
) -> None:
    """Plots the results of `mtpjax quickstart`: loss and agreement against time, and speed-up against depth.

    Args:
        history: the rows of the training log, both steps and evaluations.
        rows: one `mtpjax.training.quickstart.DepthResult` per depth.
    """
    draw_picture(path, (11, 4.4), lambda figure: _draw_quickstart(figure, history, rows), formats, title=title)


def _draw_quickstart(figure, history: list[dict[str, Any]], rows) -> None:
    losses, agreement, speed = figure.subplots(1, 3)

    # 1. Plot the loss of the trunk and each draft level, with pale lines for training and points for held-out text.
    steps = [row for row in history if "bits" in row]
    evaluations = [row for row in history if "eval" in row]
    evaluated = [row["seconds"] for row in evaluations]
    shares = list(zip(*(row["eval"]["agreement"] for row in evaluations), strict=True))
    for depth in range(len(steps[0]["bits"]) if steps else 0):
        look = {"color": level_colour(depth, len(shares))}
        losses.plot([row["seconds"] for row in steps], [row["bits"][depth] for row in steps], alpha=0.35, **look)
        held_out = [row["eval"]["bits_per_token"][depth] for row in evaluations]
        losses.plot(evaluated, held_out, "o-", label=f"draft {depth}" if depth else "trunk", **look)
    losses.set(title="loss: training (pale), held-out text", ylabel="bits per byte")

    # 2. Plot the share of drafts that agree with the trunk, per level.
    for level, values in enumerate(shares, start=1):
        agreement.plot(evaluated, values, "o-", color=level_colour(level, len(shares)), label=f"draft {level}")
    agreement.set(title="drafts that agree with the trunk", ylabel="share of positions, held-out text")
    agreement.set_ylim(share_limits(sum(shares, ())))
    for axis in (losses, agreement):
        axis.set(xlabel="seconds of training", xlim=(0, 1.03 * max(row["seconds"] for row in history)))

    # 3. Plot the measured speed-up with intervals, the ideal from measured costs, and the limit if drafts were free.
    num_steps, lengths = [row.num_steps for row in rows], [row.accept_length for row in rows]
    speed.plot(num_steps, lengths, "^:", color=GREY, label="accept length: limit if drafts were free")
    speed.plot(num_steps, [row.ideal for row in rows], "s--", color=GREY, label="ideal, from costs of a round's parts")
    points = [(row.num_steps, Estimate(row.ratio, *row.interval), row.problem) for row in rows]
    plot_speed_ups(speed, points, label="measured (95 % over prompts)", color=colour(-1), linewidth=2)
    speed.axhline(1, color="black", linewidth=0.8, label="plain decoding")
    speed.set(title="speed-up over plain decoding", xlabel="drafts per round", ylabel="ratio of times")
    speed.set(xlim=(min(num_steps) - 0.3, max(num_steps) + 0.3), xticks=num_steps)
    for axis in (losses, agreement, speed):
        legend_below(axis)


def plot_speed_ups(axis, points: Sequence[tuple[float, Estimate, str | None]], **look: Any) -> None:
    """Plots measured speed-ups, with intervals for those that can be trusted.

    Untrusted speed-ups become grey question marks without an interval, and impossible ones are left out.

    Args:
        axis: the panel.
        points: x coordinate, speed-up and problem (`mtpjax.evaluation.trust`) of each point.
        **look: as in `plot_style.plot_estimates`, including color and label.
    """
    trusted = [(place, ratio) for place, ratio, problem in points if not problem]
    if trusted:
        estimates = [(ratio.value, ratio.low, ratio.high) for _, ratio in trusted]
        plot_estimates(axis, [place for place, _ in trusted], estimates, marker="o", **look)
    doubtful = [(place, ratio.value) for place, ratio, problem in points if problem and not is_impossible(problem)]
    if doubtful:
        axis.plot(*zip(*doubtful, strict=True), **UNTRUSTED, label="measured, cannot be trusted")


def plot_acceptance(
    path, metrics: dict[str, dict[str, Any]], formats: Sequence[str] = DEFAULT_FORMATS, *, title: str = ""
) -> None:
    """Plots accept lengths by category, and survival by level, from a report of `mtpjax.evaluation.metrics`."""
    size = 9, max(3.6, 0.3 * len(metrics) + 1.8)
    draw_picture(path, size, lambda figure: _draw_acceptance(figure, metrics), formats, title=title)


def _draw_acceptance(figure, metrics: dict[str, dict[str, Any]]) -> None:
    lengths, survival = figure.subplots(1, 2)
    # The left panel shows decoded accept lengths with intervals (all prompts first), and predicted lengths as crosses.
    decoded, places = [row["decoded"]["accept_length"] for row in metrics.values()], range(len(metrics))
    look: dict[str, Any] = {"color": colour(0), "marker": "o", "linestyle": "", "label": "decoded (95 % over prompts)"}
    plot_estimates(lengths, places, ((each.value, each.low, each.high) for each in decoded), is_flat=True, **look)
    predicted = [row["predicted"]["accept_length"].value for row in metrics.values()]
    lengths.plot(predicted, places, "x", color=colour(1), markersize=8, label="predicted")
    names = [f"{plain_text(shorten(name))} ({row['prompts']})" for name, row in metrics.items()]
    lengths.set_yticks(places, names)
    # Without accepted drafts the length is 1, so start the axis there, with room for markers and a margin.
    longest = max(1.5, *(length.high for length in decoded))
    lengths.set(xlim=(0.97, 1 + 1.05 * (longest - 1)), ylim=(len(metrics) - 0.5, -0.5))
    lengths.set(title="accept length by category (prompts)", xlabel="tokens per round, bonus token included")
    # The right panel shows the share of rounds that accepted each level, over all prompts.
    overall, shown = metrics["overall"], []
    kinds = {"decoded": ("decoded", 0), "teacher-forced": ("teacher_forced", 2)}
    for number, (name, (source, own)) in enumerate(kinds.items()):
        rows = [(rate.value, rate.low, rate.high) for rate in overall[source]["survival"]]
        levels = [level + 0.05 * number for level in range(1, len(rows) + 1)]
        plot_estimates(survival, levels, rows, label=f"{name} (95 % over prompts)", **line_style(own))
        shown += sum(rows, ())
    survival.set(title="survival by level, all prompts", xlabel="draft level", ylim=share_limits(shown))
    num_levels = len(overall["decoded"]["survival"])
    survival.set(ylabel="share of rounds that accept it", xlim=(0.6, num_levels + 0.4), xticks=range(1, num_levels + 1))
    for axis in (lengths, survival):
        legend_below(axis)
