"""The router: streams pass through unbuffered, dead servers are left out, and a server that dies is an error event."""

import asyncio
import functools
import json
import socket
import threading
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx

from mtpjax.serving.http_server import serve_in_thread
from mtpjax.serving.router import Router


class Upstream:
    """A fake decode server: it streams events for as long as it is told to, and tells what it was asked."""

    def __init__(self, name):
        self.name, self.requests, self.num_left, self.delay, self.is_ready = name, [], 0, 0.0, True
        self.dies_after = None

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        if scope["path"] == "/ready":
            return await answer(send, 200 if self.is_ready else 503, b"")
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.requests.append((scope, body))
        if scope["path"] == "/error":
            return await answer(send, 418, b'{"error": "teapot"}', [(b"x-own", b"1")])
        left = asyncio.ensure_future(receive())
        headers = [(b"content-type", b"text/event-stream" if scope["path"] == "/stream" else b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(10):
            if number == self.dies_after:
                raise RuntimeError("died")  # uvicorn cuts the connection
            event = f"data: {self.name} {number}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.wait([left], timeout=self.delay)
            if left.done():
                self.num_left += 1
                return
        left.cancel()
        await send({"type": "http.response.body", "body": b""})


async def answer(send, status, body, headers=()):
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


serve = functools.partial(serve_in_thread, log_level="critical")


@pytest.fixture
def routed():
    """The router's address, the router, and two servers behind it."""
    first, second = Upstream("first"), Upstream("second")
    with serve(first) as a, serve(second) as b:
        router = Router([a, b], check_seconds=0.05)
        with serve(router) as address:
            yield address, router, [first, second]


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def test_a_stream_arrives_event_by_event(routed):
    address, router, upstreams = routed
    for upstream in upstreams:
        upstream.delay = 0.1
    times = []
    with httpx.stream("POST", f"{address}/stream?a=1%202", json={"prompt": "x"}, headers={"x-own": "2"}) as response:
        assert response.headers["content-type"] == "text/event-stream"
        for _ in response.iter_raw():
            times.append(time.monotonic())
    assert len(times) == 10 and times[-1] - times[0] > 0.5
    [(scope, body)] = upstreams[0].requests + upstreams[1].requests
    assert (scope["path"], scope["query_string"], json.loads(body)) == ("/stream", b"a=1%202", {"prompt": "x"})
    headers = dict(scope["headers"])
    assert headers[b"x-own"] == b"2" and headers[b"x-forwarded-for"] == b"127.0.0.1"
    wait_until(lambda: not any(upstream.num_running for upstream in router.upstreams))


def test_requests_go_to_the_server_with_the_fewest_and_equal_beginnings_together(routed):
    address, _, upstreams = routed
    # Without load the beginning of the prompt decides, wherever the field stands in the body.
    for number in range(4):
        httpx.post(f"{address}/stream", json={"seed": number, "prompt": "a" * 300 + str(number)})
    assert sorted(len(upstream.requests) for upstream in upstreams) == [0, 4]
    for number in range(12):
        httpx.post(f"{address}/stream", json={"prompt": f"{number}"})
    assert all(upstream.requests for upstream in upstreams)
    # Under load the same prompt goes to both.
    for upstream in upstreams:
        upstream.requests, upstream.delay = [], 0.2
    threads = [
        threading.Thread(target=httpx.post, args=(f"{address}/stream",), kwargs={"json": {"prompt": "x"}})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(upstream.requests) for upstream in upstreams] == [2, 2]


def test_errors_pass_through(routed):
    response = httpx.post(f"{routed[0]}/error", json={})
    assert (response.status_code, response.json(), response.headers["x-own"]) == (418, {"error": "teapot"}, "1")


def test_a_client_that_leaves_ends_its_request(routed):
    address, router, upstreams = routed
    for upstream in upstreams:
        upstream.delay = 3.0  # the whole stream takes half a minute
    with httpx.stream("POST", f"{address}/stream", json={}) as response:
        events = response.iter_raw()  # httpx closes the connection when nobody holds it
        next(events)
        assert sum(upstream.num_running for upstream in router.upstreams) == 1
    wait_until(lambda: sum(upstream.num_left for upstream in upstreams) == 1)
    wait_until(lambda: not any(upstream.num_running for upstream in router.upstreams))


def test_a_server_that_dies_in_mid_stream_is_an_error_event(routed):
    address, _, upstreams = routed
    for upstream in upstreams:
        upstream.dies_after = 3
    events = httpx.post(f"{address}/stream", json={}).text.split("\n\n")
    assert len(events) == 5 and json.loads(events[3].removeprefix("data: "))["error"]["code"] == "server_lost"
    # A plain answer has no place for an error: the connection breaks.
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{address}/plain", json={})


def test_a_server_that_is_down_gets_no_requests():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    upstream, dead = Upstream("alive"), f"http://127.0.0.1:{port}"
    # No check runs before the first request, so the router must try the next server by itself.
    with serve(upstream) as alive, serve(Router([dead, alive], check_seconds=0.05)) as address:
        for number in range(8):
            assert httpx.post(f"{address}/stream", json={"prompt": str(number)}).status_code == 200
        assert len(upstream.requests) == 8
        # It comes back.
        late = Upstream("late")
        with serve(late, port=port):
            wait_until(
                lambda: httpx.post(f"{address}/stream", json={"prompt": str(time.monotonic())}) and late.requests
            )
    router = Router([dead], check_seconds=0.05)
    with serve(router) as address:
        response = httpx.post(f"{address}/stream", json={})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_server")
        assert httpx.get(f"{address}/health").status_code == 503


def test_a_server_that_drains_gets_requests_last(routed):
    address, router, upstreams = routed
    upstreams[0].is_ready = False
    wait_until(lambda: not router.upstreams[0].is_ready)
    for number in range(8):
        httpx.post(f"{address}/stream", json={"prompt": str(number)})
    assert [len(upstream.requests) for upstream in upstreams] == [0, 8]
    assert httpx.get(f"{address}/health").status_code == 200


def test_a_path_cannot_name_another_server(routed):
    address, _, upstreams = routed
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as client:
        client.sendall(b"GET @127.0.0.1:1/ HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b" 400 " in client.makefile("rb").readline()
    assert not upstreams[0].requests + upstreams[1].requests


@pytest.mark.parametrize("url", ["", "localhost:30000", "ftp://host", "http://host/path", "http://host:x"])
def test_a_wrong_address_is_refused(url):
    with pytest.raises(ValueError):
        Router([url])
