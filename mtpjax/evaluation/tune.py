"""Measures which implementation of each kernel is fastest for a model on this device, for `mtpjax tune`."""

import dataclasses
import functools
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.decoding.capacity import min_rows_per_pass
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Decoder, make_spec
from mtpjax.decoding.loop import decode
from mtpjax.decoding.sampling import SamplingArrays
from mtpjax.decoding.state import NewRows, StateShape, start_rows
from mtpjax.evaluation.op_cases import CASES, implementations_of
from mtpjax.inference.requests import make_drafter
from mtpjax.models.model import MTPModel
from pallas_kernels import dispatch, measurements
from pallas_kernels.case import difference_from_xla

Question = tuple[str, dict[str, Any]]  # an op and the shape of its call
LEAST_SECONDS = 0.02  # minimum duration of a measurement; shorter calls are repeated


def find_questions(
    params: dict, *, model: MTPModel, config: DecodeConfig, batches: Sequence[int], context: int, prefill_chunk: int
) -> list[Question]:
    """Finds the ops and shapes for which decoding chooses a kernel. Traces the decoding call but runs nothing.

    Args:
        params: model parameters; shapes suffice.
        config: decoding settings, traced once with their draft levels and once without drafts.
        batches: batch sizes.
        context: number of slots in the KV caches.
        prefill_chunk: tokens per row in a prefill pass.

    Returns:
        The ops and shapes without duplicates, in order of first use.
    """
    shapes = jax.eval_shape(lambda: params)
    found: list[Question] = []
    for batch in batches:
        for num_steps in sorted({0, config.num_steps}):
            # An op may get different shapes after a kernel than after XLA, so both are traced.
            for implementation in ("xla", "triton"):
                traced = model.clone(implementation=implementation)
                for question in _trace(shapes, traced, config, batch, num_steps, context, prefill_chunk):
                    # Models leave `rms_norm` to XLA, which fuses it with adjacent operations.
                    if question not in found and question[0] != "rms_norm":
                        found.append(question)
    return found


def _trace(shapes, model, config, batch, num_steps, context, prefill_chunk) -> list[Question]:
    """Traces one decoding call and returns its ops and shapes."""
    if not num_steps:
        config = dataclasses.replace(config, num_steps=0, topk=1, num_draft_tokens=None)
    drafter = make_drafter(config)
    min_rows = min_rows_per_pass(model.config, batch, "cuda")
    spec = make_spec(config, is_greedy=True, min_rows=min_rows, prefill_chunk=prefill_chunk)
    decoder = Decoder(model, drafter, spec)

    def call(params):
        own = drafter.default_params(params, config, model=model)
        one = jnp.ones(batch, jnp.int32)
        rows = NewRows.without_stops(jnp.zeros((batch, context), jnp.int32), one, one, SamplingArrays.greedy(batch))
        state = decoder.empty_state(StateShape.of(rows), jnp.dtype(params["embedding"].dtype))
        state = start_rows(state, rows, vocab_size=decoder.vocab_size)
        # Call the function that `jax.jit` wraps, because `jax.jit` itself does not trace a known call again.
        return inspect.unwrap(decode.plain)(params, own, state, decoder=decoder)

    with dispatch.record_choices() as asked:
        jax.eval_shape(call, shapes)
    return list(asked)


def measure(
    questions: Sequence[Question], *, rounds: int = 5, implementations: tuple[str, ...] | None = None
) -> Iterator[tuple[Question, dict[str, float], str | None]]:
    """Times all implementations for each question on this device, and stores the times in the user's file right away.

    Each implementation is first compared with XLA on small arrays; if the numbers differ, it is not timed.

    Args:
        questions: what to measure, from `find_questions`.
        rounds: measurements per implementation, taken in rotation; the result is their median.
        implementations: implementations to time; None: all that the op has here.

    Yields:
        For each question: the question, the milliseconds per call of each implementation that ran, and the reason why
        an implementation or the op was not timed (None if all were timed).
    """
    for op, shape in questions:
        if op not in CASES:
            yield (op, shape), {}, "this op cannot be timed separately"
            continue
        run, arrays = CASES[op](shape)
        calls: dict[str, Callable[[], Any]] = {}
        failure = None
        for name in implementations or implementations_of(op):
            call = functools.partial(jax.jit(functools.partial(run, implementation=name)), *arrays)
            # If an implementation cannot run here for any reason, measure the others.
            try:
                jax.block_until_ready(call())
                difference = 0.0 if name == "xla" else difference_from_xla(CASES[op], shape, name)
            except Exception as error:
                failure = f"{name} fails: {str(error).partition(chr(10))[0][:200]}"
                continue
            # Do not time wrong results.
            if not difference <= 1:
                failure = f"{name} differs from xla by {difference:.3g} times the tolerance"
                continue
            calls[name] = call
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(1e3 * seconds_per_call(call))
        medians = {name: statistics.median(values) for name, values in times.items()}
        if medians:
            measurements.add(op, shape, medians)
        yield (op, shape), medians, failure


def not_measured(questions: Sequence[Question]) -> list[Question]:
    """Returns the questions without times in the user's file."""
    table = measurements.read()
    return [(op, shape) for op, shape in questions if all(cell["shape"] != shape for cell in table.get(op, ()))]


def seconds_per_call(call: Callable[[], Any], least: float = LEAST_SECONDS) -> float:
    """Times one call by repeating it until all repeats take `least` seconds. The call must have run once before."""
    jax.block_until_ready(call())
    count = 1
    while True:
        begin = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        took = time.perf_counter() - begin
        if took > least:
            return took / count
        count *= 2
