"""The server's metrics for Prometheus, under mtpjax's, SGLang's and vLLM's names.

The engine keeps its own counts, which a collector reads from its `EngineStatus` when Prometheus scrapes. Only the
latencies, sizes and end reasons of requests are kept here; `observe` records them when a request ends.
"""

import bisect
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mtpjax.serving import metric_names
from mtpjax.serving.metric_names import ALIASES, Names
from mtpjax.serving.request import Finish, RequestTimes
from mtpjax.serving.status import EngineStatus

# prometheus-client is part of the extra `serve`; this module can be imported without it.
if TYPE_CHECKING:
    from prometheus_client import Metric

Sample = tuple[str, dict[str, str], float]  # suffix of the name, labels besides `model_name`, value
THROUGHPUT_SECONDS = 1.0  # shortest interval over which `gen_throughput` is measured


class _Histogram:
    """Counts of values per bucket. The same counts are exported under several names."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def samples(self) -> list[Sample]:
        bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        counts = list(itertools.accumulate(self.counts))
        buckets = [("_bucket", {"le": bound}, count) for bound, count in zip(bounds, counts, strict=True)]
        return [*buckets, ("_count", {}, counts[-1]), ("_sum", {}, self.sum)]


class Metrics:
    """All metrics of a server. Thread-safe.

    Attributes:
        more_counters: counters outside the engine, and functions that read them.

    Example:
        metrics = Metrics(engine.status, model_name="tiny")
        metrics.observe(finish, times)  # once per request
        body, content_type = metrics.render()  # GET /metrics
    """

    def __init__(
        self, status: Callable[[], EngineStatus], *, model_name: str, aliases: tuple[str, ...] = ALIASES
    ) -> None:
        """Makes metrics without any requests.

        Args:
            status: returns the engine's status; called here and once per scrape.
            model_name: value of the label `model_name`.
            aliases: engines whose metric names are exported too: "sglang", "vllm".

        Raises:
            ValueError: an alias is unknown.
        """
        if unknown := set(aliases) - set(ALIASES):
            raise ValueError(f"unknown metric aliases: {', '.join(sorted(unknown))}; known: {', '.join(ALIASES)}")
        self._status, self._model_name, self._aliases = status, model_name, aliases
        self.more_counters: dict[Names, Callable[[], float]] = {metric_names.WATCHDOG: lambda: 0}
        self._lock = threading.Lock()
        self._finished: Counter[str] = Counter()
        self._histograms = {
            metric_names.TIME_TO_FIRST_TOKEN: _Histogram(metric_names.REQUEST_SECONDS),
            metric_names.INTER_TOKEN_LATENCY: _Histogram(metric_names.TOKEN_SECONDS),
            metric_names.E2E_LATENCY: _Histogram(metric_names.REQUEST_SECONDS),
            metric_names.QUEUE_TIME: _Histogram(metric_names.REQUEST_SECONDS),
            metric_names.PROMPT_TOKENS: _Histogram(metric_names.TOKENS),
            metric_names.NEW_TOKENS: _Histogram(metric_names.TOKENS),
        }
        # The time of the last scrape, the tokens delivered by then, and the throughput that it reported.
        self._last_scrape = (time.monotonic(), status().num_new_tokens, 0.0)

    def observe(self, finish: Finish, times: RequestTimes) -> None:
        """Records a request that ended."""
        with self._lock:
            self._finished[finish.reason] += 1
            self._histograms[metric_names.PROMPT_TOKENS].add(finish.num_prompt_tokens)
            self._histograms[metric_names.NEW_TOKENS].add(finish.num_new_tokens)
            if times.started is not None:
                self._histograms[metric_names.QUEUE_TIME].add(times.started - times.arrived)
            # A request without tokens has no latency, because it was rejected, was aborted or failed.
            if not times.deliveries:
                return
            self._histograms[metric_names.TIME_TO_FIRST_TOKEN].add(times.deliveries[0][0] - times.arrived)
            self._histograms[metric_names.E2E_LATENCY].add(times.deliveries[-1][0] - times.arrived)
            # A round delivers several tokens at once. Each token gets an equal share of the time since the last
            # delivery, so that the sum is the decoding time and the count is the number of tokens.
            for (before, _), (now, count) in itertools.pairwise(times.deliveries):
                self._histograms[metric_names.INTER_TOKEN_LATENCY].add((now - before) / count, count)

    def render(self) -> tuple[bytes, str]:
        """Returns the body and the content type of `GET /metrics`."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        # Export only these metrics: the library's default registry would add metrics about the Python process.
        return generate_latest(self), CONTENT_TYPE_LATEST

    def collect(self) -> "Iterator[Metric]":
        """Yields all metrics under all names, as a `prometheus_client` collector does."""
        from prometheus_client import Metric

        for kind, names, samples in self._families():
            for name in names.full(self._aliases):
                metric = Metric(name, names.help, kind)
                for suffix, labels, value in samples:
                    metric.add_sample(name + suffix, {"model_name": self._model_name, **labels}, value)
                yield metric

    def _families(self) -> Iterator[tuple[str, Names, list[Sample]]]:
        """Yields the kind, names and samples of each metric."""
        status = self._status()
        # 1. Values from the status. A ratio is undefined before the first pass and is then left out.
        gauges: dict[Names, float] = {names: getattr(status, names.attribute) for names in metric_names.GAUGES}
        gauges[metric_names.THROUGHPUT] = self._throughput(status.num_new_tokens)
        for names, value in gauges.items():
            yield "gauge", names, [] if math.isnan(value) else [("", {}, value)]
        for names in metric_names.COUNTERS:
            yield "counter", names, [("_total", {}, getattr(status, names.attribute))]
        for names, count in self.more_counters.items():
            yield "counter", names, [("_total", {}, count())]
        # 2. Accepted drafts by level; levels are numbered from 0, as in vLLM.
        levels: list[Sample] = [("_total", {"position": str(k)}, count) for k, count in enumerate(status.accepted)]
        yield "counter", metric_names.ACCEPTED_PER_POSITION, levels
        # 3. How requests ended, and their latencies and sizes.
        with self._lock:
            finished = dict(self._finished)
            histograms = {names: each.samples() for names, each in self._histograms.items()}
        reasons: list[Sample] = [("_total", {"finished_reason": each}, count) for each, count in finished.items()]
        yield "counter", metric_names.FINISHED, reasons
        for names, samples in histograms.items():
            yield "histogram", names, samples

    def _throughput(self, num_new_tokens: int) -> float:
        """Returns tokens per second since the previous scrape; scrapes in quick succession return the same value."""
        with self._lock:
            now, (then, tokens_then, throughput) = time.monotonic(), self._last_scrape
            if now - then >= THROUGHPUT_SECONDS:
                throughput = (num_new_tokens - tokens_then) / (now - then)
                self._last_scrape = (now, num_new_tokens, throughput)
            return throughput
