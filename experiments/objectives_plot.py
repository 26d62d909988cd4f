"""The picture of `experiments.objectives`."""

from collections.abc import Sequence
from typing import Any

from mtpjax.evaluation.plot_style import (
    DEFAULT_FORMATS,
    GREY,
    draw_picture,
    legend_key,
    line_style,
    plain_text,
    plot_estimates,
    share_limits,
    shorten,
)


def plot_objectives(path, settings: dict[str, dict[str, Any]], formats: Sequence[str] = DEFAULT_FORMATS) -> None:
    """Plots accept lengths of training objectives at each temperature, and survival by level.

    Args:
        settings: results of `experiments.objectives` by setting and temperature.
    """
    draw_picture(path, (11, 0.4 * len(settings) + 2.8), lambda figure: _draw_objectives(figure, settings), formats)


def _draw_objectives(figure, settings: dict[str, dict[str, Any]]) -> None:
    temperatures = list(next(iter(settings.values())))
    axes = figure.subplots(1, 1 + len(temperatures))
    lengths, keys, shown = axes[0], [], [0.0]
    for number, (temperature, line) in enumerate(zip(temperatures, axes[1:], strict=True)):
        look: dict[str, Any] = {"color": GREY if number else "black", "marker": "os^D"[number % 4], "linestyle": ""}
        for index, columns in enumerate(settings.values()):
            # Left panel: the accept length with its interval, and a tick per seed.
            row = columns[temperature]
            estimate = tuple(row["accept_length"][key] for key in ("value", "low", "high"))
            height = index + 0.24 * (number - (len(temperatures) - 1) / 2)
            plot_estimates(lengths, [height], [estimate], is_flat=True, **look)
            lengths.plot(row["of_seeds"], [height] * len(row["of_seeds"]), "|", color=look["color"], markersize=9)
            # The other panels, one per temperature: survival by level, a line per setting.
            survival = [rate["value"] for rate in row["survival"]]
            line.plot(range(1, len(survival) + 1), survival, **line_style(index))
            shown += survival
        keys.append(legend_key(f"temperature {temperature}", **look))
        line.set(title=f"survival, temperature {temperature}", xlabel="draft level", ylabel="share of rounds")
        line.set_xticks(range(1, len(survival) + 1))
    for line in axes[1:]:
        line.set_ylim(share_limits(shown))
    lengths.set_yticks(range(len(settings)), [plain_text(shorten(name)) for name in settings])
    lengths.invert_yaxis()
    lengths.set(title="accept length (95 %; ticks: seeds)", xlabel="tokens per round")
    keys += [legend_key(shorten(name), **line_style(index)) for index, name in enumerate(settings)]
    figure.legend(handles=keys, loc="outside lower center", ncols=4)
