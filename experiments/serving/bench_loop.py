"""Measures whether large or hostile requests block the event loop, and with it all other clients.

    python -m experiments.serving.bench_loop [--pairs 5] [--seconds 6] [--num-readers 0]
    python -m experiments.serving.bench_loop --quick

The server is real and runs in its own process; a stand-in for the engine delivers tokens at fixed times. A client
requests `/health` continuously and reads streams. In every second run, other clients send the attacks, one after the
other without a pause: a megabyte of special tokens in one message, bodies of ten megabytes (reasoning, names,
arguments), tool calls with millions of values, a million unknown keys. Runs with and without attacks alternate, since
the speed of the machine changes over time.

The results are the latencies of `/health`, the gaps between the events of streams, and the CPU time of the longest
callback in the event loop, which a debug hook in the server's process measures. A callback may include a garbage
collection, so the longest collection is shown too.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import pathlib
import sys
import tempfile
import time
from typing import Any

import numpy as np
from rich.console import Console

from experiments.common.results import about, write
from experiments.correctness.hostile.streams import SPECIAL, save_tokenizer
from experiments.serving.bench_http import SteadyEngine
from mtpjax.console import narrow_table

NUM_STREAMS = 4
TEMPLATE = (
    "{% for message in messages %}<tool>{{ message.role }}{{ message.reasoning_content }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    f"{{% endfor %}}{SPECIAL}{{% endfor %}}"
)
HEADERS = {"Content-Type": "application/json"}


def attacks() -> dict[str, bytes]:
    """Makes the bodies of the attacks on `/v1/chat/completions`."""
    user = {"role": "user", "content": "a"}
    text = "x" * 10_000_000
    call = lambda arguments: {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    bodies: dict[str, Any] = {
        "1 MB of marks": {"messages": [{"role": "user", "content": SPECIAL * 150_000}]},
        "numbers like marks": {"messages": [{"role": "user", "content": "".join(f"9{n:09o}" for n in range(50_000))}]},
        "10 MB of reasoning": {"messages": [user, {"role": "assistant", "content": "b", "reasoning_content": text}]},
        "a name of 10 MB": {"messages": [user | {"name": text}]},
        "arguments of 10 MB": {"messages": [user, call(text)]},
        "3 million values": {"messages": [user, call({"a": [1] * 3_000_000})]},
        "a million keys": {"messages": [user]} | {f"key{n}": 1 for n in range(1_000_000)},
    }
    return {name: json.dumps(body | {"max_tokens": 1}).encode() for name, body in bodies.items()}


class CallbackTimes:
    """Measures the CPU time of each callback of the event loops of this process, from now on."""

    def __init__(self):
        self.longest, self.gc_seconds, self._gc_began = 0.0, 0.0, 0.0
        gc.callbacks.append(self._note_gc)
        self._run = asyncio.Handle._run
        asyncio.Handle._run = lambda handle: self._measure(handle)  # type: ignore[method-assign]

    def _note_gc(self, phase: str, info: dict[str, int]) -> None:
        now = time.thread_time()
        if phase == "start":
            self._gc_began = now
        else:
            self.gc_seconds = max(self.gc_seconds, now - self._gc_began)

    def _measure(self, handle: asyncio.Handle) -> None:
        begin = time.thread_time()
        self._run(handle)
        self.longest = max(self.longest, time.thread_time() - begin)


def serve(folder: str, num_readers: int | None, connection: Any) -> None:
    """Serves in this process. Sends its URL, and on request the CPU time of the longest callback since the last one."""
    sys.modules["uvloop"] = None  # type: ignore[assignment] # its callbacks cannot be measured
    from mtpjax.serving.api.settings import ApiSettings
    from mtpjax.serving.app import make_app
    from mtpjax.serving.http_server import serve_in_thread

    engine: Any = SteadyEngine(0.01, 0.001, 1)
    times = CallbackTimes()
    chosen: dict[str, Any] = {} if num_readers is None else {"num_readers": num_readers}
    settings = ApiSettings(model_name="steady", **chosen)
    app = make_app(engine, save_tokenizer(pathlib.Path(folder), TEMPLATE), settings)
    # As in `running_engine`, freeze the objects made at startup, so that full collections skip them.
    gc.collect()
    gc.freeze()
    with serve_in_thread(app) as url:
        connection.send(url)
        while connection.recv():
            connection.send((times.longest, times.gc_seconds))
            times.longest = times.gc_seconds = 0.0


class Watcher:
    """A client that runs during the attacks and records its times."""

    def __init__(self, url: str):
        self.url, self.health, self.gaps, self._is_done = url, [], [], False

    async def run(self, seconds: float) -> None:
        """Requests `/health` and reads streams for this time."""
        import httpx

        async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
            tasks = [asyncio.ensure_future(self._read(client)) for _ in range(NUM_STREAMS)]
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                begin = time.perf_counter()
                (await client.get("/health")).raise_for_status()
                self.health.append(time.perf_counter() - begin)
                await asyncio.sleep(0.01)
            self._is_done = True
            await asyncio.gather(*tasks)

    async def _read(self, client: Any) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        body = {"messages": messages, "stream": True, "max_tokens": 100, "ignore_eos": True}
        while not self._is_done:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                last = None
                async for line in response.aiter_lines():
                    if line:
                        now = time.perf_counter()
                        self.gaps += [now - last] if last is not None else []
                        last = now


def attack(url: str, body: bytes, should_stop: Any) -> None:
    """Sends a body repeatedly."""
    import httpx

    with httpx.Client(base_url=url, timeout=120) as client:
        while not should_stop.is_set():
            client.post("/v1/chat/completions", content=body, headers=HEADERS)


def turn(url: str, body: bytes | None, seconds: float, context: Any, ask: Any) -> dict[str, float]:
    """Measures one turn, with an attack or undisturbed."""
    ask()
    watcher, should_stop = Watcher(url), context.Event()
    process = context.Process(target=attack, args=(url, body, should_stop), daemon=True) if body is not None else None
    if process is not None:
        process.start()
        time.sleep(1.0)  # time for the attack to start
    asyncio.run(watcher.run(seconds))
    longest, collection = ask()
    should_stop.set()
    if process is not None:
        process.join()
    p99 = lambda values: 1e3 * float(np.percentile(values, 99))
    return {
        "health_ms": p99(watcher.health),
        "gap_ms": p99(watcher.gaps),
        "callback_ms": 1e3 * longest,
        "gc_ms": 1e3 * collection,
    }


def main(argv: list[str] | None = None) -> int:
    """Measures each attack in pairs of turns, and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of turns per attack (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds per turn (default: %(default)s)")
    parser.add_argument("--num-readers", type=int, default=None, help="number of reader processes; 0: threads")
    parser.add_argument("--only", nargs="+", default=None, help="measure only these attacks")
    parser.add_argument(
        "--quick", action="store_true", help="one short pair of one attack, to check that the script runs"
    )
    parser.add_argument("--output", type=pathlib.Path, default=None, help="JSON file to write")
    options = parser.parse_args(argv)
    bodies = {name: body for name, body in attacks().items() if options.only is None or name in options.only}
    if options.quick:
        options.pairs, options.seconds, bodies = 1, 1.0, dict([bodies.popitem()])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=serve, args=(folder, options.num_readers, theirs))
        process.start()
        url = ours.recv()

        def ask() -> tuple[float, float]:
            ours.send(True)
            return ours.recv()

        turn(url, None, 1.0, context, ask)  # the first requests start the readers' processes
        for name, body in bodies.items():
            pairs = [
                (turn(url, None, options.seconds, context, ask), turn(url, body, options.seconds, context, ask))
                for _ in range(options.pairs)
            ]
            median = lambda values: float(np.median(list(values)))
            row: dict[str, Any] = {"attack": name}
            for key in ("health_ms", "gap_ms"):
                row[key] = [median(pair[n][key] for pair in pairs) for n in (0, 1)]
                row[f"{key}_ratio"] = median(beside[key] / alone[key] for alone, beside in pairs)
            row["callback_ms"] = max(beside["callback_ms"] for _, beside in pairs)
            row["callback_alone_ms"] = max(alone["callback_ms"] for alone, _ in pairs)
            row["gc_ms"] = max(each["gc_ms"] for pair in pairs for each in pair)
            rows.append(row)
        ours.send(False)
        process.join(20)
        process.kill()
    table = narrow_table()
    for heading in (
        "attack",
        "/health p99, ms",
        "ratio",
        "gap p99, ms",
        "ratio",
        "longest callback, CPU ms",
        "longest GC, ms",
    ):
        table.add_column(heading, justify="left" if heading == "attack" else "right")
    for row in rows:
        shown = [
            f"{row[key][0]:.1f} -> {row[key][1]:.1f}" if not key.endswith("ratio") else f"{row[key]:.2f}"
            for key in ("health_ms", "health_ms_ratio", "gap_ms", "gap_ms_ratio")
        ]
        table.add_row(
            row["attack"], *shown, f"{row['callback_alone_ms']:.1f} -> {row['callback_ms']:.1f}", f"{row['gc_ms']:.1f}"
        )
    Console(highlight=False).print(table)
    write(options.output, about(argv, rows=rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
