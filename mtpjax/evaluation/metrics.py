"""Computes acceptance rates and accept lengths from the counts of `mtpjax.evaluation.acceptance`.

Rates are named as in `mtpjax.decoding.result`: a level's *conditional* rate is the share of accepted drafts among the
positions where all earlier levels were accepted, and its *survival* is the share among all positions. Accept lengths
include the bonus token unless their name says otherwise. A *micro* average is over all rounds, and a *macro* average is
over the prompts' accept lengths. Intervals resample whole prompts (`mtpjax.evaluation.intervals`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mtpjax.evaluation.counts import AcceptanceCounts, TeacherForcedSums
from mtpjax.evaluation.intervals import Estimate, estimate_from, resample, resampled_weights


def estimate(numerator: np.ndarray, denominator: np.ndarray, *, offset: float = 0.0) -> list[Estimate]:
    """Estimates, for each of K columns, a ratio of sums over prompts with a bootstrap interval.

    Args:
        numerator: `[P, K]` counts per prompt.
        denominator: `[P, K]` or `[P, 1]` counts per prompt.
        offset: added to every ratio, such as 1 for the bonus token.

    Returns:
        K estimates.
    """
    # To sum over a bootstrap sample, weight each prompt by the number of times that it was drawn.
    numerator, denominator = np.broadcast_arrays(np.asarray(numerator, float), np.asarray(denominator, float))
    weights = resampled_weights(len(numerator))
    values = _ratio(numerator.sum(axis=0), denominator.sum(axis=0)) + offset
    resampled = _ratio(weights @ numerator, weights @ denominator) + offset
    return [estimate_from(value, column) for value, column in zip(values, resampled.T, strict=True)]


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    # nan where the denominator is 0
    return np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1), np.nan)


def decoded_rates(rounds: np.ndarray, accepted: np.ndarray) -> dict[str, Any]:
    """Computes the accept lengths and rates that decoding reached.

    Args:
        rounds: `[P]` verification passes per prompt.
        accepted: `[P, K]` accepted drafts per prompt and level.

    Returns:
        Estimates "accept_length" (micro), "accept_length_macro" and "accept_length_without_bonus" (micro), and lists of
        estimates by level, "conditional" and "survival".
    """
    rounds, accepted = np.asarray(rounds), np.asarray(accepted)
    # Level k is reached in every round that accepted level k-1.
    reached = np.concatenate([rounds[:, None], accepted[:, :-1]], axis=1)
    (micro,) = estimate(accepted.sum(axis=1, keepdims=True), rounds[:, None], offset=1.0)
    # Prompts without rounds have no accept length and do not count.
    has_rounds = rounds > 0
    accepted_per_round = accepted.sum(axis=1) / np.maximum(rounds, 1)
    (macro,) = estimate(np.where(has_rounds, accepted_per_round, 0)[:, None], has_rounds[:, None], offset=1.0)
    return {
        "accept_length": micro,
        "accept_length_macro": macro,
        "accept_length_without_bonus": Estimate(micro.value - 1, micro.low - 1, micro.high - 1),
        "conditional": estimate(accepted, reached),
        "survival": estimate(accepted, rounds[:, None]),
    }


def teacher_forced_rates(sums: TeacherForcedSums) -> dict[str, Any]:
    """Computes the rates of a teacher-forced pass.

    Returns:
        Lists of estimates by level: "agreement", "conditional" and "survival" compare arg-max tokens (temperature 0);
        "overlap", "overlap_conditional" and "overlap_survival" use 1 - TV, the acceptance probability under the rule
        "token" at the pass's temperature. "accept_length" and "overlap_accept_length" are 1 plus the sum of the
        survivals.
    """
    # The expected tokens of a round are the bonus token and one token for each level that survives.
    survival = estimate(sums.survives, sums.positions)
    overlap_survival = estimate(sums.overlap_survives, sums.positions)
    return {
        "agreement": estimate(sums.agrees, sums.positions),
        "conditional": estimate(sums.survives, sums.reached),
        "survival": survival,
        "overlap": estimate(sums.overlap, sums.positions),
        "overlap_conditional": estimate(sums.overlap_survives, sums.overlap_reached),
        "overlap_survival": overlap_survival,
        "accept_length": 1 + sum(rate.value for rate in survival),
        "overlap_accept_length": 1 + sum(rate.value for rate in overlap_survival),
    }


def estimate_speed_up(steps: np.ndarray, accepted: np.ndarray, plain_steps: np.ndarray) -> Estimate:
    """Estimates the ideal speed-up over plain decoding, which is the accept length divided by the cost of a round.

    Args:
        steps: `[P]` verification passes per prompt.
        accepted: `[P, K]` accepted drafts per prompt and level.
        plain_steps: `[R]` measurements of the cost of a round, in units of a plain step.

    Returns:
        The accept length over all prompts divided by the median cost, with a 95 % interval that resamples the prompts
        and, independently of them, the measurements of the cost.
    """
    prompts, timings = resample(len(steps), len(plain_steps))
    per_prompt = accepted.sum(axis=1)
    # A bootstrap sample whose prompts have no steps has no accept length and is left out.
    sampled_steps = steps[prompts].sum(axis=1)
    lengths = 1 + per_prompt[prompts].sum(axis=1) / np.where(sampled_steps > 0, sampled_steps, np.nan)
    value = (1 + per_prompt.sum() / steps.sum()) / np.median(plain_steps)
    return estimate_from(float(value), lengths / np.median(plain_steps[timings], axis=1))


def report(acceptance: AcceptanceCounts, categories: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Computes all metrics, over all prompts and per category.

    Returns:
        Metrics by category, "overall" first: counts ("prompts", "rounds", "identical") and the groups "decoded",
        "predicted" and "teacher_forced". If there is only one category, "overall" is the only entry. A category named
        "overall" becomes "category overall".
    """
    names, distinct = np.array(categories), dict.fromkeys(categories)
    groups = {"overall": np.ones(len(names), bool)}
    if len(distinct) > 1:
        groups |= {f"category {name}" if name in groups else name: names == name for name in distinct}
    # Compute the same metrics for every group from its prompts' counts.
    result = {}
    for name, mask in groups.items():
        part = acceptance.select(mask)
        predicted = part.predicted
        result[name] = {
            "prompts": int(mask.sum()),
            "rounds": int(part.rounds.sum()),
            "identical": int(part.is_identical.sum()),
            "decoded": decoded_rates(part.rounds, part.accepted),
            "predicted": {
                **decoded_rates(predicted.rounds, predicted.accepted),
                "accept_length_at_depth": estimate(predicted.accepted_at_depth, predicted.rounds_at_depth, offset=1.0),
            },
            "teacher_forced": teacher_forced_rates(part.teacher_forced),
        }
    return result


def to_json(value: Any) -> Any:
    """Converts a report, or a part of one, to JSON values: estimates become objects, and nan becomes None."""
    if isinstance(value, Estimate):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: to_json(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(part) for part in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def print_report(console, metrics: dict[str, dict[str, Any]]) -> None:
    """Prints two tables, 80 columns wide, of accept lengths by category and of rates by category and level."""
    from rich.markup import escape

    from mtpjax.evaluation.tables import number_table

    def number(value: float, digits: int) -> str:
        return "-" if np.isnan(value) else f"{value:.{digits}f}"

    def spread(rate: Estimate, digits: int = 3) -> str:
        return f"{rate.value:.{digits}f} {rate.low:.{digits}f}-{rate.high:.{digits}f}"

    # 1. Print the accept lengths that were decoded, predicted and teacher-forced, with a row per category. Only one
    # interval is shown, to leave room for the category names; the JSON file has all intervals.
    headings = ("prom-\npts", "micro", "macro", "no\nbonus", "pre-\ndicted", "teacher-\nforced", "1-TV")
    lengths = number_table("accept length: tokens per round, bonus token included (95 %)", headings, "category")
    for name, row in metrics.items():
        decoded, teacher_forced = row["decoded"], row["teacher_forced"]
        micro = spread(decoded["accept_length"], 2)
        others = (f"{decoded[f'accept_length_{kind}'].value:.2f}" for kind in ("macro", "without_bonus"))
        computed = row["predicted"]["accept_length"].value, teacher_forced["accept_length"]
        computed += (teacher_forced["overlap_accept_length"],)
        lengths.add_row(escape(name), str(row["prompts"]), micro, *others, *(number(each, 2) for each in computed))
    console.print(lengths)

    # 2. Print the rates, with a row per category and level.
    headings = ("level", "agree", "of\nreached", "1-TV", "decoded,\nof reached", "decoded,\nsurvival")
    rates = number_table("rates by level: teacher-forced on plain text, and decoded (95 %)", headings, "category")
    for name, row in metrics.items():
        decoded, teacher_forced = row["decoded"], row["teacher_forced"]
        for level in range(len(decoded["survival"])):
            rates.add_row(
                escape(name) if not level else "",
                str(level + 1),
                *(number(teacher_forced[key][level].value, 3) for key in ("agreement", "conditional", "overlap")),
                spread(decoded["conditional"][level], 2),
                spread(decoded["survival"][level], 2),
            )
    console.print(rates)
    # 3. Print the predicted accept lengths at smaller depths, which help the user to choose a depth.
    at_depth = [length.value for length in metrics["overall"]["predicted"]["accept_length_at_depth"]]
    if not np.isnan(at_depth[0]):
        values = ", ".join(f"{value:.2f}" for value in at_depth)
        console.print(f"predicted accept length of rounds with 1..{len(at_depth)} levels: {values}")
