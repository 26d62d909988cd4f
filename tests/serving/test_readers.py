"""Bodies are read in other processes as in this one, in turns of the clients, and within limits of time and memory."""

import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import zlib

import pytest

pytest.importorskip("fastapi")

from mtpjax.data.tokenizer import ByteTokenizer
from mtpjax.serving.api import read_queue
from mtpjax.serving.api.errors import ApiError
from mtpjax.serving.api.readers import SMALL_BODY_BYTES, Readers, ReadLimits
from mtpjax.serving.api.reading import BodyReader
from mtpjax.serving.api.server import ApiServer
from mtpjax.serving.api.turns import ReadQueue
from tests.helpers import chatml
from tests.helpers.api_client import api_client, api_settings, chat, completion
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.live_server import wait_until
from tests.helpers.odd_reader import OddReader

LARGE = b" " * SMALL_BODY_BYTES  # before a body: makes it large
LIMITS = ReadLimits(answer_seconds=2.0, cpu_seconds=0.3, memory=1 << 30)


@contextlib.contextmanager
def reading(reader, num_workers=2, limits=LIMITS):
    readers = Readers(reader, num_workers, limits)
    yield readers
    readers.close()


def read(readers, kind, raw=b"", client="a"):
    return asyncio.run(readers.read(kind, [raw], client))


def outcome(readers, kind, body):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        return read(readers, kind, raw)
    except ApiError as error:
        return str(error), error.status, error.param, error.code, error.headers


USER = {"role": "user", "content": "Hi <|im_end|> <|end|>é"}
TALK = [{"role": "system", "content": "Be brief.\n"}, USER, {"role": "assistant", "content": "🙂"}, USER]
BODIES = [
    ("chat", {"messages": [USER]}),
    ("chat", {"messages": TALK, "temperature": 0.5, "seed": 2**64 - 1, "stop": ["a", "é"], "logit_bias": {"3": 1.5}}),
    ("chat", {"messages": TALK * 20}),
    ("chat", {"messages": [{"role": "user"}]}),
    ("chat", {"messages": [USER], "temperature": 3}),
    ("chat", {"messages": [USER], "tools": [{}]}),
    ("completion", {"prompt": ["Hi", "<|im_end|>"], "echo": True}),
    ("completion", {"prompt": [[1, 2], [3]], "echo": True, "n": 2, "unknown": [1, {"a": None}]}),
    ("completion", {"prompt": "x" * 20_000}),
    ("completion", {"prompt": [1] * 150, "max_tokens": 100}),
    ("completion", {"prompt": "\ud800"}),
    ("completion", b'{"prompt": "a"'),
    ("completion", b"[" * 100_000),
    ("generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 3}}),
    ("generate", {"input_ids": [256], "text": "a"}),
    ("tokenize", {"messages": [USER], "add_generation_prompt": False}),
    ("tokenize", {"text": "é" * 500}),
    ("detokenize", {"tokens": [72, 105, 256]}),
    ("detokenize", {"tokens": [10**30]}),
    ("abort", {"rid": "a", "abort_all": None}),
]


@pytest.mark.parametrize("is_bytes", [True, False])
def test_a_process_reads_as_a_thread_does(is_bytes, tmp_path):
    tokenizer = ByteTokenizer() if is_bytes else chatml.save_tokenizer(tmp_path)
    engine = FakeEngine()
    reader = BodyReader(tokenizer, ApiServer(engine, tokenizer, api_settings()).limits, strict_fields=False)
    with reading(reader, 0) as threads, reading(reader, limits=ReadLimits()) as processes:
        for kind, body in BODIES:
            assert outcome(processes, kind, body) == outcome(threads, kind, body), (kind, body)
    engine.close()


@pytest.fixture(scope="module")
def odd():
    with reading(OddReader()) as readers:
        yield readers


def pid_of(readers, raw=b""):
    return read(readers, "nothing", raw).body["pid"]


def test_large_bodies_have_a_process_of_their_own_without_jax(odd):
    small, large = (read(odd, "nothing", raw).body for raw in (b"", LARGE + b" "))
    assert len({small["pid"], large["pid"], os.getpid()}) == 3
    assert not small["has_jax"] and not large["has_jax"]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_is_stopped_or_killed_is_replaced(odd, number):
    before = pid_of(odd)
    os.kill(before, number)
    assert pid_of(odd) not in (before, os.getpid())


@pytest.mark.parametrize(
    ("kind", "raw", "status", "code"),
    [
        ("compute", b"", 400, "request_too_slow"),
        ("memory", b"%d" % (2 << 30), 400, "request_too_large"),
        ("sleep", b"60", 503, "server_busy"),
        ("exit", b"3", 503, "server_busy"),
    ],
)
def test_a_body_that_exceeds_a_limit_is_an_error_and_the_next_one_is_read(odd, kind, raw, status, code):
    with pytest.raises(ApiError) as caught:
        read(odd, kind, raw)
    assert (caught.value.status, caught.value.code) == (status, code)
    assert pid_of(odd) != os.getpid()


def test_a_fault_of_the_reader_tells_its_traceback(odd):
    with pytest.raises(RuntimeError, match="KeyError: 'odd'"):
        read(odd, "fail")


def test_the_memory_of_the_server_does_not_count_as_that_of_its_processes():
    peak = b"x" * (400 << 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 >= len(peak) > 256 << 20
    with reading(OddReader(), limits=dataclasses.replace(LIMITS, memory=512 << 20)) as readers:
        assert len({pid_of(readers) for _ in range(3)}) == 1


def test_small_bodies_one_after_another_need_one_process():
    with reading(OddReader()) as readers:
        assert len({pid_of(readers) for _ in range(30)}) == 1


def test_what_a_library_prints_is_not_taken_for_an_answer(odd):
    assert read(odd, "print").body["pid"] == pid_of(odd)


def test_closing_ends_what_is_being_read():
    async def run(readers):
        # Two are read, and one waits.
        sent = [asyncio.ensure_future(readers.read("sleep", [raw], "a")) for raw in (b"60", LARGE + b"60", b"60")]
        await asyncio.sleep(0.1)
        readers.close()
        return await asyncio.gather(*sent, readers.read("nothing", [], "a"), return_exceptions=True)

    with reading(OddReader(), limits=ReadLimits()) as readers:
        pid = pid_of(readers)
        assert [each.code for each in asyncio.run(run(readers))] == ["shutting_down"] * 4  # type: ignore[union-attr]
        wait_until(lambda: not is_alive(pid))


def test_processes_end_with_a_server_that_is_killed():
    code = (
        "from tests.serving.test_readers import *; r = Readers(OddReader(), 2); print(pid_of(r), flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        process.kill()
        wait_until(lambda: not is_alive(pid))


def is_alive(pid):
    """Returns whether a process runs; one that has ended may still wait for its parent."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def fill(queue, text, *, is_small=False):
    """Adds an item per word: its client's letter and a number."""
    for word in text.split():
        assert queue.add(word[0], 1, word, is_small=is_small)


def drain(queue, *, small_only=False):
    items = []
    while taken := queue.take(small_only=small_only):
        items.append(taken[1])
        queue.finish(taken[0])
    return " ".join(items)


def test_clients_take_turns():
    queue = ReadQueue()
    fill(queue, "a1 a2 a3 b1 c1 c2")
    assert drain(queue) == "a1 b1 c1 a2 c2 a3"


def test_a_client_whose_request_is_read_comes_last():
    queue = ReadQueue()
    fill(queue, "a1 a2 a3 b1")
    assert queue.take(small_only=False) == ("a", "a1")
    fill(queue, "c1")
    # The turn of `a` comes, and it has one already.
    assert [queue.take(small_only=False)[1] for _ in range(4)] == ["b1", "c1", "a2", "a3"]  # type: ignore[index]


def test_small_requests_do_not_wait_for_large_ones():
    queue = ReadQueue()
    fill(queue, "a1 a2 b1")
    fill(queue, "a3 c1", is_small=True)
    assert drain(queue, small_only=True) == "a3 c1"
    fill(queue, "c2", is_small=True)
    assert drain(queue) == "a1 b1 a2 c2"


def test_a_full_queue_has_room_for_other_clients(monkeypatch):
    monkeypatch.setattr(read_queue, "MAX_WAITING", 4)
    monkeypatch.setattr(read_queue, "MAX_WAITING_BYTES", 100)
    queue = ReadQueue()
    fill(queue, "a1 a2 a3 a4")
    assert not queue.add("a", 1, "a5", is_small=False)
    assert queue.add("b", 1, "b1", is_small=False) and queue.add("b", 1, "b2", is_small=False)
    assert not queue.add("b", 1, "b3", is_small=False)
    assert not queue.add("c", 101, "c1", is_small=False)
    queue.discard("b", 1, "b1", is_small=False)
    assert drain(queue) == "a1 b2 a2 a3 a4"
    assert queue.add("c", 100, "c1", is_small=False)
    assert queue.clear() == ["c1"] and drain(queue) == ""


@pytest.mark.parametrize("num_readers", [0, 2])
def test_texts_are_those_of_a_server_without_processes(num_readers):
    with api_client(num_readers=num_readers) as (client, _):
        assert completion(client, prompt="x" * 150, max_tokens=5).json()["usage"]["prompt_tokens"] == 150
        assert chat(client, max_tokens=5).json()["usage"]["prompt_tokens"] == len("user: Hi\nassistant: ")
        assert client.post("/tokenize", json={"text": "ab"}).json()["tokens"] == [97, 98]
        assert client.post("/detokenize", json={"tokens": [97]}).json() == {"text": "a", "prompt": "a"}
        assert client.post("/abort_request", json={"rid": "none"}).json() == {"num_aborted": 0}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_parts_of_a_body_are_read_as_one(num_workers):
    parts = [b" " * 100_000, b"", b'"' + b"x" * 200_000, b'y"']
    with reading(OddReader(), num_workers) as readers:
        joined = asyncio.run(readers.read("nothing", parts, "a"))
    assert joined.body["checksum"] == zlib.crc32(b"".join(parts))
