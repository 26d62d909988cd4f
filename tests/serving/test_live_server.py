"""The HTTP API over a real engine: texts do not depend on the load, and whatever clients do leaves nothing behind.

Numbers in the docstrings are those of the list of server tests. After each test the server must answer a control
request as it did at the start, with nothing running, no page in use and no program compiled since.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import socket
import statistics
import time

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.live_server import live_server, read_events, wait_until

JSON = {"Content-Type": "application/json"}
GREEDY = {"temperature": 0, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 500}


@pytest.fixture(scope="module")
def running(small):
    model, params = small("grouped", "mixed", vocab_size=256, max_position_embeddings=512)
    with live_server(model, params) as server:
        yield server


@pytest.fixture
def server(running):
    yield running
    running.check()


@contextlib.contextmanager
def engine_settings(server, **changes):
    """Changes limits of the running engine."""
    holders, settings = (server.engine, server.engine._executor.session), server.engine.settings
    for holder in holders:
        holder.settings = dataclasses.replace(settings, **changes)
    try:
        yield
    finally:
        for holder in holders:
            holder.settings = settings


@contextlib.contextmanager
def api_settings(server, **changes):
    """Changes limits of the running API."""
    settings = server.api.settings
    server.api.settings = dataclasses.replace(settings, **changes)
    try:
        yield
    finally:
        server.api.settings = settings


@contextlib.contextmanager
def busy(server, count=8):
    """Keeps slots busy with streams, whose tokens are slow and who end when the context does."""
    executor = server.engine._executor
    advance = executor.advance

    def advance_slowly(*arguments):
        time.sleep(0.05)
        return advance(*arguments)

    with contextlib.ExitStack() as stack:
        executor.advance = advance_slowly
        stack.callback(setattr, executor, "advance", advance)
        body = raw_request("/v1/completions", {"prompt": "Hi", "stream": True, **LONG})
        for _ in range(count):
            stack.enter_context(connect(server, body))
        wait_until(lambda: server.engine.status().num_running == count)
        yield


def connect(server, data, *, buffer_bytes=None):
    """Returns a connection that has sent these bytes."""
    host, port = server.address.removeprefix("http://").split(":")
    client = socket.socket()
    if buffer_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    client.settimeout(30)
    client.connect((host, int(port)))
    client.sendall(data)
    return client


def raw_request(path, body):
    """Returns the bytes of a request."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: tiny\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


# Every option of a sampled text, alone and together.
OPTIONS = [
    {"temperature": 0},
    {"temperature": 1e-9},
    {"temperature": 0.7},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.05},
    {"temperature": 0, "frequency_penalty": 1.5},
    {"presence_penalty": -1.0},
    {"temperature": 0, "repetition_penalty": 1.4},
    {"temperature": 0, "logit_bias": {"65": 30.0, "66": -100.0}},
    {"min_new_tokens": 20, "stop_token_ids": list(range(40, 71))},
    {"temperature": 0, "stop": ["\ufffd\ufffd", "A"]},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
]


@pytest.mark.slow
def test_every_option_gives_the_same_tokens_in_a_mixed_batch_and_alone(server):
    """24: with and without speculation."""
    rng = random.Random(0)
    bodies = []
    for number, options in enumerate(OPTIONS):
        prompt = [rng.randrange(1, 256) for _ in range(rng.randrange(1, 60))]
        for speculative in (True, False):
            params = {"max_new_tokens": rng.randrange(20, 60), "sampling_seed": number, **options}
            body = {"input_ids": prompt, "sampling_params": params, "speculative": speculative}
            bodies.append({**body, "return_logprob": number % 2 == 0})

    async def send_all():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.address, limits=limits, timeout=120) as client:
            return await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))

    for body, mixed in zip(bodies, asyncio.run(send_all()), strict=True):
        assert mixed.status_code == 200, mixed.text
        mixed, alone = mixed.json(), server.post("/generate", **body).json()
        assert (mixed["output_ids"], mixed["text"]) == (alone["output_ids"], alone["text"]), body
        assert mixed["meta_info"]["finish_reason"] == alone["meta_info"]["finish_reason"]
        assert mixed["meta_info"]["completion_tokens"] == len(mixed["output_ids"])
        if body["return_logprob"]:
            pairs = [result["meta_info"]["output_token_logprobs"] for result in (mixed, alone)]
            np.testing.assert_allclose(*[[logprob for logprob, *_ in rows] for rows in pairs], atol=1e-4)
        # Greedy texts do not depend on speculation.
        if body["sampling_params"].get("temperature", 1) < 1e-5:
            plain = server.post("/generate", **{**body, "speculative": not body["speculative"]}).json()
            assert plain["output_ids"] == mixed["output_ids"]


def test_a_seed_gives_the_same_text_whoever_runs_beside_it(server):
    """26."""
    body = {"prompt": "Once", "seed": 7, "temperature": 1, "max_tokens": 80, "ignore_eos": True}
    alone = server.text(**body)
    assert server.text(**{**body, "seed": 8}) != alone
    rng = random.Random(1)
    for _ in range(2):
        mates = [
            {"prompt": "x" * rng.randrange(1, 90), "max_tokens": rng.randrange(1, 90), "temperature": rng.random() * 2}
            for _ in range(11)
        ]
        place = rng.randrange(12)
        responses = server.together([*mates[:place], body, *mates[place:]])
        assert [response.status_code for response in responses] == [200] * 12
        assert responses[place].json()["choices"][0]["text"] == alone


ODD_PATHS = ["/v1/models/../admin", "//v1/models", "/v1/models/%2e%2e", "/v1/%2e%2e/health", "/..//etc/passwd", "/%00"]


@pytest.mark.parametrize("path", ODD_PATHS)
def test_odd_paths_lead_nowhere(server, path):
    """31: as bytes, since clients normalize paths."""
    with connect(server, f"GET {path} HTTP/1.1\r\nHost: tiny\r\nConnection: close\r\n\r\n".encode()) as client:
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 404") and b'"error"' in answer


@pytest.fixture
def aborts(server, monkeypatch):
    """For each abort of a client: the ticks between the call and the end of its request."""
    called, ticks, abort, end = {}, [], server.engine.abort, server.engine._delivery.end

    def record_abort(request_id, reason="abort"):
        called.setdefault(request_id, server.engine.status().num_ticks)
        abort(request_id, reason)

    def record_end(sequence, reason, message=""):
        end(sequence, reason, message)
        if reason == "abort":
            ticks.append(server.engine.status().num_ticks - called[sequence.id])

    monkeypatch.setattr(server.engine, "abort", record_abort)
    monkeypatch.setattr(server.engine._delivery, "end", record_end)
    return ticks


def test_a_streaming_client_that_leaves_frees_its_slot_within_two_ticks(server, aborts):
    """32."""
    num_aborted = server.engine.status().num_aborted
    with server.stream(**LONG) as response:
        next(response.iter_lines())
    wait_until(lambda: server.is_idle)
    assert server.engine.status().num_aborted == num_aborted + 1
    assert len(aborts) == 1 and aborts[0] <= 2
    assert server.finishes[-1].num_new_tokens < 500


def test_a_plain_client_that_leaves_frees_its_slots(server, aborts):
    """33."""
    with connect(server, raw_request("/v1/completions", {"prompt": "Hi", "n": 3, "seed": 1, **LONG})):
        wait_until(lambda: server.engine.status().num_running == 3)
    wait_until(lambda: server.is_idle)
    assert len(aborts) == 3 and max(aborts) <= 2


def test_a_client_that_leaves_the_queue_never_runs(server):
    """34: while queued."""
    with busy(server):
        with connect(server, raw_request("/v1/completions", {"prompt": "Hi", "stream": True, **LONG})):
            wait_until(lambda: server.engine.status().num_waiting == 1)
        wait_until(lambda: server.engine.status().num_waiting == 0)
        assert (server.finishes[-1].reason, server.finishes[-1].num_new_tokens) == ("abort", 0)


def test_a_client_that_leaves_during_prefill_frees_its_pages(server):
    """34: a prompt of 480 tokens takes 30 ticks."""
    with connect(server, raw_request("/v1/completions", {"prompt": "leave" * 96, "max_tokens": 9, "stream": True})):
        wait_until(lambda: server.engine.status().num_used_pages)
    wait_until(lambda: server.is_idle)
    assert (server.finishes[-1].reason, server.finishes[-1].num_new_tokens) == ("abort", 0)


def test_an_abort_while_the_device_works_loses_no_other_row(server, monkeypatch):
    """34: between dispatch and report, again and again."""
    bodies = [{"prompt": "ab" * number, **GREEDY, "max_tokens": 60} for number in range(1, 9)]
    expected = [server.text(**body) for body in bodies]
    advance, num_calls = server.engine._executor.advance, [0]

    def abort_one(sequences, *arguments):
        call = advance(sequences, *arguments)
        num_calls[0] += 1
        if num_calls[0] in (3, 9):
            victim = sequences[num_calls[0] % len(sequences)]
            server.engine._delivery.end(victim, "abort")
            server.engine.abort(victim.id)
        return call

    monkeypatch.setattr(server.engine._executor, "advance", abort_one)
    choices = [response.json()["choices"][0] for response in server.together(bodies)]
    assert [choice["finish_reason"] for choice in choices].count("abort") == 2
    for choice, text in zip(choices, expected, strict=True):
        # The last character of an aborted text may be incomplete.
        assert choice["text"] == text or text.startswith(choice["text"].rstrip("\ufffd"))
        assert (choice["text"] == text) == (choice["finish_reason"] == "length")


def test_a_client_that_leaves_before_the_end_of_the_stream_is_told_changes_nothing(server):
    """34: after the last token, before [DONE]."""
    num_aborted = server.engine.status().num_aborted
    for _ in range(5):
        with server.stream(**GREEDY, max_tokens=6) as response:
            for line in response.iter_lines():
                if '"length"' in line:
                    break
    assert server.engine.status().num_aborted == num_aborted


async def abort_all_at_once(server, count):
    """Opens streams, closes them together, and returns the seconds until nothing runs."""
    host, port = server.address.removeprefix("http://").split(":")
    writers, num_finished = [], len(server.finishes)
    for number in range(count):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(raw_request("/v1/completions", {"prompt": f"storm {number}", "stream": True, **LONG}))
        writers.append(writer)
    while len(server.api.client.running) + len(server.finishes) - num_finished < count:
        await asyncio.sleep(0.005)
    begin = time.perf_counter()
    for writer in writers:
        writer.transport.abort()
    while not server.is_idle and time.perf_counter() - begin < 30:
        await asyncio.sleep(0.005)
    return time.perf_counter() - begin


def test_many_streams_that_close_at_once_free_all_slots(server):
    """35."""
    asyncio.run(abort_all_at_once(server, 60))
    assert server.is_idle


@pytest.mark.slow
def test_storms_of_aborts_free_all_slots_quickly(server):
    """35: 200 streams, ten times. The median leaves room for a machine with other work."""

    def first_token_seconds():
        begin = time.perf_counter()
        with server.stream(**GREEDY, max_tokens=2) as response:
            next(response.iter_lines())
            return time.perf_counter() - begin

    idle = statistics.median(first_token_seconds() for _ in range(9))
    seconds, first = [], []
    for _ in range(10):
        seconds.append(asyncio.run(abort_all_at_once(server, 200)))
        first.append(first_token_seconds())
    print(f"freed after {sorted(seconds)} s; first token {statistics.median(first) / idle:.2f} x idle")
    assert statistics.median(seconds) < 1
    assert statistics.median(first) < 3 * idle


def test_a_client_that_does_not_read_is_aborted_and_others_get_their_text(server):
    """36."""
    others = [{"prompt": f"other {number}", **GREEDY, "max_tokens": 60} for number in range(10)]
    expected = [server.text(**body) for body in others]
    params = {"max_new_tokens": 500, "n": 16, "ignore_eos": True, "sampling_seed": 1, "temperature": 1}
    body = {"text": "slow", "stream": True, "sampling_params": params}
    # Each event of this route has the whole text, so the stream has megabytes.
    with (
        api_settings(server, max_buffer_bytes=20_000, write_timeout=2.0),
        connect(server, raw_request("/generate", body), buffer_bytes=4096),
    ):
        wait_until(lambda: server.engine.status().num_running)
        texts = [response.json()["choices"][0]["text"] for response in server.together(others)]
        assert texts == expected
        wait_until(lambda: server.is_idle, 60)
    assert "abort" in [finish.reason for finish in server.finishes[-27:]]


def test_a_slow_reader_gets_all_of_its_text(server):
    """36: one whose stream fits into the buffers."""
    expected = server.text(**LONG)
    with connect(server, raw_request("/v1/completions", {"prompt": "Hi", "stream": True, **LONG})) as client:
        wait_until(lambda: server.engine.status().num_running)
        wait_until(lambda: server.is_idle)
        data = b""
        while b"[DONE]" not in data:
            data += client.recv(100)
    events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == expected


@pytest.mark.slow
def test_half_open_connections_do_not_hold_up_others(server):
    """37: 500 of them, which the time limits of headers and bodies close."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: tiny\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
    with api_settings(server, body_timeout=2.0), contextlib.ExitStack() as stack:
        clients = []
        for number in range(500):
            data = (b"", head[:40], head, head + b'\r\n{"prompt"')[number % 4]
            clients.append(stack.enter_context(connect(server, data)))
        seconds = []
        for _ in range(20):
            begin = time.perf_counter()
            assert httpx.get(f"{server.address}/health").status_code == 200
            seconds.append(time.perf_counter() - begin)
        print(f"/health: {1000 * statistics.median(seconds):.0f} ms")
        assert statistics.median(seconds) < 0.5
        for number, client in enumerate(clients):
            assert client.recv(100).startswith(b"HTTP/1.1 408") or number % 4 < 3


def test_a_full_queue_answers_429_and_loses_nothing(server):
    """38."""
    body = {"prompt": "queue", **GREEDY, "max_tokens": 40}
    expected = server.text(**body)
    with engine_settings(server, max_waiting=3):
        responses = server.together([body] * 30)
        with busy(server), contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(connect(server, raw_request("/v1/completions", body)))
            wait_until(lambda: server.engine.status().num_waiting == 3)
            refused = server.post(**body)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    for response in responses:
        assert response.status_code in (200, 429)
        assert response.status_code == 429 or response.json()["choices"][0]["text"] == expected


def test_requests_that_wait_or_run_for_too_long_are_told(server):
    """39."""
    with busy(server), engine_settings(server, max_queue_seconds=0.05):
        response = server.post(**LONG)
    assert response.status_code == 503 and response.json()["error"]["code"] == "timeout"
    with engine_settings(server, max_run_seconds=0.1):
        choices = [server.post(**LONG).json()["choices"][0], *read_last(server)]
    assert [choice["finish_reason"] for choice in choices] == ["timeout", "timeout"]


def read_last(server):
    with server.stream(**LONG) as response:
        *_, last, done = read_events(response)
    assert done == "[DONE]"
    return last["choices"]


@pytest.mark.parametrize("length", [1, 2, 3, 17, 120])
def test_a_stream_has_the_text_of_the_plain_response(server, length):
    """40: also where the text ends within a character. 41: both count the tokens that were sent."""
    body = {"prompt": "Grüße 🙂", "temperature": 1, "seed": 3, "ignore_eos": True, "max_tokens": length}
    plain = server.post(**body).json()
    with server.stream(**body, stream_options={"include_usage": True}) as response:
        *parts, last, _ = read_events(response)
    assert "".join(part["choices"][0]["text"] for part in parts) == plain["choices"][0]["text"]
    assert last["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] == length
    assert last["usage"]["prompt_tokens"] == len("Grüße 🙂".encode())


def test_usage_counts_what_was_sent_and_no_rejected_draft(server):
    """41."""
    before = server.engine.status()
    bodies = [{"prompt": "count", "max_tokens": 30, "seed": seed, "speculative": seed % 2 == 0} for seed in range(12)]
    usages = [response.json()["usage"] for response in server.together(bodies)]
    after = server.engine.status()
    assert sum(usage["completion_tokens"] for usage in usages) == after.num_new_tokens - before.num_new_tokens
    assert after.num_requests - before.num_requests == 12
    proposed, accepted = (sum(getattr(after, name)) - sum(getattr(before, name)) for name in ("proposed", "accepted"))
    assert 0 < accepted < proposed, "drafts are accepted at times"


def samples(server):
    """Returns value by (name, labels) as a Prometheus server reads them, and the names of counters."""
    values, counters = {}, set()
    for family in text_string_to_metric_families(httpx.get(f"{server.address}/metrics").text):
        for sample in family.samples:
            values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
            if family.type in ("counter", "histogram"):
                counters.add(sample.name)
    return values, counters


def test_metrics_under_load_never_go_down_and_match_the_requests(server):
    """52."""
    first, counters = samples(server)
    num_finished, scrapes = len(server.finishes), [first]

    async def scrape_during_load():
        load = asyncio.ensure_future(
            server.gather([{"prompt": "load", "max_tokens": 40, "seed": n} for n in range(24)])
        )
        while not load.done():
            scrapes.append((await asyncio.to_thread(samples, server))[0])
        return await load

    responses = asyncio.run(scrape_during_load())
    wait_until(lambda: server.is_idle)
    scrapes.append(samples(server)[0])
    for earlier, later in itertools.pairwise(scrapes):
        for key, value in earlier.items():
            if key[0] in counters:
                assert later[key] >= value, key
    usages = [response.json()["usage"] for response in responses]
    finishes = server.finishes[num_finished:]
    assert len(finishes) == 24

    def grown(name):
        last = scrapes[-1]
        return sum(value - first.get(key, 0) for key, value in last.items() if key[0] == name)

    num_tokens = sum(usage["completion_tokens"] for usage in usages)
    assert grown("mtpjax:generation_tokens_total") == num_tokens == sum(each.num_new_tokens for each in finishes)
    assert grown("mtpjax:prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    for name in ("mtpjax:e2e_request_latency_seconds_count", "mtpjax:time_to_first_token_seconds_count"):
        assert grown(name) == 24


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_a_body_over_the_limit_is_413_and_takes_no_more_memory_than_the_limit(server):
    """14: a chunked body without a length."""
    limit = server.api.settings.max_body_bytes
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: tiny\r\nContent-Type: application/json\r\n"
    largest = before = resident_bytes()
    with connect(server, head + b"Transfer-Encoding: chunked\r\n\r\n") as client:
        # The server answers, and closes the connection, before all is sent.
        with contextlib.suppress(ConnectionError):
            for _ in range(3 * limit // 0x10000):
                client.sendall(piece)
                largest = max(largest, resident_bytes())
        with contextlib.suppress(ConnectionError):
            assert client.recv(1000).startswith(b"HTTP/1.1 413")
    assert largest - before < 1.2 * limit + (8 << 20)
    response = httpx.post(f"{server.address}/v1/completions", content=b" " * (limit + 1), headers=JSON)
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"


@pytest.mark.slow
def test_a_word_of_four_megabytes_does_not_hold_up_others(server):
    """15: ten of them, beside a stream."""
    expected = server.text(**LONG)
    gaps = []

    async def read(client):
        last = time.perf_counter()
        text = ""
        async with client.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True, **LONG}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    gaps.append(time.perf_counter() - last)
                    last = time.perf_counter()
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def run():
        async with httpx.AsyncClient(base_url=server.address, timeout=60) as client:
            alone = await read(client)
            idle, gaps[:] = np.percentile(gaps, 99), []
            words = [client.post("/v1/completions", json={"prompt": "x" * (4 << 20)}) for _ in range(10)]
            beside, *answers = await asyncio.gather(read(client), *words)
            return alone, beside, idle, [answer.status_code for answer in answers]

    alone, beside, idle, statuses = asyncio.run(run())
    assert statuses == [400] * 10 and alone == beside == expected
    # This process makes the bodies too, so the bar is wider than the two-fold of the list.
    print(f"99th percentile of the gaps: {1000 * idle:.1f} ms -> {1000 * np.percentile(gaps, 99):.1f} ms")
    assert np.percentile(gaps, 99) < max(10 * idle, 0.5)


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_a_jump_of_the_clock_changes_nothing(server, monkeypatch, jump):
    """47-53: durations and limits are those of the monotonic clock."""
    expected, now = server.text(**LONG), time.time
    with engine_settings(server, max_queue_seconds=30.0, max_run_seconds=60.0), busy(server, 2):
        monkeypatch.setattr(time, "time", lambda: now() + jump)
        response = server.post(**{**LONG, "max_tokens": 40})
    assert response.status_code == 200 and expected.startswith(response.json()["choices"][0]["text"].rstrip("\ufffd"))
