"""Defines the common style of all plots of measurements, and the functions that draw and write them.

`draw_picture` draws every plot in this style and writes it as PNG, SVG or PDF. Importing this module does not import
matplotlib, which loads slowly. Without matplotlib nothing is drawn, and a warning is logged once.

The library's `plot_*` functions take the same `path`, `formats` and `title` as `draw_picture`.
"""

import contextlib
import functools
import importlib.util
import logging
import math
import pathlib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mtpjax.errors import UsageError, install_extra

log = logging.getLogger(__name__)
FORMATS = ("png", "svg", "pdf")
DEFAULT_FORMATS = ("png", "svg")  # PNG opens anywhere, SVG scales
# The palette of Okabe and Ito, which colour-blind readers can distinguish. Draft levels use its first colours and other
# series in the same plot use its last ones, so that no colour has two meanings.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#56b4e9", "#cc79a7", "#e69f00")
GREY = "#777777"
UNTRUSTED: dict[str, Any] = {"marker": "$?$", "linestyle": "", "color": GREY, "markersize": 9}  # measurements
# Markers differ too, for printing in grey, and line styles change after every sixth series.
MARKERS, LINES = "os^DvP", ("-", "--", ":", "-.")
# matplotlib's settings for every plot. Type 42 embeds fonts in PDF files, as journals require. With a fixed salt, the
# same plot produces the same SVG file.
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "figure.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GREY,
    "grid.alpha": 0.2,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.markersize": 5,
    "errorbar.capsize": 3,
    "figure.facecolor": "white",
    "savefig.dpi": 140,
    "pdf.fonttype": 42,
    "svg.hashsalt": "mtpjax",
}
# Leave the date out of the files, so that the same figure produces the same bytes.
_METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def picture_paths(path, formats: Sequence[str] = DEFAULT_FORMATS) -> list[pathlib.Path]:
    """Lists a plot's files; the list is empty without matplotlib. Arguments and errors are as in `draw_picture`."""
    path = pathlib.Path(path)
    wanted = [path.suffix[1:]] if path.suffix else list(dict.fromkeys(formats))
    for each in wanted:
        if each not in FORMATS:
            name = f"the suffix of {path}" if path.suffix else "a plot's format"
            raise ValueError(f"{name} must be {', '.join(FORMATS)}, not '{each}'")
    if wanted and not _has_matplotlib():
        return []
    return [path] if path.suffix else [path.with_name(f"{path.name}.{each}") for each in wanted]


@functools.cache
def _has_matplotlib() -> bool:
    """Returns whether matplotlib is installed. If it is not, the first call logs a warning."""
    try:
        require_matplotlib()
    except UsageError as error:
        log.warning("no plots are drawn: %s", error)
        return False
    return True


def require_matplotlib() -> None:
    """Raises `UsageError` if matplotlib is missing, for commands whose main result is a plot."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"matplotlib is missing: {install_extra('plots')}")


def draw_picture(
    path,
    size: tuple[float, float],
    draw: Callable[[Any], None],
    formats: Sequence[str] = DEFAULT_FORMATS,
    *,
    title: str = "",
) -> None:
    """Draws a plot and writes it; does nothing without matplotlib or formats.

    Args:
        path: the file. Its suffix sets the format; without a suffix, one file per format is written.
        size: width and height of the panels in inches; the title adds to the height.
        draw: draws into a `matplotlib.figure.Figure`.
        formats: any of "png", "svg" and "pdf".
        title: says what was measured, and on which device.

    Raises:
        ValueError: a format or suffix is not supported.
    """
    if picture_paths(path, formats):
        with picture(path, size, formats, title=title) as figure:
            draw(figure)


@contextlib.contextmanager
def picture(
    path, size: tuple[float, float], formats: Sequence[str] = DEFAULT_FORMATS, *, title: str = ""
) -> Iterator[Any]:
    """Yields a figure in the common style, and writes it when the block ends. Arguments are as in `draw_picture`.

    Raises:
        UsageError: matplotlib is missing.
    """
    files = picture_paths(path, formats)
    require_matplotlib()
    import matplotlib
    import matplotlib.figure

    # At 11 points, about 12 characters fit into an inch.
    lines = [part for line in title.splitlines() for part in textwrap.wrap(line, int(12 * size[0]))]
    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure(figsize=(size[0], size[1] + 0.25 * len(lines)), layout="constrained")
        if lines:
            figure.suptitle(plain_text("\n".join(lines)))
        yield figure
        for file in files:
            figure.savefig(file, metadata=_METADATA.get(file.suffix[1:]))


def plain_log_ticks(axis: Any, values: Sequence[float]) -> None:
    """Labels the logarithmic axis for `values` with plain numbers: 400 instead of 4 x 10^2."""
    import matplotlib.ticker as ticker

    # Over a narrow range, ticks at 1, 2 and 5 times powers of ten would be too few.
    is_wide = max(values) > 8 * min(values)
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)) if is_wide else ticker.MaxNLocator(6, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(ticker.StrMethodFormatter("{x:,.10g}"))
    axis.set_minor_locator(ticker.NullLocator())


def level_colour(level: int, num_levels: int) -> Any:
    """Returns the colour of one of `num_levels` draft levels; level 0 is the trunk, which is black."""
    if not level:
        return "black"
    if num_levels <= len(COLOURS):
        return colour(level - 1)
    import matplotlib

    # There are more levels than colours, so use a scale from dark to light.
    return matplotlib.colormaps["viridis"](0.9 * (level - 1) / (num_levels - 1))


def colour(number: int) -> str:
    """Returns the colour of series `number`, counted from 0. Colours repeat after six series; -1 is the last colour."""
    return COLOURS[number % len(COLOURS)]


def line_style(number: int) -> dict[str, Any]:
    """Returns the colour, marker and line style of series `number`, which repeat after 24 series."""
    cycle = number // len(COLOURS)
    # Also change each colour's marker from cycle to cycle, to distinguish points without lines.
    marker = MARKERS[(number + cycle) % len(MARKERS)]
    return {"color": colour(number), "marker": marker, "linestyle": LINES[cycle % len(LINES)]}


def shorten(name: str, limit: int = 28) -> str:
    """Shortens a name in the middle, because paths differ at the end and categories at the start."""
    if len(name) <= limit:
        return name
    end = (limit - 1) // 2
    return f"{name[: limit - 1 - end]}…{name[-end:]}"


def plain_text(text: str) -> str:
    """Escapes text so that matplotlib does not read it as a formula."""
    return text.replace("$", r"\$")


def plot_estimates(
    axis,
    places: Sequence[float],
    estimates: Iterable[tuple[float, float, float]],
    *,
    is_flat: bool = False,
    **look: Any,
) -> None:
    """Plots values with their intervals.

    Args:
        axis: the axis.
        places: the x coordinates.
        estimates: value, lower end and upper end of each interval. If the value is outside its interval, the bar on
            that side is left out.
        is_flat: plot horizontally, with `places` as y coordinates and the values as x coordinates.
        **look: arguments of `matplotlib.axes.Axes.plot`, including color and marker.
    """
    rows = list(estimates)
    values = [value for value, _, _ in rows]
    sides = [[max(value - low, 0) for value, low, _ in rows], [max(high - value, 0) for value, _, high in rows]]
    x, y = (values, places) if is_flat else (places, values)
    # Only the line has the label, so that legends keep the order of the calls.
    axis.plot(x, y, **look)
    axis.errorbar(x, y, fmt="none", ecolor=look["color"], zorder=1.9, **{"xerr" if is_flat else "yerr": sides})


def share_limits(values: Iterable[float]) -> tuple[float, float]:
    """Returns axis limits for shares: the whole tenths around all values except nan, within 0..1, plus a margin."""
    known = [value for value in values if not math.isnan(value)] or [0.0, 1.0]
    low = max(math.floor(10 * min(known) - 0.3), 0) / 10
    high = min(math.ceil(10 * max(known) + 0.3), 10) / 10
    room = 0.03 * (high - low)
    return low - room, high + room


def legend_key(label: str, **look: Any) -> Any:
    """Makes a legend entry for a line or marker from the arguments of `Line2D`. It is grey by default."""
    from matplotlib.lines import Line2D

    look.setdefault("color", GREY)
    return Line2D([], [], label=plain_text(label), **look)


def legend_columns(labels: Sequence[str], width: float) -> int:
    """Returns the number of legend columns with which these labels fit into `width` inches."""
    return max(1, min(len(labels), int(width / (0.6 + 0.075 * max(map(len, labels))))))


def legend_below(axis, **settings: Any) -> None:
    """Puts the legend, if there is one, below the label of the x axis; `settings` are arguments of `Axes.legend`."""
    from matplotlib.transforms import ScaledTranslation

    if settings.get("handles") or axis.get_legend_handles_labels()[0]:
        # Leave a fixed distance, in inches, for the tick labels and the axis label.
        place = axis.transAxes + ScaledTranslation(0, -0.55, axis.figure.dpi_scale_trans)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=place, borderaxespad=0, **settings)
