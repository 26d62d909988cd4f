"""The sections of an ablation's report that compare drafters: rates, categories of prompts, and cost of training.

A row is a line of `cells.jsonl`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mtpjax.ablation.cells import Cell, Group, Row, by_speed, group_by_batch_and_temperature
from mtpjax.ablation.drafters import AblatedDrafter
from mtpjax.evaluation.trust import mark

HEADING = "The fastest setting of each drafter, an exact one where there is one."


def best_of_each_drafter(rows: Iterable[Row]) -> dict[Group, list[Row]]:
    """Picks the fastest setting of each drafter, among its exact settings and trusted measurements if it has any.

    Returns a row per drafter, fastest first, for each batch size and temperature.
    """
    best: dict[Group, list[Row]] = {}
    for group, of_group in group_by_batch_and_temperature(rows).items():
        # Exact settings before lossy ones, among them trusted measurements before others, and then the fastest first.
        # Each drafter keeps its first row.
        ordered = sorted(of_group, key=lambda row: (row["lossless"] in ("lossy", "DIFFERS"), *by_speed(row)))
        firsts = {row["cell"]["drafter"]: row for row in reversed(ordered)}
        best[group] = sorted(firsts.values(), key=by_speed)
    return best


def round_cost(row: Row) -> float:
    """Returns the measured cost of a round, in plain rounds: accept length over ratio."""
    return row["accept_length"]["value"] / row["ratio"]["value"]


def parts_cost(row: Row) -> float:
    """Returns the cost of a round's passes alone, in plain rounds."""
    return row["costs"]["parts"] / row["costs"]["plain"]


def format_comparison(rows: list[Row], methods: Sequence[AblatedDrafter]) -> list[str]:
    """Writes the sections "Drafters", "Categories of prompts" and "Training" of `recommendation.md`, if not empty."""
    # Every setting is in `cells.csv`. The tables compare drafters, so each drafter has one row in them.
    best = best_of_each_drafter(rows)
    lines: list[str] = []
    if len(methods) > 1:
        lines += ["", "## Drafters", "", HEADING, *_drafter_tables(best)]
    if any(row["categories"] for row in rows):
        lines += ["", "## Categories of prompts", "", HEADING, *_category_tables(best)]
    if any(method.training for method in methods):
        lines += ["", "## Training", "", *_training_table(methods)]
    return lines


def _drafter_tables(best: dict[Group, list[Row]]) -> Iterator[str]:
    headings = ("drafter", "setting", "accept length (95 %)", "accepted at least k drafts, k = 1, 2, ...")
    headings += ("round in plain rounds", "of these its passes", "ratio to plain (95 %)", "ideal", "text")
    for (batch_size, temperature), group in best.items():
        yield from ("", f"Batch {batch_size}, temperature {temperature:g}:", "")
        body = []
        for row in group:
            cell = Cell(**row["cell"])
            # The difference of the two costs is what acceptance, commit and the loop itself take.
            costs = (f"{round_cost(row):.2f}", f"{parts_cost(row):.2f}")
            speed = (format_ratio(row), f"{row['ideal_ratio']:.2f}", row["lossless"])
            setting = f"{cell.shape_text}, {cell.acceptance}"
            lengths = (format_interval(row["accept_length"]), format_rates(row["survival"]))
            body.append((cell.drafter, setting, *lengths, *costs, *speed))
        yield from _table(headings, body)


def _category_tables(best: dict[Group, list[Row]]) -> Iterator[str]:
    headings = ("category", "prompts", "drafter", "accept length (95 %)", "accepted at least k drafts")
    headings += ("ratio to plain (95 %)", "ideal")
    for (batch_size, temperature), group in best.items():
        yield from ("", f"Batch {batch_size}, temperature {temperature:g}:", "")
        body = []
        # The drafters of a category stand below each other.
        for category in dict.fromkeys(name for row in group for name in row["categories"]):
            for row in (row for row in group if category in row["categories"]):
                rates = row["categories"][category]
                # Batches of several prompts mix the categories, so that their time has no parts.
                ratio = "-" if rates["ratio"] is None else format_ratio(rates)
                lengths = (format_interval(rates["accept_length"]), format_rates(rates["survival"]))
                speed = (ratio, f"{rates['ideal_ratio']:.2f}")
                body.append((category, str(rates["prompts"]), row["cell"]["drafter"], *lengths, *speed))
        yield from _table(headings, body)


def _training_table(methods: Sequence[AblatedDrafter]) -> Iterator[str]:
    # The cells of drafters that are not training runs are empty.
    body = []
    for method in methods:
        cost = method.training
        numbers = ("", "", "", "")
        if cost is not None:
            seconds = (f"{cost.seconds_per_update:.3g}", f"{cost.seconds:.0f}")
            numbers = (str(cost.updates), str(cost.tokens), *seconds)
        body.append((method.name, method.kind, *numbers))
    yield from _table(("drafter", "kind", "updates", "tokens", "seconds per update", "seconds of the run"), body)
    # Longer training alone makes a drafter better, so a comparison needs equal tokens.
    if len({method.training.tokens for method in methods if method.training}) > 1:
        yield from ("", "The drafters were not trained on equally many tokens.")


def _table(headings: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for cells in body:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def format_interval(estimate: dict[str, float]) -> str:
    """Formats an estimate with its 95 % interval, such as "1.50 (1.45-1.55)"."""
    return f"{estimate['value']:.2f} ({estimate['low']:.2f}-{estimate['high']:.2f})"


def format_ratio(row: dict[str, Any]) -> str:
    """Formats the ratio of a row, or of one of its categories, with its interval, marked if it cannot be trusted."""
    return format_interval(row["ratio"]) + mark(row["problem"])


def format_rates(rates: Iterable[dict[str, float | None]]) -> str:
    """Formats rates by draft position, such as ".80 .64"; a dash for positions without one."""
    return " ".join("-" if rate["value"] is None else f"{rate['value']:.2f}".removeprefix("0") for rate in rates)
