"""Writes the report sections that compare drafters by rates, prompt categories and training cost."""

from collections.abc import Iterable, Iterator, Sequence

from mtpjax.ablation.cells import (
    Group,
    Row,
    by_speed,
    cell_of,
    format_interval,
    format_rates,
    format_ratio,
    group_by_batch_and_temperature,
    parts_cost,
    round_cost,
)
from mtpjax.ablation.drafters import AblatedDrafter

HEADING = "The fastest exact setting of each drafter, or its fastest lossy setting if it has no exact one."
DRAFTER_COLUMNS = ("drafter", "setting", "accept length (95 %)", "accepted at least k drafts, k = 1, 2, ...")
DRAFTER_COLUMNS += ("round in plain rounds", "passes in plain rounds", "ratio to plain (95 %)", "ideal", "text")
CATEGORY_COLUMNS = ("category", "prompts", "drafter", "accept length (95 %)", "accepted at least k drafts")
CATEGORY_COLUMNS += ("ratio to plain (95 %)", "ideal")


def best_of_each_drafter(rows: Iterable[Row]) -> dict[Group, list[Row]]:
    """Picks the fastest setting of each drafter, preferring exact settings first and trusted measurements second.

    Returns one row per drafter, sorted by speed, for each batch size and temperature.
    """
    best: dict[Group, list[Row]] = {}
    for group, of_group in group_by_batch_and_temperature(rows).items():
        # Sort exact settings before lossy ones, then trusted measurements before others, then by speed. Each drafter
        # keeps its first row.
        ordered = sorted(of_group, key=lambda row: (row["lossless"] in ("lossy", "DIFFERS"), *by_speed(row)))
        firsts = {row["cell"]["drafter"]: row for row in reversed(ordered)}
        best[group] = sorted(firsts.values(), key=by_speed)
    return best


def format_comparison(rows: list[Row], methods: Sequence[AblatedDrafter]) -> list[str]:
    """Formats the sections "Drafters", "Categories of prompts" and "Training" of `recommendation.md`, unless empty."""
    # `cells.csv` lists every setting. These tables compare the drafters and have one row for each.
    best = best_of_each_drafter(rows)
    lines: list[str] = []
    if len(methods) > 1:
        lines += ["", "## Drafters", "", HEADING, *_group_tables(best, DRAFTER_COLUMNS, _drafter_cells)]
    if any(row["categories"] for row in rows):
        lines += ["", "## Categories of prompts", "", HEADING, *_group_tables(best, CATEGORY_COLUMNS, _category_cells)]
    if any(method.training for method in methods):
        lines += ["", "## Training", "", *_training_table(methods)]
    return lines


def _group_tables(best: dict[Group, list[Row]], headings: Sequence[str], cells_of) -> Iterator[str]:
    for (batch_size, temperature), group in best.items():
        yield from ("", f"Batch {batch_size}, temperature {temperature:g}:", "", *_table(headings, cells_of(group)))


def _drafter_cells(group: list[Row]) -> Iterator[Sequence[str]]:
    for row in group:
        cell = cell_of(row)
        lengths = (format_interval(row["accept_length"]), format_rates(row["survival"]))
        # The difference between the two costs is the cost of acceptance, commit and the loop itself.
        costs = (f"{round_cost(row):.2f}", f"{parts_cost(row):.2f}")
        speed = (format_ratio(row), f"{row['ideal_ratio']:.2f}", row["lossless"])
        yield cell.drafter, f"{cell.shape_text}, {cell.acceptance}", *lengths, *costs, *speed


def _category_cells(group: list[Row]) -> Iterator[Sequence[str]]:
    # List the rows by category, with one row per drafter.
    for category in dict.fromkeys(name for row in group for name in row["categories"]):
        for row in (row for row in group if category in row["categories"]):
            rates = row["categories"][category]
            lengths = (format_interval(rates["accept_length"]), format_rates(rates["survival"]))
            # Batches of several prompts mix categories, so the time that each category takes is unknown.
            speed = ("-" if rates["ratio"] is None else format_ratio(rates), f"{rates['ideal_ratio']:.2f}")
            yield category, str(rates["prompts"]), row["cell"]["drafter"], *lengths, *speed


def _training_table(methods: Sequence[AblatedDrafter]) -> Iterator[str]:
    # Leave the cells empty for drafters whose training cost is unknown.
    body = []
    for method in methods:
        cost = method.training
        numbers = ("", "", "", "")
        if cost is not None:
            seconds = (f"{cost.seconds_per_update:.3g}", f"{cost.seconds:.0f}")
            numbers = (str(cost.updates), str(cost.tokens), *seconds)
        body.append((method.name, method.kind, *numbers))
    yield from _table(("drafter", "kind", "updates", "tokens", "seconds per update", "seconds of the run"), body)
    # Longer training alone makes a drafter better, so a fair comparison needs equal numbers of training tokens.
    if len({method.training.tokens for method in methods if method.training}) > 1:
        yield from ("", "The drafters were not trained on the same number of tokens.")


def _table(headings: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for cells in body:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
