"""Measures the durations of rounds, from which the engine chooses its depth."""

import itertools
import statistics
import time

import numpy as np

from mtpjax.serving.depth import Costs
from mtpjax.serving.executor import Executor
from mtpjax.serving.request import Lease, Request, Sequence

NUM_MEASURED = 5  # timed rounds per batch size and depth
PROMPT_LENGTH = 16  # of the rows whose rounds are timed


def measure_costs(executor: Executor) -> Costs:
    """Times rounds of the engine's own programs, for each batch size and depth, in seconds.

    All slots must be free; the state is reset afterwards. A deeper round never counts as faster than a shallower one.
    """
    depths = range(executor.session.decoder.spec.num_steps + 1)
    costs = [[_measure(executor, size, depth) for depth in depths] for size in executor.session.sizes.batch_sizes]
    executor.session.reset()
    return tuple(tuple(np.maximum.accumulate(durations).tolist()) for durations in costs)


def _measure(executor: Executor, size: int, depth: int) -> float:
    """Returns the duration of a round of `depth` draft levels on `size` rows per shard, in seconds."""
    sizes, decoder = executor.session.sizes, executor.session.decoder
    # 1. Rows with a short text and room for the timed rounds, if the longest text has that room. Rows may share pages:
    #    their results are not used.
    num_tokens = min(sizes.max_length, decoder.max_length_of(sizes.shard_pages))
    prompt_length = max(min(PROMPT_LENGTH, decoder.spec.prefill_chunk, num_tokens - depth - 1), 1)
    num_rounds = max(min((num_tokens - prompt_length - 1) // (depth + 1), NUM_MEASURED + 1), 1)
    num_new = min(1 + num_rounds * (depth + 1), num_tokens - prompt_length)
    request = Request(prompt=(0,) * prompt_length, max_new_tokens=max(num_new, 1))
    rows = executor.programs.make_rows(request)
    num_pages = decoder.num_pages_of(int(rows.settings.limit[0]))
    sequences = []
    for shard, slot in itertools.product(range(sizes.num_shards), range(size)):
        sequence = Sequence.new(-1, request, rows, lambda event: None)
        sequence.shard, sequence.slot, sequence.num_to_prefill = shard, slot, prompt_length
        pages = [(slot * num_pages + page) % sizes.shard_pages for page in range(num_pages)]
        sequence.lease = Lease(pages, 0, 0, b"")
        sequences.append(sequence)
    executor.admit(sequences)
    max_rows = sizes.prefill_sizes[-1]
    for begin in range(0, size, max_rows):
        some = [sequence for sequence in sequences if begin <= (sequence.slot or 0) < begin + max_rows]
        executor.prefill([(sequence, 0, prompt_length) for sequence in some]).read()
    # 2. The first round prepares the dispatch of later ones.
    durations = []
    for _ in range(num_rounds):
        begin = time.perf_counter()
        executor.advance(sequences, depth, 1).read()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations[1:] or durations)
