"""Reports runs with and without drafts as a table, Markdown, JSON and a plot."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import rich.table

from mtpjax.atomic import write_text
from mtpjax.console import narrow_table
from mtpjax.evaluation.plot_style import GREY, colour, draw_picture, legend_below, plain_log_ticks
from mtpjax.evaluation.plots import plot_speed_ups
from mtpjax.evaluation.trust import mark, verdict
from mtpjax.messages import count_of
from mtpjax.serving.bench.speedup import PUBLISHED_SOURCE, Run, Speedup

Reference = Mapping[int, float]  # published speed-ups by concurrency; if empty, none are shown


def speedup_table(rows: Sequence[Speedup], reference: Reference) -> rich.table.Table:
    """Makes the table for the terminal, at most 80 columns wide."""
    table = narrow_table()
    for heading in _headings(reference):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, reference))
    return table


def _headings(reference: Reference) -> list[str]:
    published = ["AMD"] if reference else []
    speeds = ["at\nonce", "without\ntok/s", "MTP\ntok/s", "speed-up\n(95 %)"]
    return [*speeds, *published, "accept\nlength", "TTFT\nms", "ITL\nms"]


def _cells(row: Speedup, reference: Reference) -> list[str]:
    interval = f" {row.ratio.low:.2f}-{row.ratio.high:.2f}" if row.num_pairs > 1 else ""
    published = [_number(reference.get(row.concurrency), 2)] if reference else []
    return [
        str(row.concurrency),
        f"{row.throughput[0]:.0f}",
        f"{row.throughput[1]:.0f}",
        f"{row.ratio.value:.2f}{interval}{mark(row.problem)}",
        *published,
        _number(row.accept_length, 2),
        "/".join(_number(value, 0) for value in row.ttft),
        "/".join(_number(value, 1) for value in row.itl),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def rows_verdict(rows: Sequence[Speedup]) -> str:
    """Returns the line above the table, which says which speed-ups can be trusted."""
    return verdict([row.problem for row in rows], max(row.waited for row in rows))


def notes(rows: Sequence[Speedup], reference: Reference) -> list[str]:
    """Explains the columns, and the limitations of the numbers."""
    result = [
        "speed-up: output tokens per second with drafts, divided by those without drafts (`speculative: false`), for "
        "the same requests in alternating runs; the interval comes from resampling pairs of runs",
        "accept length: 1 + accepted drafts / verification passes; TTFT and ITL: means, without drafts / with MTP",
    ]
    if reference:
        result.insert(1, f"AMD: published speed-up ({PUBLISHED_SOURCE}); a different model on a different machine")
    if failed := sum(row.num_failed for row in rows):
        result.append(f"{count_of(failed, 'request')} failed; their tokens do not count")
    result += [f"{count_of(row.concurrency, 'request')} at once: {row.problem}" for row in rows if row.problem]
    if any(row.num_pairs == 1 for row in rows):
        result.append("a single pair of runs gives no interval: raise --repeats")
    if any(row.accept_length is None for row in rows):
        result.append("the server reports no accept length")
    if busy := [str(row.concurrency) for row in rows if row.is_client_busy]:
        result.append(
            f"the client was overloaded at {', '.join(busy)} requests at once: the measured latencies are too long"
        )
    # A server that does not know the field `speculative` uses drafts for all requests.
    if any((row.accept_length_without or 1) > 1.001 for row in rows):
        result.append("the server drafts despite `speculative: false`, so the comparison is not valid")
    return result


def write_report(
    output,
    rows: Sequence[Speedup],
    runs: Sequence[Run],
    settings: dict[str, Any],
    formats: Sequence[str],
    reference: Reference,
) -> list[pathlib.Path]:
    """Writes JSON, Markdown and plots, and returns the paths of the JSON and Markdown files.

    Args:
        output: path of the files without suffix.
        rows: the comparisons.
        runs: the runs from which the comparisons were made.
        settings: how the runs were measured (server, requests, machine).
        formats: formats of the plots.
        reference: published speed-ups to show next to them.
    """
    output = pathlib.Path(output)
    content = {
        "settings": settings,
        **({"published": {"source": PUBLISHED_SOURCE, "speedup": reference}} if reference else {}),
        "speedups": [row.to_dict() for row in rows],
        "runs": [{**vars(run)} for run in runs],
    }
    files = [output.with_name(f"{output.name}.{suffix}") for suffix in ("json", "md")]
    write_text(files[0], json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_text(files[1], format_markdown(rows, settings, reference))
    # The client does not know the server's device; the address and the client's processor are all it can report.
    title = f"Serving {settings.get('model')} at {settings.get('url')}\n"
    title += f"client: {settings.get('client_cpu')}, {settings.get('client_cores')} cores"
    plot_speedup(output, rows, formats, reference, title=title)
    return files


def format_markdown(rows: Sequence[Speedup], settings: dict[str, Any], reference: Reference) -> str:
    """Formats the comparison as Markdown, with a table, notes and settings."""
    lines, headings = ["# Serving with and without MTP", "", rows_verdict(rows), ""], _headings(reference)
    lines.append(f"| {' | '.join(heading.replace(chr(10), ' ') for heading in headings)} |")
    lines.append("|" + "--:|" * len(headings))
    lines += [f"| {' | '.join(_cells(row, reference))} |" for row in rows]
    lines += ["", *(f"- {note}" for note in notes(rows, reference)), "", "## Measured", ""]
    lines += [f"- {name.replace('_', ' ')}: {value}" for name, value in settings.items() if value not in (None, "")]
    return "\n".join(lines) + "\n"


def plot_speedup(
    path, rows: Sequence[Speedup], formats: Sequence[str], reference: Reference, *, title: str = ""
) -> None:
    """Plots throughput and speed-up against concurrency.

    Args:
        rows: the comparisons.
        reference: published speed-ups to show next to them.
    """

    def draw(figure):
        throughput, speed = figure.subplots(1, 2)
        places = [row.concurrency for row in rows]
        # Left: output tokens per second.
        for side, name in enumerate(("without drafts", "with MTP")):
            look = {"color": GREY if side == 0 else colour(0), "label": name}
            throughput.plot(places, [row.throughput[side] for row in rows], "o-", **look)
        throughput.set(title="throughput", xlabel="requests at once", ylabel="output tokens per second", yscale="log")
        plain_log_ticks(throughput.yaxis, [value for row in rows for value in row.throughput])
        # Right: the speed-up with its interval, and published ones at the same concurrencies.
        points = [(row.concurrency, row.ratio, row.problem) for row in rows]
        plot_speed_ups(speed, points, label="measured (95 % over pairs of runs)", color=colour(0))
        published = [(place, reference[place]) for place in places if place in reference]
        if published:
            speed.plot(*zip(*published, strict=True), "s--", color=GREY, label=PUBLISHED_SOURCE)
        speed.axhline(1, color="black", linewidth=0.8, label="without drafts")
        speed.set(title="speed-up by MTP", xlabel="requests at once", ylabel="ratio of throughputs")
        speed.set_ylim(bottom=min(0.9, speed.get_ylim()[0]))
        for axes in (throughput, speed):
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, [str(place) for place in places])
            legend_below(axes)

    draw_picture(path, (9.5, 4.2), draw, formats, title=title)
