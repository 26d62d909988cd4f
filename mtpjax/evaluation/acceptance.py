"""What drafts are worth on given prompts: teacher-forced along the model's own text, and in decoding.

Counts of each prompt; `mtpjax.evaluation.metrics` makes rates and lengths of them. *Predicted* is what the
teacher-forced pass says of decoding (`mtpjax.evaluation.predict`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.capacity import bucket
from mtpjax.decoding.config import DecodeConfig, SamplingParams
from mtpjax.decoding.generate import generate, speculative_generate
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.evaluation.predict import acceptance_along, expected_rounds
from mtpjax.models.model import MTPModel, forward, shift_left

MOST_LOGITS = 1 << 28  # numbers of a teacher-forced pass: a gigabyte


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
    predicted_accepted: np.ndarray  # [P, K] float64, nan where the drafts are none that `is_predictable` knows
    steps_at_depth: np.ndarray  # [P, K] float64, predicted if rounds had 1..K levels; the last are decoding's
    accepted_at_depth: np.ndarray  # [P, K] float64, of all levels
    is_identical: np.ndarray  # [P] whether the text is that of plain decoding with the same seed, see `is_plain`
    texts: list[list[int]]  # plain decoding's

    @property
    def predicted_steps(self) -> np.ndarray:
        """`[P]`."""
        return self.steps_at_depth[:, -1]

    def take(self, mask: np.ndarray) -> "Acceptance":
        """Of the prompts in `mask [P]` alone."""
        return Acceptance(
            forced=TeacherForced(*(array[mask] for array in _fields(self.forced))),
            texts=[text for text, is_in in zip(self.texts, mask, strict=True) if is_in],
            **{name: getattr(self, name)[mask] for name in _COUNTS},
        )


_COUNTS = ("steps", "accepted", "predicted_accepted", "steps_at_depth", "accepted_at_depth", "is_identical")


def measure_acceptance(
    params: dict,
    prompts: Sequence[list[int]],
    *,
    model: MTPModel,
    config: DecodeConfig,
    temperature: float | Sequence[float] = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    progress: Callable[[int], Any] = lambda count: None,
) -> Acceptance:
    """Decodes the prompts plainly and with drafts, and runs the model over the plain texts. `progress` is told prompts.

    `temperature` is one for all prompts, or one for each; so greedy and sampled ones share a batch. The plain texts go
    on behind a limit or stop token for as long as a round's drafts may, which is what these are compared with; where
    the model has no such positions, predicted drafts end with the text.

    Raises `ValueError` for what decoding refuses, and for no draft levels.
    """
    if not config.num_steps:
        raise ValueError("acceptance needs draft levels: num_steps must be at least 1")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    temperatures = np.broadcast_to(np.asarray(temperature, float), len(prompts))
    if not (np.isfinite(temperatures) & (temperatures >= 0)).all():
        raise ValueError(f"temperature {temperature} must be finite and not negative")
    longest = model.config.max_position_embeddings
    beyond = dataclasses.replace(
        config,
        max_new_tokens=config.max_new_tokens + config.num_steps,
        max_length=min((config.max_length or longest) + config.num_steps, longest),
        stop_token_ids=(),
        stop_sequences=(),
    )
    parts: list[Acceptance] = []
    for begin in range(0, len(prompts), batch_size):
        rows = list(prompts[begin : begin + batch_size])
        warmth = temperatures[begin : begin + batch_size]
        asked = sampled(warmth, [seed + begin + number for number in range(len(rows))])
        long = generate(params, rows, model=model, config=beyond, **asked).rows()
        texts = [_ended(text, config, len(row), model) for row, text in zip(rows, long, strict=True)]
        result = speculative_generate(params, rows, model=model, config=config, **asked)
        is_identical = is_plain(params, rows, result.rows(), texts, model=model, config=config, **asked)
        forced, predicted = _along(params, rows, texts, long, model=model, config=config, temperatures=warmth)
        steps, accepted = result.stats.steps, result.stats.accepted
        parts.append(Acceptance(forced, steps, accepted, **predicted, is_identical=is_identical, texts=texts))
        progress(len(rows))
    return _joined(parts)


def _joined(parts: Sequence[Acceptance]) -> Acceptance:
    forced = zip(*(_fields(part.forced) for part in parts), strict=True)
    return Acceptance(
        forced=TeacherForced(*map(np.concatenate, forced)),
        texts=[text for part in parts for text in part.texts],
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _COUNTS},
    )


class Parting(NamedTuple):
    """The first new token, from 0, that two texts do not share, and how far apart the logits of theirs are."""

    place: int
    gap: float


def partings(
    params: dict,
    prompts: Sequence[list[int]],
    rows: Sequence[list[int]],
    others: Sequence[list[int]],
    *,
    model: MTPModel,
) -> list[Parting | None]:
    """Of two texts behind each prompt, where they part (None: nowhere), by the trunk's logits as they are.

    A text that is the other's beginning parts from it at its end, with an infinite gap.
    """
    places: dict[int, int] = {}
    for number, texts in enumerate(zip(rows, others, strict=True)):
        unlike = [place for place, (token, other) in enumerate(itertools.zip_longest(*texts)) if token != other]
        if unlike:
            places[number] = unlike[0]
    compared = [number for number, place in places.items() if place < min(len(rows[number]), len(others[number]))]
    gaps = dict.fromkeys(places, math.inf)
    if compared:
        config = DecodeConfig(num_steps=0, max_new_tokens=1, logprobs=True)
        shared = [[*prompts[number], *rows[number][: places[number]]] for number in compared]
        logprobs = []
        for texts in (rows, others):
            sampling = SamplingParams(allowed_tokens=[[texts[number][places[number]]] for number in compared])
            result = generate(params, shared, model=model, config=config, sampling=sampling)
            assert result.logprobs is not None
            logprobs.append(result.logprobs[:, 0])
        gaps |= dict(zip(compared, np.abs(logprobs[0] - logprobs[1]).tolist(), strict=True))
    return [Parting(places[number], gaps[number]) if number in places else None for number in range(len(rows))]


def is_plain(
    params: dict,
    prompts: Sequence[list[int]],
    rows: Sequence[list[int]],
    plain: Sequence[list[int]],
    *,
    model: MTPModel,
    config: DecodeConfig,
    **asked,
) -> np.ndarray:
    """Whether texts, decoded by `config`, are plain decoding's `[P]`; `asked` is what that call was given besides.

    Below float32 passes of other widths round differently, and near ties fall either way: there a text that is not the
    `plain` one may be that of plain decoding in passes as wide as the drafts'. An adaptive depth's have several widths,
    but with `config.min_rows` that of the deepest; and linear attention's replayed states may differ in the last bit.
    """
    found = np.array([row == other for row, other in zip(rows, plain, strict=True)])
    if found.all() or jnp.finfo(params["embedding"].dtype).bits >= 32:
        return found
    as_wide = dataclasses.replace(config, min_rows=max(config.num_nodes, config.min_rows or 1))
    wide = generate(params, prompts, model=model, config=as_wide, **asked).rows()
    return found | np.array([row == other for row, other in zip(rows, wide, strict=True)])


def sampled(temperature, seeds: list[int]) -> dict[str, Any]:
    """What a call gets beyond its prompts for rows of their own seeds; nothing where all are at temperature 0."""
    return {"sampling": SamplingParams(temperature=temperature, seed=seeds)} if np.any(temperature) else {}


def is_predictable(config: DecodeConfig, rule: str) -> bool:
    """Whether `mtpjax.evaluation.predict` knows how decoding accepts: chains of a fixed depth under an exact rule."""
    is_chain = config.topk == 1 and config.depth_policy == "fixed" and config.draft_window is None
    return is_chain and config.draft_vocabulary is None and rule in ("greedy", "sample", "token", "block")


def _ended(text: list[int], config: DecodeConfig, prompt_length: int, model: MTPModel) -> list[int]:
    """The text as `config` ends it: by its limits and stop sequences."""
    longest = config.max_length or model.config.max_position_embeddings
    text = text[: min(config.max_new_tokens, longest - prompt_length)]
    stops = [(token,) for token in config.stop_token_ids] + list(config.stop_sequences)
    ends = (end for end in range(1, len(text) + 1) if any(tuple(text[:end][-len(stop) :]) == stop for stop in stops))
    return text[: next(ends, len(text))]


def _along(params, prompts, texts, long, *, model: MTPModel, config: DecodeConfig, temperatures: np.ndarray):
    """One pass over the prompts and their `long` texts: `TeacherForced` of `texts`, and `Acceptance`'s predictions."""
    places = _run_along(params, prompts, long, model=model, config=config, temperatures=temperatures)
    starts = np.array([len(prompt) for prompt in prompts])
    ends = starts + np.array([len(text) for text in texts])
    is_greedy = temperatures == 0
    rule = DecodeSpec.of(config, is_greedy=bool(is_greedy.all())).rule
    accepted, steps_at_depth, accepted_at_depth = np.full((3, len(prompts), config.num_steps), np.nan)
    if is_predictable(config, rule):
        acceptance = acceptance_along(places.is_text, places.log_ratio, is_greedy, rule=rule)
        for depth in range(1, config.num_steps + 1):
            steps_at_depth[:, depth - 1], accepted = expected_rounds(acceptance[:, :, :depth], starts, ends)
            accepted_at_depth[:, depth - 1] = accepted.sum(axis=1)
    predicted = {
        "predicted_accepted": accepted,
        "steps_at_depth": steps_at_depth,
        "accepted_at_depth": accepted_at_depth,
    }
    return _forced(places, starts, ends), predicted


class Places(NamedTuple):
    """What a teacher-forced pass says of each place i of a text and each level k: arrays `[B, T, K]`."""

    agrees: Any  # level k's arg-max is the trunk's choice for the same token, i + k + 1
    overlap: Any  # 1 - TV of their distributions
    is_text: Any  # level k's arg-max is the text's token
    log_ratio: Any  # log q - log p of the text's token; -inf where the text has ended


def _run_along(
    params, prompts, continuations, *, model: MTPModel, config: DecodeConfig, temperatures: np.ndarray
) -> Places:
    texts = [prompt + row for prompt, row in zip(prompts, continuations, strict=True)]
    columns = bucket(max(map(len, texts)))
    size = columns * model.config.vocab_size * (config.num_steps + 1)
    rows_at_once = min(max(1, MOST_LOGITS // size), len(texts))
    compare = functools.partial(compare_levels, model=model, num_depths=config.num_steps)
    parts = []
    for begin in range(0, len(texts), rows_at_once):
        group = texts[begin : begin + rows_at_once]
        warmth = np.ones(rows_at_once, np.float32)
        warmth[: len(group)] = temperatures[begin : begin + rows_at_once]
        group += [[0]] * (rows_at_once - len(group))  # one shape
        tokens = np.array([text + [0] * (columns - len(text)) for text in group], np.int32)
        lengths = np.array([len(text) for text in group], np.int32)
        parts.append(jax.device_get(compare(params, tokens, lengths, np.where(warmth == 0, 1, warmth))))
    return Places(*(np.concatenate(arrays)[: len(texts)] for arrays in zip(*parts, strict=True)))


@functools.partial(jax.jit, static_argnames=("model", "num_depths"))
def compare_levels(params, tokens, lengths, temperature, *, model: MTPModel, num_depths: int) -> Places:
    """Levels 1..num_depths against the trunk, at every place of `tokens [B, T]`."""
    output = forward(params, tokens, model=model, lengths=lengths, num_depths=num_depths, attention_layout="ttt")
    is_token = jnp.arange(model.config.vocab_size) < (model.config.num_tokens or model.config.vocab_size)

    def logs(logits):
        return jax.nn.log_softmax(jnp.where(is_token[None, None], logits, -jnp.inf) / temperature[:, None, None])

    target = logs(output.logits)
    columns = jnp.arange(tokens.shape[1])[None, :]
    levels = []
    for depth, logits in enumerate(output.mtp_logits, start=1):
        draft, trunk = logs(logits), shift_left(target, depth)
        text = shift_left(tokens, depth + 1)
        choice = jnp.argmax(draft, axis=-1)
        of_draft, of_trunk = (jnp.take_along_axis(log, text[:, :, None], axis=-1)[:, :, 0] for log in (draft, trunk))
        is_known = columns + depth + 1 < lengths[:, None]
        levels.append(
            Places(
                choice == jnp.argmax(trunk, axis=-1),
                jnp.exp(jnp.minimum(draft, trunk)).sum(axis=-1),
                is_known & (choice == text),
                jnp.where(is_known, of_draft - of_trunk, -jnp.inf),
            )
        )
    return Places(*(jnp.stack(field, axis=-1) for field in zip(*levels, strict=True)))


def _forced(places: Places, starts: np.ndarray, ends: np.ndarray) -> TeacherForced:
    """Sums over the continuations, which reach from `starts [B]` to `ends [B]`."""
    _, T, K = places.agrees.shape
    column, level = np.arange(T)[None, :, None], np.arange(1, K + 1)[None, None, :]
    is_counted = (column >= starts[:, None, None] - 1) & (column + level < ends[:, None, None])

    def before(products: np.ndarray) -> np.ndarray:
        return np.concatenate([np.ones_like(products[..., :1]), products[..., :-1]], axis=-1)

    survives, product = np.cumprod(places.agrees, axis=-1), np.cumprod(places.overlap, axis=-1)
    fields = (places.agrees, before(survives), survives, places.overlap, before(product), product)
    return TeacherForced(is_counted.sum(axis=1), *(np.where(is_counted, field, 0).sum(axis=1) for field in fields))


def _fields(forced: TeacherForced) -> list[np.ndarray]:
    return [getattr(forced, field.name) for field in dataclasses.fields(forced)]
