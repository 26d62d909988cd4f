"""The report of an ablation: advice, tables, `cells.csv` and `recommendation.md`.

A row is a line of `cells.jsonl`.
"""

import csv
import dataclasses
import io
from collections.abc import Iterable, Sequence
from typing import Any

from mtpjax.ablation.cells import (
    Cell,
    Group,
    Row,
    Settings,
    by_speed,
    format_rates,
    format_ratio,
    group_by_batch_and_temperature,
    parts_cost,
    round_cost,
)
from mtpjax.ablation.comparison import format_comparison
from mtpjax.ablation.drafters import MTP, AblatedDrafter
from mtpjax.ablation.workload import Workload
from mtpjax.console import narrow_table, print_parts
from mtpjax.evaluation.trust import mark, verdict
from mtpjax.messages import count_of


def cell_of(row: Row) -> Cell:
    return Cell(**row["cell"])


def group_rows(rows: Iterable[Row]) -> dict[Group, list[Row]]:
    """Groups rows; a group starts with the trusted rows, and both parts are sorted fastest first."""
    return group_by_batch_and_temperature(sorted(rows, key=by_speed))


@dataclasses.dataclass(frozen=True)
class Advice:
    """The advice for one batch size and temperature.

    Attributes:
        batch_size: the batch size.
        temperature: the temperature.
        best: the row of the setting to use; None where plain decoding is best, or nothing is known.
        text: the advice in words.
        certainty: how certain it is, in words.
        is_known: at least one exact setting has a measurement that can be trusted.
    """

    batch_size: int
    temperature: float
    best: Row | None
    text: str
    certainty: str
    is_known: bool = True


def advise(rows: Iterable[Row]) -> list[Advice]:
    """Chooses the fastest exact setting of each batch size and temperature.

    A setting is advised only if its measurement can be trusted, the interval of its ratio is above 1, and its texts
    passed their check.
    """
    result = []
    for (batch_size, temperature), group in group_rows(rows).items():
        # Lossy rules change the distribution, so they are reported but never advised.
        exact = [row for row in group if row["lossless"] not in ("lossy", "DIFFERS")]
        if not exact:
            result.append(Advice(batch_size, temperature, None, "no exact setting was measured", "", is_known=False))
            continue
        fastest, trusted = exact[0], [row for row in exact if not row["problem"]]
        if not trusted:
            text = "not known: no measurement can be trusted; measure again"
            why = f"the fastest, {cell_of(fastest).setting}, has ratio to plain {format_ratio(fastest)}: "
            why += fastest["problem"]
            result.append(Advice(batch_size, temperature, None, text, why, is_known=False))
            continue
        # Speculation pays only if the lower end of the ratio's interval is above 1.
        paying = [row for row in trusted if row["ratio"]["low"] > 1]
        left_out = len(exact) - len(trusted)
        also = f"; not compared, because they cannot be trusted: {left_out}" if left_out else ""
        if not paying:
            is_slower = fastest["ratio"]["value"] <= 1
            text = "do not speculate" if is_slower else "speculation is not shown to pay: decode plainly"
            why = f"the fastest, {cell_of(fastest).setting}, has ratio to plain {format_ratio(fastest)}"
            result.append(Advice(batch_size, temperature, None, text, why + also))
            continue
        best = paying[0]
        length, ratio = best["accept_length"]["value"], format_ratio(best)
        text = f"{cell_of(best).setting}: accept length {length:.2f}, ratio to plain {ratio}"
        others = [row for row in trusted if row is not best]
        result.append(Advice(batch_size, temperature, best, text, _certainty(best, others) + also))
    return result


def rows_verdict(rows: Sequence[Row]) -> str:
    """Returns one line about which rows can be trusted."""
    return verdict([row["problem"] for row in rows], max(row["waited"] for row in rows))


def _certainty(best: Row, others: list[Row]) -> str:
    """Compares the best setting with the runner-up by their intervals."""
    if not others:
        return "no other setting to compare with"
    # Intervals that do not overlap are clear. A best interval above the runner-up's value is probable.
    second = others[0]
    measured = f"{cell_of(second).setting}: {format_ratio(second)}"
    if best["ratio"]["low"] > second["ratio"]["high"]:
        return f"clearly faster than {measured}"
    if best["ratio"]["low"] > second["ratio"]["value"]:
        return f"probably faster than {measured}"
    alike = [row for row in others if row["ratio"]["value"] >= best["ratio"]["low"]]
    return f"not distinguishable from {measured}" + (f", nor from {len(alike) - 1} more" if len(alike) > 1 else "")


def format_recommendation(
    rows: list[Row],
    reasons: dict[str, int],
    workload: Workload,
    settings: Settings,
    environment: dict[str, Any],
    methods: Sequence[AblatedDrafter] = (MTP,),
) -> str:
    """Writes `recommendation.md`. `reasons` are numbers of combinations left out, by reason."""
    # First whether the measurements can be trusted. Then the advice: what to use where, how certain it is, and the
    # flags.
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
    # Then what the advice leaves out: lossy rules, and settings whose texts differ from plain decoding.
    lossy = [row for row in rows if row["lossless"] == "lossy"]
    if lossy:
        lines += ["", "## Lossy settings, which change the text's distribution and are never advised", ""]
        lines += [f"- {cell_of(row).name}: {format_summary(row)}" for row in lossy]
    differing = [row for row in rows if row["lossless"] == "DIFFERS"]
    if differing:
        lines += ["", "## Texts that differ from plain decoding", ""]
        lines += [
            f"- {cell_of(row).name}: {row['differing_rows']} of {row['compared_rows']} texts" for row in differing
        ]
    # Then the comparison of the drafters.
    lines += format_comparison(rows, methods)
    # Last how it was measured, with everything that limits what the numbers mean.
    lines += ["", "## Measured", ""]
    lines += [
        f"- {count_of(len(rows), 'cell')}, {count_of(settings.repeats, 'repeat')}, "
        f"{count_of(settings.max_new_tokens, 'new token')}; {workload.source}",
        f"- {environment['device']}, {environment['processor']}",
        f"- jax {environment['jax']}, model {environment['model']}",
        *(
            f"- drafter {method.name}: {method.kind}, {method.digest}, {method.path}"
            for method in methods
            if method.path
        ),
        "- ratio: tokens/s over plain decoding of the same prompts, batch and temperature, in turns; 95 % intervals",
        "- ideal: accept length over the cost of a round's passes (verifying and drafting) in plain rounds; without "
        "the cost of acceptance and sampling",
    ]
    # A single batch of prompts cannot be resampled, so its interval does not cover other prompts.
    single_batch_sizes = sorted(size for size in settings.batch_sizes if len(workload.batches(size)) == 1)
    if single_batch_sizes:
        sizes = ", ".join(map(str, single_batch_sizes))
        lines.append(f"- the prompts are one batch of {sizes}: intervals there cover timing, not other prompts")
    lines += [f"- {cell_of(row).name}: {row['problem']}" for row in rows if row["problem"]]
    lines += [f"- left out: {reason} ({count_of(count, 'cell')})" for reason, count in reasons.items()]
    return "\n".join(lines) + "\n"


CELL_COLUMNS = ("drafter", "batch_size", "temperature", "num_steps", "topk", "num_nodes", "acceptance")


def to_csv(rows: Iterable[Row]) -> str:
    """Formats `cells.csv`, a line per cell; rates by level are separated by spaces, and costs are milliseconds."""

    def estimate(row: Row, name: str) -> Row:
        return {name: row[name]["value"], f"{name}_low": row[name]["low"], f"{name}_high": row[name]["high"]}

    def numbers(values: Row) -> Row:
        return {name: "" if value is None else f"{value:.5g}" for name, value in values.items()}

    # The order of the entries is that of the columns.
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
    """Prints whether the cells can be trusted, and a table of 80 columns per batch size and temperature."""
    from rich.markup import escape

    print_parts(console, [rows_verdict(rows)])
    # A column names the drafter where there are others than MTP modules; it takes the place of the tokens/s.
    has_drafters = any(row["cell"]["drafter"] != MTP.name for row in rows)
    for (batch_size, temperature), group in group_rows(rows).items():
        # Every cell has measured plain decoding; the group's first one is trusted if any is.
        plain = f"plain {group[0]['plain_tokens_per_second']:.0f} tokens/s{mark(group[0]['problem'])}"
        table = narrow_table(f"batch {batch_size}, temperature {temperature:g}: {plain}")
        headings = ["depth", "topk/\nnodes", "rule", "accept\nlength", "survival", "ratio (95 %)", "ideal"]
        headings.insert(*((0, "drafter") if has_drafters else (5, "tokens/s")))
        # Only the survival rates may wrap, because their number grows with the depth, and the names of drafters.
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
    # Explain the marks of the columns for rule; the verdict above explains the question mark.
    kinds = {row["lossless"] for row in rows}
    if "lossy" in kinds:
        console.print("* lossy: changes the distribution of the text")
    if "DIFFERS" in kinds:
        console.print("! texts DIFFER from plain decoding", style="bold red")


def format_summary(row: Row) -> str:
    """Formats a row in a line: accept length, ratio with its interval, and the check of its texts."""
    return f"accept length {row['accept_length']['value']:.2f}, ratio {format_ratio(row)}, {row['lossless']}"
