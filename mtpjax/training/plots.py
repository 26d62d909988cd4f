"""Plots losses and acceptance of training runs over their updates, for one run or for several side by side."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtpjax.evaluation.plot_style import (
    DEFAULT_FORMATS,
    colour,
    draw_picture,
    legend_below,
    legend_columns,
    legend_key,
    level_colour,
    line_style,
    plot_estimates,
    share_limits,
    shorten,
)
from mtpjax.training.panel import KIND_TEMPERATURES

History = Sequence[Mapping[str, Any]]  # rows of metrics.jsonl


def plot_run(path, history: History, formats: Sequence[str] = DEFAULT_FORMATS, *, title: str = "") -> None:
    """Plots losses, agreement and survival by level, and accept lengths over the updates of a run.

    Args:
        history: rows of `metrics.jsonl`, with at least one evaluation. Without draft levels, only losses are plotted.
    """
    evaluations = [row for row in history if "eval" in row]
    num_levels = len(evaluations[-1]["eval"]["agreement"])

    def draw(figure):
        axes = figure.subplots(1, 3 if num_levels else 1, squeeze=False)[0]
        _draw_losses(axes[0], history, evaluations)
        if num_levels:
            _draw_rates(axes[1], evaluations, num_levels)
            _draw_lengths(axes[2], evaluations)
        for axis in axes:
            axis.set(xlabel="updates", xlim=(0, 1.03 * max(row["step"] for row in history)))
            axis.xaxis.get_major_locator().set_params(integer=True)

    draw_picture(path, (11, 4.6) if num_levels else (6, 4), draw, formats, title=title)


def _draw_losses(axis, history: History, evaluations: History) -> None:
    """Draws the training loss (pale) and the held-out loss for the trunk and each draft level."""
    # Levels that are evaluated but not trained have no pale line.
    num_levels = len(evaluations[-1]["eval"]["bits_per_token"]) - 1
    for depth in range(num_levels + 1):
        name, look = f"draft {depth}" if depth else "trunk", {"color": level_colour(depth, num_levels)}
        logged = [row for row in history if depth < len(row.get("bits", ()))]
        axis.plot([row["step"] for row in logged], [row["bits"][depth] for row in logged], **look, alpha=0.35)
        values = [row["eval"]["bits_per_token"][depth] for row in evaluations]
        axis.plot([row["step"] for row in evaluations], values, "o-", **look, label=name)
    axis.set(title="loss: training (pale), held-out text", ylabel="bits per token")
    legend_below(axis, ncols=_num_columns(num_levels + 1))


def _draw_rates(axis, evaluations: History, num_levels: int) -> None:
    """Draws the teacher-forced rates of each draft level on held-out text."""
    steps, shown = [row["step"] for row in evaluations], []
    lines = {"agreement": {"marker": "o", "linestyle": "-"}, "survival": {"marker": "s", "linestyle": "--"}}
    levels = {f"draft {level}": level_colour(level, num_levels) for level in range(1, num_levels + 1)}
    for level, color in enumerate(levels.values()):
        # At level 1, agreement and survival are the same, so only one line is drawn.
        for name in list(lines)[: level + 1]:
            values = [row["eval"][name][level] for row in evaluations]
            axis.plot(steps, values, color=color, **lines[name])
            shown += values
    axis.set(title="drafts that agree with the trunk", ylabel="share of positions, held-out text")
    axis.set_ylim(share_limits(shown))
    # Survival means that this level and all levels before it agree.
    keys = [legend_key(name, color=color, linewidth=4) for name, color in levels.items()]
    keys += [legend_key(name, **look) for name, look in lines.items()][: min(num_levels, 2)]
    legend_below(axis, handles=keys, ncols=_num_columns(len(keys)))


def _draw_lengths(axis, evaluations: History) -> None:
    """Draws estimated, decoded and predicted accept lengths by temperature."""
    steps, longest = [row["step"] for row in evaluations], 1.5
    has_decoded = any(map(_overall_decoded, evaluations))
    keys = [legend_key("teacher-forced", marker=".", linestyle=":")]
    keys += [legend_key("decoded (95 %)", marker="o"), legend_key("predicted", marker="x", linestyle="")] * has_decoded
    for number, (kind, survival) in enumerate({"greedy": "survival", "sampled": "sampled_survival"}.items()):
        look: dict[str, Any] = {"color": colour(-1 - number)}
        keys.append(legend_key(f"temperature {KIND_TEMPERATURES[kind]:g}", **look, linewidth=4))
        # The dotted line is the estimate over all positions. At evaluations that also decoded, points with error bars
        # are decoded accept lengths, and crosses are predicted ones.
        estimated = [1 + sum(row["eval"][survival]) for row in evaluations]
        axis.plot(steps, estimated, ".:", **look)
        decoded = {row["step"]: _overall_decoded(row)[kind] for row in evaluations if kind in _overall_decoded(row)}
        lengths = _accept_lengths(decoded.values())
        plot_estimates(axis, list(decoded), lengths, marker="o", **look)
        axis.plot(list(decoded), [row["predicted"] for row in decoded.values()], "x", **look, markersize=8)
        longest = max(longest, *estimated, *(high for *_, high in lengths))
    axis.set(title="accept length on held-out prompts", ylabel="tokens per round", ylim=_length_limits(longest))
    legend_below(axis, handles=keys, ncols=2)


def _num_columns(num_keys: int) -> int:
    return 2 if num_keys <= 6 else 3


def plot_comparison(
    path, runs: Mapping[str, History], formats: Sequence[str] = DEFAULT_FORMATS, *, title: str = ""
) -> None:
    """Plots runs side by side, with the trunk's loss over the updates and the acceptance at the last evaluation.

    Args:
        runs: each run's history by name, with at least one evaluation. Panels without data are left out.
    """
    draws = [_compare_losses]
    last = [[row for row in history if "eval" in row][-1] for history in runs.values()]
    draws += [_compare_survival] * any(row["eval"]["survival"] for row in last)
    draws += [_compare_lengths] * any(map(_overall_decoded, last))
    num_columns = legend_columns(names := [shorten(name, 60) for name in runs], width := 3.7 * len(draws))
    height = 3.7 + 0.2 * -(-len(runs) // num_columns)

    def draw(figure):
        axes = figure.subplots(1, len(draws), squeeze=False)[0]
        for draw_panel, axis in zip(draws, axes, strict=True):
            draw_panel(axis, list(runs.values()))
        handles = [legend_key(name, **line_style(number)) for number, name in enumerate(names)]
        figure.legend(handles=handles, loc="outside lower center", ncols=num_columns)

    draw_picture(path, (width, height), draw, formats, title=title)


def _compare_losses(axis, histories: Sequence[History]) -> None:
    for number, history in enumerate(histories):
        evaluations = [row for row in history if "eval" in row]
        bits = [row["eval"]["bits_per_token"][0] for row in evaluations]
        axis.plot([row["step"] for row in evaluations], bits, **line_style(number))
    axis.set(title="trunk's loss on held-out text", xlabel="updates", ylabel="bits per token")
    axis.set_xlim(0, 1.03 * max(row["step"] for history in histories for row in history))
    axis.xaxis.get_major_locator().set_params(integer=True)


def _compare_survival(axis, histories: Sequence[History]) -> None:
    shown, num_levels = [], 1
    for number, history in enumerate(histories):
        survival = [row for row in history if "eval" in row][-1]["eval"]["survival"]
        levels = [level + _shift(number, len(histories)) for level in range(1, len(survival) + 1)]
        axis.plot(levels, survival, **line_style(number))
        shown, num_levels = shown + list(survival), max(num_levels, len(survival))
    axis.set(title="survival at the last evaluation", xlabel="draft level", xticks=range(1, num_levels + 1))
    axis.set(ylabel="share of positions, held-out text", xlim=(0.5, num_levels + 0.5), ylim=share_limits(shown))


def _compare_lengths(axis, histories: Sequence[History]) -> None:
    longest, last = 1.5, [_overall_decoded([row for row in history if "eval" in row][-1]) for history in histories]
    kinds = [kind for kind in KIND_TEMPERATURES if any(kind in decoded for decoded in last)]
    for number, decoded in enumerate(last):
        places = [place + _shift(number, len(histories)) for place, kind in enumerate(kinds) if kind in decoded]
        lengths = _accept_lengths(decoded[kind] for kind in kinds if kind in decoded)
        look = line_style(number)
        look["linestyle"] = ""
        plot_estimates(axis, places, lengths, **look)
        longest = max(longest, *(high for *_, high in lengths), 0)
    axis.set_xticks(range(len(kinds)), [f"temperature {KIND_TEMPERATURES[kind]:g}" for kind in kinds])
    axis.set(title="accept length, decoded (95 %)", ylabel="tokens per round", ylim=_length_limits(longest))
    axis.set_xlim(-0.5, len(kinds) - 0.5)


def _shift(number: int, count: int) -> float:
    """Returns how far to shift the points of run `number` from their tick, so that runs do not overlap."""
    return 0.6 * (number + 0.5) / count - 0.3


def _overall_decoded(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns an evaluation's decoded metrics over all prompts, by kind; empty if nothing was decoded."""
    return row["eval"].get("decoded", {}).get("overall", {})


def _accept_lengths(decoded: Iterable[Mapping[str, float]]) -> list[tuple[float, float, float]]:
    """Returns accept lengths with the lower and upper ends of their intervals."""
    return [(row["real"], row["real_low"], row["real_high"]) for row in decoded]


def _length_limits(longest: float) -> tuple[float, float]:
    """Returns axis limits for accept lengths. They start at 1, which is the length if no draft is accepted."""
    return 1 - 0.05 * (longest - 1), 1 + 1.05 * (longest - 1)
