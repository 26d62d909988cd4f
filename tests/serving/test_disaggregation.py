"""Prefill and decode on different servers: pages keep their bits, and a prefill server that fails costs only time."""

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time

import httpx
import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("msgpack")

from starlette.testclient import TestClient

from mtpjax.data.tokenizer import ByteTokenizer
from mtpjax.serving.api.settings import ApiSettings
from mtpjax.serving.app import make_app
from mtpjax.serving.disaggregation import protocol, remote_prefill
from mtpjax.serving.disaggregation.protocol import PATH, DisaggregationSettings, Forged, Signer
from mtpjax.serving.disaggregation.remote_prefill import RemotePrefill
from mtpjax.serving.disaggregation.setup import set_up
from mtpjax.serving.disaggregation.transfer import HttpTransfer, JaxTransfer, own_address
from mtpjax.serving.engine import Engine
from mtpjax.serving.page_pool import page_digests
from mtpjax.serving.request import Request
from tests.serving.test_engine import CONFIG, ONE_SIZE, Client, alone

SETTINGS = dataclasses.replace(ONE_SIZE, host_bytes=1 << 22)
SECRET = b"0123456789abcdef"
NUM_WHOLE = 5  # pages of the prompt below, of 8 tokens each


def make_request(seed=0):
    prompt = np.random.default_rng(seed).integers(0, 61, 8 * NUM_WHOLE + 2)
    return Request(prompt=tuple(prompt.tolist()), max_new_tokens=20)


@contextlib.contextmanager
def running(model, params, settings=SETTINGS, config=CONFIG):
    engine = Engine(params, model=model, config=config, settings=settings)
    engine.start()
    try:
        yield engine
    finally:
        assert engine.close(timeout=30)


@pytest.fixture(scope="module")
def pair(small):
    """A model, its parameters, and two engines of it."""
    model, params = small("grouped", "mixed")
    with running(model, params) as first, running(model, params) as second:
        yield model, params, first, second


@contextlib.contextmanager
def prefill_server(engine, **changes):
    """Yields a client of a prefill server, and the transport to it for `remote`."""
    app = make_app(engine, ByteTokenizer(), ApiSettings(model_name="tiny"))
    settings = DisaggregationSettings(prefill_url=None, secret=SECRET, **{"backend": "http", **changes})
    set_up(app, engine, settings)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def remote(engine, client, *, model=None, transfer=None, secret=SECRET, timeout=60.0):
    """A decode server's side that asks `client`, or an address."""
    url = client if isinstance(client, str) else "http://127.0.0.1"
    made = RemotePrefill(
        engine.pages,
        url,
        signer=Signer(secret),
        model=model or engine.pages.digest(),
        transfer=transfer or HttpTransfer(),
        timeout=timeout,
    )
    if not isinstance(client, str):
        made._client = client
    return made


@pytest.mark.parametrize("attention", ["grouped", pytest.param("latent", marks=pytest.mark.slow)])
def test_pages_of_another_engine_are_those_of_its_own_prefill(small, attention):
    model, params = small(attention, "mixed")
    request = make_request()
    with running(model, params) as first, running(model, params) as second, running(model, params) as third:
        expected = alone(params, model, request)[0]
        tokens, _, own = Client(first).run([request])[0]
        assert tokens == expected
        pages = first.pages.read(request.prompt, request.salt)
        assert [digest for digest, _ in pages] == list(page_digests(request.prompt, 8))
        assert len(pages) == NUM_WHOLE
        # An engine that has the pages from elsewhere.
        second.pages.put(pages)
        assert second.pages.count_known(request.prompt, request.salt) == NUM_WHOLE
        tokens, _, finish = Client(second).run([request])[0]
        assert tokens == expected and finish.num_cached_tokens == 8 * NUM_WHOLE
        assert (finish.num_steps, finish.proposed, finish.accepted) == (own.num_steps, own.proposed, own.accepted)
        assert second.status().num_received_pages == NUM_WHOLE
        # After it has decoded they are in its pool, unchanged, and equal to those of a third engine's own prefill.
        Client(third).run([dataclasses.replace(request, max_new_tokens=1)])
        for (_, before), (_, after), (_, computed) in zip(
            pages, second.pages.read(request.prompt, b""), third.pages.read(request.prompt, b""), strict=True
        ):
            for arrays in zip(before, after, computed, strict=True):
                np.testing.assert_array_equal(arrays[0], arrays[1])
                np.testing.assert_array_equal(arrays[0], arrays[2])
        assert any(array.any() for array in pages[-1][1])


@pytest.mark.parametrize("backend", ["http", "jax"])
def test_a_decode_engine_gets_its_pages_from_the_prefill_server(pair, backend):
    model, params, first, second = pair
    request = dataclasses.replace(make_request(1 + (backend == "jax")), salt=b"a client")
    transfer = None
    if backend == "jax":
        try:
            transfer = JaxTransfer()
        except ValueError as error:
            pytest.skip(str(error))
    with prefill_server(first, backend=backend) as client:
        side = remote(second, client, transfer=transfer)
        asyncio.run(side.prepare([request, request]))
        assert (side.num_fetched, side.num_fallbacks) == (1, 0)
        tokens, _, finish = Client(second).run([request])[0]
        assert tokens == alone(params, model, request)[0] and finish.num_cached_tokens == 8 * NUM_WHOLE
        # Now it knows the pages, and asks for none.
        num_requests = first.status().num_requests
        asyncio.run(side.prepare([request]))
        assert (side.num_fetched, first.status().num_requests) == (1, num_requests)
        # A longer text needs only the pages that are new.
        longer = dataclasses.replace(request, prompt=request.prompt[:40] + tuple(range(9)))  # one token behind a page
        before = second.status().num_received_pages
        asyncio.run(side.prepare([longer]))
        assert second.status().num_received_pages == before + 1
    # Nobody with another salt finds them.
    assert second.pages.count_known(request.prompt, b"another client") == 0


def ask(client, body, headers):
    return client.post(PATH, content=body, headers=headers).status_code


def test_only_those_with_the_secret_may_ask(pair, monkeypatch):
    engine = pair[2]
    signer = Signer(SECRET)
    tokens = np.array(make_request(3).prompt, "<i4").tobytes()
    body = protocol.pack({"model": engine.pages.digest(), "tokens": tokens, "salt": b"", "num_known": 0})
    with prefill_server(engine) as client:
        num_requests = engine.status().num_requests
        assert ask(client, body, {}) == 403
        assert ask(client, body, Signer(SECRET[::-1]).sign(body)) == 403
        assert ask(client, body + b"\0", signer.sign(body)) == 403
        assert ask(client, body, {**signer.sign(body), protocol.TIME: repr(time.time() + 1)}) == 403
        now = time.time()
        with monkeypatch.context() as context:
            context.setattr(protocol.time, "time", lambda: now - protocol.MAX_AGE - 1)
            old = signer.sign(body)
        assert ask(client, body, old) == 403
        assert engine.status().num_requests == num_requests  # none of them cost a prefill
        headers = signer.sign(body)
        assert ask(client, body, headers) == 200
        assert ask(client, body, headers) == 403  # the same again
        assert ask(client, b"x" * 10_000, signer.sign(b"x" * 10_000)) == 413
        for wrong in (b"", b"\xc1", protocol.pack({"tokens": b""}), b"\xdd\xff\xff\xff\xff"):
            assert ask(client, wrong, signer.sign(wrong)) == 400


def test_an_answer_is_signed_for_its_request():
    signer = Signer(SECRET)
    request, other = signer.sign(b"ask"), signer.sign(b"ask")
    answer = signer.sign_answer(request, b"answer")
    signer.check_answer(request, answer, b"answer")
    for headers, body in ((request, b"other answer"), (other, b"answer")):
        with pytest.raises(Forged):
            signer.check_answer(headers, answer, body)
    with pytest.raises(ValueError, match="at least 16 bytes"):
        Signer(b"short")


def test_servers_with_other_weights_or_settings_refuse_each_other(small, pair, caplog):
    model, params, first, second = pair
    digests = {first.pages.digest(), second.pages.digest()}
    assert len(digests) == 1
    others = [
        (small("grouped"), SETTINGS, CONFIG),
        ((model, params), dataclasses.replace(SETTINGS, page_size=16), CONFIG),
        ((model, params), SETTINGS, dataclasses.replace(CONFIG, kv_cache_dtype="bfloat16")),
        ((model, params), SETTINGS, dataclasses.replace(CONFIG, num_steps=0)),
    ]
    for (other_model, other_params), settings, config in others:
        digests.add(Engine(other_params, model=other_model, config=config, settings=settings).pages.digest())
    assert len(digests) == 1 + len(others)
    request = make_request(4)
    with prefill_server(first) as client:
        side = remote(second, client, model=bytes(32))
        asyncio.run(side.prepare([request]))
    assert (side.num_fetched, side.num_fallbacks) == (0, 1)
    assert "the servers differ in their model" in caplog.text
    tokens, _, finish = Client(second).run([request])[0]
    assert tokens == alone(params, model, request)[0] and finish.num_cached_tokens == 0


class Fault:
    """A prefill server that answers with something else."""

    def __init__(self, client, change):
        self.client, self.change = client, change

    @contextlib.contextmanager
    def stream(self, method, url, *, content, headers):
        answer = self.client.post(PATH, content=content, headers=headers)
        body, answer_headers = self.change(answer.content, dict(answer.headers), headers)
        yield httpx.Response(answer.status_code, content=iter([body]), headers=answer_headers)


def damage(body, headers, request_headers):
    """Damages the pages, and signs the answer again: only the checksum can tell."""
    values = protocol.unpack(body, {"size": int, "checksum": bytes, "data": bytes})
    body = protocol.pack({**values, "data": bytes([values["data"][0] ^ 1]) + values["data"][1:]})
    return body, Signer(SECRET).sign_answer(request_headers, body)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body, headers, request: (body, {}), "not signed"),
        (lambda body, headers, request: (body[:-1] + b"x", headers), "not signed"),
        (damage, "corrupted"),
        (lambda body, headers, request: (body + bytes(10_000), headers), "more than"),
    ],
    ids=["unsigned", "changed", "damaged", "large"],
)
def test_a_wrong_answer_is_not_used(pair, caplog, change, reason):
    engine, request = pair[3], make_request(5)
    with prefill_server(pair[2]) as client:
        side = remote(engine, Fault(client, change))
        asyncio.run(side.prepare([request]))
    assert (side.num_fetched, side.num_fallbacks) == (0, 1) and reason in caplog.text
    assert engine.pages.count_known(request.prompt, b"") == 0


def test_a_dead_or_hanging_prefill_server_costs_only_time(pair, monkeypatch):
    model, params, _, engine = pair
    monkeypatch.setattr(remote_prefill, "PAUSE_SECONDS", 0.5)
    with hanging_server() as address:
        side = remote(engine, address, timeout=0.3)
        for number, request in enumerate([make_request(6), make_request(7)]):
            begin = time.monotonic()
            asyncio.run(side.prepare([request]))
            # The second request does not wait: the server has just failed.
            assert (time.monotonic() - begin < 0.25) == bool(number)
        assert (side.num_fetched, side.num_fallbacks) == (0, 2)
        tokens, _, finish = Client(engine).run([request])[0]
        assert tokens == alone(params, model, request)[0] and finish.num_cached_tokens == 0
    # Nobody listens there any more.
    side = remote(engine, address)
    asyncio.run(side.prepare([make_request(8)]))
    assert (side.num_fetched, side.num_fallbacks) == (0, 1)


@contextlib.contextmanager
def hanging_server():
    """Yields the address of a server that takes requests and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = []
        thread = threading.Thread(target=lambda: taken.append(listener.accept()[0]), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(5)
        for connection in taken:
            connection.close()


def test_requests_fetch_their_pages_before_they_run(pair):
    _, _, first, second = pair
    prompt = "the quick brown fox jumps over the dog"
    with prefill_server(first) as client:
        app = make_app(second, LowTokenizer(), ApiSettings(model_name="tiny"))
        side = remote(second, client)
        app.state.server.prepare = side.prepare
        with TestClient(app) as decode:
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            usage = decode.post("/v1/completions", json=body).json()["usage"]
    assert side.num_fetched == 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == (len(prompt) - 1) // 8 * 8


class LowTokenizer(ByteTokenizer):
    """Bytes, for a vocabulary of 61."""

    def encode(self, text):
        return [token % 61 for token in super().encode(text)]


def test_an_engine_without_host_memory_cannot_take_part(small):
    model, params = small("grouped", "mixed")
    engine = Engine(params, model=model, config=CONFIG, settings=dataclasses.replace(SETTINGS, host_bytes=0))
    app = make_app(engine, ByteTokenizer(), ApiSettings(model_name="tiny"))
    with pytest.raises(ValueError, match="needs a prefix cache"):
        set_up(app, engine, DisaggregationSettings(prefill_url=None, secret=SECRET, backend="http"))


def test_the_address_for_pages_is_one_that_others_reach():
    assert own_address("10.0.0.7") == "10.0.0.7"
    try:
        address = own_address("0.0.0.0")
    except ValueError as error:
        pytest.skip(str(error))
    assert address != "0.0.0.0"
    socket.create_server((address, 0)).close()  # only an address of this machine can be bound


def test_a_port_in_use_is_an_error_that_says_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ValueError, match="bootstrap-port"):
        JaxTransfer("127.0.0.1", listener.getsockname()[1])
