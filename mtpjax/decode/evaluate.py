"""What drafts are worth on given prompts: teacher-forced along the model's own text, and in decoding.

Rates are named as in `mtpjax.decode.result`: a level's *conditional* rate is over the places where all levels before it
were right, its *survival* over all places. Accept lengths include the bonus token unless they say otherwise; *micro* is
over all steps, *macro* the mean of each prompt's own. Intervals are 95 %, by resampling whole prompts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decode.config import DecodeConfig, SamplingParams
from mtpjax.decode.generate import bucket, generate, speculative_generate
from mtpjax.model import MTPModel, forward

MOST_LOGITS = 1 << 28  # numbers of a teacher-forced pass: a gigabyte
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval; nan for what nothing was counted of."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        return {name: None if np.isnan(value) else value for name, value in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class TeacherForced:
    """Sums over the places of each prompt's continuation, `[P, K]`.

    A place counts at level k where its k-1 draft inputs are text and the trunk's own choice is known. `agrees`: level
    k's arg-max is the trunk's; `survives`: levels 1..k are, `reached`: levels 1..k-1 are. `overlap` is 1 - TV of the
    two distributions; the others of that name are the products of the levels' overlaps.
    """

    places: np.ndarray
    agrees: np.ndarray
    reached: np.ndarray
    survives: np.ndarray
    overlap: np.ndarray
    overlap_reached: np.ndarray
    overlap_survives: np.ndarray


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Counts of each of P prompts, over K levels."""

    forced: TeacherForced
    steps: np.ndarray  # [P]
    accepted: np.ndarray  # [P, K]
    is_identical: np.ndarray  # [P] whether the text is that of plain decoding with the same seed


def measure_acceptance(
    params: dict,
    prompts: Sequence[list[int]],
    *,
    model: MTPModel,
    config: DecodeConfig,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    progress: Callable[[int], Any] = lambda count: None,
) -> Acceptance:
    """Decodes the prompts plainly and with drafts, and runs the model over the plain texts. `progress` is told prompts.

    Raises `ValueError` for what decoding refuses, and for no draft levels.
    """
    if not config.num_steps:
        raise ValueError("acceptance needs draft levels: num_steps must be at least 1")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    if not (np.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature {temperature} must be finite and not negative")
    forced, steps, accepted, is_identical = [], [], [], []
    for begin in range(0, len(prompts), batch_size):
        rows = list(prompts[begin : begin + batch_size])
        seeds = [seed + begin + number for number in range(len(rows))]
        asked = sampled(temperature, seeds)
        texts = generate(params, rows, model=model, config=config, **asked).rows()
        result = speculative_generate(params, rows, model=model, config=config, **asked)
        forced.append(teacher_forced(params, rows, texts, model=model, config=config, temperature=temperature))
        steps.append(result.stats.steps)
        accepted.append(result.stats.accepted)
        is_identical += [found == wanted for found, wanted in zip(result.rows(), texts, strict=True)]
        progress(len(rows))
    return Acceptance(
        forced=TeacherForced(*(np.concatenate(arrays) for arrays in zip(*map(_fields, forced), strict=True))),
        steps=np.concatenate(steps),
        accepted=np.concatenate(accepted),
        is_identical=np.array(is_identical),
    )


def sampled(temperature: float, seeds: list[int]) -> dict[str, Any]:
    """What a call gets beyond its prompts for rows of their own seeds; nothing at temperature 0."""
    return {"sampling": SamplingParams(temperature=temperature, seed=seeds)} if temperature else {}


def teacher_forced(
    params: dict,
    prompts: list[list[int]],
    continuations: list[list[int]],
    *,
    model: MTPModel,
    config: DecodeConfig,
    temperature: float = 0.0,
) -> TeacherForced:
    """One pass over prompts and continuations; overlaps are at `temperature`, or at 1 where that is 0."""
    texts = [prompt + row for prompt, row in zip(prompts, continuations, strict=True)]
    columns = bucket(max(map(len, texts)))
    size = columns * model.config.vocab_size * (config.num_steps + 1)
    rows_at_once = min(max(1, MOST_LOGITS // size), len(texts))
    parts = []
    for begin in range(0, len(texts), rows_at_once):
        group = texts[begin : begin + rows_at_once]
        group += [[0]] * (rows_at_once - len(group))  # one shape
        tokens = np.array([text + [0] * (columns - len(text)) for text in group], np.int32)
        lengths = np.array([len(text) for text in group], np.int32)
        starts = np.array([len(prompt) for prompt in prompts[begin : begin + rows_at_once]], np.int32)
        starts = np.pad(starts, (0, rows_at_once - len(starts)), constant_values=columns)
        sums = _forced_sums(
            params,
            tokens,
            lengths,
            starts,
            jnp.float32(temperature or 1.0),
            model=model,
            num_depths=config.num_steps,
        )
        parts.append([np.asarray(array) for array in jax.device_get(sums)])
    joined = (np.concatenate(arrays)[: len(texts)] for arrays in zip(*parts, strict=True))
    return TeacherForced(*joined)


@functools.partial(jax.jit, static_argnames=("model", "num_depths"))
def _forced_sums(params, tokens, lengths, starts, temperature, *, model: MTPModel, num_depths: int):
    """The fields of `TeacherForced`, each `[B, K]`."""
    output = forward(params, tokens, model=model, lengths=lengths, num_depths=num_depths, attention_layout="ttt")
    columns = jnp.arange(tokens.shape[1])[None, :]
    choices = jnp.argmax(output.logits, axis=-1)
    target = jax.nn.softmax(output.logits / temperature, axis=-1)
    survives = jnp.ones(tokens.shape, bool)
    product = jnp.ones(tokens.shape, jnp.float32)
    sums = []
    for depth, logits in enumerate(output.mtp_logits, start=1):

        def ahead(rows, depth=depth):  # what stands `depth` columns further
            return jnp.pad(rows[:, depth:], ((0, 0), (0, depth)) + ((0, 0),) * (rows.ndim - 2))

        is_counted = (columns >= starts[:, None] - 1) & (columns + depth < lengths[:, None])
        agrees = jnp.argmax(logits, axis=-1) == ahead(choices)
        overlap = jnp.minimum(jax.nn.softmax(logits / temperature, axis=-1), ahead(target)).sum(axis=-1)
        reached, product_reached = survives, product
        survives, product = survives & agrees, product * overlap
        fields = (is_counted, agrees, reached, survives, overlap, product_reached, product)
        sums.append([jnp.where(is_counted, field, 0).sum(axis=1) for field in fields])
    return [jnp.stack(field, axis=1) for field in zip(*sums, strict=True)]


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


def _fields(forced: TeacherForced) -> list[np.ndarray]:
    return [getattr(forced, field.name) for field in dataclasses.fields(forced)]


def report(acceptance: Acceptance, categories: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Category -> its figures, "overall" first: `{"prompts", "decoded", "teacher_forced", "identical"}`."""
    names = np.array(categories)
    groups = {"overall": np.ones(len(names), bool)}
    groups |= {f"{name}": names == name for name in dict.fromkeys(categories)}
    if len(groups) == 2:
        del groups[categories[0]]  # it is the whole
    result = {}
    for name, mask in groups.items():
        forced = TeacherForced(*(array[mask] for array in _fields(acceptance.forced)))
        result[name] = {
            "prompts": int(mask.sum()),
            "steps": int(acceptance.steps[mask].sum()),
            "identical": int(acceptance.is_identical[mask].sum()),
            "decoded": decoded_rates(acceptance.steps[mask], acceptance.accepted[mask]),
            "teacher_forced": forced_rates(forced),
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
    from mtpjax.tables import narrow_table

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
        "teacher-\nforced",
        "1-TV",
    )
    for name, row in figures.items():
        decoded, forced = row["decoded"], row["teacher_forced"]
        lengths.add_row(
            name,
            str(row["prompts"]),
            spread(decoded["accept_length"], 2),
            spread(decoded["accept_length_macro"], 2),
            f"{decoded['accept_length_without_bonus'].value:.2f}",
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
                name if not level else "",
                str(level + 1),
                *(f"{forced[key][level].value:.3f}" for key in ("agreement", "conditional", "overlap")),
                spread(decoded["conditional"][level], 2),
                spread(decoded["survival"][level], 2),
            )
    console.print(rates)
