"""Measures acceptance on given prompts with plain decoding, decoding with drafts, and a teacher-forced pass.

This module returns counts per prompt. `mtpjax.evaluation.metrics` turns them into rates and accept lengths, as it does
for the counts from `mtpjax ablate` and `merge-mtp --check`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.config import DecodeConfig, SamplingParams
from mtpjax.drafters.trained import DraftParams
from mtpjax.evaluation.counts import AcceptanceCounts, Predicted, TeacherForcedSums
from mtpjax.evaluation.teacher_forced import count_teacher_forced
from mtpjax.inference.generate import generate, speculative_generate
from mtpjax.models.model import MTPModel
from mtpjax.program_memory import free_programs_if_full


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
) -> AcceptanceCounts:
    """Decodes prompts plainly and with drafts, and runs a teacher-forced pass over the plain texts.

    If a drafter has parameters but is not a `TrainedDrafter`, there is no teacher-forced pass, so the sums are 0 and
    the predictions are nan.

    Args:
        params: parameters of `model` with unrolled layers.
        prompts: P token lists.
        config: decoding settings; `num_steps` must be at least 1.
        temperature: one temperature for all prompts, or one per prompt.
        seed: random seed for the first prompt; the seed increases by 1 per prompt.
        batch_size: number of prompts decoded together.
        draft_params: parameters of `config.drafter`, if it has its own (`mtpjax.load_drafter`).

    Returns:
        The counts for each prompt.

    Raises:
        ValueError: the config has no draft levels, the batch size or a temperature is out of range, or decoding rejects
            the settings.
    """
    # Check before decoding, which may take minutes.
    if not config.num_steps:
        raise ValueError("acceptance needs draft levels: num_steps must be at least 1")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    temperatures = np.broadcast_to(np.asarray(temperature, float), len(prompts))
    if not (np.isfinite(temperatures) & (temperatures >= 0)).all():
        raise ValueError(f"temperature {temperature} must be finite and not negative")
    batches = []
    for begin in range(0, len(prompts), batch_size):
        batch = slice(begin, begin + batch_size)
        seeds = [seed + number for number in range(begin, begin + len(prompts[batch]))]
        sampling = sampling_arguments(temperatures[batch], seeds)
        counts = _measure_batch(
            params, prompts[batch], temperatures[batch], sampling, model=model, config=config, draft_params=draft_params
        )
        batches.append(counts)
        free_programs_if_full()
    return AcceptanceCounts.concatenate(batches)


def _measure_batch(
    params: dict,
    prompts: Sequence[list[int]],
    temperatures: np.ndarray,
    sampling: dict[str, Any],
    *,
    model: MTPModel,
    config: DecodeConfig,
    draft_params: Any,
) -> AcceptanceCounts:
    # The last round's drafts may extend up to K tokens past the end of the text. Plain decoding therefore continues K
    # tokens further, so that the prediction can compare these drafts too. At the model's maximum length, predicted
    # drafts end with the text.
    longest = model.config.max_position_embeddings
    extended_config = dataclasses.replace(
        config,
        max_new_tokens=config.max_new_tokens + config.num_steps,
        max_length=min((config.max_length or longest) + config.num_steps, longest),
        stop_token_ids=(),
        stop_sequences=(),
    )
    # 1. Decode plainly, and cut each text where the user's limits and stop sequences end it.
    rows = list(prompts)
    extended = generate(params, rows, model=model, config=extended_config, **sampling).rows()
    plain = [_cut_at_end(text, config, len(row), model) for row, text in zip(rows, extended, strict=True)]
    # 2. Decode with drafts and the same seeds, and check that the texts are the same.
    drafted: dict[str, Any] = {"model": model, "config": config, "draft_params": draft_params}
    result = speculative_generate(params, rows, **drafted, **sampling)
    is_identical = equals_plain_decoding(params, rows, result.rows(), plain, model=model, config=config, **sampling)
    # 3. Run one teacher-forced pass over the plain texts, which gives the rates at every position and the predictions.
    if draft_params is None or isinstance(draft_params, DraftParams):
        num_new = np.array([len(text) for text in plain])
        forced = count_teacher_forced(params, rows, num_new, extended, temperatures=temperatures, **drafted)
    else:
        shape = len(rows), config.num_steps
        forced = TeacherForcedSums(*np.zeros((7, *shape))), Predicted(*np.full((3, *shape), np.nan))
    # Use an array of lists, so that it can be indexed and concatenated like the counts.
    texts = np.empty(len(plain), object)
    texts[:] = plain
    return AcceptanceCounts(*forced, result.stats.rounds, result.stats.accepted, is_identical, texts)


def _cut_at_end(text: list[int], config: DecodeConfig, prompt_length: int, model: MTPModel) -> list[int]:
    """Cuts a text where the limits or stop sequences of `config` end it."""
    longest = config.max_length or model.config.max_position_embeddings
    text = text[: min(config.max_new_tokens, longest - prompt_length)]
    stops = [(token,) for token in config.stop_token_ids] + list(config.stop_sequences)
    ends = (end for end in range(1, len(text) + 1) if any(tuple(text[:end][-len(stop) :]) == stop for stop in stops))
    return text[: next(ends, len(text))]


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
    """Checks, for each prompt, whether decoding with drafts and plain decoding return the same text.

    Below float32, matmuls round differently at different batch widths, so near-tied logits can flip. Texts that differ
    are therefore compared once more, with plain decoding at the width of verification. This second comparison is
    reliable at a fixed depth; with adaptive depth, the width varies between rounds unless `config.min_rows` is the
    width of the deepest round. The states that linear attention replays may also differ in the last bit.

    Args:
        rows: new tokens from decoding with `config`.
        plain: new tokens from plain decoding.
        **sampling_kwargs: the result of `sampling_arguments` for these calls.

    Returns:
        `[P]` bool, True for equal texts.
    """
    is_equal = np.array([row == other for row, other in zip(rows, plain, strict=True)])
    if is_equal.all() or jnp.finfo(params["embedding"].dtype).bits >= 32:
        return is_equal
    # Decode plainly once more, padded to the width of verification.
    wide_config = dataclasses.replace(config, min_rows=max(config.num_nodes, config.min_rows or 1))
    wide_rows = generate(params, prompts, model=model, config=wide_config, **sampling_kwargs).rows()
    return is_equal | np.array([row == other for row, other in zip(rows, wide_rows, strict=True)])


def sampling_arguments(temperature, seeds: list[int]) -> dict[str, Any]:
    """Returns `{"sampling": SamplingParams}` for a decoding call, or an empty dict if every row is at temperature 0."""
    return {"sampling": SamplingParams(temperature=temperature, seed=seeds)} if np.any(temperature) else {}
