"""Measures MTP's speed-up under load by sending the same requests with and without drafts, at several concurrencies."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mtpjax.evaluation.intervals import Estimate, estimate_from, resample
from mtpjax.evaluation.trust import speed_up_problem
from mtpjax.serving.bench.backends import BenchRequest
from mtpjax.serving.bench.client import Client
from mtpjax.serving.bench.sending import measure
from mtpjax.serving.bench.summary import is_client_busy

# Speed-ups by concurrency, which `--reference` shows next to the measured ones.
PUBLISHED = {1: 2.11, 2: 2.04, 4: 1.84, 8: 1.70, 16: 1.53, 32: 1.44, 64: 1.25}
PUBLISHED_SOURCE = "AMD, DeepSeek with MTP on MI300X"
WITHOUT_DRAFTS = {"speculative": False}  # added to the body of a request


@dataclasses.dataclass(frozen=True)
class Run:
    """One pass over all requests.

    Attributes:
        concurrency: requests that run at the same time.
        repeat: index of the pair that the run belongs to.
        speculative: whether drafts are on.
        summary: its numbers, from `summarize`.
    """

    concurrency: int
    repeat: int
    speculative: bool
    summary: dict[str, Any]


async def compare(
    client: Client,
    requests: Sequence[BenchRequest],
    runs: list[Run],
    *,
    concurrencies: Sequence[int],
    repeats: int,
    progress: Callable[[Run | None], None],
) -> None:
    """Runs all requests with and without drafts, alternately, at each concurrency.

    Args:
        client: the client.
        requests: the requests, the same in every run.
        runs: receives each run when it ends, so that an interrupted caller keeps the finished ones.
        concurrencies: numbers of requests that run at the same time.
        repeats: pairs of runs per concurrency.
        progress: called with None when a request ends, and with the run when a run ends.
    """
    for concurrency in concurrencies:
        for repeat in range(repeats):
            # The order alternates, so that a machine that slows down or speeds up favours neither side.
            for speculative in (True, False) if repeat % 2 == 0 else (False, True):
                # The previous run sent the same prompts, which this run would otherwise find in the cache.
                await client.flush_cache()
                summary = await measure(
                    client,
                    requests,
                    [],
                    times=[0.0] * len(requests),
                    max_concurrency=concurrency,
                    extra_body={} if speculative else WITHOUT_DRAFTS,
                    progress=lambda: progress(None),
                )
                runs.append(Run(concurrency, repeat, speculative, summary))
                progress(runs[-1])


@dataclasses.dataclass(frozen=True)
class Speedup:
    """The comparison at one concurrency.

    Attributes:
        ratio: output throughput with drafts divided by output throughput without drafts. The interval comes from
            resampling pairs of runs, and is nan for a single pair.
        throughput: output tokens per second, without and with drafts.
        ttft: mean milliseconds to the first token, without and with drafts.
        itl: mean milliseconds per token after the first, without and with drafts; None if there are no such tokens.
        accept_length: tokens per verification pass with drafts; None if the server does not report it.
        accept_length_without: the same without drafts; 1 if the server turns drafts off as requested.
        num_pairs: pairs of runs.
        num_failed: requests that failed.
        is_client_busy: whether the client was too busy in any run, as determined by the function `is_client_busy`.
        waited: the largest share of a run's time for which the client's threads waited for a core.
        problem: the reason why the ratio cannot be trusted (`mtpjax.evaluation.trust`); None if it can be trusted.
    """

    concurrency: int
    ratio: Estimate
    throughput: tuple[float, float]
    ttft: tuple[float | None, float | None]
    itl: tuple[float | None, float | None]
    accept_length: float | None
    accept_length_without: float | None
    num_pairs: int
    num_failed: int
    is_client_busy: bool = False
    waited: float = 0.0
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ratio": self.ratio.to_dict()}


def speedups(runs: Sequence[Run]) -> list[Speedup]:
    """Compares the runs of each concurrency that has a complete pair, in which both runs got tokens."""
    by_key = {(run.concurrency, run.repeat, run.speculative): run.summary for run in runs}
    result = []
    for concurrency in sorted({run.concurrency for run in runs}):
        repeats = sorted({run.repeat for run in runs if run.concurrency == concurrency})
        pairs = [[by_key.get((concurrency, repeat, side)) for side in (False, True)] for repeat in repeats]
        pairs = [[each for each in pair if each is not None and each["total_output_tokens"]] for pair in pairs]
        pairs = [pair for pair in pairs if len(pair) == 2]
        if not pairs:
            continue
        # Throughput is the number of all tokens divided by all seconds. Resampling draws whole pairs.
        tokens = np.array([[side["total_output_tokens"] for side in pair] for pair in pairs], float)  # [pairs, 2]
        seconds = np.array([[side["duration"] for side in pair] for pair in pairs], float)
        throughput = tokens.sum(0) / seconds.sum(0)
        (units,) = resample(len(pairs))
        resampled = tokens[units].sum(1) / seconds[units].sum(1)  # [samples, 2]
        ratio = estimate_from(throughput[1] / throughput[0], resampled[:, 1] / resampled[:, 0])
        ratio = ratio if len(pairs) > 1 else Estimate(ratio.value, np.nan, np.nan)
        accept_length = _mean(pairs, 1, "accept_length")
        waited = max(side.get("client_waited_share", 0.0) for pair in pairs for side in pair)
        result.append(
            Speedup(
                concurrency=concurrency,
                ratio=ratio,
                throughput=(float(throughput[0]), float(throughput[1])),
                ttft=(_mean(pairs, 0, "mean_ttft_ms"), _mean(pairs, 1, "mean_ttft_ms")),
                itl=(_mean(pairs, 0, "mean_itl_ms"), _mean(pairs, 1, "mean_itl_ms")),
                accept_length=accept_length,
                accept_length_without=_mean(pairs, 0, "accept_length"),
                num_pairs=len(pairs),
                num_failed=sum(side["failed"] for pair in pairs for side in pair),
                is_client_busy=any(is_client_busy(side) for pair in pairs for side in pair),
                waited=waited,
                problem=speed_up_problem(ratio, accept_length, waited=waited),
            )
        )
    return result


def _mean(pairs: list[list[dict[str, Any]]], side: int, name: str) -> float | None:
    """Returns the mean of metric `name` over one side of the pairs, or None if any of those runs lacks the metric."""
    values = [pair[side][name] for pair in pairs]
    return None if None in values else sum(values) / len(values)
