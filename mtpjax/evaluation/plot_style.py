"""The style of all pictures of measurements, and how they are written.

Every picture is drawn inside `picture`, which gives a figure with the style and writes it as PNG, SVG or PDF.
matplotlib is imported inside, since it takes long to load. Without it nothing is drawn, and a warning says so once.
"""

import contextlib
import functools
import importlib.util
import logging
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from mtpjax.errors import UsageError, install_extra

log = logging.getLogger(__name__)
FORMATS = ("png", "svg", "pdf")
DEFAULT_FORMATS = ("png", "svg")  # one to look at anywhere, one that scales
# The palette of Okabe and Ito, whose colours colour-blind readers can distinguish.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
GREY = "#777777"
# matplotlib's settings for every picture. Type 42 embeds fonts in PDF files as journals ask for; the salt makes the
# same picture the same SVG file.
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GREY,
    "grid.alpha": 0.2,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.markersize": 4,
    "errorbar.capsize": 3,
    "figure.facecolor": "white",
    "savefig.dpi": 120,
    "pdf.fonttype": 42,
    "svg.hashsalt": "mtpjax",
}
# Files without a date: the same figure gives the same bytes.
_METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def picture_paths(path, formats: Sequence[str] = DEFAULT_FORMATS) -> list[pathlib.Path]:
    """Lists the files of a picture.

    Args:
        path: the picture. A suffix decides its only format; without one, there is a file per format.
        formats: of "png", "svg" and "pdf".

    Returns:
        The files; none without matplotlib.

    Raises:
        ValueError: a format or suffix is not supported.
    """
    path = pathlib.Path(path)
    wanted = [path.suffix[1:]] if path.suffix else list(dict.fromkeys(formats))
    for each in wanted:
        if each not in FORMATS:
            name = f"the suffix of {path}" if path.suffix else "a picture's format"
            raise ValueError(f"{name} must be {', '.join(FORMATS)}, not '{each}'")
    if wanted and not _has_matplotlib():
        return []
    return [path] if path.suffix else [path.with_name(f"{path.name}.{each}") for each in wanted]


@functools.cache
def _has_matplotlib() -> bool:
    """Returns whether matplotlib is installed; the first call warns if not."""
    try:
        require_matplotlib()
    except UsageError as error:
        log.warning("no pictures are drawn: %s", error)
        return False
    return True


def require_matplotlib() -> None:
    """Raises `UsageError` if matplotlib is missing, for commands that were asked for a picture."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"matplotlib is missing: {install_extra('plots')}")


@contextlib.contextmanager
def picture(path, size: tuple[float, float], formats: Sequence[str] = DEFAULT_FORMATS) -> Iterator[Any]:
    """Gives a figure in the common style, and writes it when the block ends.

    Args:
        path: as in `picture_paths`.
        size: width and height in inches.
        formats: as in `picture_paths`.

    Yields:
        The `matplotlib.figure.Figure`.

    Raises:
        ValueError: a format or suffix is not supported.
        UsageError: matplotlib is missing.
    """
    files = picture_paths(path, formats)
    require_matplotlib()
    import matplotlib
    import matplotlib.figure

    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
        yield figure
        for file in files:
            figure.savefig(file, metadata=_METADATA.get(file.suffix[1:]))


def level_colour(level: int) -> str:
    """Returns the colour of a draft level; level 0 is the trunk, which is black."""
    return colour(level - 1) if level else "black"


def colour(number: int) -> str:
    """Returns the colour of series `number`, from 0; they repeat after the sixth."""
    return COLOURS[number % len(COLOURS)]
