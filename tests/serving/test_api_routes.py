"""The routes give OpenAI's and SGLang's responses, and a stream gives the same text as a plain response."""

import random
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
import tokenizers

from mtpjax.data.tokenizer import HuggingFaceTokenizer
from mtpjax.decoding.config import SamplingParams
from mtpjax.serving.api import health_routes
from mtpjax.serving.api.health_routes import HEALTH_SECONDS
from mtpjax.serving.request import Finish, Request
from tests.helpers import chat_templates, chatml
from tests.helpers.api_client import api_client, chat, completion, events
from tests.helpers.decoder_kinds import KINDS, make_tokenizer
from tests.helpers.fake_engine import REPLY, FakeEngine


@pytest.fixture(scope="module")
def server():
    with api_client(model_aliases=("small",)) as (client, engine):
        yield client, engine


@pytest.fixture
def client(server):
    return server[0]


def streamed_text(response):
    choices = [choice for event in events(response)[:-1] for choice in event["choices"]]
    texts = {}
    for choice in choices:
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


@pytest.mark.parametrize("stop", [None, "café", ["🙂 c", "—"], [" ok?"], ["ü", "Prüf"]])
@pytest.mark.parametrize("length", [1, 4, 5, 25, 28, 100])  # some end inside of a character
def test_a_stream_gives_the_plain_text(client, stop, length):
    body = {"stop": stop, "max_tokens": length, "n": 2}
    plain = completion(client, **body).json()
    stream = completion(client, **body, stream=True, stream_options={"include_usage": True})
    assert streamed_text(stream) == {choice["index"]: choice["text"] for choice in plain["choices"]}
    assert events(stream)[-2]["usage"] == plain["usage"]
    ends = [choice["finish_reason"] for event in events(stream)[:-2] for choice in event["choices"]]
    assert [end for end in ends if end] == [choice["finish_reason"] for choice in plain["choices"]]


def test_a_chat_stream_gives_the_plain_text(client):
    plain, stream = chat(client, max_tokens=30).json(), chat(client, max_tokens=30, stream=True)
    assert streamed_text(stream) == {0: plain["choices"][0]["message"]["content"]}
    first = events(stream)[0]
    assert first["object"] == "chat.completion.chunk" and first["choices"][0]["delta"]["role"] == "assistant"
    assert events(stream)[-1] == "[DONE]" and "usage" not in first


def test_streams_have_the_headers_of_server_sent_events(client):
    response = completion(client, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers


def test_a_completion_has_openais_fields(client):
    body = completion(client, model="small", user="me").json()
    assert body["object"] == "text_completion" and body["model"] == "small" and body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "i" + REPLY, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2 + len(REPLY.encode()),
        "total_tokens": 4 + len(REPLY.encode()),
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    histogram = body["metrics"]["speculative_decoding"]["acceptance_histogram"]
    assert sum(histogram) == body["metrics"]["speculative_decoding"]["num_spec_steps"]


def test_tokens_behind_a_stop_string_are_not_counted(client):
    body = completion(client, stop="naïve").json()
    assert body["choices"][0]["text"] == "iPrüfung: the "
    assert body["choices"][0]["finish_reason"] == "stop" and body["choices"][0]["stop_reason"] == "naïve"
    assert body["usage"]["completion_tokens"] == len("iPrüfung: the naïve".encode())


def test_all_forms_of_prompts_give_the_same_text(client):
    texts = [
        [choice["text"] for choice in completion(client, prompt=prompt, max_tokens=9).json()["choices"]]
        for prompt in ("Hi", ["Hi"], [72, 105], [[72, 105]])
    ]
    assert texts == [["iPrüfung"]] * 4


def test_choices_of_several_prompts_come_in_order(client):
    body = completion(client, prompt=["a", "b", "c"], n=2, max_tokens=1).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == list(enumerate("aabbcc"))
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 6


def test_usage_may_come_with_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(completion(client, stream=True, stream_options=options))[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 2 + len(REPLY.encode())


def test_eos_ends_the_text_unless_it_is_ignored(client):
    assert completion(client).json()["choices"][0]["finish_reason"] == "stop"
    body = completion(client, ignore_eos=True).json()
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 100
    assert "\0" not in body["choices"][0]["text"]


def test_options_reach_the_engine(server):
    client, engine = server
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1}
    options |= {"frequency_penalty": 0.5, "presence_penalty": -0.5}
    body = {**options, "min_tokens": 2, "seed": 7, "stop_token_ids": [9], "speculative": False, "n": 2, "logprobs": 0}
    assert completion(client, **body).status_code == 200
    first, second = engine.requests[-2:]
    assert first.sampling == SamplingParams(**options, min_new_tokens=2, seed=7)
    assert second.sampling.seed == 8
    assert (first.stop_token_ids, first.speculative, first.logprobs, first.max_new_tokens) == ((0, 9), False, True, 100)
    assert first.prompt == (72, 105)


def test_a_missing_seed_is_random_and_a_given_one_is_kept(server):
    client, engine = server
    seeds = []
    for body in ({}, {}, {"seed": 3}, {"seed": 3}, {"seed": -1}):
        completion(client, temperature=1, **body)
        seeds.append(engine.requests[-1].sampling.seed)
    assert seeds[0] != seeds[1] and seeds[2:4] == [3, 3] and seeds[4] == 2**64 - 1


def test_echo_gives_log_probabilities_of_the_prompt(client):
    # lm-eval's way to score a text.
    body = completion(client, prompt=[72, 105], echo=True, logprobs=1, max_tokens=1).json()
    choice = body["choices"][0]
    assert choice["text"] == "Hii"
    assert choice["logprobs"] == {
        "tokens": ["H", "i", "i"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"i": -0.5}, {"i": -0.5}],
        "text_offset": [0, 1, 2],
    }


def test_alternatives_of_new_tokens(client):
    choice = completion(client, logprobs=2, max_tokens=4).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 4
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3] and choice["text"] == "iPr\ufffd"
    assert choice["logprobs"]["top_logprobs"][0] == {"i": -0.5, "\x01": -1.5}
    content = chat(client, max_tokens=2, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert content[1]["token"] == "P" and content[1]["bytes"] == [80]
    assert [each["logprob"] for each in content[1]["top_logprobs"]] == [-0.5, -1.5]


def test_streamed_log_probabilities_are_those_of_the_plain_response(client):
    plain = completion(client, logprobs=0).json()["choices"][0]["logprobs"]
    parts = [event["choices"][0]["logprobs"] for event in events(completion(client, logprobs=0, stream=True))[:-1]]
    for name in ("tokens", "token_logprobs"):
        assert [each for part in parts if part for each in part[name]] == plain[name]
    plain = chat(client, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    parts = [event["choices"][0]["logprobs"] for event in events(chat(client, logprobs=True, stream=True))[:-1]]
    assert [each for part in parts if part for each in part["content"]] == plain


def test_infinite_log_probabilities_are_finite_in_json_and_nan_is_a_fault():
    with api_client() as (client, engine):
        engine.logprob = -float("inf")
        body = completion(client, logprobs=1, echo=True, max_tokens=2).json()
        assert body["choices"][0]["logprobs"]["token_logprobs"][1:] == [-9999.0] * 3
        engine.logprob = float("nan")
        response = completion(client, logprobs=0)
        assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"


def test_generate_has_sglangs_fields(client):
    body = client.post("/generate", json={"text": "Hi", "sampling_params": {"temperature": 0, "stop": "naïve"}}).json()
    assert body["text"] == "iPrüfung: the "
    info = body["meta_info"]
    assert info["finish_reason"] == {"type": "stop", "matched": "naïve"}
    assert (info["prompt_tokens"], info["completion_tokens"]) == (2, len("iPrüfung: the naïve".encode()))
    assert len(body["output_ids"]) == info["completion_tokens"] and info["e2e_latency"] > 0
    names = {"id", "cached_tokens", "spec_accept_length", "spec_verify_ct", "spec_accept_token_num"}
    assert names <= set(info)


def test_generate_streams_the_whole_text_so_far(client):
    params = {"max_new_tokens": 12, "ignore_eos": True}
    plain = client.post("/generate", json={"text": "Hi", "sampling_params": params}).json()
    response = client.post("/generate", json={"text": "Hi", "sampling_params": params, "stream": True})
    *parts, last, done = events(response)
    assert done == "[DONE]" and last["text"] == plain["text"]
    assert all(last["text"].startswith(part["text"]) for part in parts)
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


def test_generate_takes_lists(client):
    bodies = client.post("/generate", json={"input_ids": [[65], [66]], "sampling_params": {"max_new_tokens": 1}}).json()
    assert [body["text"] for body in bodies] == ["A", "B"]
    body = {"text": ["A"], "return_logprob": True, "sampling_params": {"max_new_tokens": 1}}
    [body] = client.post("/generate", json=body).json()
    assert body["meta_info"]["output_token_logprobs"] == [[-0.5, 65, None]]


def test_tokenize_and_detokenize(client):
    assert client.post("/tokenize", json={"prompt": "hé"}).json()["tokens"] == [104, 195, 169]
    assert client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()["count"] == 19
    assert client.post("/detokenize", json={"tokens": [104, 195, 169]}).json()["text"] == "hé"


def test_a_stop_string_is_no_abort():
    with api_client() as (client, engine):
        completion(client, stop="naïve")
        assert engine.reasons == ["stop"]


def test_information_about_server_and_model(client):
    for path in ("/server_info", "/get_server_info"):
        assert client.get(path).json()["internal_states"][0]["avg_spec_accept_length"] == 1.5
    for path in ("/model_info", "/get_model_info"):
        assert client.get(path).json()["model_path"] == "tiny"
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["tiny", "small"]
    assert client.get("/v1/models/small").json()["max_model_len"] == 200
    assert client.post("/flush_cache").json() == {"success": True, "num_pages": 3}


def test_health_and_readiness():
    with api_client() as (client, engine):
        for path in ("/health", "/ping", "/ready", "/health_generate"):
            assert client.get(path).status_code == 200
        assert engine.requests[-1].max_new_tokens == 1
        # While the server stops, what runs goes on and nothing new begins.
        client.app.state.server.client.is_stopping = True
        assert client.get("/health").status_code == 200
        for response in (client.get("/ready"), completion(client), chat(client), client.get("/health_generate")):
            assert response.status_code == 503 and "retry-after" in response.headers
        engine.failure = "the engine does not answer"
        assert client.get("/health").status_code == 503


def test_a_checkpoint_tokenizer_with_a_template(tmp_path):
    engine = FakeEngine(reply="ok", max_length=300)
    engine.vocab_size = 300
    with api_client(engine, chatml.save_tokenizer(tmp_path)) as (client, engine):
        assert chat(client, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]).status_code == 200
        assert engine.requests[-1].prompt[0] == 256 and engine.requests[-1].stop_token_ids == (257,)
        assert completion(client, prompt="a\0b", max_tokens=3).status_code == 200


@pytest.fixture
def ask(tmp_path):
    """`ask(template, messages, **body)` -> the response, and the text of the prompt that reached the engine."""

    def ask(template, messages, **body):
        engine = FakeEngine(reply="ok", max_length=500)
        engine.vocab_size = 300
        tokenizer = chatml.save_tokenizer(tmp_path, template)
        with api_client(engine, tokenizer) as (client, _):
            response = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2, **body})
        tokens = engine.requests[-1].prompt if response.status_code == 200 else []
        return response, tokenizer._tokenizer.decode(tokens, skip_special_tokens=False)

    return ask


CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"city": "Köln"}'}}
A, B = {"role": "user", "content": "A"}, {"role": "user", "content": "B"}


@pytest.mark.parametrize(
    "answer",
    [{}, {"content": None}, {"content": []}, {"content": ""}, {"content": None, "reasoning_content": "hm"}],
    ids=["absent", "null", "empty list", "empty", "reasoning only"],
)
def test_an_answer_without_text_may_be_sent_back(ask, answer):
    response, prompt = ask(chatml.CHATML, [A, {"role": "assistant", **answer}, B])
    assert response.status_code == 200
    expected = (
        "user\nA<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt == "<|im_start|>" + expected


@pytest.mark.parametrize("content", [None, []])
def test_a_question_without_text_is_refused_by_name(ask, content):
    response, _ = ask(chatml.CHATML, [A, {"role": "user", "content": content}])
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages[1].content"


def test_a_template_gets_a_chat_in_the_forms_that_it_reads(ask):
    history = [A, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "r"}, B]
    assert "<key>city</key><value>Köln</value>" in ask(chat_templates.GLM, history)[1]
    assert 'f{"city": "Köln"}</call>' in ask(chat_templates.DEEPSEEK, history)[1]
    assert "user\nA<|im_end|>" in ask(chat_templates.PARTS, [A])[1]
    parts = {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}
    assert "user\nA\nB<|im_end|>" in ask(chatml.CHATML, [parts])[1]
    response, _ = ask(chatml.CHATML, history)
    assert response.status_code == 400 and "does not write the tool call of message 2 of 4" in response.text
    bad = [A, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, B]
    response, _ = ask(chat_templates.GLM, bad)
    assert response.status_code == 400 and "message 2: tool call 1: arguments is text that is not JSON" in response.text


def test_tools_are_shown_to_the_model_only_if_it_may_not_call_them(ask):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    response, _ = ask(chat_templates.QWEN, [A], tools=tools)
    assert response.status_code == 400 and "tool_choice none" in response.json()["error"]["message"]
    response, prompt = ask(chat_templates.QWEN, [A], tools=tools, tool_choice="none")
    assert response.status_code == 200 and prompt.startswith('{"type": "function", "function": {"name": "weather"')
    response, _ = ask(chatml.CHATML, [A], tools=tools, tool_choice="none")
    assert response.status_code == 400 and "does not write the tools" in response.text


def test_a_model_without_a_chat_template_says_so(tmp_path):
    tokenizer = chatml.save_tokenizer(tmp_path)
    tokenizer.chat_templates.templates.clear()
    with api_client(tokenizer=tokenizer) as (client, _):
        response = chat(client)
        assert response.status_code == 400 and "no chat template" in response.json()["error"]["message"]


KEY = "sécret"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([("Authorization", b"Bearer wrong")], 401),
        ([("Authorization", b"Bearer s")], 401),
        ([("Authorization", b"Bearer \xff\xfe")], 401),
        ([("Authorization", b"Bearer ")], 401),
        ([("Authorization", b"Basic " + KEY.encode())], 401),
        ([("Authorization", b"Bearer " + KEY.encode())] * 2, 401),
        ([("Authorization", b"Bearer " + KEY.encode())], 200),
        ([("Authorization", b"bearer other")], 200),
    ],
)
def test_keys(headers, status):
    with api_client(api_keys=(KEY, "other")) as (client, _):
        response = client.get("/v1/models", headers=headers)
        assert response.status_code == status
        if status == 401:
            assert response.json()["error"]["code"] == "invalid_api_key"


def test_every_route_but_those_for_probes_needs_a_key():
    with api_client(api_keys=(KEY,)) as (client, _):
        paths = client.app.openapi()["paths"]
        assert len(paths) > 15
        for path, methods in paths.items():
            for method in methods:
                response = client.request(method.upper(), path.replace("{name}", "tiny"))
                assert response.status_code == (200 if path in ("/health", "/ready") else 401), path
        for path in ("/openapi.json", "/docs", "/unknown", "//health", "/health/", "/health/../v1/models"):
            assert client.get(f"http://testserver{path}").status_code == 401
        assert client.get("/metrics").status_code == 401


@pytest.mark.parametrize("keys", [(), (KEY,)])
@pytest.mark.parametrize(
    ("sent", "status"),
    [(None, 401), (b"wrong", 401), (KEY.encode(), 403), (b"admin", 200), (b"second", 200)],
)
def test_what_changes_the_server_for_everybody_needs_an_admin_key(keys, sent, status):
    headers = [] if sent is None else [("Authorization", b"Bearer " + sent)]
    if status == 403 and not keys:
        status = 401  # nobody knows this key
    with api_client(api_keys=keys, admin_api_keys=("admin", "second")) as (client, _):
        responses = [
            client.post("/flush_cache", headers=headers),
            client.post("/abort_request", json={"abort_all": True}, headers=headers),
        ]
        assert {response.status_code for response in responses} == {status}
        codes = {401: "invalid_api_key", 403: "admin_api_key_needed"}
        if status != 200:
            assert {response.json()["error"]["code"] for response in responses} == {codes[status]}
            assert responses[0].json()["error"]["type"] in ("authentication_error", "permission_error")
        # Everything else needs an ordinary key, or none, or takes the admin key too.
        others = [
            client.get("/v1/models", headers=headers),
            client.post("/abort_request", json={"rid": "unknown"}, headers=headers),
        ]
        assert {response.status_code for response in others} == {401 if keys and status == 401 else 200}


def test_without_an_admin_key_an_ordinary_one_is_enough():
    with api_client(api_keys=(KEY,)) as (client, _):
        headers = [("Authorization", b"Bearer " + KEY.encode())]
        assert client.post("/flush_cache", headers=headers).status_code == 200
        assert client.post("/abort_request", json={"abort_all": True}, headers=headers).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://testserver", "http://127.0.0.1:1"])
def test_no_web_page_of_another_site_empties_the_cache(origin):
    # A name such as testserver may be the page's own, which now leads to this machine.
    with api_client() as (client, _):
        assert client.get("/flush_cache").status_code == 405
        response = client.post("/flush_cache", headers={"Origin": origin})
        assert response.status_code == 403 and response.json()["error"]["code"] == "other_origin"
        own = {"Origin": "http://127.0.0.1:30000", "Host": "127.0.0.1:30000"}
        assert client.post("/flush_cache", headers=own).status_code == 200


def test_a_page_with_a_key_may_empty_the_cache():
    with api_client(api_keys=(KEY,)) as (client, _):
        headers = [("Authorization", b"Bearer " + KEY.encode()), ("Origin", b"https://chat.example")]
        assert client.post("/flush_cache", headers=headers).status_code == 200


def test_the_effort_of_reasoning_reaches_the_template(tmp_path):
    template = chatml.CHATML + "effort {{ reasoning_effort }}"
    tokenizer = chatml.save_tokenizer(tmp_path, template)
    with api_client(FakeEngine(max_length=300), tokenizer) as (client, engine):
        engine.vocab_size = 300
        assert chat(client, reasoning_effort="high").status_code == 200
        assert tokenizer.decode(engine.requests[-1].prompt).endswith("effort high")
        both = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}
        assert chat(client, **both).status_code == 200
        response = chat(client, **{**both, "reasoning_effort": "high"})
        assert response.status_code == 400 and response.json()["error"]["param"] == "reasoning_effort"
        assert chat(client, reasoning_effort=["high"]).status_code == 400


def test_special_tokens_around_a_text_can_be_left_out(tmp_path):
    tokenizer = chatml.save_tokenizer(tmp_path)
    first = tokenizer.encode("<|im_start|>")[0]
    tokenizer._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", first)]
    )
    with api_client(FakeEngine(), tokenizer) as (client, engine):
        engine.vocab_size = 300
        for body, has_first in (({}, True), ({"add_special_tokens": False}, False)):
            assert completion(client, **body).status_code == 200
            assert (engine.requests[-1].prompt[0] == first) is has_first
            assert client.post("/generate", json={"text": "Hi", **body}).status_code == 200
            assert (engine.requests[-1].prompt[0] == first) is has_first
            tokens = client.post("/tokenize", json={"prompt": "Hi", **body}).json()["tokens"]
            assert (tokens[0] == first) is has_first and len(tokens) == 2 + has_first


def test_a_busy_engine_is_healthy_while_its_device_answers():
    with api_client(FakeEngine(delay=0.02, max_length=10_000, max_requests=1)) as (client, engine):
        running = client.app.state.server.engine.submit(
            Request(prompt=(1,), max_new_tokens=9000, stop_token_ids=()), lambda event: None
        )
        begin = time.monotonic()
        assert client.get("/health_generate").status_code == 200  # the queue is full
        assert time.monotonic() - begin < 1 and len(engine.requests) == 1
        engine.progress_at -= HEALTH_SECONDS + 1
        response = client.get("/health_generate")
        assert response.status_code == 503 and "the device has not answered for 21 s" in response.text
        engine.abort(running)
        assert engine.wait_until_idle()


def test_an_idle_engine_that_makes_no_token_is_not_healthy(monkeypatch):
    monkeypatch.setattr(health_routes, "IDLE_HEALTH_SECONDS", 0.1)
    with api_client(FakeEngine(delay=0.5)) as (client, engine):
        assert client.get("/health_generate").status_code == 200  # others' work may have come first
        assert engine.wait_until_idle()
        engine.progress_at -= HEALTH_SECONDS + 1
        assert client.get("/health_generate").status_code == 503


def test_clients_with_different_keys_share_no_pages():
    with api_client(api_keys=("a", "b")) as (client, engine):
        for key in "aab":
            client.headers["Authorization"] = f"Bearer {key}"
            assert completion(client).status_code == 200
        salts = [request.salt for request in engine.requests]
        assert salts[0] == salts[1] != salts[2] and all(salts)


ODD_PATHS = ["/v1/models/../admin", "//v1/models", "/v1/models/%2e%2e", "/v1/%2e%2e/health", "/docs"]


@pytest.mark.parametrize("path", ODD_PATHS)
def test_odd_paths_lead_nowhere(client, path):
    response = client.get(f"http://testserver{path}")
    assert response.status_code == 404 and "error" in response.json()


def test_a_fault_of_the_engine_is_an_error_with_an_id_only(client, caplog):
    with api_client(FakeEngine(fail_after=4)) as (client, _):
        response = completion(client)
        assert response.status_code == 500
        message = response.json()["error"]["message"]
        assert "injected" not in message and message.removeprefix("internal error ") in caplog.text


def test_a_fault_in_mid_stream_is_the_last_event():
    with api_client(FakeEngine(fail_after=4)) as (client, _):
        for response in (completion(client, stream=True), chat(client, stream=True)):
            assert response.status_code == 200
            assert events(response)[-1]["error"]["code"] == "internal_error"
            assert "[DONE]" not in response.text


def test_unexpected_exceptions_are_errors_with_an_id_only(monkeypatch):
    with api_client() as (client, engine):

        def fail(*_):
            raise RuntimeError("details at /some/path 0x7f")

        monkeypatch.setattr(engine, "submit", fail)
        response = completion(client)
        assert response.status_code == 500 and "details" not in response.text
        monkeypatch.setattr(engine, "score", fail)
        monkeypatch.undo()
        assert completion(client).status_code == 200


def test_a_full_queue_is_429_and_nothing_is_lost():
    with api_client(FakeEngine(max_requests=3)) as (client, engine):
        engine.max_requests = 2  # another request has a place
        for stream in (False, True):
            response = completion(client, n=3, stream=stream)
            assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
            assert engine.wait_until_idle()
            assert not client.app.state.server.client.running
        assert completion(client, n=2).status_code == 200


def test_a_batch_that_never_fits_is_400_with_the_numbers():
    with api_client(FakeEngine(max_requests=12)) as (client, engine):
        responses = [
            completion(client, prompt=["a"] * 13),
            completion(client, n=13),
            chat(client, n=13, stream=True),
            client.post("/generate", json={"input_ids": [[1]] * 7, "sampling_params": {"n": 2}}),
        ]
        for response in responses:
            assert response.status_code == 400 and response.json()["error"]["code"] == "batch_too_large"
            assert "at most 12 at once" in response.json()["error"]["message"]
        assert [response.json()["error"]["param"] for response in responses] == ["prompt", "n", "n", "input_ids"]
        assert not engine.requests and completion(client, prompt=["a"] * 12).status_code == 200


def test_an_answer_continues_the_text_of_its_prompt(tmp_path):
    """SentencePiece's first token has a space, which is part of the answer, in every form of the response."""
    made = make_tokenizer(*KINDS["byte-fallback, Llama"])
    made.save(str(tmp_path / "tokenizer.json"))
    engine, the = FakeEngine(chr(made.token_to_id("<0x2E>"))), made.token_to_id("▁the")
    engine.vocab_size = made.get_vocab_size()
    with api_client(engine, HuggingFaceTokenizer(tmp_path, engine.vocab_size)) as (client, _):
        for echo in (False, True):
            body = {"prompt": [the, the], "echo": echo, "logprobs": 0, "max_tokens": 2}
            plain = completion(client, **body).json()["choices"][0]
            assert plain["text"] == "the the" * echo + " the."
            assert plain["logprobs"]["text_offset"] == ([0, 3, 7, 11] if echo else [0, 4])
            body |= {"stream": True, "logprobs": None if echo else 0}  # a stream has none of the prompt
            chunks = [event["choices"][0] for event in events(completion(client, **body))[:-1]]
            assert "".join(each["text"] for each in chunks) == plain["text"]
            offsets = [offset for each in chunks if each["logprobs"] for offset in each["logprobs"]["text_offset"]]
            assert offsets == ([] if echo else [0, 4])


def test_offsets_of_a_stream_are_those_of_the_plain_response():
    rng, pieces = random.Random(0), ["a", "é", "€", "🙂", " ", "ab", "\xff", "xyz"]
    with api_client(FakeEngine(max_length=400)) as (client, engine):
        for _ in range(200):
            engine.reply = "".join(rng.choices(pieces, k=20))
            engine.sizes = rng.choices((1, 2, 3, 7), k=4)
            stop = rng.choice([None, None, ["b€", "yz a"], ["🙂a"]])
            body = {"logprobs": 0, "max_tokens": rng.randint(1, 60), "stop": stop}
            plain = completion(client, **body).json()["choices"][0]
            chunks = [event["choices"][0] for event in events(completion(client, **body, stream=True))[:-1]]
            streamed = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
            offsets = [offset for each in streamed for offset in each["text_offset"]]
            assert offsets == plain["logprobs"]["text_offset"], (engine.reply, engine.sizes, body)


def test_time_limits_of_the_engine_are_told(monkeypatch):
    with api_client() as (client, engine):
        monkeypatch.setattr(engine, "_deltas", lambda request: iter([Finish("timeout", 2)]))
        response = completion(client)
        assert response.status_code == 503 and response.json()["error"]["code"] == "timeout"


def test_the_schema_describes_the_bodies(client):
    paths = client.get("/openapi.json").json()["paths"]
    required = {"/v1/completions": ["prompt"], "/v1/chat/completions": ["messages"], "/generate": []}
    for path, names in required.items():
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema.get("required", []) == names and {"stream", "speculative", *names} <= set(schema["properties"])


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_generated_requests_cause_no_fault_of_the_server(client, mode):
    schemathesis = pytest.importorskip("schemathesis")
    import hypothesis

    schema = schemathesis.openapi.from_asgi("/openapi.json", client.app)
    mode, answers = schemathesis.GenerationMode[mode], []

    checks = list(hypothesis.HealthCheck)
    settings = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": checks}

    @hypothesis.settings(max_examples=60, **settings)
    @hypothesis.given(case=schema.as_strategy(generation_mode=mode))
    def check(case):
        response = case.call()
        answers.append((case.method, response.status_code))
        assert response.status_code < 500, response.text

    check()
    # Some reach the engine, or are wrong in their body.
    assert ("POST", 200 if mode == schemathesis.GenerationMode.POSITIVE else 400) in answers
