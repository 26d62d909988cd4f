"""Counts where drafts agree with the trunk and what decoding would accept, in one teacher-forced pass over a text.

*Predicted* counts are the counts that decoding would have, computed from the pass (`mtpjax.evaluation.predict`).
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
from mtpjax.drafters.forward import forward_with_drafter
from mtpjax.drafters.trained import DraftParams, TrainedDrafter
from mtpjax.evaluation.counts import Predicted, TeacherForcedSums
from mtpjax.evaluation.predict import PREDICTABLE_RULES, acceptance_probabilities, expected_rounds
from mtpjax.evaluation.row_pass import run_on_rows
from mtpjax.models.decoding_layout import run_on_shards
from mtpjax.models.forward import forward, shift_left
from mtpjax.models.model import MTPModel

MAX_LOGITS_PER_PASS = 1 << 28  # maximum number of float32 logits in one teacher-forced pass: 1 GiB


def is_predictable(config: DecodeConfig, rule: str) -> bool:
    """Returns whether `mtpjax.evaluation.predict` covers these settings.

    It covers chains with a fixed depth under an exact rule. It does not cover a draft window, a reduced draft
    vocabulary or drafts that end early, because the teacher-forced pass does not model them.

    Args:
        config: decoding settings.
        rule: the name of the resolved acceptance rule.
    """
    is_chain = config.topk == 1 and config.depth_policy == "fixed" and config.draft_window is None
    if isinstance(config.drafter, TrainedDrafter) and config.drafter.ends_early:
        return False
    return is_chain and config.draft_vocabulary is None and rule in PREDICTABLE_RULES


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
    """Runs one pass over prompts and texts, and predicts the counts of decoding from it.

    The first `num_new [B]` tokens of each text count. The tokens after them are only compared with the last drafts.
    """
    # 1. Pad the texts to one shape and compare the levels. Rows at temperature 0 are compared at temperature 1.
    rows = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    tokens = np.zeros((len(rows), round_up_capacity(max(map(len, rows)))), np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    padded = PaddedTexts(
        tokens,
        np.array([len(row) for row in rows], np.int32),
        np.where(temperatures == 0, 1, temperatures).astype(np.float32),
    )
    # A separate drafter has its own teacher-forced pass.
    drafter = config.drafter if isinstance(config.drafter, TrainedDrafter) else None
    settings = {"drafter": drafter, "draft_params": draft_params}
    comparison = compare_levels(params, padded, model=model, num_depths=config.num_steps, **settings)
    # 2. Predict decoding from the end of each prompt to the end of its text.
    starts = np.array([len(prompt) for prompt in prompts])
    ends = starts + num_new
    is_greedy = temperatures == 0
    rule = make_spec(config, is_greedy=bool(is_greedy.all())).rule.name
    # Compute the expected counts for every depth 1..K. `accepted` ends up with the counts for K, the depth of the call.
    accepted, rounds_at_depth, accepted_at_depth = np.full((3, len(prompts), config.num_steps), np.nan)
    if is_predictable(config, rule):
        probabilities = acceptance_probabilities(comparison.matches_text, comparison.log_ratio, is_greedy, rule=rule)
        for depth in range(1, config.num_steps + 1):
            rounds_at_depth[:, depth - 1], accepted = expected_rounds(probabilities[:, :, :depth], starts, ends)
            accepted_at_depth[:, depth - 1] = accepted.sum(axis=1)
    return _sum_over_positions(comparison, starts, ends), Predicted(accepted, rounds_at_depth, accepted_at_depth)


class LevelComparison(NamedTuple):
    """Comparison of the draft levels with the trunk at each position i and level k, as arrays `[B, T, K]`."""

    agrees: Any  # bool: level k's arg-max equals the trunk's choice for the same token, i + k + 1
    overlap: Any  # float: 1 - TV between their distributions
    matches_text: Any  # bool: level k's arg-max equals the text's token
    log_ratio: Any  # float: log q - log p of the text's token; -inf past the end of the text


class PaddedTexts(NamedTuple):
    """Right-padded texts on the host."""

    tokens: Any  # [B, T] int32
    lengths: Any  # [B] int32, number of tokens in each text
    temperature: Any  # [B] float32, above 0


def compare_levels(
    params: dict,
    texts: PaddedTexts,
    *,
    model: MTPModel,
    num_depths: int,
    drafter: TrainedDrafter | None = None,
    draft_params: DraftParams | None = None,
) -> LevelComparison:
    """Compares draft levels 1..num_depths with the trunk at every position of texts.

    On a mesh, each device compares its shard of the texts, with the weights sharded as in decoding.

    Args:
        params: model parameters with unrolled layers.
        texts: the texts.
        model: the model.
        num_depths: draft levels, K.
        drafter: a separate drafter; None: MTP modules.
        draft_params: the drafter's parameters.

    Returns:
        The comparison, `[B, T, K]`, on the host.
    """
    # The logits of the trunk and of all levels are in memory at the same time.
    num_logits = texts.tokens.shape[1] * model.config.vocab_size * (num_depths + 1)
    batch_size = max(1, MAX_LOGITS_PER_PASS // num_logits)
    network = {} if drafter is None or draft_params is None else draft_params.beside_trunk()
    settings = {"batch_size": batch_size, "model": model, "num_depths": num_depths, "drafter": drafter}
    return run_on_rows(_compare_on_shards, params, network, texts, **settings)


@functools.partial(jax.jit, static_argnames=("model", "num_depths", "drafter"))
def _compare_on_shards(
    params: dict, draft_params: dict, texts: PaddedTexts, *, model: MTPModel, num_depths: int, drafter: Any
) -> LevelComparison:
    def compare_shard(params: dict, draft_params: dict, texts: PaddedTexts) -> tuple[PaddedTexts, LevelComparison]:
        # 1. Run the trunk and all levels. Recycled levels attend to the same keys as in decoding, which are the true
        # prefix's keys and then their own (`ttt`).
        params, (tokens, lengths, temperature) = {**params, **draft_params}, texts
        if drafter is None:
            output = forward(
                params, tokens, model=model, lengths=lengths, num_depths=num_depths, attention_layout="ttt"
            )
        else:
            is_text = (jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]).astype(jnp.int32)
            output = forward_with_drafter(params, tokens, is_text, model=model, drafter=drafter, num_depths=num_depths)
        # Decoding never picks ids that are only padding in the embedding table.
        is_token = jnp.arange(model.config.vocab_size) < (model.config.num_tokens or model.config.vocab_size)

        def log_probabilities(logits):
            return jax.nn.log_softmax(jnp.where(is_token[None, None], logits, -jnp.inf) / temperature[:, None, None])

        # 2. Compare each level with the trunk and with the text.
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
                    # The sum of min(p, q) is 1 - TV, the probability that the rule "token" accepts a sampled draft.
                    jnp.exp(jnp.minimum(draft, trunk)).sum(axis=-1),
                    is_known & (choice == text),
                    jnp.where(is_known, log_q - log_p, -jnp.inf),
                )
            )
        return texts, LevelComparison(*(jnp.stack(field, axis=-1) for field in zip(*levels, strict=True)))

    return run_on_shards(compare_shard, model.config, params, draft_params, texts, has_row_outputs=True)[1]


def _sum_over_positions(comparison: LevelComparison, starts: np.ndarray, ends: np.ndarray) -> TeacherForcedSums:
    """Sums over each text's continuation, from token `starts [B]` to token `ends [B]`."""
    # Position i counts if it is not before the last prompt token and the token that position i + k predicts is in the
    # text.
    _, T, K = comparison.agrees.shape
    column, level = np.arange(T)[None, :, None], np.arange(1, K + 1)[None, None, :]
    is_counted = (column >= starts[:, None, None] - 1) & (column + level < ends[:, None, None])

    # The products over levels 1..k-1 are the products over 1..k, shifted by one level.
    def before(products: np.ndarray) -> np.ndarray:
        return np.concatenate([np.ones_like(products[..., :1]), products[..., :-1]], axis=-1)

    survives, product = np.cumprod(comparison.agrees, axis=-1), np.cumprod(comparison.overlap, axis=-1)
    fields = (comparison.agrees, before(survives), survives, comparison.overlap, before(product), product)
    return TeacherForcedSums(is_counted.sum(axis=1), *(np.where(is_counted, field, 0).sum(axis=1) for field in fields))
