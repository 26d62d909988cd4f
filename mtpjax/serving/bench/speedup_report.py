"""The report of runs with and without drafts: table, Markdown, JSON and picture."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import rich.table

from mtpjax.atomic import write_text
from mtpjax.console import narrow_table
from mtpjax.evaluation.plot_style import DEFAULT_FORMATS, GREY, colour, picture, picture_paths
from mtpjax.serving.bench.speedup import PUBLISHED, PUBLISHED_SOURCE, Run, Speedup

HEADINGS = (
    "at\nonce",
    "without\ntok/s",
    "MTP\ntok/s",
    "speed-up\n(95 %)",
    "AMD",
    "accept\nlength",
    "TTFT\nms",
    "ITL\nms",
)


def speedup_table(rows: Sequence[Speedup]) -> rich.table.Table:
    """Makes the table for the terminal, at most 80 columns wide."""
    table = narrow_table()
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Speedup) -> list[str]:
    ratio = f"{row.ratio.value:.2f} {row.ratio.low:.2f}-{row.ratio.high:.2f}"
    return [
        str(row.concurrency),
        f"{row.throughput[0]:.0f}",
        f"{row.throughput[1]:.0f}",
        ratio if row.num_pairs > 1 else f"{row.ratio.value:.2f}",
        _number(row.published, 2),
        _number(row.accept_length, 2),
        "/".join(_number(value, 0) for value in row.ttft),
        "/".join(_number(value, 1) for value in row.itl),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def notes(rows: Sequence[Speedup]) -> list[str]:
    """Says what the columns mean, and what limits the numbers."""
    result = [
        "speed-up: output tokens per second with drafts over those of the same requests with `speculative: false`, in "
        "turns; the interval is over pairs of runs",
        f"AMD: published speed-up ({PUBLISHED_SOURCE}); another model and another machine",
        "accept length: 1 + accepted drafts / verification passes; TTFT and ITL: means, without drafts / with MTP",
    ]
    if failed := sum(row.num_failed for row in rows):
        result.append(f"{failed} requests failed; their tokens do not count")
    if any(row.num_pairs == 1 for row in rows):
        result.append("one pair of runs has no interval: raise --repeats")
    if any(row.accept_length is None for row in rows):
        result.append("the server reports no accept length")
    if busy := [str(row.concurrency) for row in rows if row.is_client_busy]:
        result.append(f"the client itself was too busy at {', '.join(busy)} requests at once: latencies are too long")
    # A server that does not know the field answers all requests with drafts.
    if any((row.accept_length_without or 1) > 1.001 for row in rows):
        result.append("the server drafts in spite of `speculative: false`: this is no comparison")
    return result


def write_report(
    output, rows: Sequence[Speedup], runs: Sequence[Run], settings: dict[str, Any], formats: Sequence[str]
) -> list[pathlib.Path]:
    """Writes JSON, Markdown and pictures.

    Args:
        output: path of the files without suffix.
        rows: the comparisons.
        runs: the runs that they come from.
        settings: how they were measured: server, requests, machine.
        formats: formats of the pictures.

    Returns:
        The files of JSON and Markdown.
    """
    output = pathlib.Path(output)
    content = {
        "settings": settings,
        "published": {"source": PUBLISHED_SOURCE, "speedup": PUBLISHED},
        "speedups": [row.to_dict() for row in rows],
        "runs": [{**vars(run)} for run in runs],
    }
    files = [output.with_name(f"{output.name}.{suffix}") for suffix in ("json", "md")]
    write_text(files[0], json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_text(files[1], format_markdown(rows, settings))
    plot_speedup(output, rows, formats)
    return files


def format_markdown(rows: Sequence[Speedup], settings: dict[str, Any]) -> str:
    """Formats the comparison as Markdown: table, notes and settings."""
    lines = ["# Serving with and without MTP", ""]
    lines.append(f"| {' | '.join(heading.replace(chr(10), ' ') for heading in HEADINGS)} |")
    lines.append("|" + "--:|" * len(HEADINGS))
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    lines += ["", *(f"- {note}" for note in notes(rows)), "", "## Measured", ""]
    lines += [f"- {name.replace('_', ' ')}: {value}" for name, value in settings.items() if value not in (None, "")]
    return "\n".join(lines) + "\n"


def plot_speedup(path, rows: Sequence[Speedup], formats: Sequence[str] = DEFAULT_FORMATS) -> None:
    """Plots throughput and speed-up against concurrency.

    Args:
        path: the picture, as in `plot_style.picture_paths`.
        rows: the comparisons.
        formats: formats of a path without suffix.
    """
    if not picture_paths(path, formats):
        return
    with picture(path, (9.5, 3.8), formats) as figure:
        throughput, speed = figure.subplots(1, 2)
        places = [row.concurrency for row in rows]
        # Left: output tokens per second.
        for side, name in enumerate(("without drafts", "with MTP")):
            look = {"color": GREY if side == 0 else colour(0), "label": name}
            throughput.plot(places, [row.throughput[side] for row in rows], "o-", **look)
        throughput.set(title="output tokens per second", xlabel="requests at once", yscale="log")
        # Right: the speed-up with its interval, beside the published one at the same concurrencies.
        below = [max(row.ratio.value - row.ratio.low, 0) for row in rows]
        above = [max(row.ratio.high - row.ratio.value, 0) for row in rows]
        ratios = [row.ratio.value for row in rows]
        speed.errorbar(places, ratios, [below, above], fmt="o-", color=colour(0), label="measured (95 % over pairs)")
        published = [(row.concurrency, row.published) for row in rows if row.published is not None]
        if published:
            speed.plot(*zip(*published, strict=True), "s--", color=GREY, label=PUBLISHED_SOURCE)
        speed.axhline(1, color="black", linewidth=0.8)
        speed.set(title="speed-up by MTP", xlabel="requests at once", ylabel="ratio")
        speed.set_ylim(bottom=min(0.9, *(value - error for value, error in zip(ratios, below, strict=True))))
        for axes in (throughput, speed):
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, [str(place) for place in places])
            axes.legend()
