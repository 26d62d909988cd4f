"""Runs mixed traffic against a real server. No request may get lost, no text may change, no memory may leak.

    python -m experiments.correctness.soak [--minutes 30] [--quick] [--seed 0]

A server with a tiny model answers over HTTP. Clients send plain and streamed requests, disconnect at random, abort by
id, send bad requests and read slowly. Each request must end exactly once. A complete text must equal the text
that the same request got from the idle server, and an aborted text must be a prefix of it. Prints a line per minute,
and exits with 1 if a check fails.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import sys
import time

import httpx
import numpy as np

from mtpjax import DecodeConfig, MTPModel
from mtpjax.data.tokenizer import ByteTokenizer
from mtpjax.serving.api.settings import ApiSettings
from mtpjax.serving.app import make_app
from mtpjax.serving.engine import Engine
from mtpjax.serving.http_server import serve_in_thread
from mtpjax.serving.sizes import EngineSettings
from tests.helpers import small_models

NUM_CLIENTS = 24
BAD = [b"{", b"[]", b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": [9999]}', b'{"prompt": "a", "top_p": NaN}']
SETTLED = 0.2  # share of the run after which memory must be flat (minute 6 of 30)
MAX_GROWTH = 0.02


def make_requests(seed: int, count: int) -> list[dict]:
    """Makes requests of all kinds, whose texts do not depend on timing."""
    rng = random.Random(seed)
    options = [
        {"temperature": 0},
        {"temperature": 0.9},
        {"temperature": 1.2, "top_p": 0.8, "top_k": 30},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 0.7, "frequency_penalty": 0.5, "logit_bias": {"65": 4}},
        {"temperature": 1, "stop": ["\x12\x0b", "="]},
    ]
    shared = "A beginning that many prompts have, so that its pages are shared. "
    return [
        {
            "prompt": (shared if rng.random() < 0.5 else "")
            + "".join(rng.choices("abcdefgh ", k=rng.randrange(1, 120))),
            "max_tokens": rng.randrange(1, 150),
            "seed": rng.randrange(2**31),
            "ignore_eos": True,
            "speculative": rng.random() < 0.8,
            **rng.choice(options),
        }
        for _ in range(count)
    ]


class Soak:
    """The clients, and how each of their requests ended.

    Args:
        address: address of the server.
        requests: the requests to send.
        seed: random seed for the clients' behaviour.
    """

    def __init__(self, address: str, requests: list[dict], seed: int):
        self.address, self.requests, self.rng = address, requests, random.Random(seed)
        self.expected: list[str] = []
        self.ends: collections.Counter[str] = collections.Counter()
        self.num_sent = 0
        self.faults: list[str] = []
        self._client = httpx.AsyncClient(base_url=address, timeout=120, limits=httpx.Limits(max_connections=None))

    async def learn(self) -> None:
        """Sends each request to the idle server and keeps its text."""
        for body in self.requests:
            response = await self._client.post("/v1/completions", json=body)
            response.raise_for_status()
            self.expected.append(response.json()["choices"][0]["text"])

    async def run(self, until: float) -> None:
        """Sends requests until a time (`time.monotonic`)."""
        kinds = [self.plain, self.stream, self.leave, self.leave_stream, self.abort, self.bad, self.slow]

        async def client() -> None:
            while time.monotonic() < until:
                kind = self.rng.choices(kinds, [6, 6, 2, 2, 2, 1, 1])[0]
                self.num_sent += 1
                end = await kind(self.rng.randrange(len(self.requests)))
                self.ends[end] += 1

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))

    def check(self, index: int, text: str, reason: str) -> str:
        """Compares a text with the one from the idle server; returns how the request ended."""
        expected = self.expected[index]
        # The last character of an aborted text may be incomplete.
        is_right = expected.startswith(text.rstrip("\ufffd")) if reason == "abort" else text == expected
        if not is_right:
            self.faults.append(f"request {index} ({reason}): {text!r} is not {expected!r}")
        return reason

    async def plain(self, index: int) -> str:
        response = await self._client.post("/v1/completions", json=self.requests[index])
        if response.status_code != 200:
            self.faults.append(f"status {response.status_code}: {response.text[:200]}")
            return "error"
        [choice] = response.json()["choices"]
        return self.check(index, choice["text"], choice["finish_reason"])

    async def stream(self, index: int, *, rid: str | None = None, delay: float = 0.0) -> str:
        body = {**self.requests[index], "stream": True, **({"rid": rid} if rid else {})}
        text, reason, last = "", "", ""
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line:
                    continue
                await asyncio.sleep(delay)
                last = line.removeprefix("data: ")
                if last != "[DONE]":
                    [choice] = json.loads(last)["choices"]
                    text, reason = text + choice["text"], choice["finish_reason"] or reason
        if last != "[DONE]" or not reason:
            self.faults.append(f"request {index}: the stream ended with {last[:200]!r}")
        return self.check(index, text, reason)

    async def slow(self, index: int) -> str:
        """Reads one event per 20 ms."""
        return await self.stream(index, delay=0.02)

    async def leave(self, index: int) -> str:
        """Disconnects, usually before the answer."""
        try:
            await asyncio.wait_for(self.plain(index), self.rng.random() * 0.2)
        except TimeoutError:
            return "left"
        return "stayed"

    async def leave_stream(self, index: int) -> str:
        """Disconnects after some events."""
        body, left = {**self.requests[index], "stream": True}, self.rng.randrange(1, 20)
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                left -= 1
                if not left:
                    return "left"
        return "stayed"

    async def abort(self, index: int) -> str:
        """Aborts a stream by its id."""
        rid = f"soak-{self.num_sent}-{index}-{self.rng.random()}"
        task = asyncio.ensure_future(self.stream(index, rid=rid))
        await asyncio.sleep(self.rng.random() * 0.2)
        await self._client.post("/abort_request", json={"rid": rid})
        return await task

    async def bad(self, index: int) -> str:
        """Sends a body that must be rejected."""
        body = BAD[index % len(BAD)]
        response = await self._client.post(
            "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
        if response.status_code != 400:
            self.faults.append(f"{body!r} got status {response.status_code}")
        return "rejected"


@contextlib.contextmanager
def running_server():
    """Yields the address of a server with a tiny model in a thread, and its engine."""
    model = MTPModel(small_models.small_config(vocab_size=256, max_position_embeddings=512))
    params = small_models.constructed_params(model, "grouped", "mixed")
    # The pool has space for only half of the slots' longest texts, so that requests are preempted.
    settings = EngineSettings(num_slots=8, batch_sizes=(1, 8), num_pages=72, prefill_tokens=64, max_waiting=256)
    engine = Engine(params, model=model, config=DecodeConfig(num_steps=2, prefill_chunk=32), settings=settings)
    engine.warm_up()
    engine.start()
    app = make_app(engine, ByteTokenizer(), ApiSettings(model_name="tiny"))
    with serve_in_thread(app) as address:
        yield address, engine
    engine.close(timeout=10)


def resident_bytes() -> int:
    """Returns the memory that this process uses."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def soak(address: str, engine: Engine, seconds: float, seed: int) -> list[str]:
    """Runs the traffic; returns the problems."""
    clients = Soak(address, make_requests(seed, 48), seed)
    await clients.learn()
    begin = time.monotonic()
    memory: list[tuple[float, int]] = []

    async def watch() -> None:
        shown = begin
        while True:
            now = time.monotonic()
            memory.append((now - begin, resident_bytes()))
            if now - shown >= 60:
                shown, status = now, engine.status()
                print(
                    f"{now - begin:5.0f} s: {clients.num_sent} requests, {memory[-1][1] / 1e6:.1f} MB, "
                    f"{status.num_running} run, {status.num_waiting} wait, {status.num_preempted} preempted, "
                    f"{len(clients.faults)} faults",
                    flush=True,
                )
            await asyncio.sleep(1)

    watcher = asyncio.ensure_future(watch())
    await clients.run(begin + seconds)
    watcher.cancel()
    faults = clients.faults
    # 1. Nothing runs, and no page is in use.
    end = time.monotonic() + 10
    status = engine.status()
    while time.monotonic() < end and (status.num_running or status.num_waiting or status.num_used_pages):
        await asyncio.sleep(0.05)
        status = engine.status()
    for name in ("num_running", "num_waiting", "num_used_pages", "num_compilations", "num_failed"):
        if getattr(status, name):
            faults.append(f"{name} is {getattr(status, name)} at the end")
    # 2. Every request has ended exactly once.
    if sum(clients.ends.values()) != clients.num_sent:
        faults.append(f"{clients.num_sent} requests, {sum(clients.ends.values())} ends")
    # 3. The idle server gives the same texts.
    before = clients.expected
    clients.expected = []
    await clients.learn()
    if clients.expected != before:
        faults.append("the idle server gives other texts than at the start")
    # 4. Memory is flat.
    times, sizes = np.array([each for each in memory if each[0] >= SETTLED * seconds]).T
    slope = np.polyfit(times, sizes, 1)[0]
    growth = slope * (seconds - times[0]) / sizes[0]
    print(f"ends: {dict(clients.ends)}; {status.num_preempted} preempted, {status.num_ticks} ticks")
    print(f"memory: {sizes[0] / 1e6:.1f} MB -> {sizes[-1] / 1e6:.1f} MB, {60 * slope / 1e6:+.2f} MB per minute")
    if seconds >= 1200 and growth > MAX_GROWTH:
        faults.append(f"memory grew by {100 * growth:.1f} %")
    return faults


def main() -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--quick", action="store_true", help="run for one minute")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seconds = 60.0 if options.quick else 60 * options.minutes
    with running_server() as (address, engine):
        faults = asyncio.run(soak(address, engine, seconds, options.seed))
    for fault in faults[:20]:
        print(f"fault: {fault}")
    print(f"{len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
