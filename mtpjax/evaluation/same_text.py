"""Compares two texts for the same prompt, and finds how close the logits are where the texts differ."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mtpjax.decoding.config import DecodeConfig, SamplingParams
from mtpjax.inference.generate import generate
from mtpjax.models.model import MTPModel


class Divergence(NamedTuple):
    """The first difference between two texts."""

    position: int  # number of new tokens that the texts share
    gap: float  # distance between the trunk's logits for the two tokens there; inf if one text ends there


def first_divergences(
    params: dict,
    prompts: Sequence[list[int]],
    rows: Sequence[list[int]],
    other_rows: Sequence[list[int]],
    *,
    model: MTPModel,
) -> list[Divergence | None]:
    """Finds where the two texts of each prompt first differ, and how close the trunk's logits for the two tokens are.

    A small gap means a near tie, which rounding can decide either way; a large gap means an error.

    `rows` and `other_rows` are the new tokens of each prompt's two texts.

    Returns:
        A `Divergence` per prompt; None for identical texts. If one text is a prefix of the other, they differ at its
        end, with an infinite gap. The gaps are computed from the trunk's unmodified logits.
    """
    # 1. Find the first differing token in each pair of texts.
    positions = [
        next((place for place, (token, other) in enumerate(itertools.zip_longest(*texts)) if token != other), None)
        for texts in zip(rows, other_rows, strict=True)
    ]
    # 2. Compare logits only for pairs in which both texts have a token there.
    shortest = [min(map(len, texts)) for texts in zip(rows, other_rows, strict=True)]
    compared = {
        number: place for number, place in enumerate(positions) if place is not None and place < shortest[number]
    }
    gaps: dict[int, float] = {}
    if compared:
        config = DecodeConfig(num_steps=0, max_new_tokens=1, logprobs=True)
        # Decode one token after the common prefix twice, allowing only one of the two tokens each time. The reported
        # log-probabilities come from the unmodified logits, so the normaliser cancels in the difference.
        shared = [[*prompts[number], *rows[number][:place]] for number, place in compared.items()]
        logprobs = []
        for texts in (rows, other_rows):
            sampling = SamplingParams(allowed_tokens=[[texts[number][place]] for number, place in compared.items()])
            result = generate(params, shared, model=model, config=config, sampling=sampling)
            assert result.logprobs is not None
            logprobs.append(result.logprobs[:, 0])
        gaps = dict(zip(compared, np.abs(logprobs[0] - logprobs[1]).tolist(), strict=True))
    return [
        None if place is None else Divergence(place, gaps.get(number, math.inf))
        for number, place in enumerate(positions)
    ]
