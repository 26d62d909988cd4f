"""Generates texts for a list of prompts in batches, like vLLM's offline inference. Requires no extras.

With stop strings, a batch decodes only a few rounds per call, so that it can end soon after every text contains one.
The host searches for them, because only the host has the decoded text.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mtpjax.decoding.config import DecodeConfig, SamplingParams, check_integer
from mtpjax.decoding.gpu_graph import GRAPHS
from mtpjax.decoding.result import GenerationResult
from mtpjax.decoding.state import NewRows
from mtpjax.inference.generate import BatchCall, decode_batch, make_call
from mtpjax.inference.requests import repeat_first_row
from mtpjax.models.model import MTPModel
from mtpjax.serving.completion import Completion
from mtpjax.serving.text_stream import Span, TextStream

ROUNDS_PER_CHECK = 16  # rounds between two searches for stop strings; each search copies the tokens to the host


class CompletedBatch(NamedTuple):
    """The results for a batch of consecutive prompts.

    Attributes:
        completions: one per prompt.
        result: the tokens that the loop decoded for them, which may continue after a stop string.
    """

    completions: list[Completion]
    result: GenerationResult


def complete(
    params: dict,
    prompts: Sequence[Sequence[int]],
    *,
    model: MTPModel,
    config: DecodeConfig,
    sampling: SamplingParams,
    make_stream: Callable[[Sequence[int]], TextStream],
    batch_size: int = 8,
    draft_params: Any = None,
) -> Iterator[CompletedBatch]:
    """Continues prompts, `batch_size` of them at a time.

    All batches have one shape, so they share their compiled programs. The batches depend only on the order of the
    prompts, and a row's tokens do not depend on its batch.

    Args:
        params: parameters of `model`.
        prompts: token ids of each prompt.
        model: the model.
        config: the settings.
        sampling: the sampling parameters, which are the same for all rows except for a seed per prompt.
        make_stream: makes the decoder for the text that follows a prompt.
        batch_size: rows that decode at the same time.
        draft_params: the drafter's own parameters.

    Yields:
        The batches, in the order of the prompts.

    Raises:
        ValueError: a prompt or setting is out of range; raised before the first batch.
    """
    if check_integer("batch_size", batch_size) < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    seeds = list(sampling.seed)  # type: ignore[arg-type]
    # 1. Check all prompts, and size the state for the longest of them. Compile only what the requests use.
    arrays, num_rows = [np.asarray(prompt) for prompt in prompts], min(batch_size, len(prompts))
    call = make_call(
        params, arrays, model=model, config=config, sampling=sampling, batch=num_rows, draft_params=draft_params
    )
    # 2. Decode the batches. The last batch is filled up with copies of its first prompt.
    for begin in range(0, len(prompts), batch_size):
        batch = prompts[begin : begin + batch_size]
        of_batch = dataclasses.replace(sampling, seed=seeds[begin : begin + batch_size])
        rows = call.make_rows(arrays[begin : begin + batch_size], of_batch)
        rows = repeat_first_row(rows, num_rows - len(batch))

        def decode(batch=batch, rows=rows) -> CompletedBatch:
            return _decode(call, rows, batch, [make_stream(prompt) for prompt in batch])

        yield GRAPHS.run_or_repeat(call.mesh or jax.sharding.get_mesh(), decode)


def _decode(
    call: BatchCall, rows: NewRows, prompts: Sequence[Sequence[int]], streams: list[TextStream]
) -> CompletedBatch:
    """Decodes one batch until every row has ended or produced a stop string."""
    rounds = np.int32(ROUNDS_PER_CHECK) if any(stream.has_stops for stream in streams) else None
    state, is_started = call.start(rows), False
    spans: list[list[Span]] = [[] for _ in streams]
    lengths = [0] * len(streams)
    while True:
        state = decode_batch(call, state, rounds, is_started=is_started)
        is_started, result = True, call.collect(state, len(streams))
        for row, (stream, tokens) in enumerate(zip(streams, result.rows(), strict=True)):
            origins = result.origins[row, lengths[row] : len(tokens)].tolist()
            spans[row] += stream.push(tokens[lengths[row] :], origins).spans
            lengths[row] = len(tokens)
        is_running = [reason == "running" for reason in result.finish_reasons]
        if not any(running and not stream.is_stopped for running, stream in zip(is_running, streams, strict=True)):
            break
    completions = []
    for row, stream in enumerate(streams):
        spans[row] += stream.finish().spans
        reason = "stop" if stream.is_stopped else result.finish_reasons[row]
        tokens = result.rows()[row][: stream.num_tokens]
        completions.append(Completion(spans[row], tokens, reason, stream.matched, prompts[row]))
    return CompletedBatch(completions, result)
