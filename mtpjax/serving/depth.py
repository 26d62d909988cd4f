"""Chooses how many draft levels the engine's next call uses, based on measured costs and acceptance.

The cost model is the one in `mtpjax.decoding.depth_policy`, which divides a round's expected tokens by its duration.
There, the loop decides on the device, before every round of one batch. Here, the host decides before every call, from
durations measured for each batch size (`depth_costs`) and from acceptance counted over all requests. The choice
depends only on earlier rounds, so exact rules stay exact.
"""

import dataclasses
import logging

import numpy as np

from mtpjax.decoding.depth_policy import ASSUMED_PRIOR_COUNT, DECAY_ROUNDS, MIN_SPEEDUP, PRIOR_RATE, PROBE_INTERVAL
from mtpjax.serving.sizes import bucket

_log = logging.getLogger(__name__)
Costs = tuple[tuple[float, ...], ...]  # per batch size, the duration of a round at depths 0, 1, ...


def estimate_rates(verified: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Estimates the acceptance rate `[K]` of each level, given that all levels before it were accepted.

    `verified` `[K]` counts the drafts whose predecessors were all accepted, and `accepted` `[K]` counts those of them
    that were accepted. Each rate is shrunk towards the previous level's rate, and the first one towards `PRIOR_RATE`.
    """
    rates, expected = [], PRIOR_RATE
    for num_verified, num_accepted in zip(verified, accepted, strict=True):
        expected = (num_accepted + ASSUMED_PRIOR_COUNT * expected) / (num_verified + ASSUMED_PRIOR_COUNT)
        rates.append(expected)
    return np.array(rates)


def best_depth(costs: tuple[float, ...], rates: np.ndarray) -> int:
    """Returns the depth with the most expected tokens per unit of time, given round durations at depths 0..K."""
    tokens = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(rates))])
    return int(np.argmax(tokens / np.array(costs)))


def probe_depth(costs: tuple[float, ...], best: int) -> int:
    """Returns `best` + 1, or `best` if no greater depth would win even if all drafts were accepted."""
    perfect = np.arange(1, len(costs) + 1) / np.array(costs)
    can_win = perfect[best + 1 :].max(initial=0.0) >= MIN_SPEEDUP * perfect[best]
    return best + int(can_win)


@dataclasses.dataclass
class AdaptiveDepth:
    """Chooses the depth from acceptance counts over all requests.

    Attributes:
        costs: for each of `batch_sizes`, the duration of a round at depths 0..K.
        batch_sizes: numbers of rows for which calls are compiled, ascending.
        verified: `[K]` per level, the decayed count of drafts whose predecessors were all accepted.
        accepted: `[K]` per level, the decayed count of these drafts that were accepted.
        since_probe: calls since the last probe.
    """

    costs: Costs
    batch_sizes: tuple[int, ...]
    verified: np.ndarray = dataclasses.field(init=False)
    accepted: np.ndarray = dataclasses.field(init=False)
    since_probe: int = 0

    def __post_init__(self):
        self.verified, self.accepted = np.zeros((2, len(self.costs[0]) - 1))
        for size, durations in zip(self.batch_sizes, self.costs, strict=True):
            shown = ", ".join(f"{depth}: {1000 * seconds:.2f}" for depth, seconds in enumerate(durations))
            _log.info("ms per round with %d rows, by draft levels: %s", size, shown)

    def record(self, num_rounds: int, proposed: np.ndarray, accepted: np.ndarray) -> None:
        """Records one call's rounds, and its proposed and accepted drafts `[K]` per level over all rows."""
        # Rounds without drafts reveal nothing about acceptance, so they do not change the counts.
        if not proposed.any():
            return
        # A draft is evidence about its level only if all drafts before it were accepted.
        verified = np.minimum(proposed, np.concatenate([proposed[:1], accepted[:-1]]))
        decay = (1 - 1 / DECAY_ROUNDS) ** num_rounds
        self.verified, self.accepted = decay * self.verified + verified, decay * self.accepted + accepted

    def choose(self, num_rows: int) -> int:
        """Returns the best depth, according to the counts, for the next call with `num_rows` rows in one shard.

        At regular intervals, returns one level more, because a round reveals nothing about deeper levels.
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
