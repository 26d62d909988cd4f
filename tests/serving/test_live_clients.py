"""Other projects' clients over a real server: openai's, and schemathesis."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from tests.helpers.live_server import live_server, wait_until


@pytest.fixture(scope="module")
def running(small):
    model, params = small("grouped", "mixed", vocab_size=256, max_position_embeddings=512)
    with live_server(model, params) as server:
        yield server


@pytest.fixture
def server(running):
    yield running
    running.check()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}])
def test_the_openai_client_reads_the_same_text_in_both_ways(server, options):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="any", max_retries=0) as client:
        prompt = {"model": "tiny", "prompt": "Once upon", "max_tokens": 60, **options}
        plain = client.completions.create(**prompt)
        chunks = list(client.completions.create(**prompt, stream=True, stream_options={"include_usage": True}))
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == plain.choices[0].text != ""
        assert chunks[-1].usage == plain.usage
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, **options}
        answer = client.chat.completions.create(**chat, logprobs=True)
        chunks = list(client.chat.completions.create(**chat, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == answer.choices[0].message.content
        assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_generated_requests_cause_no_fault_of_the_server(server, mode):
    """53: 200 examples of each route."""
    schemathesis = pytest.importorskip("schemathesis")
    import hypothesis

    schema = schemathesis.openapi.from_url(f"{server.address}/openapi.json")
    mode, answers, faults = schemathesis.GenerationMode[mode], [], []
    checks = list(hypothesis.HealthCheck)
    settings = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": checks}
    for result in schema.get_all_operations():
        operation = result.ok()

        @hypothesis.settings(max_examples=200, **settings)
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            response = case.call(base_url=server.address, timeout=60)
            answers.append((case.method, response.status_code))
            if response.status_code >= 500:
                faults.append((case.path, case.body, response.text))

        try:
            check()
        except (hypothesis.errors.Unsatisfiable, schemathesis.errors.InvalidSchema):
            continue  # a route without parameters has no wrong requests
    assert not faults, faults[:3]
    assert ("POST", 200 if mode == schemathesis.GenerationMode.POSITIVE else 400) in answers
    wait_until(lambda: server.is_idle, 60)
