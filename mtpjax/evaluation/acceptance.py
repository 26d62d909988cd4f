"""Counts accepted drafts on given prompts: in decoding, and teacher-forced along the model's own text.

This module returns counts per prompt; `mtpjax.evaluation.metrics` turns them into rates and accept lengths. *Predicted*
counts are those of decoding, computed from the teacher-forced pass (`mtpjax.evaluation.predict`).
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

from mtpjax.decoding.capacity import round_up_capacity
from mtpjax.decoding.config import DecodeConfig, SamplingParams
from mtpjax.decoding.spec import DecodeSpec, Rule
from mtpjax.distributed import gather_processes
from mtpjax.drafters.forward import forward_with_drafter
from mtpjax.drafters.trained import DraftParams, TrainedDrafter
from mtpjax.evaluation.predict import acceptance_probabilities, expected_rounds
from mtpjax.inference.generate import generate, speculative_generate
from mtpjax.models.forward import forward, shift_left
from mtpjax.models.model import MTPModel
from mtpjax.program_memory import free_programs_if_full

MAX_LOGITS_PER_PASS = 1 << 28  # most float32 logits of one teacher-forced pass: 1 GiB


@dataclasses.dataclass(frozen=True)
class TeacherForcedSums:
    """Sums over the positions of each prompt's continuation, `[P, K]`, from one teacher-forced pass.

    A position counts at level k if its k-1 draft inputs are tokens of the text and the trunk's own choice is known.

    Attributes:
        positions: positions that count.
        agrees: positions where level k's arg-max equals the trunk's.
        reached: positions where levels 1..k-1 agree.
        survives: positions where levels 1..k agree.
        overlap: sum of 1 - TV between level k's distribution and the trunk's.
        overlap_reached: sum of the product of the overlaps of levels 1..k-1.
        overlap_survives: sum of the product of the overlaps of levels 1..k.
    """

    positions: np.ndarray
    agrees: np.ndarray
    reached: np.ndarray
    survives: np.ndarray
    overlap: np.ndarray
    overlap_reached: np.ndarray
    overlap_survives: np.ndarray


@dataclasses.dataclass(frozen=True)
class AcceptanceCounts:
    """Counts for P prompts and K draft levels.

    Attributes:
        teacher_forced: sums of the teacher-forced pass.
        rounds: `[P]` verification passes of decoding.
        accepted: `[P, K]` accepted drafts of decoding per level.
        predicted_accepted: `[P, K]` float64 predicted accepted drafts per level; nan unless `is_predictable`.
        rounds_at_depth: `[P, K]` float64 predicted rounds if rounds had 1..K levels; nan unless `is_predictable`.
        accepted_at_depth: `[P, K]` float64 predicted accepted drafts of all levels if rounds had 1..K levels.
        is_identical: `[P]` bool, True if decoding with drafts returned plain decoding's text (`equals_plain_decoding`).
        texts: new tokens of plain decoding.
    """

    teacher_forced: TeacherForcedSums
    rounds: np.ndarray
    accepted: np.ndarray
    predicted_accepted: np.ndarray
    rounds_at_depth: np.ndarray
    accepted_at_depth: np.ndarray
    is_identical: np.ndarray
    texts: list[list[int]]

    @property
    def predicted_rounds(self) -> np.ndarray:
        """`[P]` float64 predicted rounds at the depth of the call."""
        return self.rounds_at_depth[:, -1]

    def select(self, mask: np.ndarray) -> "AcceptanceCounts":
        """Returns the counts of the prompts in `mask [P]` bool."""
        return AcceptanceCounts(
            teacher_forced=TeacherForcedSums(*(array[mask] for array in _fields(self.teacher_forced))),
            texts=[text for text, is_in in zip(self.texts, mask, strict=True) if is_in],
            **{name: getattr(self, name)[mask] for name in _COUNTS},
        )


# The per-prompt arrays of `AcceptanceCounts`, which batches and groups of prompts concatenate or index alike.
_PREDICTED = ("predicted_accepted", "rounds_at_depth", "accepted_at_depth")
_COUNTS = ("rounds", "accepted", *_PREDICTED, "is_identical")


def measure_acceptance(
    params: dict,
    prompts: Sequence[list[int]],
    *,
    model: MTPModel,
    config: DecodeConfig,
    temperature: float | Sequence[float] = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    draft_params: Any = None,
    progress: Callable[[int], Any] = lambda count: None,
) -> AcceptanceCounts:
    """Decodes prompts plainly and with drafts, and runs a teacher-forced pass over the plain texts.

    A drafter of your own that has parameters has no teacher-forced pass: its sums are 0, and its predictions are nan.

    Args:
        params: parameters of `model` with unrolled layers.
        prompts: P token lists.
        model: the model.
        config: decoding settings with `num_steps` of at least 1.
        temperature: one temperature for all prompts, or one per prompt.
        seed: seed of the first prompt; each further prompt's seed is one higher.
        batch_size: prompts decoded together.
        draft_params: parameters of `config.drafter`, if it has its own (`mtpjax.load_drafter`).
        progress: called after each batch with its number of prompts.

    Returns:
        The counts of every prompt.

    Raises:
        ValueError: for a config without draft levels, a batch size or temperature out of range, and settings that
            decoding rejects.
    """
    # Check before decoding, which may take minutes.
    if not config.num_steps:
        raise ValueError("acceptance needs draft levels: num_steps must be at least 1")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    temperatures = np.broadcast_to(np.asarray(temperature, float), len(prompts))
    if not (np.isfinite(temperatures) & (temperatures >= 0)).all():
        raise ValueError(f"temperature {temperature} must be finite and not negative")
    # Drafts of the last round may reach up to K tokens past the text's end. Plain decoding continues that far, so that
    # the prediction can compare them. Where the model has no positions left, predicted drafts end with the text.
    longest = model.config.max_position_embeddings
    extended_config = dataclasses.replace(
        config,
        max_new_tokens=config.max_new_tokens + config.num_steps,
        max_length=min((config.max_length or longest) + config.num_steps, longest),
        stop_token_ids=(),
        stop_sequences=(),
    )
    parts: list[AcceptanceCounts] = []
    for begin in range(0, len(prompts), batch_size):
        rows = list(prompts[begin : begin + batch_size])
        batch_temperatures = temperatures[begin : begin + batch_size]
        # 1. Decode plainly, and cut the text where the user's limits and stop sequences end it.
        sampling_kwargs = sampling_arguments(batch_temperatures, [seed + begin + number for number in range(len(rows))])
        extended_texts = generate(params, rows, model=model, config=extended_config, **sampling_kwargs).rows()
        texts = [_cut_at_end(text, config, len(row), model) for row, text in zip(rows, extended_texts, strict=True)]
        # 2. Decode with drafts and the same seeds, and check that the text is the same.
        result = speculative_generate(
            params, rows, model=model, config=config, draft_params=draft_params, **sampling_kwargs
        )
        is_identical = equals_plain_decoding(
            params, rows, result.rows(), texts, model=model, config=config, **sampling_kwargs
        )
        # 3. One teacher-forced pass over the plain text gives rates at every position, and the predictions.
        if draft_params is None or isinstance(draft_params, DraftParams):
            arguments = {"model": model, "config": config, "temperatures": batch_temperatures}
            teacher_forced, predicted = _teacher_forced(
                params, rows, texts, extended_texts, draft_params=draft_params, **arguments
            )
        else:
            teacher_forced, predicted = _no_teacher_forced(len(rows), config.num_steps)
        rounds, accepted = result.stats.rounds, result.stats.accepted
        parts.append(
            AcceptanceCounts(teacher_forced, rounds, accepted, **predicted, is_identical=is_identical, texts=texts)
        )
        progress(len(rows))
        free_programs_if_full()
    return _concatenate(parts)


def _concatenate(parts: Sequence[AcceptanceCounts]) -> AcceptanceCounts:
    """Concatenates the counts of several batches of prompts."""
    teacher_forced = zip(*(_fields(part.teacher_forced) for part in parts), strict=True)
    return AcceptanceCounts(
        teacher_forced=TeacherForcedSums(*map(np.concatenate, teacher_forced)),
        texts=[text for part in parts for text in part.texts],
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _COUNTS},
    )


class Divergence(NamedTuple):
    """The first difference between two texts."""

    position: int  # number of new tokens that both share
    gap: float  # distance between the trunk's logits of the two different tokens; inf where one text ends


def first_divergences(
    params: dict,
    prompts: Sequence[list[int]],
    rows: Sequence[list[int]],
    other_rows: Sequence[list[int]],
    *,
    model: MTPModel,
) -> list[Divergence | None]:
    """Finds where two texts of each prompt first differ, and how close the trunk's logits of the two tokens are.

    A small gap means a near tie, which rounding can decide either way; a large gap means an error.

    Args:
        params: parameters of `model` with unrolled layers.
        prompts: P token lists.
        rows: new tokens of the first text of each prompt.
        other_rows: new tokens of the second text of each prompt.
        model: the model.

    Returns:
        A `Divergence` per prompt, None for equal texts. If one text is the beginning of the other, they differ at its
        end, with an infinite gap. Logits are the trunk's unmodified ones.
    """
    # The first differing token of each pair of texts.
    positions: dict[int, int] = {}
    for number, texts in enumerate(zip(rows, other_rows, strict=True)):
        differing = [
            position for position, (token, other) in enumerate(itertools.zip_longest(*texts)) if token != other
        ]
        if differing:
            positions[number] = differing[0]
    # Only pairs in which both texts have a token there have two logits to compare.
    compared = [
        number for number, position in positions.items() if position < min(len(rows[number]), len(other_rows[number]))
    ]
    gaps = dict.fromkeys(positions, math.inf)
    if compared:
        config = DecodeConfig(num_steps=0, max_new_tokens=1, logprobs=True)
        # Decode one token behind the shared beginning, once with each token as the only allowed one. The reported
        # log-probabilities are those of the unmodified logits, so the normaliser cancels in the difference.
        shared = [[*prompts[number], *rows[number][: positions[number]]] for number in compared]
        logprobs = []
        for texts in (rows, other_rows):
            sampling = SamplingParams(allowed_tokens=[[texts[number][positions[number]]] for number in compared])
            result = generate(params, shared, model=model, config=config, sampling=sampling)
            assert result.logprobs is not None
            logprobs.append(result.logprobs[:, 0])
        gaps |= dict(zip(compared, np.abs(logprobs[0] - logprobs[1]).tolist(), strict=True))
    return [Divergence(positions[number], gaps[number]) if number in positions else None for number in range(len(rows))]


def equals_plain_decoding(
    params: dict,
    prompts: Sequence[list[int]],
    rows: Sequence[list[int]],
    plain: Sequence[list[int]],
    *,
    model: MTPModel,
    config: DecodeConfig,
    **sampling_kwargs,
) -> np.ndarray:
    """Checks that texts decoded with drafts equal plain decoding's.

    Below float32, matmuls round differently at different batch widths, so near-tied logits can flip. A text that
    differs from `plain` is therefore compared again, with plain decoding in passes as wide as verification. This second
    comparison is reliable for a fixed depth; rounds of an adaptive depth have several widths, unless `config.min_rows`
    is the width of the deepest. The states that linear attention replays may also differ in the last bit.

    Args:
        params: parameters of `model` with unrolled layers.
        prompts: P token lists.
        rows: new tokens of decoding with `config`.
        plain: new tokens of plain decoding.
        model: the model.
        config: the settings that `rows` were decoded with.
        **sampling_kwargs: further arguments of that call, such as `sampling`.

    Returns:
        `[P]` bool.
    """
    is_equal = np.array([row == other for row, other in zip(rows, plain, strict=True)])
    if is_equal.all() or jnp.finfo(params["embedding"].dtype).bits >= 32:
        return is_equal
    # Decode plainly once more, padded to the width of verification.
    wide_config = dataclasses.replace(config, min_rows=max(config.num_nodes, config.min_rows or 1))
    wide_rows = generate(params, prompts, model=model, config=wide_config, **sampling_kwargs).rows()
    return is_equal | np.array([row == other for row, other in zip(rows, wide_rows, strict=True)])


def sampling_arguments(temperature, seeds: list[int]) -> dict[str, Any]:
    """Makes the sampling arguments of a decoding call.

    Args:
        temperature: one temperature, or one per row.
        seeds: one seed per row.

    Returns:
        `{"sampling": SamplingParams}`, or an empty dict if every row is at temperature 0.
    """
    return {"sampling": SamplingParams(temperature=temperature, seed=seeds)} if np.any(temperature) else {}


def is_predictable(config: DecodeConfig, rule: Rule) -> bool:
    """Returns whether `mtpjax.evaluation.predict` covers these settings.

    It covers chains of a fixed depth under an exact rule. The teacher-forced pass has no draft window and no reduced
    draft vocabulary, and does not end drafts early, so it does not describe drafts that are made with them.

    Args:
        config: decoding settings.
        rule: the resolved acceptance rule.

    Returns:
        True if predictions are possible.
    """
    is_chain = config.topk == 1 and config.depth_policy == "fixed" and config.draft_window is None
    if isinstance(config.drafter, TrainedDrafter) and config.drafter.ends_early:
        return False
    return is_chain and config.draft_vocabulary is None and rule in ("greedy", "sample", "token", "block")


def _cut_at_end(text: list[int], config: DecodeConfig, prompt_length: int, model: MTPModel) -> list[int]:
    """Cuts a text where the limits or stop sequences of `config` end it."""
    longest = config.max_length or model.config.max_position_embeddings
    text = text[: min(config.max_new_tokens, longest - prompt_length)]
    stops = [(token,) for token in config.stop_token_ids] + list(config.stop_sequences)
    ends = (end for end in range(1, len(text) + 1) if any(tuple(text[:end][-len(stop) :]) == stop for stop in stops))
    return text[: next(ends, len(text))]


def _no_teacher_forced(num_prompts: int, num_steps: int) -> tuple[TeacherForcedSums, dict[str, np.ndarray]]:
    """Returns the results of a teacher-forced pass that counts no position, and predicts nothing."""
    shape = num_prompts, num_steps
    sums = TeacherForcedSums(*(np.zeros(shape) for _ in dataclasses.fields(TeacherForcedSums)))
    return sums, {name: np.full(shape, np.nan) for name in _PREDICTED}


def _teacher_forced(
    params,
    prompts,
    texts,
    extended_texts,
    *,
    model: MTPModel,
    config: DecodeConfig,
    temperatures: np.ndarray,
    draft_params: Any = None,
):
    """Runs one pass over the prompts and their `extended_texts`.

    Returns:
        `TeacherForcedSums` of `texts`, and the predicted fields of `AcceptanceCounts`.
    """
    # A drafter beside the trunk has its own teacher-forced pass.
    drafter, network = None, {}
    if isinstance(config.drafter, TrainedDrafter):
        drafter, network = config.drafter, draft_params.beside_trunk()
    arguments = {"model": model, "config": config, "temperatures": temperatures, "drafter": drafter}
    comparison = _compare_texts({**params, **network}, prompts, extended_texts, **arguments)
    starts = np.array([len(prompt) for prompt in prompts])
    ends = starts + np.array([len(text) for text in texts])
    is_greedy = temperatures == 0
    rule = DecodeSpec.from_config(config, is_greedy=bool(is_greedy.all())).rule
    # Expected counts for every depth 1..K; `accepted` keeps those of the deepest, the depth of the call.
    accepted, rounds_at_depth, accepted_at_depth = np.full((3, len(prompts), config.num_steps), np.nan)
    if is_predictable(config, rule):
        assert isinstance(rule, str)  # custom rules, which are callables, are not predictable
        probabilities = acceptance_probabilities(comparison.matches_text, comparison.log_ratio, is_greedy, rule=rule)
        for depth in range(1, config.num_steps + 1):
            rounds_at_depth[:, depth - 1], accepted = expected_rounds(probabilities[:, :, :depth], starts, ends)
            accepted_at_depth[:, depth - 1] = accepted.sum(axis=1)
    predicted = {
        "predicted_accepted": accepted,
        "rounds_at_depth": rounds_at_depth,
        "accepted_at_depth": accepted_at_depth,
    }
    return _sum_over_positions(comparison, starts, ends), predicted


class LevelComparison(NamedTuple):
    """A teacher-forced pass, compared with the trunk at each position i and level k: arrays `[B, T, K]`."""

    agrees: Any  # bool: level k's arg-max equals the trunk's choice for the same token, i + k + 1
    overlap: Any  # float: 1 - TV of their distributions
    matches_text: Any  # bool: level k's arg-max equals the text's token
    log_ratio: Any  # float: log q - log p of the text's token; -inf past the end of the text


def _compare_texts(
    params,
    prompts,
    continuations,
    *,
    model: MTPModel,
    config: DecodeConfig,
    temperatures: np.ndarray,
    drafter: TrainedDrafter | None,
) -> LevelComparison:
    """Runs `compare_levels` over the texts, in groups whose logits fit `MAX_LOGITS_PER_PASS`."""
    texts = [prompt + row for prompt, row in zip(prompts, continuations, strict=True)]
    # All groups have the same number of rows and columns, so they share one compiled program.
    columns = round_up_capacity(max(map(len, texts)))
    size = columns * model.config.vocab_size * (config.num_steps + 1)
    rows_at_once = min(max(1, MAX_LOGITS_PER_PASS // size), len(texts))
    compare = functools.partial(compare_levels, model=model, num_depths=config.num_steps, drafter=drafter)
    parts = []
    for begin in range(0, len(texts), rows_at_once):
        group = texts[begin : begin + rows_at_once]
        batch_temperatures = np.ones(rows_at_once, np.float32)
        batch_temperatures[: len(group)] = temperatures[begin : begin + rows_at_once]
        group += [[0]] * (rows_at_once - len(group))  # the last group's padding rows
        tokens = np.array([text + [0] * (columns - len(text)) for text in group], np.int32)
        lengths = np.array([len(text) for text in group], np.int32)
        compared = compare(params, tokens, lengths, np.where(batch_temperatures == 0, 1, batch_temperatures))
        parts.append(jax.device_get(gather_processes(compared)))
    return LevelComparison(*(np.concatenate(arrays)[: len(texts)] for arrays in zip(*parts, strict=True)))


@functools.partial(jax.jit, static_argnames=("model", "num_depths", "drafter"))
def compare_levels(
    params,
    tokens,
    lengths,
    temperature,
    *,
    model: MTPModel,
    num_depths: int,
    drafter: TrainedDrafter | None = None,
) -> LevelComparison:
    """Compares draft levels 1..num_depths with the trunk at every position of a text.

    Args:
        params: model parameters.
        tokens: `[B, T]` int32, right-padded.
        lengths: `[B]` tokens of each text.
        temperature: `[B]` float32, above 0.
        model: the model.
        num_depths: draft levels, K.
        drafter: the drafter beside the trunk, whose parameters are then in `params`; None: MTP modules.

    Returns:
        The comparison, `[B, T, K]`.
    """
    # Recycled levels see the keys that they see in decoding: the true prefix, then their own (`ttt`).
    if drafter is None:
        output = forward(params, tokens, model=model, lengths=lengths, num_depths=num_depths, attention_layout="ttt")
    else:
        is_text = (jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]).astype(jnp.int32)
        output = forward_with_drafter(params, tokens, is_text, model=model, drafter=drafter, num_depths=num_depths)
    # Decoding never picks ids that only pad the embedding table.
    is_token = jnp.arange(model.config.vocab_size) < (model.config.num_tokens or model.config.vocab_size)

    def log_probabilities(logits):
        return jax.nn.log_softmax(jnp.where(is_token[None, None], logits, -jnp.inf) / temperature[:, None, None])

    target = log_probabilities(output.logits)
    columns = jnp.arange(tokens.shape[1])[None, :]
    levels = []
    for depth, logits in enumerate(output.mtp_logits, start=1):
        # Level k at position i and the trunk at position i + k both predict token i + k + 1.
        draft, trunk = log_probabilities(logits), shift_left(target, depth)
        text = shift_left(tokens, depth + 1)
        choice = jnp.argmax(draft, axis=-1)
        log_q, log_p = (jnp.take_along_axis(log, text[:, :, None], axis=-1)[:, :, 0] for log in (draft, trunk))
        is_known = columns + depth + 1 < lengths[:, None]
        levels.append(
            LevelComparison(
                choice == jnp.argmax(trunk, axis=-1),
                # The sum of min(p, q) is 1 - TV: the rate at which the rule "token" accepts a sampled draft.
                jnp.exp(jnp.minimum(draft, trunk)).sum(axis=-1),
                is_known & (choice == text),
                jnp.where(is_known, log_q - log_p, -jnp.inf),
            )
        )
    return LevelComparison(*(jnp.stack(field, axis=-1) for field in zip(*levels, strict=True)))


def _sum_over_positions(comparison: LevelComparison, starts: np.ndarray, ends: np.ndarray) -> TeacherForcedSums:
    """Sums over the continuations, tokens `starts [B]` to `ends [B]` of each text."""
    # Place i counts from the last prompt token on, as long as the trunk's choice at i + k is inside the text.
    _, T, K = comparison.agrees.shape
    column, level = np.arange(T)[None, :, None], np.arange(1, K + 1)[None, None, :]
    is_counted = (column >= starts[:, None, None] - 1) & (column + level < ends[:, None, None])

    # Products over levels 1..k-1 are those over 1..k, one level later.
    def before(products: np.ndarray) -> np.ndarray:
        return np.concatenate([np.ones_like(products[..., :1]), products[..., :-1]], axis=-1)

    survives, product = np.cumprod(comparison.agrees, axis=-1), np.cumprod(comparison.overlap, axis=-1)
    fields = (comparison.agrees, before(survives), survives, comparison.overlap, before(product), product)
    return TeacherForcedSums(is_counted.sum(axis=1), *(np.where(is_counted, field, 0).sum(axis=1) for field in fields))


def _fields(teacher_forced: TeacherForcedSums) -> list[np.ndarray]:
    return [getattr(teacher_forced, field.name) for field in dataclasses.fields(teacher_forced)]
