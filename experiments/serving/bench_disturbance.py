"""Measures how much hostile clients of `mtpjax serve` slow down other clients, in three cases.

    python -m experiments.serving.bench_disturbance [--model DIR] [--quick] [--output FILE]

    long word       a prompt that is one word of 4 MB, sent again and again; the p99 of the other streams' gaps between
                    events over that of undisturbed streams. Goal: below 2
    slow reader     a client that reads one byte per second of a long stream; the same ratio. Goal: at most 1.5
    aborts          200 streams that close at once: seconds until nothing runs, goal: below 1; and the time to the first
                    token right after, over that of an idle server, goal: at most 1.2

Both sides of a ratio are measured in turns. The server runs in a separate process, with constructed weights or with the
byte-level model given as `--model`. Clients and server share the machine's cores.
"""

import argparse
import asyncio
import contextlib
import json
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import numpy as np
from rich.console import Console

from experiments.common.results import about, write
from experiments.serving.bench_engine import make_model, median_ratio
from experiments.serving.bench_servers import server
from mtpjax.console import narrow_table
from mtpjax.evaluation.machine import Stopwatch
from mtpjax.io.checkpoint import save_model

LONG_WORD = "a" * 4_000_000
NUM_OTHERS = 10
LONG_TEXT = 448  # tokens
GOALS = {"long word": "< 2", "slow reader": "<= 1.5", "first token": "<= 1.2", "seconds until free": "< 1"}


async def stream_gaps(url: str, number: int, new_tokens: int) -> list[float]:
    """Streams one completion; returns the seconds between its events."""
    body = {"prompt": f"other {number}", "max_tokens": new_tokens, "stream": True, "ignore_eos": True}
    times = []
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return np.diff(times).tolist()


async def p99_of_gaps(url: str, new_tokens: int) -> float:
    """Returns the 99th percentile of the gaps of `NUM_OTHERS` simultaneous streams, in seconds."""
    gaps = await asyncio.gather(*(stream_gaps(url, number, new_tokens) for number in range(NUM_OTHERS)))
    return float(np.percentile(np.concatenate(gaps), 99))


@contextlib.asynccontextmanager
async def in_background(work: Awaitable[None]) -> AsyncIterator[None]:
    """Runs `work` while the block runs, and cancels it at its end. A failure of `work` is raised."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def send_long_words(url: str) -> None:
    """Sends the long word until cancelled. Each answer must be a client error (4xx) or a text."""
    async with httpx.AsyncClient(timeout=120) as client:
        while True:
            response = await client.post(f"{url}/v1/completions", json={"prompt": LONG_WORD, "max_tokens": 1})
            if response.status_code not in (200, 400, 413):
                raise SystemExit(f"the long word was answered with status {response.status_code}")


def request_bytes(path: str, body: dict) -> bytes:
    """Returns a POST request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


async def open_stream(url: str, body: dict) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request for a streamed completion over a new connection."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
    writer.write(request_bytes("/v1/completions", {"stream": True, "ignore_eos": True, **body}))
    return reader, writer


async def read_slowly(url: str) -> None:
    """Reads one byte per second of long streams until cancelled."""
    while True:
        reader, writer = await open_stream(url, {"prompt": "slow", "max_tokens": LONG_TEXT, "n": 4, "logprobs": 3})
        try:
            while await reader.read(1):
                await asyncio.sleep(1)
        except ConnectionError:
            pass  # the server has given up on this reader
        finally:
            writer.close()


async def num_unfinished(client: httpx.AsyncClient, url: str) -> int:
    """Returns how many requests run or wait."""
    text = (await client.get(f"{url}/metrics")).text
    found = re.findall(r"^sglang:num_(?:running|queue)_reqs(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    if len(found) != 2:
        raise SystemExit("/metrics does not say how many requests run and wait")
    return int(sum(map(float, found)))


async def first_token_seconds(url: str) -> float:
    """Returns the time to the first event of a short stream."""
    begin = time.perf_counter()
    reader, writer = await open_stream(url, {"prompt": "first", "max_tokens": 2})
    async for line in reader:
        if line.startswith(b"data: "):
            break
    seconds = time.perf_counter() - begin
    writer.close()
    return seconds


async def abort_all_at_once(url: str, count: int) -> float:
    """Opens streams, closes them together, and returns the seconds until no request runs or waits."""
    async with httpx.AsyncClient(timeout=120) as client:
        body = {"max_tokens": LONG_TEXT}
        streams = [await open_stream(url, {"prompt": f"storm {number}", **body}) for number in range(count)]
        await asyncio.sleep(1)  # wait until all have arrived; few of the long texts have ended by then
        begin = time.perf_counter()
        for _, writer in streams:
            writer.transport.abort()
        while await num_unfinished(client, url):
            await asyncio.sleep(0.005)
        return time.perf_counter() - begin


async def compare_gaps(
    url: str, disturb: Callable[[str], Awaitable[None]], turns: int, new_tokens: int
) -> dict[str, object]:
    """Compares the gaps of disturbed streams with those of undisturbed ones, in turns; the first turn warms up."""
    quiet, disturbed = [], []
    for _ in range(turns + 1):
        quiet.append(await p99_of_gaps(url, new_tokens))
        async with in_background(disturb(url)):
            await asyncio.sleep(0.2)
            disturbed.append(await p99_of_gaps(url, new_tokens))
    ratio = median_ratio(np.array(disturbed[1:]), np.array(quiet[1:]))
    return {"quiet_ms": 1000 * float(np.median(quiet[1:])), "ratio": ratio.to_dict()}


async def measure_aborts(url: str, turns: int, count: int) -> dict[str, object]:
    """Measures bursts of aborts, and the time to the first token before and right after each burst."""
    free, before, after = [], [], []
    for _ in range(turns + 1):
        before.append(np.median([await first_token_seconds(url) for _ in range(5)]))
        free.append(await abort_all_at_once(url, count))
        after.append(await first_token_seconds(url))
    ratio = median_ratio(np.array(after[1:]), np.array(before[1:]))
    idle_ms = 1000 * float(np.median(before[1:]))
    return {"seconds_until_free": sorted(free[1:]), "first_token_ms": idle_ms, "first_token": ratio.to_dict()}


async def measure(url: str, turns: int, new_tokens: int, count: int) -> dict[str, dict]:
    """Runs the three cases."""
    return {
        "long word": await compare_gaps(url, send_long_words, turns, new_tokens),
        "slow reader": await compare_gaps(url, read_slowly, turns, new_tokens),
        "aborts": await measure_aborts(url, turns, count),
    }


def print_table(console: Console, found: dict[str, dict]) -> None:
    """Prints each figure with its goal."""
    table = narrow_table()
    for heading in ("case", "measured", "95 %", "goal"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    ratios = {name: found[name]["ratio"] for name in ("long word", "slow reader")}
    for name, ratio in {**ratios, "first token": found["aborts"]["first_token"]}.items():
        table.add_row(name, f"{ratio['value']:.2f}", f"{ratio['low']:.2f}-{ratio['high']:.2f}", GOALS[name])
    seconds = found["aborts"]["seconds_until_free"]
    name = "seconds until free"
    table.add_row(name, f"{np.median(seconds):.2f}", f"{seconds[0]:.2f}-{seconds[-1]:.2f} (all)", GOALS[name])
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Starts a server and measures it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=None, help="byte-level model (default: constructed)")
    parser.add_argument("--turns", type=int, default=10, help="measurements of each case (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short turn, to check that it runs")
    parser.add_argument("--output", type=pathlib.Path, default=None, help="JSON file to write")
    options = parser.parse_args(argv)
    turns, new_tokens, count = (1, 16, 8) if options.quick else (options.turns, 128, 200)
    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as name:
        folder, model = pathlib.Path(name), options.model
        if model is None:
            model = folder / "checkpoint"
            save_model(model, *make_model("tiny" if options.quick else "larger", vocab_size=256))
        command = [sys.executable, "-m", "mtpjax.cli.start", "serve", "--model", str(model), "--enable-metrics"]
        command += ["--max-running-requests", "16", "--context-length", str(LONG_TEXT + 64), "--num-steps", "2"]
        command += ["--precompile-bs-paddings", "16", "--wait-for-warm-up"]
        with server(command, folder / "server.log") as url:
            found = asyncio.run(measure(url, turns, new_tokens, count))
    console = Console(highlight=False)
    print_table(console, found)
    if options.output is not None:
        description = about(argv, waited_share=stopwatch.waited_share())
        write(options.output, {**description, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
