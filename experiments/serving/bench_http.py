"""Measures the cost of HTTP. A stand-in for the engine delivers tokens at fixed times; the rest is real.

    python -m experiments.serving.bench_http [--counts 1 16 64] [--tick 4.5]
    python -m experiments.serving.bench_http --quick

In each tick the stand-in computes for a while and sleeps for the rest, as the engine's thread does while a GPU works,
and then delivers some tokens to every request. So the number of tokens per second without HTTP is known; it is requests
x tokens / tick. HTTP slows ticks down, because its event loop and the engine's thread share Python's lock. It also
needs time per event, which limits the tokens per second of a process. The output shows both effects: "late" is the
median time by which a tick is longer than it should be, and the CPU microseconds are the server's CPU time per event of
a stream.
"""

import argparse
import asyncio
import itertools
import multiprocessing
import pathlib
import sys
import threading
import time
from typing import Any

import numpy as np
from rich.console import Console

from experiments.common.results import about, write
from experiments.gpu.gpu_models import NumberTokenizer
from mtpjax.console import narrow_table
from mtpjax.serving.request import Deliver, Delta, Finish, Request
from mtpjax.serving.status import EngineStatus

VOCAB_SIZE = 1000


class SteadyEngine:
    """Delivers `num_tokens` tokens to each request every `tick` seconds, and computes for `busy` of these seconds."""

    max_length, vocab_size, max_requests, grammars, failure = 1 << 20, VOCAB_SIZE, 1 << 20, None, ""

    def __init__(self, tick: float, busy: float, num_tokens: int):
        self._tick, self._busy, self._num_tokens = tick, busy, num_tokens
        self._ids = itertools.count()
        self._rows: dict[int, tuple[Request, Deliver, int]] = {}
        self._new: list[tuple[int, Request, Deliver]] = []
        self.late: list[float] = []
        self.num_events = 0
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Adds a request."""
        number = next(self._ids)
        self._new.append((number, request, deliver))
        return number

    def abort(self, request_id: int, reason: str = "abort") -> None:
        """Forgets a request."""
        self._rows.pop(request_id, None)

    def status(self) -> EngineStatus:
        """Returns a status in which all counts are zero."""
        raise NotImplementedError

    def flush_cache(self) -> int:
        """Does nothing, because there is no cache."""
        return 0

    def _run(self) -> None:
        while True:
            begin, busy_until = time.perf_counter(), time.thread_time() + self._busy
            while time.thread_time() < busy_until:
                sum(range(200))  # holds Python's lock
            time.sleep(max(begin + self._tick - time.perf_counter(), 0.0))
            if self._rows:
                self.late.append(time.perf_counter() - begin - self._tick)
            while self._new:
                number, request, deliver = self._new.pop()
                self._rows[number] = request, deliver, 0
            for number, (request, deliver, count) in list(self._rows.items()):
                tokens = list(range(min(self._num_tokens, request.max_new_tokens - count)))
                deliver(Delta(tokens, [0] * len(tokens), None))
                self.num_events += 1
                count += len(tokens)
                self._rows[number] = request, deliver, count
                if count == request.max_new_tokens:
                    deliver(Finish("length", len(request.prompt), num_new_tokens=count, num_steps=count))
                    self._rows.pop(number, None)


def serve(tick: float, busy: float, num_tokens: int, connection) -> None:
    """Serves a stand-in in this process. Sends its URL, and on request the measurements since the last request."""
    from mtpjax.serving.api.settings import ApiSettings
    from mtpjax.serving.app import make_app
    from mtpjax.serving.http_server import serve_in_thread

    engine: Any = SteadyEngine(tick, busy, num_tokens)
    with serve_in_thread(make_app(engine, NumberTokenizer(), ApiSettings(model_name="steady"))) as url:
        connection.send(url)
        while connection.recv():
            late, engine.late = engine.late, []
            connection.send((late, engine.num_events, time.process_time()))


async def measure(url: str, count: int, new_tokens: int, ask) -> dict:
    """Sends all requests at once, and measures them and the server."""
    from mtpjax.serving.bench.backends import BACKENDS, BenchRequest
    from mtpjax.serving.bench.client import Client
    from mtpjax.serving.bench.sending import measure as send

    async with Client(url, BACKENDS["openai"]) as client:
        requests = [BenchRequest("1 2 3", new_tokens)] * count
        _, events, cpu = ask()
        summary = await send(client, requests, [], times=[0.0] * count, max_concurrency=count)
        late, events_after, cpu_after = ask()
    return {
        "requests": count,
        "tokens_per_second": summary["output_throughput"],
        "late_ms": 1e3 * float(np.median(late)),
        "itl_ms": summary["mean_itl_ms"],
        "cpu_us_per_event": 1e6 * (cpu_after - cpu) / (events_after - events),
        "client_cpu_share": summary["client_cpu_share"],
        "failed": summary["failed"],
    }


def main(argv: list[str] | None = None) -> int:
    """Measures the server at several numbers of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 16, 64], help="numbers of simultaneous requests")
    parser.add_argument("--tick", type=float, default=4.5, help="milliseconds per tick (default: %(default)s)")
    parser.add_argument(
        "--busy", type=float, default=1.5, help="milliseconds of computation per tick (default: %(default)s)"
    )
    parser.add_argument("--num-tokens", type=int, default=4, help="tokens per request and tick (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=512, help="new tokens per request (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each cell (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few requests and tokens, to check that the script runs")
    parser.add_argument("--output", type=pathlib.Path, default=None, help="JSON file to write")
    options = parser.parse_args(argv)
    if options.quick:
        options.counts, options.new_tokens, options.turns = [1, 4], 32, 1
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (options.tick / 1e3, options.busy / 1e3, options.num_tokens, theirs)
    process = context.Process(target=serve, args=arguments, daemon=True)
    process.start()
    url = ours.recv()

    def ask() -> Any:
        ours.send(True)
        return ours.recv()

    table = narrow_table()
    for heading in ("requests", "tokens/s", "without HTTP", "share", "late, ms", "CPU us / event", "client's CPU"):
        table.add_column(heading, justify="right")
    rows = []
    for count in options.counts:
        turns = [asyncio.run(measure(url, count, options.new_tokens, ask)) for _ in range(options.turns + 1)][1:]
        row = {key: float(np.median([turn[key] for turn in turns])) for key in turns[0]}
        row["tokens_per_second_alone"] = 1e3 * count * options.num_tokens / options.tick
        rows.append(row)
        table.add_row(
            str(count),
            f"{row['tokens_per_second']:.0f}",
            f"{row['tokens_per_second_alone']:.0f}",
            f"{row['tokens_per_second'] / row['tokens_per_second_alone']:.2f}",
            f"{row['late_ms']:.2f}",
            f"{row['cpu_us_per_event']:.0f}",
            f"{row['client_cpu_share']:.2f}",
        )
    ours.send(False)
    process.join(10)
    process.kill()
    Console(highlight=False).print(table)
    write(options.output, about(argv, rows=rows))
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
