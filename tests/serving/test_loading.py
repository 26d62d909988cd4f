"""The port while a server loads: it is open, says how far the start is, and loses no client at its end."""

import contextlib
import socket
import threading
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

import httpx
from starlette.responses import PlainTextResponse

from mtpjax.serving import loading
from mtpjax.serving.http_server import address_of, listen, run_in_thread
from mtpjax.serving.loading import open_port


@pytest.fixture
def listener():
    with listen("127.0.0.1", 0) as opened:
        yield opened


def test_health_answers_and_everything_else_is_asked_to_come_again(listener):
    with open_port(listener, "mtpjax serve") as start, httpx.Client(base_url=address_of(listener)) as client:
        assert [client.get(path).status_code for path in ("/health", "/ping")] == [200, 200]
        for path in ("/ready", "/health_generate", "/metrics", "/", "/v1/models"):
            assert client.get(path).status_code == 503
        start.report("loading the weights")
        assert "loading the weights" in client.get("/ready").text
        start.report("compiling", 7, 48)
        answer = client.post("/v1/completions", content=b"x" * 3_000_000)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    assert answer.json()["error"]["message"] == "the server is loading: compiling 7/48"
    assert answer.json()["error"]["code"] == "loading"


def test_clients_that_come_between_the_two_servers_are_answered(listener):
    """Half a request is on its way when the first server ends, and a connection waits for the second."""
    address, request = listener.getsockname(), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with open_port(listener, "mtpjax serve"):
        late = socket.create_connection(address)
        late.sendall(request[:20])
        time.sleep(0.1)  # so that the first server has it
        threading.Timer(0.1, late.sendall, (request[20:],)).start()
    between = socket.create_connection(address)
    between.sendall(request)
    with run_in_thread(PlainTextResponse("served"), listener):
        answers = []
        for connection in (late, between):
            with contextlib.closing(connection):
                connection.settimeout(10)
                answers.append(connection.recv(1000))
    assert answers[0].startswith(b"HTTP/1.1 200") and answers[1].endswith(b"served")


def test_a_log_gets_a_line_every_few_seconds(listener, capsys, monkeypatch):
    monkeypatch.setattr(loading, "LINE_SECONDS", 0.05)
    with open_port(listener, "mtpjax serve") as start:
        start.report("compiling", 7, 48)
        time.sleep(0.4)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert lines[-1].startswith(f"mtpjax serve: {address_of(listener)} is open, compiling 7/48 (")


def test_a_quick_start_says_nothing(capsys):
    with open_port(None, "mtpjax serve") as start:
        start.report("compiling", 1, 3)
    assert capsys.readouterr().err == ""
