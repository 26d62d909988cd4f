"""Writes an ablation's report, which consists of tables, `cells.csv` and `recommendation.md`."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from mtpjax.ablation.advice import advise, group_rows
from mtpjax.ablation.cells import Row, Settings, cell_of, format_rates, format_ratio, parts_cost, round_cost
from mtpjax.ablation.comparison import format_comparison
from mtpjax.ablation.drafters import MTP, AblatedDrafter
from mtpjax.ablation.workload import Workload
from mtpjax.console import narrow_table, print_parts
from mtpjax.evaluation.trust import mark, verdict
from mtpjax.messages import count_of


def rows_verdict(rows: Sequence[Row]) -> str:
    """Returns a line that says how many rows can be trusted, and why the others cannot."""
    return verdict([row["problem"] for row in rows], max(row["waited"] for row in rows))


def format_recommendation(
    rows: list[Row],
    reasons: dict[str, int],
    workload: Workload,
    settings: Settings,
    environment: dict[str, Any],
    methods: Sequence[AblatedDrafter] = (MTP,),
) -> str:
    """Formats `recommendation.md`. `reasons` counts the combinations that were left out for each reason."""
    # First say whether the measurements can be trusted. Then give the advice for each batch size and temperature, with
    # its certainty and the flags to pass.
    lines, advices = ["# Which draft settings to use", "", rows_verdict(rows), ""], advise(rows)
    drafter_flags = {method.name: method.flags for method in methods}
    for advice in advices:
        lines.append(f"- **batch {advice.batch_size}, temperature {advice.temperature:g}**: {advice.text}")
        if advice.certainty:
            lines.append(f"  - {advice.certainty}")
        if advice.best is not None:
            cell = cell_of(advice.best)
            lines.append(f"  - `{' '.join(filter(None, [drafter_flags[cell.drafter], cell.flags]))}`")
    plain_cases = [
        f"batch {advice.batch_size} at temperature {advice.temperature:g}"
        for advice in advices
        if advice.is_known and not advice.best
    ]
    if any(advice.is_known for advice in advices):
        lines += ["", "When not to speculate: " + (", ".join(plain_cases) or "in none of the known cases") + "."]
    # Then list the settings that are never advised, because their rule is lossy or their texts differ.
    lossy = [row for row in rows if row["lossless"] == "lossy"]
    if lossy:
        lines += ["", "## Lossy settings, which change the distribution of the text and are never advised", ""]
        lines += [f"- {cell_of(row).name}: {format_summary(row)}" for row in lossy]
    differing = [row for row in rows if row["lossless"] == "DIFFERS"]
    if differing:
        lines += ["", "## Texts that differ from plain decoding", ""]
        lines += [
            f"- {cell_of(row).name}: {row['differing_rows']} of {row['compared_rows']} texts" for row in differing
        ]
    # Then compare the drafters.
    lines += format_comparison(rows, methods)
    # Last, describe how the cells were measured, including everything that limits the meaning of the numbers.
    lines += ["", "## Measured", ""]
    lines += [
        f"- {count_of(len(rows), 'cell')}, {count_of(settings.repeats, 'repeat')}, "
        f"{count_of(settings.max_new_tokens, 'new token')}; {workload.source}",
        f"- {environment['device']}, {environment['processor']}",
        f"- jax {environment['jax']}, model {environment['model']}",
        *(f"- drafter {each.name}: {each.kind}, {each.digest}, {each.path}" for each in methods if each.path),
        "- ratio: tokens/s relative to plain decoding with the same prompts, batch and temperature, measured "
        "alternately; 95 % intervals",
        "- ideal: accept length divided by the cost of a round's passes (verifying and drafting) in plain rounds, "
        "without the cost of acceptance and sampling",
    ]
    # A single batch of prompts cannot be resampled, so its interval does not include the variation between prompts.
    single_batch_sizes = sorted(size for size in settings.batch_sizes if len(workload.batches(size)) == 1)
    if single_batch_sizes:
        sizes = ", ".join(map(str, single_batch_sizes))
        lines.append(f"- at batch {sizes}, all prompts are one batch: intervals include only the variation of timings")
    lines += [f"- {cell_of(row).name}: {row['problem']}" for row in rows if row["problem"]]
    lines += [f"- left out: {reason} ({count_of(count, 'cell')})" for reason, count in reasons.items()]
    return "\n".join(lines) + "\n"


CELL_COLUMNS = ("drafter", "batch_size", "temperature", "num_steps", "topk", "num_nodes", "acceptance")


def to_csv(rows: Iterable[Row]) -> str:
    """Formats `cells.csv` with one line per cell, per-level rates separated by spaces, and costs in milliseconds."""

    def estimate(row: Row, name: str) -> Row:
        return {name: row[name]["value"], f"{name}_low": row[name]["low"], f"{name}_high": row[name]["high"]}

    def numbers(values: Row) -> Row:
        return {name: "" if value is None else f"{value:.5g}" for name, value in values.items()}

    # The order of the entries determines the order of the columns.
    lines = []
    for row in rows:
        lengths = {**estimate(row, "accept_length"), "accept_length_macro": row["accept_length_macro"]["value"]}
        speeds = {name: row[name] for name in ("tokens_per_second", "plain_tokens_per_second")}
        speeds |= {**estimate(row, "ratio"), "ideal_ratio": row["ideal_ratio"]}
        speeds |= {"round_steps": round_cost(row), "parts_steps": parts_cost(row)}
        speeds |= {f"{part}_ms": 1e3 * row["costs"][part] for part in ("plain", "verify", "parts")}
        lines.append(
            {name: row["cell"][name] for name in CELL_COLUMNS}
            | numbers(lengths)
            | {name: " ".join(_format_rate(rate) for rate in row[name]) for name in ("conditional", "survival")}
            | numbers(speeds)
            | {"lossless": row["lossless"], "problem": row["problem"] or ""}
        )
    file = io.StringIO()
    writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _format_rate(rate: dict[str, float | None]) -> str:
    return "" if rate["value"] is None else f"{rate['value']:.4f}"


def print_cells(console, rows: list[Row]) -> None:
    """Prints whether the cells can be trusted, and an 80-column table for each batch size and temperature."""
    from rich.markup import escape

    print_parts(console, [rows_verdict(rows)])
    # If there are drafters other than MTP modules, a column for the drafter replaces the column for tokens/s.
    has_drafters = any(row["cell"]["drafter"] != MTP.name for row in rows)
    for (batch_size, temperature), group in group_rows(rows).items():
        # Every cell also measures plain decoding. The group's first cell is trusted if any cell in the group is.
        plain = f"plain {group[0]['plain_tokens_per_second']:.0f} tokens/s{mark(group[0]['problem'])}"
        table = narrow_table(f"batch {batch_size}, temperature {temperature:g}: {plain}")
        headings = ["depth", "topk/\nnodes", "rule", "accept\nlength", "survival", "ratio (95 %)", "ideal"]
        headings.insert(*((0, "drafter") if has_drafters else (5, "tokens/s")))
        # Only drafter names and survival rates may wrap, because the number of survival rates grows with the depth.
        for heading in headings:
            fixed = heading not in ("survival", "drafter")
            justify = "left" if heading == "drafter" else "right"
            width = None if fixed else len(heading)
            table.add_column(heading, justify=justify, overflow="fold", no_wrap=fixed, min_width=width)
        for row in group:
            cell, ratio = cell_of(row), row["ratio"]
            values = [
                str(cell.num_steps),
                f"{cell.topk}/{cell.num_nodes}",
                cell.acceptance + {"lossy": " *", "DIFFERS": " !"}.get(row["lossless"], ""),
                f"{row['accept_length']['value']:.2f}",
                format_rates(row["survival"]),
                f"{ratio['value']:.2f} {ratio['low']:.2f}-{ratio['high']:.2f}{mark(row['problem'])}",
                f"{row['ideal_ratio']:.2f}",
            ]
            values.insert(*((0, escape(cell.drafter)) if has_drafters else (5, f"{row['tokens_per_second']:.0f}")))
            table.add_row(*values)
        console.print(table)
    # Explain the marks in the rule columns; the verdict above explains the question mark.
    kinds = {row["lossless"] for row in rows}
    if "lossy" in kinds:
        console.print("* lossy: changes the distribution of the text")
    if "DIFFERS" in kinds:
        console.print("! texts DIFFER from plain decoding", style="bold red")


def format_summary(row: Row) -> str:
    """Formats a row's accept length, ratio with interval, and result of comparing its texts, as one line."""
    return f"accept length {row['accept_length']['value']:.2f}, ratio {format_ratio(row)}, {row['lossless']}"
