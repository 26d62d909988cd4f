"""Bad requests are answered with 4xx and OpenAI's error object, and never reach the engine."""

import gzip
import json
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from tests.helpers.api_client import api_client, chat, completion

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server():
    with api_client(max_body_bytes=1 << 20, max_prompt_characters=100_000) as (client, engine):
        yield client, engine


@pytest.fixture
def client(server):
    """The client; afterwards it must still answer, and nothing may run."""
    client, engine = server
    yield client
    assert engine.wait_until_idle()
    assert completion(client).json()["choices"][0]["text"].startswith("iPrüfung")


def post(client, raw, path="/v1/completions", headers=JSON):
    return client.post(path, content=raw, headers=headers)


def assert_error(response, status=400, *, param=None, code=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "/" not in error["message"].replace("application/json", ""), "a message must not hold a path"
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error["message"]


def test_an_empty_object_names_the_missing_field(client):
    assert_error(post(client, b"{}"), param="prompt")
    assert_error(post(client, b"{}", "/v1/chat/completions"), param="messages")
    assert_error(post(client, b"{}", "/generate"), param="text")


@pytest.mark.parametrize("raw", [b"", b'{"prompt": "a"', b"\xff\xfe{}", b'{"prompt": "\xff"}', b"[1]", b"null", b'"a"'])
def test_bytes_that_are_no_json_object_are_rejected(client, raw):
    assert_error(post(client, raw), code="invalid_json")


def test_a_byte_order_mark_is_skipped(client):
    assert post(client, b'\xef\xbb\xbf{"prompt": "a"}').status_code == 200


def test_deep_nesting_is_rejected_quickly(client):
    for raw in (b"[" * 100_000, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a":' * 100_000):
        start = time.monotonic()
        assert_error(post(client, raw), code="invalid_json")
        assert time.monotonic() - start < 1


FLOATS = ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", '"0.5"', "true", "[]"])
def test_numbers_must_be_finite(client, name, number):
    assert_error(post(client, b'{"prompt": "a", "%s": %s}' % (name.encode(), number.encode())))


@pytest.mark.parametrize("number", ["1" * 5000, "-" + "9" * 400])
def test_huge_integers_are_rejected(client, number):
    for name in ("max_tokens", "temperature", "seed", "top_k"):
        assert_error(post(client, f'{{"prompt": "a", "{name}": {number}}}'.encode()))


@pytest.mark.parametrize("name", ["prompt", "stop", "user", "model"])
def test_lone_surrogates_are_rejected(client, name):
    body = json.dumps({"prompt": "a", name: "x\ud800"}).encode()
    assert_error(post(client, body), param=name)


def test_lone_surrogates_in_messages_are_rejected(client):
    for message in ({"content": "\udfff"}, {"content": [{"type": "text", "text": "\ud800"}]}):
        body = json.dumps({"messages": [{"role": "user", **message}]}).encode()
        assert_error(post(client, body, "/v1/chat/completions"))
    body = json.dumps({"messages": [{"role": "user", "content": "a", "name": "\ud800"}]}).encode()
    assert_error(post(client, body, "/v1/chat/completions"), param="messages[0].name")


@pytest.mark.parametrize("value", [0, -1, 10**30, 2**31, True, "5", 5.5, [], {}])
def test_wrong_max_tokens_are_rejected(client, value):
    assert_error(completion(client, max_tokens=value), param="max_tokens")
    assert_error(chat(client, max_completion_tokens=value), param="max_completion_tokens")


def test_max_tokens_may_be_null_or_a_whole_float(client):
    assert completion(client, max_tokens=None).json()["usage"]["completion_tokens"] == 16
    assert completion(client, max_tokens=5.0).json()["usage"]["completion_tokens"] == 5


def test_a_text_longer_than_the_context_is_rejected_with_both_numbers(client):
    message = assert_error(completion(client, prompt="x" * 150, max_tokens=51), code="context_length_exceeded")
    assert "150 tokens" in message and "200 tokens" in message
    assert completion(client, prompt="x" * 150, max_tokens=50).status_code == 200


@pytest.mark.parametrize("make", [lambda size: "x" * size, lambda size: [65] * size, lambda size: [[65] * size]])
def test_a_prompt_must_leave_room_for_one_token(client, make):
    response = completion(client, prompt=make(199), max_tokens=None)
    assert response.json()["usage"]["completion_tokens"] == 1
    for size in (200, 201):
        response = completion(client, prompt=make(size), max_tokens=None)
        assert_error(response, param="prompt", code="context_length_exceeded")


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [[1], []], None, 5, True, {}])
def test_empty_prompts_are_rejected(client, prompt):
    assert_error(completion(client, prompt=prompt), param="prompt")


@pytest.mark.parametrize(
    "make",
    [
        lambda text: {"name": text},
        lambda text: {"reasoning_content": text},
        lambda text: {"tool_calls": [{"function": {"name": text, "arguments": "{}"}}]},
        lambda text: {"tool_calls": [{"function": {"name": "f", "arguments": {"a": [text]}}}]},
        lambda text: {"tool_calls": [{"function": {"name": "f", "arguments": {text: 1}}}]},
        lambda text: {"tool_calls": [{"function": {"name": "f", "arguments": {"a": [10**4000] * 50}}}]},
    ],
)
def test_every_text_of_a_message_counts_as_its_prompt(client, make):
    message = {"role": "assistant", "content": "a", **make("x" * 60_000)}
    answer = client.post("/v1/chat/completions", json={"messages": [message, message]})
    assert "100000 characters" in assert_error(answer)


def test_the_text_of_tools_counts_as_that_of_messages(client):
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 60_000}}]
    body = {"messages": [{"role": "user", "content": "y" * 60_000}], "tools": tools, "tool_choice": "none"}
    assert "100000 characters" in assert_error(client.post("/v1/chat/completions", json=body), param="tools")


@pytest.mark.parametrize(
    "extra",
    [
        {"metadata": [0] * 140_000},
        {"metadata": {str(number): [0] for number in range(70_000)}},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [0] * 140_000}}}]}
            ]
        },
    ],
)
def test_the_values_of_a_body_are_limited(client, extra):
    body = {"messages": [{"role": "user", "content": "a"}], **extra}
    assert "131072 JSON values" in assert_error(
        client.post("/v1/chat/completions", json=body), code="request_too_large"
    )


def test_the_fields_beside_the_prompt_are_limited(client):
    assert "300" in assert_error(completion(client, metadata="x" * 300_000), code="request_too_large")
    assert completion(client, metadata="x" * 200_000).status_code == 200


def test_empty_messages_are_rejected(client):
    assert_error(client.post("/v1/chat/completions", json={"messages": []}), param="messages")


@pytest.mark.parametrize("token", [-1, 256, 2**31, 10**30, 1.5, True, "3", [3], None])
def test_token_ids_must_be_in_the_vocabulary(client, token):
    for prompt in ([1, token], [[1, token]]):
        assert_error(completion(client, prompt=prompt), param="prompt")
    if isinstance(token, int | float):
        assert_error(completion(client, prompt=[1, token]), code="out_of_vocabulary")
    assert_error(completion(client, stop_token_ids=[token]), param="stop_token_ids", code="out_of_vocabulary")
    assert_error(client.post("/generate", json={"input_ids": [1, token]}), param="input_ids")
    assert_error(client.post("/detokenize", json={"tokens": [1, token]}), param="tokens")


def test_stop_tokens_are_limited_by_what_the_engine_compares(client):
    assert completion(client, stop_token_ids=list(range(100, 131))).status_code == 200
    # The end token is the 33rd.
    assert_error(completion(client, stop_token_ids=list(range(100, 132))), param="stop_token_ids")
    assert completion(client, stop_token_ids=list(range(100, 132)), ignore_eos=True).status_code == 200
    assert_error(completion(client, stop_token_ids=list(range(100, 133)), ignore_eos=True), param="stop_token_ids")


@pytest.mark.parametrize("prompt", [["a", 1], [[1], 2], [[1], "a"], [1, [2]], [[[1]]], ["a", None]])
def test_ragged_prompts_are_rejected(client, prompt):
    assert_error(completion(client, prompt=prompt), param="prompt")


def test_large_bodies_are_rejected_before_they_are_parsed(client):
    assert_error(post(client, b"{" * (50 << 20)), 413, code="body_too_large")
    consumed = []

    def chunks():  # a body without a length
        for number in range(100):
            consumed.append(number)
            yield b" " * (1 << 16)

    assert_error(post(client, chunks()), 413, code="body_too_large")


def test_a_long_word_is_rejected_by_its_characters(client):
    assert "100000" in assert_error(completion(client, prompt="x" * 100_001), param="prompt")
    assert_error(chat(client, "x" * 100_001))


@pytest.mark.parametrize("headers", [{"Content-Type": "text/plain"}, {}, {"Content-Type": "multipart/form-data"}])
def test_other_content_types_are_rejected(client, headers):
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize", "/abort_request"):
        assert_error(post(client, b'{"prompt": "a"}', path, headers), 415)


def test_content_types_may_have_parameters(client):
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert post(client, b'{"prompt": "a"}', headers=headers).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity", "x" * 99])
def test_compressed_bodies_are_rejected_as_such(client, encoding):
    headers = {**JSON, "Content-Encoding": encoding}
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/abort_request"):
        response = post(client, gzip.compress(b'{"prompt": "a"}'), path, headers)
        assert "send it uncompressed" in assert_error(response, 415, code="unsupported_content_encoding")
    assert post(client, b'{"prompt": "a"}', headers={**JSON, "Content-Encoding": "identity"}).status_code == 200


def test_unknown_models_paths_and_methods_have_their_status(client):
    assert_error(completion(client, model="other"), 404, code="model_not_found", param="model")
    assert_error(client.get("/v1/models/org/other"), 404, code="model_not_found")
    assert_error(client.get("/v2/nothing"), 404)
    assert_error(client.get("/v1/completions"), 405)
    assert_error(client.post("/health"), 405)


def test_unknown_fields_are_ignored_and_the_last_equal_key_counts(client):
    assert completion(client, no_such_field=[1]).status_code == 200
    response = post(client, b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2}')
    assert response.json()["usage"]["completion_tokens"] == 2


def test_strict_fields_reject_unknown_ones():
    with api_client(strict_fields=True) as (client, _):
        assert_error(completion(client, no_such_field=1), code="unknown_field", param="no_such_field")
        assert completion(client, stop=["x"], logprobs=None).status_code == 200


@pytest.mark.parametrize("n", [0, 17, 10**6, -1, True])
def test_n_is_limited(client, n):
    start = time.monotonic()
    assert_error(completion(client, n=n), param="n")
    assert_error(chat(client, n=n), param="n")
    assert time.monotonic() - start < 0.5


def test_best_of_must_equal_n(client):
    assert_error(completion(client, n=2, best_of=1), param="best_of")
    assert_error(completion(client, n=1, best_of=2), param="best_of")
    assert completion(client, n=2, best_of=2).status_code == 200


def test_prompts_are_limited(client):
    assert_error(completion(client, prompt=["a"] * 1025), param="prompt")
    assert_error(completion(client, prompt=[[1]] * 1025), param="prompt")
    assert_error(completion(client, prompt=["a"] * 300, n=16), param="n")


@pytest.mark.parametrize("number", [-1, 21, 256, True, "1"])
def test_logprobs_are_limited(client, number):
    assert_error(completion(client, logprobs=number), param="logprobs")
    assert_error(chat(client, logprobs=True, top_logprobs=number), param="top_logprobs")


def test_streams_have_no_alternatives(client):
    assert_error(completion(client, stream=True, logprobs=1), code="unsupported_option")
    assert_error(chat(client, stream=True, logprobs=True, top_logprobs=1), code="unsupported_option")
    assert_error(chat(client, top_logprobs=1), param="top_logprobs")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("top_k", -2), ("top_k", 1.5), ("top_p", 0), ("top_p", 1.1), ("temperature", -1), ("temperature", 2.1)],
        *[("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0), ("frequency_penalty", 2.1)],
        *[("presence_penalty", -2.1), ("stream", 1), ("speculative", "no"), ("ignore_eos", 0), ("user", 5)],
        *[("seed", 1.5), ("min_tokens", 101), ("stream_options", {"include_usage": True})],
    ],
)
def test_sampling_options_have_ranges(client, name, value):
    assert_error(completion(client, **{name: value}), param=name)


@pytest.mark.parametrize(("given", "used"), [(0, 0), (-1, 0), (1, 1), (255, 255), (256, 0), (257, 0)])
def test_top_k_of_the_whole_vocabulary_is_off(server, given, used):
    client, engine = server
    assert completion(client, top_k=given).status_code == 200
    assert engine.requests[-1].sampling.top_k == used


@pytest.mark.parametrize(("given", "used"), [(0, 0), (1e-9, 0), (0.5, 0.5), (2, 2)])
def test_tiny_temperatures_are_greedy(server, given, used):
    client, engine = server
    assert completion(client, temperature=given).status_code == 200
    assert engine.requests[-1].sampling.temperature == used


@pytest.mark.parametrize(
    "bias", [{"256": 1}, {"-1": 1}, {"a": 1}, {"1.0": 1}, {"1": 101}, {"1": "1"}, {"1": None}, {"1": True}, [1], "a"]
)
def test_logit_bias_needs_ids_and_finite_numbers(client, bias):
    assert_error(completion(client, logit_bias=bias))
    assert_error(client.post("/generate", json={"text": "a", "sampling_params": {"logit_bias": bias}}))


def test_logit_bias_is_limited_and_reaches_the_engine(server):
    client, engine = server
    assert_error(completion(client, logit_bias={str(number): 1 for number in range(100_000)}), param="logit_bias")
    assert completion(client, logit_bias={"3": -100, "5": 2.5}).status_code == 200
    assert engine.requests[-1].sampling.logit_bias == {3: -100, 5: 2.5}


@pytest.mark.parametrize("stop", [["x"] * 17, "", ["a", ""], "x" * 10_000, "é" * 257, [1], 5, {"a": 1}, [None]])
def test_stop_strings_are_limited(client, stop):
    assert_error(completion(client, stop=stop), param="stop")


@pytest.mark.parametrize("stop", [None, [], "x", ["x"] * 5, [str(number) for number in range(16)], "é" * 256])
def test_stop_strings_within_the_limits_are_allowed(client, stop):
    assert completion(client, stop=stop).status_code == 200


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest", "file:///etc/passwd", "data:image/png;base64,AAAA"])
def test_images_are_rejected_and_never_fetched(client, url, monkeypatch):
    def connect(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr("socket.socket.connect", connect)
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
    response = chat(client, parts)
    assert_error(response)
    assert url not in response.text


@pytest.mark.parametrize(
    "message",
    [
        *[{"role": "wizard", "content": "a"}, {"content": "a"}, {"role": "user"}, {"role": "user", "content": None}],
        *[
            {"role": "user", "content": []},
            {"role": "user", "content": 5},
            {"role": ["user"], "content": "a"},
            None,
            "a",
        ],
    ],
)
def test_messages_need_a_known_role_and_a_content(client, message):
    response = client.post("/v1/chat/completions", json={"messages": [message]})
    assert_error(response)
    assert response.json()["error"]["param"].startswith("messages[0]")


def test_messages_are_limited(client):
    messages = [{"role": "user", "content": "a"}] * 2049
    assert_error(client.post("/v1/chat/completions", json={"messages": messages}), param="messages")


def test_chat_templates_come_from_the_server_only(client):
    assert_error(chat(client, chat_template="{{ 1 }}"), param="chat_template")
    for variables in ({"tokenize": True}, {"enable_thinking": {"a": 1}}, {"unknown": 1}, [1], {"thinking": None}):
        assert_error(chat(client, chat_template_kwargs=variables))
    assert chat(client, chat_template_kwargs={"enable_thinking": False}).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [("tools", [{}]), ("response_format", {"type": "json_object"}), ("suffix", "x"), ("guided_regex", "a+")],
)
def test_options_that_would_have_no_effect_are_rejected(client, name, value):
    assert_error(completion(client, **{name: value}), param=name, code="unsupported_option")


TEXT_CHANGING = {
    "documents": [{"text": "a"}],
    "structural_tag": "{}",
    "grammar": "root ::= a",
    "tool_choice": "required",
    "function_call": {"name": "f"},
    "verbosity": "low",
    "guided_whitespace_pattern": " ",
    "thinking": {"type": "disabled"},
    "enable_thinking": False,
    "thinking_token_budget": 5,
    "web_search_options": {},
    "custom_params": {"a": 1},
    "repetition_detection": {"max_pattern_size": 5},
}


@pytest.mark.parametrize("name", TEXT_CHANGING)
def test_fields_that_would_change_the_text_are_rejected_in_every_route(client, name):
    value = TEXT_CHANGING[name]
    responses = {
        name: [completion(client, **{name: value}), chat(client, **{name: value})],
        f"sampling_params.{name}": [client.post("/generate", json={"text": "a", "sampling_params": {name: value}})],
    }
    for param, sent in responses.items():
        for response in sent:
            assert name in assert_error(response, param=param, code="unsupported_option")
    assert completion(client, **{name: None}).status_code == 200


def test_fields_that_change_no_text_are_ignored(client):
    body = {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True, "priority": 1}
    body |= {"tool_choice": "auto", "prediction": {"type": "content", "content": "a"}, "prompt_cache_key": "a"}
    assert chat(client, **body).status_code == completion(client, **body).status_code == 200


def test_a_chat_template_that_does_not_read_the_effort_says_so(client):
    message = assert_error(chat(client, reasoning_effort="high"), param="reasoning_effort", code="unsupported_option")
    assert "does not read it" in message and chat(client, reasoning_effort=None).status_code == 200
    assert_error(completion(client, reasoning_effort="high"), param="reasoning_effort")
    assert_error(chat(client, add_special_tokens=True), param="add_special_tokens")
    assert chat(client, add_special_tokens=False).status_code == 200


def test_options_whose_value_has_no_effect_are_allowed(client):
    body = {"tools": [], "response_format": {"type": "text"}, "suffix": None, "logprobs": None, "best_of": 1}
    assert completion(client, **body).status_code == 200


def test_errors_do_not_repeat_the_request(client):
    secret = "my secret words"
    for body in ({"temperature": secret}, {"model": secret}, {"stop": {"a": secret}}, {"logit_bias": {secret: 1}}):
        assert secret not in completion(client, **body).text


def test_generate_checks_its_sampling_params(client):
    for name, value in (("temperature", -1), ("max_new_tokens", 0), ("stop", [""]), ("n", 99), ("regex", "a")):
        response = client.post("/generate", json={"text": "a", "sampling_params": {name: value}})
        assert_error(response, param=f"sampling_params.{name}")
    assert_error(client.post("/generate", json={"text": "a", "input_ids": [1]}))
    assert_error(client.post("/generate", json={"text": "a", "logprob_start_len": 0}), param="logprob_start_len")
    assert client.post("/generate", json={"text": "a", "logprob_start_len": -1}).status_code == 200
    assert_error(client.post("/generate", json={"text": "a", "sampling_params": [1]}))
