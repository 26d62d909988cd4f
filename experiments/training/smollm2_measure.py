"""Measures the module of `train_smollm2`: acceptance and equal text on held-out prompts; the sampled distribution."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common.smollm2_settings import NUM_DEPTHS, Settings
from mtpjax import DecodeConfig, MTPModel, SamplingParams, forward, generate, speculative_generate
from mtpjax.evaluation.acceptance import first_divergences, sampling_arguments
from mtpjax.evaluation.metrics import decoded_rates, to_json

LAW_TOKENS, LAW_TOP_K = 4, 2  # the test of the distribution samples one of top_k ** tokens texts
LAW_BATCH = 64
LAW_PROMPT = "Once upon a time there was a"
MAX_BATCH = 8


def measure_acceptance(
    params: dict, rows: Sequence[list[int]], categories: Sequence[str], *, model: MTPModel, config: DecodeConfig
) -> dict[str, Any]:
    """Decodes prompts greedily, plainly and with drafts.

    Args:
        params: parameters of `model`.
        rows: tokens of each prompt.
        categories: category of each prompt.
        model: the model with its module.
        config: decoding settings with drafts.

    Returns:
        Counts of equal texts, and rates by category, as JSON.
    """
    steps, accepted = np.zeros(len(rows), int), np.zeros((len(rows), config.num_steps), int)
    differing = []
    for group, prompts in batches(rows):
        plain = generate(params, prompts, model=model, config=config).rows()
        result = speculative_generate(params, prompts, model=model, config=config)
        steps[group], accepted[group] = result.stats.rounds[: len(group)], result.stats.accepted[: len(group)]
        # Where texts differ, keep how close the trunk's two logits are: a near tie is rounding.
        divergences = first_divergences(params, prompts, result.rows(), plain, model=model)[: len(group)]
        differing += [
            {"prompt": number, "token": each.position, "gap": float(each.gap)}
            for number, each in zip(group, divergences, strict=True)
            if each is not None
        ]
        print(f"acceptance: {int((steps > 0).sum())} of {len(rows)} prompts", flush=True)
    # The rates of all prompts together and of each category.
    masks = {"overall": np.ones(len(rows), bool)}
    masks |= {name: np.array([each == name for each in categories]) for name in dict.fromkeys(categories)}
    rates = {
        name: {"prompts": int(mask.sum()), **to_json(decoded_rates(steps[mask], accepted[mask]))}
        for name, mask in masks.items()
    }
    return {"prompts": len(rows), "equal_texts": len(rows) - len(differing), "differing": differing, "rates": rates}


def plain_texts(params: dict, rows: Sequence[list[int]], *, model: MTPModel, config: DecodeConfig) -> list[list[int]]:
    """Decodes prompts greedily without drafts; arguments as in `measure_acceptance`.

    Returns:
        The text of each prompt.
    """
    texts: list[list[int]] = [[]] * len(rows)
    for group, prompts in batches(rows):
        found = generate(params, prompts, model=model, config=config).rows()
        for number, text in zip(group, found, strict=False):
            texts[number] = text
    return texts


def count_accepted(
    params: dict,
    rows: Sequence[list[int]],
    *,
    draft_params: Any,
    model: MTPModel,
    config: DecodeConfig,
    temperature: float,
) -> dict[str, Any]:
    """Decodes prompts with drafts.

    Args:
        params: parameters of `model`.
        rows: tokens of each prompt.
        draft_params: parameters of the drafter; None for MTP modules.
        model: the model.
        config: decoding settings with drafts.
        temperature: sampling temperature; the seed of a prompt is its number.

    Returns:
        Per prompt the "rounds", the "accepted" drafts of each level, and the "texts", as JSON.
    """
    found: dict[str, list[Any]] = {name: [None] * len(rows) for name in ("rounds", "accepted", "texts")}
    for group, prompts in batches(rows):
        seeds = (group + [group[-1]] * len(prompts))[: len(prompts)]
        asked = sampling_arguments(temperature, seeds)
        result = speculative_generate(params, prompts, model=model, config=config, draft_params=draft_params, **asked)
        values = result.stats.rounds.tolist(), result.stats.accepted.tolist(), result.rows()
        for name, of_rows in zip(found, values, strict=True):
            for number, value in zip(group, of_rows, strict=False):
                found[name][number] = value
    return found


def batches(rows: Sequence[list[int]]) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Groups prompts of similar lengths, which have little padding.

    Args:
        rows: tokens of each prompt.

    Yields:
        Numbers of prompts, and a batch that begins with these prompts. All batches have one size, so that they compile
        once for each cache capacity: the last one repeats its last prompt.
    """
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    size = -(-len(order) // -(-len(order) // MAX_BATCH))
    for begin in range(0, len(order), size):
        group = order[begin : begin + size]
        yield group, [rows[number] for number in (group + [group[-1]] * size)[:size]]


def choose_timed_prompts(rows: Sequence[list[int]], categories: Sequence[str], count: int) -> list[list[int]]:
    """Chooses the shortest prompts of different categories: their prefill is short beside the decoding.

    Args:
        rows: tokens of each prompt.
        categories: category of each prompt.
        count: number of prompts.

    Returns:
        Tokens of the chosen prompts, the shortest first.
    """
    shortest: dict[str, list[int]] = {}
    for row, category in zip(rows, categories, strict=True):
        shortest[category] = min(shortest.get(category, row), row, key=len)
    return sorted(shortest.values(), key=len)[:count]


def check_law(
    params: dict, prompt: list[int], *, model: MTPModel, draft_vocabulary: Sequence[int], settings: Settings
) -> dict[str, Any]:
    """Compares sampled texts with the target's distribution, whose probabilities are computed exactly.

    With top_k 2 there are 16 texts of four tokens. Their probabilities come from one teacher-forced pass of the trunk;
    the samples come from speculative decoding with the default rule. The statistic is Pearson's. Rule "sample" must
    also give plain sampling's tokens for the same seeds.

    Args:
        params: parameters of `model`.
        prompt: tokens of a prompt.
        model: the model with its module.
        draft_vocabulary: token ids that the module may draft.
        settings: number of samples, and seed.

    Returns:
        Statistic, degrees of freedom, p-value, accept length, and equality under rule "sample", as JSON.
    """
    texts, expected = enumerate_texts(params, prompt, model=model)
    decode: dict[str, Any] = {"max_new_tokens": LAW_TOKENS, "num_steps": NUM_DEPTHS, "prefill_chunk": 16}
    decode["draft_vocabulary"] = tuple(draft_vocabulary)
    config = DecodeConfig(**decode)
    counts, steps, accepted = np.zeros(len(texts)), 0, 0
    batch = min(LAW_BATCH, settings.law_samples)
    for begin in range(0, settings.law_samples // batch * batch, batch):
        seeds = [settings.seed + begin + number for number in range(batch)]
        sampling = SamplingParams(temperature=1.0, top_k=LAW_TOP_K, seed=seeds)
        result = speculative_generate(params, [prompt] * batch, model=model, config=config, sampling=sampling)
        for row in result.rows():
            counts[texts.index(tuple(row))] += 1
        steps, accepted = steps + int(result.stats.rounds.sum()), accepted + int(result.stats.accepted.sum())
    report = pearson(counts, expected) | {"samples": int(counts.sum()), "accept_length": 1 + accepted / steps}
    # Rule "sample" draws each token from the target with noise of its position, as plain sampling does.
    sampling = SamplingParams(temperature=1.0, seed=list(range(min(8, batch))))
    config = DecodeConfig(**{**decode, "max_new_tokens": 8 * LAW_TOKENS}, acceptance="sample")
    prompts = [prompt] * min(8, batch)
    drafted = speculative_generate(params, prompts, model=model, config=config, sampling=sampling).rows()
    plain = generate(params, prompts, model=model, config=config, sampling=sampling).rows()
    equal = sum(row == other for row, other in zip(drafted, plain, strict=True))
    return report | {"rule_sample_equal": equal, "rule_sample_texts": len(plain)}


def enumerate_texts(params: dict, prompt: list[int], *, model: MTPModel) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Lists all texts that top_k 2 can sample at temperature 1, and their probabilities.

    Args:
        params: parameters of `model`.
        prompt: tokens of the prompt.
        model: the model.

    Returns:
        Texts of `LAW_TOKENS` tokens, and `[texts]` float64 probabilities, which sum to 1.
    """
    beams: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(LAW_TOKENS):
        # Each text so far goes on with its two likeliest tokens, renormalised.
        rows = jnp.asarray([prompt + list(text) for text, _ in beams], jnp.int32)
        logits = np.asarray(forward(params, rows, model=model, num_depths=0).logits[:, -1], np.float64)
        best = np.argsort(-logits, axis=-1)[:, :LAW_TOP_K]
        weights = np.exp(np.take_along_axis(logits, best, axis=-1) - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        beams = [
            ((*text, int(best[row, place])), probability * float(weights[row, place]))
            for (row, (text, probability)), place in itertools.product(enumerate(beams), range(LAW_TOP_K))
        ]
    return [text for text, _ in beams], np.array([probability for _, probability in beams])


def pearson(counts: np.ndarray, probabilities: np.ndarray, least: float = 5.0) -> dict[str, float]:
    """Tests counts against probabilities with Pearson's chi-square; rare outcomes are counted together.

    Args:
        counts: `[n]` how often each outcome was sampled.
        probabilities: `[n]` their probabilities.
        least: smallest expected count of a cell.

    Returns:
        "statistic", "degrees" and "p".
    """
    expected = probabilities * counts.sum()
    is_rare = expected < least
    cells = [(counts[~is_rare], expected[~is_rare])]
    # Expected counts of all rare outcomes together; if they are still too few, the largest cell takes them in.
    if is_rare.any():
        cells.append((counts[is_rare].sum(keepdims=True), expected[is_rare].sum(keepdims=True)))
    found, wanted = (np.concatenate(parts) for parts in zip(*cells, strict=True))
    if len(wanted) > 1 and wanted[-1] < least:
        largest = int(np.argmax(wanted[:-1]))
        found[largest] += found[-1]
        wanted[largest] += wanted[-1]
        found, wanted = found[:-1], wanted[:-1]
    statistic, degrees = float(((found - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    p = float(jax.scipy.stats.chi2.sf(statistic, degrees)) if degrees else 1.0
    return {"statistic": statistic, "degrees": degrees, "p": p}
