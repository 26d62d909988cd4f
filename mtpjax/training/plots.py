"""Plots of training runs: losses and acceptance over the steps, for one run or for several side by side."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtpjax.evaluation.plot_style import DEFAULT_FORMATS, colour, level_colour, picture, picture_paths
from mtpjax.training.decoding_eval import KIND_TEMPERATURES

History = Sequence[Mapping[str, Any]]  # rows of metrics.jsonl


def plot_run(path, history: History, formats: Sequence[str] = DEFAULT_FORMATS) -> None:
    """Plots losses, agreement and survival by level, and accept lengths over the steps of a run.

    Args:
        path: the picture, as in `plot_style.picture_paths`.
        history: rows of `metrics.jsonl`, with at least one evaluation.
        formats: formats of a path without suffix.
    """
    if not picture_paths(path, formats):
        return
    with picture(path, (14, 4.2), formats) as figure:
        _draw_run(figure, history)


def _draw_run(figure, history: History) -> None:
    # Three panels: losses, teacher-forced rates, accept lengths.
    losses, rates, lengths = figure.subplots(1, 3)
    evaluations = [row for row in history if "eval" in row]
    steps = [row["step"] for row in evaluations]
    _draw_losses(losses, history, evaluations)
    for level in range(len(evaluations[-1]["eval"]["agreement"])):
        # At level 1 agreement and survival are the same, so only one line is drawn.
        for name, style in (("agreement", "o-"), ("survival", "s--"))[: level + 1]:
            values = [row["eval"][name][level] for row in evaluations]
            rates.plot(steps, values, style, color=colour(level), label=f"{name}, level {level + 1}")
    _style_axis(rates, "drafts and trunk on held-out text, all positions", "share", ylim=(0, 1))
    for number, (kind, survival) in enumerate({"greedy": "survival", "sampled": "sampled_survival"}.items()):
        look, name = {"color": colour(number)}, f"temperature {KIND_TEMPERATURES[kind]:g}"
        # Dotted: the estimate over all positions. Points with error bars and crosses: decoded and predicted accept
        # lengths, at the evaluations that also decoded.
        plain = [1 + sum(row["eval"][survival]) for row in evaluations]
        lengths.plot(steps, plain, ":", **look, label=f"{name}, teacher-forced, all positions")
        decoded = {row["step"]: _overall_decoded(row)[kind] for row in evaluations if kind in _overall_decoded(row)}
        if decoded:
            at, predicted = list(decoded), [row["predicted"] for row in decoded.values()]
            lengths.errorbar(at, *_accept_lengths(decoded.values()), **look, fmt="o-", label=f"{name}, decoded (95 %)")
            lengths.plot(at, predicted, "x", **look, markersize=9, label=f"{name}, predicted")
    _style_axis(lengths, "accept length", "tokens per step", ylim=(1, None))


def plot_comparison(path, runs: Mapping[str, History], formats: Sequence[str] = DEFAULT_FORMATS) -> None:
    """Plots runs side by side: the trunk's loss over the steps, survival and accept lengths at the last evaluation.

    Args:
        path: the picture, as in `plot_style.picture_paths`.
        runs: history of each run by name; each has at least one evaluation.
        formats: formats of a path without suffix.
    """
    if not picture_paths(path, formats):
        return
    with picture(path, (14, 4.2), formats) as figure:
        _draw_comparison(figure, runs)


def _draw_comparison(figure, runs: Mapping[str, History]) -> None:
    # Grouped bars: the runs of one level or temperature stand next to each other, centred on its tick.
    losses, rates, lengths = figure.subplots(1, 3)
    width, levels = 0.8 / len(runs), 1
    for number, (name, history) in enumerate(runs.items()):
        look, shift = {"color": colour(number), "label": name}, (number - (len(runs) - 1) / 2) * width
        evaluations = [row for row in history if "eval" in row]
        bits = [row["eval"]["bits_per_token"][0] for row in evaluations]
        losses.plot([row["step"] for row in evaluations], bits, "o-", **look)
        survival, decoded = evaluations[-1]["eval"]["survival"], _overall_decoded(evaluations[-1])
        levels = max(levels, len(survival))
        rates.bar([level + shift for level in range(1, len(survival) + 1)], survival, width, **look)
        places = [place + shift for place, kind in enumerate(KIND_TEMPERATURES) if kind in decoded]
        heights, sides = _accept_lengths(decoded[kind] for kind in KIND_TEMPERATURES if kind in decoded)
        lengths.bar(places, heights, width, yerr=sides, **look)
    rates.set_xticks(range(1, levels + 1))
    lengths.set_xticks(
        range(len(KIND_TEMPERATURES)), [f"temperature {temperature:g}" for temperature in KIND_TEMPERATURES.values()]
    )
    _style_axis(losses, "trunk's loss on held-out text", "bits per token")
    _style_axis(rates, "survival, teacher-forced, at the last evaluation", "share", xlabel="draft level", ylim=(0, 1))
    _style_axis(lengths, "accept length, decoded (95 %)", "tokens per step", xlabel="")


def _draw_losses(axis, history: History, evaluations: History) -> None:
    """Draws the training loss (pale) and the held-out loss of the trunk and each draft level."""
    steps = [row for row in history if "bits" in row]
    # Evaluations may have more levels than training, which then have no pale line.
    for depth in range(len(evaluations[-1]["eval"]["bits_per_token"])):
        name, look = f"draft {depth}" if depth else "trunk", {"color": level_colour(depth)}
        logged = [row for row in steps if depth < len(row["bits"])]
        axis.plot([row["step"] for row in logged], [row["bits"][depth] for row in logged], **look, alpha=0.35)
        values = [row["eval"]["bits_per_token"][depth] for row in evaluations]
        axis.plot([row["step"] for row in evaluations], values, "o-", **look, label=name)
    _style_axis(axis, "loss: training (pale) and held out", "bits per token")


def _overall_decoded(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the decoded metrics of an evaluation over all prompts, by kind; empty if nothing was decoded."""
    return row["eval"].get("decoded", {}).get("overall", {})


def _accept_lengths(decoded: Iterable[Mapping[str, float]]) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Returns accept lengths, and the distances to the lower and upper end of their intervals."""
    rows = list(decoded)
    sides = [row["real"] - row["real_low"] for row in rows], [row["real_high"] - row["real"] for row in rows]
    return [row["real"] for row in rows], sides


def _style_axis(axis, title: str, ylabel: str, *, xlabel: str = "steps", **limits) -> None:
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel, **limits)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
