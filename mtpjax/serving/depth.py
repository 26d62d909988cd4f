"""Adaptive depth of the engine: chooses the draft levels of the next call from measured costs and acceptance.

The cost model is that of `mtpjax.decoding.depth_policy`: expected tokens of a round over its duration. There the loop
decides on the device, before every round of one batch. Here the host decides before every call: durations are measured
for each batch size, and acceptance is counted over all requests. The choice depends only on earlier rounds, so exact
rules stay exact.
"""

import dataclasses
import statistics
import time

import numpy as np

from mtpjax.decoding.depth_policy import ASSUMED_PRIOR_COUNT, DECAY_ROUNDS, MIN_SPEEDUP, PRIOR_RATE, PROBE_INTERVAL
from mtpjax.serving.executor import Executor
from mtpjax.serving.request import Lease, Request, RequestTimes, Sequence
from mtpjax.serving.sizes import bucket

NUM_MEASURED = 5  # timed rounds per batch size and depth
PROMPT_LENGTH = 16  # of the rows whose rounds are timed

Costs = tuple[tuple[float, ...], ...]  # per batch size, the duration of a round at depths 0, 1, ...


def estimate_rates(verified: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Estimates the acceptance rate `[K]` of each level, given that all levels before it were accepted.

    From counts `[K]` of drafts whose predecessors were all accepted, and of the accepted ones among them. Each rate is
    shrunk towards the rate of the level before; the first one towards `PRIOR_RATE`.
    """
    rates, expected = [], PRIOR_RATE
    for num_verified, num_accepted in zip(verified, accepted, strict=True):
        expected = (num_accepted + ASSUMED_PRIOR_COUNT * expected) / (num_verified + ASSUMED_PRIOR_COUNT)
        rates.append(expected)
    return np.array(rates)


def best_depth(costs: tuple[float, ...], rates: np.ndarray) -> int:
    """Returns the depth with the most expected tokens per unit of time, by the durations of a round at depths 0..K."""
    tokens = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(rates))])
    return int(np.argmax(tokens / np.array(costs)))


def probe_depth(costs: tuple[float, ...], best: int) -> int:
    """Returns the depth after `best`; `best` itself if no deeper one would win even if all drafts were accepted."""
    perfect = np.arange(1, len(costs) + 1) / np.array(costs)
    can_win = perfect[best + 1 :].max(initial=0.0) >= MIN_SPEEDUP * perfect[best]
    return best + int(can_win)


@dataclasses.dataclass
class AdaptiveDepth:
    """Acceptance counts of all requests, and the choice of the depth.

    Attributes:
        costs: for each of `batch_sizes`, the duration of a round at depths 0..K.
        batch_sizes: numbers of rows that calls are compiled for, ascending.
        verified: `[K]` decayed count of drafts per level whose predecessors were all accepted.
        accepted: `[K]` decayed count of the accepted ones among them.
        since_probe: calls since the last probe.
    """

    costs: Costs
    batch_sizes: tuple[int, ...]
    verified: np.ndarray = dataclasses.field(init=False)
    accepted: np.ndarray = dataclasses.field(init=False)
    since_probe: int = 0

    def __post_init__(self):
        self.verified, self.accepted = np.zeros((2, len(self.costs[0]) - 1))

    def record(self, num_rounds: int, proposed: np.ndarray, accepted: np.ndarray) -> None:
        """Counts the rounds of one call: proposed and accepted drafts `[K]` per level, of all rows."""
        # Rounds without drafts reveal nothing about acceptance, so they do not change the counts.
        if not proposed.any():
            return
        # A draft says something about its level only if all drafts before it were accepted.
        verified = np.minimum(proposed, np.concatenate([proposed[:1], accepted[:-1]]))
        decay = (1 - 1 / DECAY_ROUNDS) ** num_rounds
        self.verified, self.accepted = decay * self.verified + verified, decay * self.accepted + accepted

    def choose(self, num_rows: int) -> int:
        """Chooses the depth of the next call for `num_rows` rows of one shard: the best by the counts.

        At regular intervals it is one level deeper, because rounds reveal nothing about acceptance beyond their depth.
        """
        costs = self.costs[self.batch_sizes.index(bucket(num_rows, self.batch_sizes))]
        best = best_depth(costs, estimate_rates(self.verified, self.accepted))
        self.since_probe += 1
        # A first call without drafts would reveal nothing, so it probes too.
        is_first = best == 0 and not self.verified.any()
        if self.since_probe < PROBE_INTERVAL and not is_first:
            return best
        self.since_probe = 0
        return probe_depth(costs, best)


def measure_costs(executor: Executor) -> Costs:
    """Times rounds of the engine's own programs, for each batch size and depth, in seconds.

    All slots must be free; the state is reset afterwards. A deeper round never counts as faster than a shallower one.
    """
    depths = range(executor.decoder.spec.num_steps + 1)
    costs = [[_measure(executor, size, depth) for depth in depths] for size in executor.sizes.batch_sizes]
    executor.reset()
    return tuple(tuple(np.maximum.accumulate(durations).tolist()) for durations in costs)


def _measure(executor: Executor, size: int, depth: int) -> float:
    """Returns the duration of a round of `depth` draft levels on `size` rows per shard, in seconds."""
    sizes = executor.sizes
    # 1. Rows with a short text and room for the timed rounds, if the longest text has that room. Rows may share pages:
    #    their results are not used.
    num_tokens = min(sizes.max_length, executor.decoder.max_length_of(sizes.shard_pages))
    prompt_length = max(min(PROMPT_LENGTH, executor.decoder.spec.prefill_chunk, num_tokens - depth - 1), 1)
    num_rounds = max(min((num_tokens - prompt_length - 1) // (depth + 1), NUM_MEASURED + 1), 1)
    num_new = min(1 + num_rounds * (depth + 1), num_tokens - prompt_length)
    request = Request(prompt=(0,) * prompt_length, max_new_tokens=max(num_new, 1))
    rows = executor.make_rows(request)
    num_pages = executor.decoder.num_pages_of(int(rows.settings.limit[0]))
    sequences = [
        Sequence(
            -1, request, lambda event: None, list(request.prompt), limit=prompt_length + num_new, rows=rows,
            is_plain=True, matcher=None, times=RequestTimes(0.0), shard=shard, slot=slot, num_to_prefill=prompt_length,
            lease=Lease([(slot * num_pages + page) % sizes.shard_pages for page in range(num_pages)], 0, 0, b""),
        )
        for shard in range(sizes.num_shards) for slot in range(size)
    ]  # fmt: skip
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
