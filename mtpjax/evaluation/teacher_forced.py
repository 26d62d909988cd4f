"""Counts along a text in one teacher-forced pass: where drafts agree with the trunk, and what decoding would accept.

*Predicted* counts are those of decoding, computed from the pass (`mtpjax.evaluation.predict`).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.capacity import round_up_capacity
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import make_spec
from mtpjax.distributed import gather_processes
from mtpjax.drafters.forward import forward_with_drafter
from mtpjax.drafters.trained import TrainedDrafter
from mtpjax.evaluation.predict import PREDICTABLE_RULES, acceptance_probabilities, expected_rounds
from mtpjax.models.forward import forward, shift_left
from mtpjax.models.model import MTPModel

MAX_LOGITS_PER_PASS = 1 << 28  # maximum number of float32 logits of one teacher-forced pass: 1 GiB


class TeacherForcedSums(NamedTuple):
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


class Predicted(NamedTuple):
    """Predicted counts of decoding, `[P, K]` float64; nan unless `is_predictable`.

    Attributes:
        accepted: accepted drafts per level.
        rounds_at_depth: rounds if rounds had 1..K levels.
        accepted_at_depth: accepted drafts of all levels if rounds had 1..K levels.
    """

    accepted: np.ndarray
    rounds_at_depth: np.ndarray
    accepted_at_depth: np.ndarray

    @property
    def rounds(self) -> np.ndarray:
        """`[P]` rounds at the depth of the call."""
        return self.rounds_at_depth[:, -1]


def is_predictable(config: DecodeConfig, rule: str) -> bool:
    """Returns whether `mtpjax.evaluation.predict` covers these settings.

    It covers chains of a fixed depth under an exact rule. The teacher-forced pass has no draft window and no reduced
    draft vocabulary, and does not end drafts early, so it does not cover drafts made with them.

    Args:
        config: decoding settings.
        rule: the name of the resolved acceptance rule.
    """
    is_chain = config.topk == 1 and config.depth_policy == "fixed" and config.draft_window is None
    if isinstance(config.drafter, TrainedDrafter) and config.drafter.ends_early:
        return False
    return is_chain and config.draft_vocabulary is None and rule in PREDICTABLE_RULES


def count_without_pass(num_prompts: int, num_steps: int) -> tuple[TeacherForcedSums, Predicted]:
    """Returns sums over no position and no predictions, for drafters that have no teacher-forced pass."""
    shape = num_prompts, num_steps
    return TeacherForcedSums(*np.zeros((7, *shape))), Predicted(*np.full((3, *shape), np.nan))


def count_teacher_forced(
    params: dict,
    prompts: Sequence[list[int]],
    num_new: np.ndarray,
    texts: Sequence[list[int]],
    *,
    model: MTPModel,
    config: DecodeConfig,
    temperatures: np.ndarray,
    draft_params: Any = None,
) -> tuple[TeacherForcedSums, Predicted]:
    """Runs one pass over prompts and texts, and predicts decoding from it.

    The first `num_new [B]` tokens of each text count; the last drafts are compared with the others.
    """
    # A separate drafter has its own teacher-forced pass.
    drafter, network = None, {}
    if isinstance(config.drafter, TrainedDrafter):
        drafter, network = config.drafter, draft_params.beside_trunk()
    arguments = {"model": model, "config": config, "temperatures": temperatures, "drafter": drafter}
    comparison = _compare_texts({**params, **network}, prompts, texts, **arguments)
    starts = np.array([len(prompt) for prompt in prompts])
    ends = starts + num_new
    is_greedy = temperatures == 0
    rule = make_spec(config, is_greedy=bool(is_greedy.all())).rule.name
    # Expected counts for every depth 1..K; `accepted` keeps those of the deepest, the depth of the call.
    accepted, rounds_at_depth, accepted_at_depth = np.full((3, len(prompts), config.num_steps), np.nan)
    if is_predictable(config, rule):
        probabilities = acceptance_probabilities(comparison.matches_text, comparison.log_ratio, is_greedy, rule=rule)
        for depth in range(1, config.num_steps + 1):
            rounds_at_depth[:, depth - 1], accepted = expected_rounds(probabilities[:, :, :depth], starts, ends)
            accepted_at_depth[:, depth - 1] = accepted.sum(axis=1)
    return _sum_over_positions(comparison, starts, ends), Predicted(accepted, rounds_at_depth, accepted_at_depth)


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
        drafter: the separate drafter, whose parameters are then in `params`; None: MTP modules.

    Returns:
        The comparison, `[B, T, K]`.
    """
    # Recycled levels attend to the same keys as in decoding: the true prefix, then their own (`ttt`).
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
    # Place i counts from the last prompt token on, while the trunk's choice at i + k is inside the text.
    _, T, K = comparison.agrees.shape
    column, level = np.arange(T)[None, :, None], np.arange(1, K + 1)[None, None, :]
    is_counted = (column >= starts[:, None, None] - 1) & (column + level < ends[:, None, None])

    # Products over levels 1..k-1 are those over 1..k, one level later.
    def before(products: np.ndarray) -> np.ndarray:
        return np.concatenate([np.ones_like(products[..., :1]), products[..., :-1]], axis=-1)

    survives, product = np.cumprod(comparison.agrees, axis=-1), np.cumprod(comparison.overlap, axis=-1)
    fields = (comparison.agrees, before(survives), survives, comparison.overlap, before(product), product)
    return TeacherForcedSums(is_counted.sum(axis=1), *(np.where(is_counted, field, 0).sum(axis=1) for field in fields))
