"""Metrics of acceptance: rates and accept lengths from the counts of `mtpjax.evaluation.acceptance`.

Rates are named as in `mtpjax.decoding.result`: a level's *conditional* rate is over the places where all levels before
it were right, its *survival* over all places. Accept lengths include the bonus token unless they say otherwise;
*micro* is
over all steps, *macro* the mean of each prompt's own. Intervals are 95 %, by resampling whole prompts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtpjax.evaluation.acceptance import Acceptance, TeacherForced

RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval; nan for what nothing was counted of."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        return {name: None if np.isnan(value) else value for name, value in dataclasses.asdict(self).items()}


def estimate(numerator: np.ndarray, denominator: np.ndarray, *, offset: float = 0.0) -> list[Estimate]:
    """Sum over sum of `[P, K]` counts, plus `offset`, for each of the K columns; prompts are what is resampled."""
    numerator, denominator = np.broadcast_arrays(np.asarray(numerator, float), np.asarray(denominator, float))
    count = len(numerator)
    weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    values = _over(numerator.sum(axis=0), denominator.sum(axis=0)) + offset
    drawn = _over(weights @ numerator, weights @ denominator) + offset
    estimates = []
    for value, column in zip(values, drawn.T, strict=True):
        known = column[~np.isnan(column)]
        low, high = np.quantile(known, (0.025, 0.975)) if known.size else (np.nan, np.nan)
        estimates.append(Estimate(float(value), float(low), float(high)))
    return estimates


def _over(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1), np.nan)


def decoded_rates(steps: np.ndarray, accepted: np.ndarray) -> dict[str, Any]:
    """Accept lengths and rates of `steps [P]` and `accepted [P, K]`, as `Estimate`s."""
    steps, accepted = np.asarray(steps), np.asarray(accepted)
    reached = np.concatenate([steps[:, None], accepted[:, :-1]], axis=1)
    (micro,) = estimate(accepted.sum(axis=1, keepdims=True), steps[:, None], offset=1.0)
    has_steps = steps > 0
    own = accepted.sum(axis=1) / np.maximum(steps, 1)
    (macro,) = estimate(np.where(has_steps, own, 0)[:, None], has_steps[:, None], offset=1.0)
    return {
        "accept_length": micro,
        "accept_length_macro": macro,
        "accept_length_without_bonus": Estimate(micro.value - 1, micro.low - 1, micro.high - 1),
        "conditional": estimate(accepted, reached),
        "survival": estimate(accepted, steps[:, None]),
    }


def forced_rates(forced: TeacherForced) -> dict[str, Any]:
    """Rates of the teacher-forced pass, as `Estimate`s; accept lengths are `1 + sum of survival`."""
    survival = estimate(forced.survives, forced.places)
    overlap_survival = estimate(forced.overlap_survives, forced.places)
    return {
        "agreement": estimate(forced.agrees, forced.places),
        "conditional": estimate(forced.survives, forced.reached),
        "survival": survival,
        "overlap": estimate(forced.overlap, forced.places),
        "overlap_conditional": estimate(forced.overlap_survives, forced.overlap_reached),
        "overlap_survival": overlap_survival,
        "accept_length": 1 + sum(rate.value for rate in survival),
        "overlap_accept_length": 1 + sum(rate.value for rate in overlap_survival),
    }


def report(acceptance: Acceptance, categories: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Category -> its figures, "overall" first: `{"prompts", "decoded", "predicted", "teacher_forced", …}`.

    One category alone is the whole; one that is called "overall" itself becomes "category overall".
    """
    names, distinct = np.array(categories), dict.fromkeys(categories)
    groups = {"overall": np.ones(len(names), bool)}
    if len(distinct) > 1:
        groups |= {f"category {name}" if name in groups else name: names == name for name in distinct}
    result = {}
    for name, mask in groups.items():
        part = acceptance.take(mask)
        result[name] = {
            "prompts": int(mask.sum()),
            "steps": int(part.steps.sum()),
            "identical": int(part.is_identical.sum()),
            "decoded": decoded_rates(part.steps, part.accepted),
            "predicted": {
                **decoded_rates(part.predicted_steps, part.predicted_accepted),
                "accept_length_at_depth": estimate(part.accepted_at_depth, part.steps_at_depth, offset=1.0),
            },
            "teacher_forced": forced_rates(part.forced),
        }
    return result


def to_json(value: Any) -> Any:
    """The report as JSON holds it: estimates as objects, nan as null."""
    if isinstance(value, Estimate):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: to_json(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(part) for part in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def print_report(console, figures: dict[str, dict[str, Any]]) -> None:
    """Two tables, within 80 columns: accept lengths by category, and rates by category and level."""
    from rich.markup import escape

    from mtpjax.console import narrow_table

    def table(title: str, *headings: str):
        made = narrow_table(title)
        made.add_column("category", overflow="fold")
        for heading in headings:
            made.add_column(heading, justify="right", no_wrap=True)
        return made

    def spread(rate: Estimate, digits: int = 3) -> str:
        return f"{rate.value:.{digits}f} {rate.low:.{digits}f}-{rate.high:.{digits}f}"

    lengths = table(
        "accept length: tokens per step, bonus token included (95 %)",
        "prompts",
        "micro",
        "macro",
        "without\nbonus",
        "pre-\ndicted",
        "teacher-\nforced",
        "1-TV",
    )
    for name, row in figures.items():
        decoded, forced = row["decoded"], row["teacher_forced"]
        predicted = row["predicted"]["accept_length"].value
        lengths.add_row(
            escape(name),
            str(row["prompts"]),
            spread(decoded["accept_length"], 2),
            spread(decoded["accept_length_macro"], 2),
            f"{decoded['accept_length_without_bonus'].value:.2f}",
            "-" if np.isnan(predicted) else f"{predicted:.2f}",
            f"{forced['accept_length']:.2f}",
            f"{forced['overlap_accept_length']:.2f}",
        )
    console.print(lengths)

    rates = table(
        "rates by level: teacher-forced on plain text, and decoded (95 %)",
        "level",
        "agree",
        "of\nreached",
        "1-TV",
        "decoded,\nof reached",
        "decoded,\nsurvival",
    )
    for name, row in figures.items():
        decoded, forced = row["decoded"], row["teacher_forced"]
        for level in range(len(decoded["survival"])):
            rates.add_row(
                escape(name) if not level else "",
                str(level + 1),
                *(f"{forced[key][level].value:.3f}" for key in ("agreement", "conditional", "overlap")),
                spread(decoded["conditional"][level], 2),
                spread(decoded["survival"][level], 2),
            )
    console.print(rates)
    at_depth = [length.value for length in figures["overall"]["predicted"]["accept_length_at_depth"]]
    if not np.isnan(at_depth[0]):
        values = ", ".join(f"{value:.2f}" for value in at_depth)
        console.print(f"accept length of rounds of 1..{len(at_depth)} levels, predicted: {values}")
