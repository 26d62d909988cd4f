"""Continues a list of prompts to texts, some of them at a time, as vLLM's offline inference does. Needs no extra.

A batch decodes with the resumable loop, so that it can end as soon as every text has met a stop string: these are
matched on text, which only the host has.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from mtpjax.decoding.config import DecodeConfig, SamplingParams, check_integer
from mtpjax.decoding.gpu_graph import GRAPHS
from mtpjax.decoding.result import GenerationResult, collect
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.decoding.sampling_params import make_sampling_arrays
from mtpjax.inference.requests import check_request, make_drafter, make_stop_table
from mtpjax.inference.resumable import init_state, insert, resolve_statics, run
from mtpjax.models.model import MTPModel
from mtpjax.serving.api.text_stream import Span, TextStream

ROUNDS_PER_CHECK = 16  # between two searches for stop strings, each of which copies the tokens to the host
ALL_ROUNDS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Completion:
    """The continuation of one prompt.

    Attributes:
        spans: its text by token, without the stop string or stop token that ended it.
        tokens: new tokens, up to the one that completed a stop string.
        finish_reason: "stop" for a stop string, stop token or stop sequence, "length" for the limit.
        matched_stop: the stop string or stop token; None for the limit.
    """

    spans: list[Span]
    tokens: list[int]
    finish_reason: str
    matched_stop: str | int | None

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(span.text for span in self.spans)


class CompletedBatch(NamedTuple):
    """Some prompts, in order.

    Attributes:
        completions: one per prompt.
        result: what the loop decoded for them, which may go on after a stop string.
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
    seeds: Sequence[int],
    make_decoder: Callable[[Sequence[int]], Callable[[int | None], str]],
    stop: Sequence[str] = (),
    batch_size: int = 8,
    draft_params: Any = None,
) -> Iterator[CompletedBatch]:
    """Continues prompts, `batch_size` of them at a time.

    All batches have one shape, so they share their compiled programs. Which prompts decode together depends on their
    order alone, and a row's tokens do not depend on its batch.

    Args:
        params: parameters of `model`.
        prompts: token ids of each prompt.
        model: the model.
        config: the settings. Its stop tokens are no part of the texts.
        sampling: the sampling parameters, one value for all rows, without seeds.
        seeds: one per prompt.
        make_decoder: returns an incremental decoder of the tokenizer for what follows a prompt.
        stop: strings that end a text, wherever the tokens split them.
        batch_size: rows that decode at the same time.
        draft_params: the drafter's own parameters.

    Yields:
        The batches, in the order of the prompts.

    Raises:
        ValueError: a prompt or setting is out of range; before the first batch.
    """
    if check_integer("batch_size", batch_size) < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    # 1. Check all prompts, and size the state for the longest of them.
    limit = check_request([np.asarray(prompt) for prompt in prompts], model, config, make_drafter(config))
    longest = max(map(len, prompts))
    max_length = min(longest + min(config.max_new_tokens, limit), limit)
    # 2. Compile what the requests use and nothing else, as `speculative_generate` does.
    is_greedy = config.acceptance == "auto" and not sampling.temperature
    config = dataclasses.replace(config, max_length=max_length, acceptance="greedy" if is_greedy else config.acceptance)
    arrays = make_sampling_arrays(
        dataclasses.replace(sampling, seed=0), 1, model.config, None, tuple(config.stop_token_ids)
    )
    spec, mesh = resolve_statics(params, model, config, min(batch_size, len(prompts)))[3:]
    num_slots = _count_slots(min(batch_size, len(prompts)), mesh)
    call = _Call(params, {"model": model, "config": config}, draft_params, num_slots, arrays.features, spec.is_exact)
    # 3. Decode the batches. The last one leaves slots free.
    for begin in range(0, len(prompts), batch_size):
        batch = slice(begin, begin + batch_size)
        row_sampling = dataclasses.replace(sampling, seed=list(seeds[batch]))

        def decode(batch=batch, row_sampling=row_sampling) -> CompletedBatch:
            streams = [
                TextStream(
                    make_decoder(prompt),
                    stop=stop,
                    hidden_tokens=config.stop_token_ids,
                    min_tokens=int(sampling.min_new_tokens),  # type: ignore[arg-type]
                )
                for prompt in prompts[batch]
            ]
            return call.decode(prompts[batch], row_sampling, streams, ROUNDS_PER_CHECK if stop else ALL_ROUNDS)

        yield GRAPHS.run_or_repeat(mesh or jax.sharding.get_mesh(), decode)


def _count_slots(num_rows: int, mesh: Mesh | None) -> int:
    """Returns the slots of a state for these rows: a multiple of the mesh's `data`."""
    parts = 1 if mesh is None else mesh.shape.get("data", 1)
    return -(-num_rows // parts) * parts


class _Call(NamedTuple):
    """What all batches have in common."""

    params: dict
    settings: dict[str, Any]
    draft_params: Any
    num_slots: int
    features: SamplingFeatures
    is_exact: bool

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        streams: list[TextStream],
        rounds: int,
    ) -> CompletedBatch:
        """Decodes one batch until every row has ended or met a stop string."""
        config: DecodeConfig = self.settings["config"]
        state = init_state(
            self.params,
            **self.settings,
            num_slots=self.num_slots,
            max_length=config.max_length,
            stops_shape=make_stop_table(config).shape,  # type: ignore[arg-type]
            features=self.features,
        )
        slots = range(len(prompts))
        inserted = [list(prompt) for prompt in prompts]
        state = insert(
            self.params, state, slots, inserted, **self.settings, sampling=sampling, draft_params=self.draft_params
        )
        spans: list[list[Span]] = [[] for _ in prompts]
        lengths = [0] * len(prompts)
        while True:
            result = collect(state, slots, is_exact=self.is_exact)
            for row, (stream, tokens) in enumerate(zip(streams, result.rows(), strict=True)):
                origins = result.origins[row, lengths[row] : len(tokens)].tolist()
                spans[row] += stream.push(tokens[lengths[row] :], origins).spans
                lengths[row] = len(tokens)
            is_running = [reason == "running" for reason in result.finish_reasons]
            if not any(running and not stream.is_stopped for running, stream in zip(is_running, streams, strict=True)):
                break
            state = run(self.params, state, rounds, **self.settings, draft_params=self.draft_params)
        completions = []
        for row, stream in enumerate(streams):
            spans[row] += stream.finish().spans
            reason = "stop" if stream.is_stopped else result.finish_reasons[row]
            tokens = result.rows()[row][: stream.num_tokens]
            completions.append(Completion(spans[row], tokens, reason, stream.matched))
        return CompletedBatch(completions, result)
