"""Sends the requests of a benchmark at their arrival times, and stops at Ctrl-C."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from mtpjax.evaluation.machine import Stopwatch
from mtpjax.serving.bench.backends import BenchRequest
from mtpjax.serving.bench.client import Client
from mtpjax.serving.bench.outcome import Outcome
from mtpjax.serving.bench.summary import summarize

T = TypeVar("T")


async def measure(
    client: Client,
    requests: Sequence[BenchRequest],
    outcomes: list[Outcome],
    *,
    times: Sequence[float],
    max_concurrency: int | None = None,
    extra_body: dict[str, Any] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Sends requests, waits for all of them, and summarizes the run.

    Args:
        client: the client.
        requests: the requests.
        outcomes: receives each outcome when its request ends, so that an interrupted caller keeps the finished ones.
        times: arrival of each request, in seconds from now. A request is sent when it arrives, or later if
            `max_concurrency` requests are already running.
        max_concurrency: maximum number of requests that run at the same time; None means no limit.
        extra_body: merged into every body.
        progress: called when a request ends.
    """
    limit = max_concurrency or len(requests)
    await client.open_connections(min(limit, len(requests)))
    before = await client.speculation_counts()
    stopwatch = Stopwatch()
    begin, slots = time.perf_counter(), asyncio.Semaphore(limit)

    async def send(request: BenchRequest, at: float) -> None:
        await asyncio.sleep(begin + at - time.perf_counter())
        # The semaphore grants slots in order of arrival. The wait for a slot is not part of the latency.
        async with slots:
            outcomes.append(await client.send(request, extra_body))
        progress()

    async with asyncio.TaskGroup() as group:
        for request, at in zip(requests, times, strict=True):
            group.create_task(send(request, at))
    # A client that needs a whole core, or waits for one, reads tokens late.
    elapsed = stopwatch.read()
    shares = {"client_cpu_share": elapsed["cpu_seconds"] / elapsed["seconds"]}
    shares["client_waited_share"] = stopwatch.waited_share()
    after = await client.speculation_counts()
    counts = None if before is None or after is None else (after[0] - before[0], after[1] - before[1])
    return {**summarize(outcomes, counts), **shares}


def run_until_interrupted(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine. Ctrl-C cancels it; KeyboardInterrupt is raised unless it then returns a partial result."""
    previous = signal.getsignal(signal.SIGINT)

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        # Only the main thread can have signal handlers; elsewhere the caller handles Ctrl-C.
        with contextlib.suppress(ValueError, RuntimeError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        return await work

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, previous)
