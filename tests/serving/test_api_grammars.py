"""The fields that ask for a grammar reach the engine, and a wrong grammar is a 400."""

import asyncio
import concurrent.futures
import threading
import time

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("llguidance")

from mtpjax.serving.matcher import num_words

from mtpjax.data.tokenizer import ByteTokenizer
from mtpjax.serving.api import server as api_server
from mtpjax.serving.api.turns import Turns
from mtpjax.serving.grammar import Grammars, GrammarTooSlow
from mtpjax.serving.request import Finish
from tests.helpers.api_client import api_client, chat, completion, events
from tests.helpers.fake_engine import FakeEngine

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
MATCHING = {"json": b'{"a": true}', "object": b'{"b": [1]}', "regex": b"abb", "any": b"[1]"}


@pytest.fixture(scope="module")
def server():
    with api_client(FakeEngine(grammars=Grammars(ByteTokenizer(), 256))) as (client, engine):
        yield client, engine


def generate(client, **sampling):
    return client.post("/generate", json={"text": "Hi", "sampling_params": sampling})


def matches(grammar, text):
    """Returns whether a text is complete."""
    matcher, masks = grammar.start(), np.zeros((1, num_words(256)), np.int32)
    try:
        matcher.consume(text)
    except ValueError:
        return False
    matcher.fill_masks(masks, [0])
    return bool(masks[0, 0] & 1)


@pytest.mark.parametrize("send", [completion, chat, generate])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "regex": None}, None),
        ({"response_format": {"type": "json_object"}}, {"json", "object"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            {"json"},
        ),
        ({"json_schema": '{"type": "object"}'}, {"json", "object"}),
        ({"json_schema": "$$ANY$$"}, {"json", "object", "any"}),
        ({"regex": "(a|b)*abb"}, {"regex"}),
        ({"guided_json": SCHEMA}, {"json"}),
        ({"guided_regex": "(a|b)*abb"}, {"regex"}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json"}),
        ({"structured_outputs": {"regex": "(a|b)*abb"}}, {"regex"}),
        ({"structured_outputs": {"json_object": True}}, {"json", "object"}),
    ],
)
def test_every_name_of_a_grammar_reaches_the_engine(server, send, body, expected):
    client, engine = server
    assert send(client, **body).status_code == 200
    grammar = engine.requests[-1].grammar
    if expected is None:
        assert grammar is None
    else:
        assert {name for name, text in MATCHING.items() if matches(grammar, text)} == expected


def test_all_choices_share_a_grammar(server):
    client, engine = server
    assert completion(client, regex="a*", n=2).status_code == 200
    first, second = engine.requests[-2:]
    assert first.grammar is second.grammar is not None


@pytest.mark.parametrize("send", [completion, chat, generate])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "bogus"}}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": '{"$ref": "http://localhost/x"}'}, "json_schema"),
        ({"regex": "("}, "regex"),
        ({"regex": 5}, "regex"),
        ({"regex": "a" * 70_000}, "regex"),
        ({"guided_json": {"properties": {f"p{i}": {"const": "x" * 900} for i in range(90)}}}, "guided_json"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"regex": "a", "json_schema": "{}"}, "regex"),
    ],
)
def test_a_wrong_grammar_is_a_400_that_names_the_field(server, send, body, param):
    client, engine = server
    before = len(engine.requests)
    response = send(client, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == ("sampling_params." if send is generate else "") + param
    assert len(error["message"]) < 400 and len(engine.requests) == before


def test_a_server_without_grammars_says_so():
    with api_client() as (client, _):
        response = completion(client, response_format={"type": "json_object"})
        assert response.status_code == 400 and response.json()["error"]["code"] == "unsupported_option"
        assert completion(client, response_format={"type": "text"}).status_code == 200


def test_a_grammar_that_compiles_for_too_long_is_a_400(server, monkeypatch):
    client, engine = server
    ends = threading.Event()
    monkeypatch.setattr(api_server, "GRAMMAR_SECONDS", 0.05)
    monkeypatch.setattr(engine.grammars, "compile", lambda *_, seconds: ends.wait(30))
    response = completion(client, regex="a")
    ends.set()
    assert response.status_code == 400 and "too long" in response.json()["error"]["message"]


def test_a_small_grammar_does_not_wait_for_large_ones(monkeypatch):
    large_may_end, begun = threading.Event(), []

    class Slow(Grammars):
        def compile(self, kind, source, *, seconds):
            if source.startswith("large"):
                begun.append(seconds)
                if seconds < 1:
                    raise GrammarTooSlow(seconds)
                assert large_may_end.wait(30)
            return super().compile(kind, source, seconds=seconds)

    monkeypatch.setattr(api_server, "GRAMMAR_SECONDS", 0.5)
    with api_client(FakeEngine(grammars=Slow(ByteTokenizer(), 256))) as (client, _):
        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            waiting = [threads.submit(completion, client, regex=f"large{index}") for index in range(6)]
            while len(begun) < 6 + api_server.SLOW_GRAMMARS:
                time.sleep(0.01)
            assert completion(client, regex="[a-z]").status_code == 200
            # Those that run have taken too long. The time of those that wait has not begun.
            first = concurrent.futures.wait(waiting, timeout=1)
            assert {each.result().status_code for each in first.done} == {400}
            large_may_end.set()
        assert [each.result().status_code for each in waiting].count(200) == 6 - len(first.done) == 4


def test_turns_go_round_the_clients():
    async def run():
        turns, order = Turns(1), []

        async def work(client):
            await turns.take(client)
            order.append(client)
            await asyncio.sleep(0)
            turns.release(client)

        await turns.take("first")
        tasks = [asyncio.create_task(work(client)) for client in "aaaabbc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        turns.release("first")
        await asyncio.gather(*tasks, return_exceptions=True)
        assert "".join(order) == "abcaba"
        await turns.take("last")  # the slot is free again

    asyncio.run(run())


def test_a_client_with_running_work_waits_for_clients_without():
    async def run():
        turns, order = Turns(2), []

        async def work(client):
            await turns.take(client)
            order.append(client)

        await turns.take("a")
        await turns.take("a")
        tasks = [asyncio.create_task(work(client)) for client in "abc"]
        await asyncio.sleep(0)
        for client in "aab":
            turns.release(client)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert "".join(order) == "bac"

    asyncio.run(run())


def test_a_grammar_that_fails_while_decoding_is_a_400(server, monkeypatch):
    client, engine = server
    finish = Finish("invalid", 2, message="the grammar failed: too complex")
    monkeypatch.setattr(engine, "_deltas", lambda request: iter([finish]))
    response = completion(client, regex="a")
    assert response.status_code == 400 and response.json()["error"]["code"] == "grammar_failed"
    assert "too complex" in events(completion(client, regex="a", stream=True))[-1]["error"]["message"]
