"""Over real connections: clients that leave, read slowly or send nothing cost the engine nothing, and others go on."""

import asyncio
import contextlib
import http.client
import importlib
import json
import select
import signal
import socket
import threading
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

import httpx
from mtpjax.serving.api.settings import ApiSettings

from mtpjax.data import template_worker
from mtpjax.data.tokenizer import ByteTokenizer
from mtpjax.serving import header_limits
from mtpjax.serving.app import make_app
from tests.helpers import chatml
from tests.helpers.api_server import serve
from tests.helpers.fake_engine import REPLY, FakeEngine

JSON = {"Content-Type": "application/json"}
LONG = {"prompt": "Hi", "max_tokens": 50_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow():
    """A server whose engine makes a delta per 10 ms, and the engine."""
    engine = FakeEngine(delay=0.01, max_length=100_000)
    with serve(engine) as address:
        yield address, engine


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_streaming_client_that_leaves_ends_its_request(slow, path):
    address, engine = slow
    num_aborted = engine.num_aborted
    body = {**LONG, "text": "Hi", "sampling_params": {"max_new_tokens": 50_000, "ignore_eos": True}, "stream": True}
    with httpx.stream("POST", address + path, json=body) as response:
        next(response.iter_lines())
        assert engine.status().num_running == 1
    assert engine.wait_until_idle()
    assert engine.num_aborted == num_aborted + 1


def test_a_plain_client_that_leaves_ends_its_request(slow):
    address, engine = slow
    num_aborted = engine.num_aborted
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/completions", json={**LONG, "n": 3}, timeout=0.2)
    assert engine.wait_until_idle()
    assert engine.num_aborted == num_aborted + 3


def test_many_clients_that_leave_at_once_leave_nothing_behind(slow):
    address, engine = slow

    async def storm():
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=60)) as client:

            async def read_one():
                async with client.stream(
                    "POST", f"{address}/v1/completions", json={**LONG, "stream": True}
                ) as response:
                    await response.aiter_lines().__anext__()
                    await asyncio.sleep(0.1)

            await asyncio.gather(*(read_one() for _ in range(50)))

    asyncio.run(storm())
    assert engine.wait_until_idle()
    response = httpx.post(f"{address}/v1/completions", json={"prompt": "Hi", "max_tokens": 9})
    assert response.json()["choices"][0]["text"] == "iPrüfung"


def test_a_request_ends_by_its_id(slow):
    address, engine = slow
    body = {**LONG, "stream": True, "rid": "mine"}
    with httpx.stream("POST", f"{address}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        # The same id cannot be used twice at the same time.
        assert httpx.post(f"{address}/v1/completions", json=body).status_code == 400
        assert httpx.post(f"{address}/abort_request", json={"rid": "other"}).json() == {"num_aborted": 0}
        assert httpx.post(f"{address}/abort_request", json={"rid": "mine"}).json() == {"num_aborted": 1}
        *_, last, done = [line.removeprefix("data: ") for line in lines if line]
    assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "abort"
    assert engine.wait_until_idle()


def test_all_requests_can_be_aborted(slow):
    address, engine = slow
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(httpx.post(f"{address}/v1/completions", json=LONG)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: engine.status().num_running == 3)
    httpx.post(f"{address}/abort_request", json={"abort_all": True})
    for thread in threads:
        thread.join()
    assert [answer.json()["choices"][0]["finish_reason"] for answer in answers] == ["abort"] * 3


def test_running_requests_finish_or_are_told_when_the_server_stops():
    async def run():
        engine = FakeEngine(delay=0.01, max_length=100_000)
        app = make_app(engine, ByteTokenizer(), ApiSettings(model_name="tiny"))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
            bodies = [{**LONG, "stream": True}, LONG, {**LONG, "max_tokens": 9}]
            tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
            while len(engine.requests) < 3:
                await asyncio.sleep(0.01)
            drained = asyncio.create_task(app.state.server.drain(1))
            await asyncio.sleep(0)
            refused = await client.post("/v1/completions", json=LONG)
            await drained
            stream, plain, short = [await task for task in tasks]
        engine.close()
        assert refused.status_code == 503
        assert '"finish_reason":"abort"' in stream.text and stream.text.endswith("data: [DONE]\n\n")
        assert plain.json()["choices"][0]["finish_reason"] == "abort"
        assert short.json()["choices"][0]["finish_reason"] == "length"

    asyncio.run(run())


def test_a_stopped_template_process_does_not_hold_up_the_end(tmp_path):
    tokenizer = chatml.save_tokenizer(tmp_path)
    tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    template_worker.WORKER._worker._process.send_signal(signal.SIGSTOP)
    engine = FakeEngine()
    app = make_app(engine, tokenizer, ApiSettings(model_name="tiny"))

    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=60) as client:
            body = {"messages": [{"role": "user", "content": "a"}]}
            tasks = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(5)]
            await asyncio.sleep(0.2)
            begin = time.monotonic()
            await app.state.server.drain(0.1)
            responses = [await task for task in tasks]
            assert time.monotonic() - begin < 5  # the worker's own limit is 12 seconds
            assert {response.status_code for response in responses} <= {400, 503}

    asyncio.run(run())
    engine.close()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}])  # in a new process


def test_a_request_id_belongs_to_a_key():
    engine = FakeEngine(delay=0.01, max_length=100_000)
    with serve(engine, api_keys=("a", "b"), admin_api_keys=("admin",)) as address:
        headers = {key: {"Authorization": f"Bearer {key}"} for key in ("a", "b", "admin")}
        abort = lambda key: httpx.post(f"{address}/abort_request", json={"rid": "x"}, headers=headers[key]).json()
        body = {**LONG, "stream": True, "rid": "x"}

        def stream(key):
            return httpx.stream("POST", f"{address}/v1/completions", json=body, headers=headers[key])

        with stream("a") as mine, stream("b") as other:
            assert mine.status_code == other.status_code == 200
            with stream("a") as again:
                assert again.status_code == 400
            assert abort("b") == {"num_aborted": 1}
            assert '"finish_reason":"abort"' in other.read().decode()
            assert engine.status().num_running == 1 and abort("b") == {"num_aborted": 0}
            assert abort("admin") == {"num_aborted": 1}
            assert '"finish_reason":"abort"' in mine.read().decode()


def connect(address, body, *, length=None, buffer_bytes=1 << 16):
    """Returns a connection that has sent a completion's body."""
    host, port = address.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    client.settimeout(5)
    client.connect((host, int(port)))
    lines = ["POST /v1/completions HTTP/1.1", "Host: tiny", "Content-Type: application/json"]
    lines += [f"Content-Length: {length or len(body)}", "", ""]
    client.sendall("\r\n".join(lines).encode() + body)
    return client


def test_a_slow_reader_is_aborted_and_others_go_on():
    engine = FakeEngine(max_length=10_000_000, delay=0.0001)
    with serve(engine, max_buffer_bytes=20_000, write_timeout=0.5) as address:
        body = json.dumps({**LONG, "max_tokens": 9_000_000, "stream": True, "logprobs": 0}).encode()
        with connect(address, body, buffer_bytes=4096):
            wait_until(lambda: engine.requests)
            response = httpx.post(f"{address}/v1/completions", json={"prompt": "Hi"})
            assert response.json()["usage"]["completion_tokens"] == 16
            # Nothing is read: the buffers of the connection fill, then the server's own.
            assert engine.wait_until_idle(20)
    assert engine.num_aborted == 1


def test_a_body_that_does_not_arrive_is_408():
    with serve(FakeEngine(), body_timeout=0.3) as address, connect(address, b'{"prompt"', length=50) as client:
        assert httpx.get(f"{address}/health").status_code == 200
        answer = b"".join(iter(lambda: client.recv(4096), b""))  # until the server closes
    assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: tiny\r\n\r\n"])
@pytest.mark.parametrize("data", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: ti"])
def test_a_header_that_does_not_arrive_closes_the_connection(before, data):
    with serve(FakeEngine(), header_seconds=0.3) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            if before:
                # An earlier request on the same connection is answered.
                client.sendall(before)
                assert client.recv(4096).startswith(b"HTTP/1.1 200")
            client.sendall(data)
            # Uvicorn itself closes a connection that is idle after a request.
            assert client.recv(4096) == b""


@pytest.fixture(params=["h11", "httptools"])
def parser(request, monkeypatch):
    """Lets uvicorn use one of its two parsers."""
    pytest.importorskip(request.param)
    kind = importlib.import_module(f"uvicorn.protocols.http.{request.param}_impl")
    chosen = kind.H11Protocol if request.param == "h11" else kind.HttpToolsProtocol
    monkeypatch.setattr(header_limits, "AutoHTTPProtocol", chosen)


def send_until_closed(address, begin, repeated, max_bytes):
    """Sends bytes until the server closes the connection; returns its answer and how many it took."""
    host, port = address.removeprefix("http://").split(":")
    answer, num_sent = b"", 0
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(begin)
        with contextlib.suppress(ConnectionError):
            while num_sent < max_bytes:
                num_sent += client.send(repeated)
                if select.select([client], [], [], 0)[0]:
                    if not (part := client.recv(4096)):
                        break
                    answer += part
            while part := client.recv(4096):
                answer += part
    return answer, num_sent


GET, CHUNKED = b"GET / HTTP/1.1\r\nHost: tiny\r\n", b"POST /tokenize HTTP/1.1\r\nHost: tiny\r\n"
CHUNKED += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        (GET, b"X: " + b"a" * 1000 + b"\r\n"),
        (GET + b"X: ", b"a" * 60_000),
        (b"GET /", b"a" * 1000),
    ],
)
def test_a_header_without_end_is_431_before_any_key_is_checked(parser, begin, repeated):
    with serve(FakeEngine(), api_keys=("key",)) as address:
        answer, num_sent = send_until_closed(address, begin, repeated, 50 << 20)
        assert httpx.get(f"{address}/health").status_code == 200
    assert num_sent < 20 << 20  # what the buffers of two sockets hold; the server keeps 16 KiB
    assert answer.startswith(b"HTTP/1.1 431") or not answer  # a reset may overtake the answer


@pytest.mark.parametrize("begin", [CHUNKED + b"1\r\n{\r\n0\r\nX: ", CHUNKED + b"1;", GET + b"\r\n" + GET + b"X: "])
def test_a_trailer_a_chunk_or_a_later_header_without_end_closes_the_connection(parser, begin):
    with serve(FakeEngine()) as address:
        _, num_sent = send_until_closed(address, begin, b"a" * 1000, 50 << 20)
        assert httpx.get(f"{address}/health").status_code == 200
    assert num_sent < 20 << 20


def test_headers_below_the_limit_and_many_requests_of_a_connection_pass(parser):
    with serve(FakeEngine()) as address, httpx.Client(headers={"X": "a" * 12_000}) as client:
        for _ in range(5):
            body = {"prompt": "x" * 90, "stop": ["y" * 400], "user": "é" * 500}
            assert client.post(f"{address}/v1/completions", json=body).status_code == 200
            assert client.get(f"{address}/health").status_code == 200
        # A large body in small chunks.
        chunks = (b'{"prompt": "a"', b" " * 70_000, *[b" "] * 3000, b"}")
        headers = {"Content-Type": "application/json"}
        assert client.post(f"{address}/v1/completions", content=iter(chunks), headers=headers).status_code == 200


def test_two_lengths_of_a_body_are_400_and_close_the_connection(parser):
    with serve(FakeEngine()) as address:
        begin = CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n") + b"0\r\n\r\n" + GET + b"\r\n"
        answer, _ = send_until_closed(address, begin, b"", 0)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1


def test_a_long_response_outlives_the_time_for_headers():
    engine = FakeEngine(delay=0.05, max_length=1000)
    with serve(engine, header_seconds=0.2) as address:
        response = httpx.post(f"{address}/v1/completions", json={"prompt": "Hi", "max_tokens": 20, "ignore_eos": True})
    assert response.json()["usage"]["completion_tokens"] == 20


def test_the_openai_client_reads_the_same_text_in_both_ways():
    openai = pytest.importorskip("openai")
    with serve(FakeEngine(), api_keys=("key",)) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["tiny"]
            prompt = {"model": "tiny", "prompt": "Hi", "max_tokens": 40}
            plain = client.completions.create(**prompt)
            chunks = list(client.completions.create(**prompt, stream=True, stream_options={"include_usage": True}))
            assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == plain.choices[0].text
            assert chunks[-1].usage == plain.usage and plain.usage.completion_tokens == 40
            messages = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
            answer = client.chat.completions.create(**messages, logprobs=True)
            assert answer.choices[0].message.content == " " + REPLY
            assert answer.choices[0].finish_reason == "stop" and answer.choices[0].logprobs.content[0].token == " "
            chunks = list(client.chat.completions.create(**messages, stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " " + REPLY
            with pytest.raises(openai.BadRequestError) as error:
                client.completions.create(model="tiny", prompt="a" * 500)
            assert error.value.code == "context_length_exceeded"
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="other", prompt="a")
        with (
            openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


class FailingTokenizer(ByteTokenizer):
    """Fails at one text as a fault of the program would."""

    def encode(self, text):
        if text == "fail":
            raise RuntimeError("injected")
        return super().encode(text)


def test_a_connection_outlives_an_internal_error():
    with (
        serve(FakeEngine(), FailingTokenizer()) as address,
        contextlib.closing(http.client.HTTPConnection(address.removeprefix("http://"))) as connection,
    ):
        for prompt, status in (("fail", 500), ("Hi", 200), ("fail", 500), ("Hi", 200)):
            connection.request("POST", "/v1/completions", json.dumps({"prompt": prompt}), JSON)
            response = connection.getresponse()
            assert (response.status, response.will_close) == (status, False)
            body = json.loads(response.read())
            if status == 500:
                assert "injected" not in body["error"]["message"] and body["error"]["code"] == "internal_error"
                time.sleep(0.1)  # in which a server that closes the connection does so
                assert connection.sock is not None and select.select([connection.sock], [], [], 0)[0] == []
