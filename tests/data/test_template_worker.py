"""Chat templates under limits: whatever a template does, the caller gets one line in bounded time."""

import concurrent.futures
import os
import pathlib
import signal
import time

import pytest

from mtpjax.data import template_worker
from mtpjax.data.template_worker import TemplateFailure, TemplateWorker
from mtpjax.errors import ConversationError, TokenizerError
from tests.helpers.rendered_chats import render_chat

MESSAGES = [{"role": "user", "content": "hi"}]
FAILING = [
    "{{ 1 / 0 }}",
    "{{ {}['a'].b }}",
    "{{ messages[9].role.x }}",
    "{{ [1, 2] | map('nosuch') | list }}",
    "{{ 'abc'.index('d') }}",
    "{{ '%d' | format('x') }}",
    "{{ messages | tojson(indent='x' * 3) | int + messages }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]
HUNGRY = ["{{ 'a' * 10**9 }}", "{{ ('a\\n' * 10**6) | indent(10**6) }}", "{{ '%3000000000d' | format(1) }}"]
ENDLESS = ["{{ 9**(9**9) }}", "{% for a in 'x' * 9999 %}{% for b in 'x' * 9999 %}{% endfor %}{% endfor %}"]


def render(worker, template, variables):
    [result] = worker.render_all(template, [variables])
    if isinstance(result, TemplateFailure):
        raise result
    return result.text


@pytest.fixture
def worker():
    worker = TemplateWorker()
    yield worker
    worker.close()


@pytest.mark.parametrize("template", FAILING + HUNGRY)
def test_every_exception_of_a_template_is_one_line(template):
    with pytest.raises(ConversationError, match="the chat template failed: ") as raised:
        render_chat(template, MESSAGES)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400
    assert render_chat("{{ messages[0].content }}", MESSAGES) == "hi"


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_that_does_not_end_is_stopped(template, monkeypatch, tmp_path, worker):
    # The worker's limit is in its own source; a copy with a short one saves the test's time.
    source = pathlib.Path(template_worker.__file__).read_text()
    assert "MAX_SECONDS = 10" in source
    (tmp_path / "short.py").write_text(source.replace("MAX_SECONDS = 10", "MAX_SECONDS = 1"))
    monkeypatch.setattr(worker._worker, "_script", str(tmp_path / "short.py"))
    begin = time.monotonic()
    with pytest.raises(TemplateFailure, match="ran for more than"):
        render(worker, template, {"messages": MESSAGES})
    assert time.monotonic() - begin < 15
    assert render(worker, "{{ messages[0].role }}", {"messages": MESSAGES}) == "user"


def test_long_output_is_refused(worker):
    with pytest.raises(TemplateFailure, match="more than 16777216 characters"):
        render(worker, "{% for i in 'x' * 200 %}{{ 'a' * 100000 }}{% endfor %}", {})


def test_a_template_that_does_not_compile_is_the_tokenizers_error():
    with pytest.raises(TokenizerError, match="TemplateSyntaxError") as raised:
        render_chat("{% if %}", MESSAGES)
    assert not isinstance(raised.value, ConversationError)


def test_a_variable_without_json_form_is_refused():
    with pytest.raises(ConversationError, match="no JSON form"):
        render_chat("x", MESSAGES, tools=object())


def test_threads_share_a_worker_and_get_their_own_answers(worker):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda number: render(worker, "{{ a }}", {"a": number}), range(100))
    assert list(answers) == [str(number) for number in range(100)]


def test_a_worker_that_was_killed_is_replaced(worker):
    assert render(worker, "a", {}) == "a"
    worker._worker._process.kill()
    worker._worker._process.wait()
    assert render(worker, "b", {}) == "b"
    assert worker._worker._owner == os.getpid()


def test_tojson_takes_the_keywords_of_transformers(worker):
    value = {"b": "<é>", "a": [1, {}]}
    for keywords, text in (
        ("", '{"b": "<é>", "a": [1, {}]}'),
        ("(ensure_ascii=False)", '{"b": "<é>", "a": [1, {}]}'),
        ("(ensure_ascii=True)", '{"b": "<\\u00e9>", "a": [1, {}]}'),
        ("(separators=(',', ':'))", '{"b":"<é>","a":[1,{}]}'),
        ("(sort_keys=True, indent=None)", '{"a": [1, {}], "b": "<é>"}'),
        ("(indent=1)", '{\n "b": "<é>",\n "a": [\n  1,\n  {}\n ]\n}'),
    ):
        assert render(worker, "{{ value | tojson" + keywords + " }}", {"value": value}) == text


# The spans are those that transformers 5.24 reports for these templates.
@pytest.mark.parametrize(
    ("template", "text", "spans"),
    [
        ("a{% generation %}b{{ c }}{% endgeneration %}d", "abcd", [(1, 3)]),
        ("a {%- generation -%} b {%- endgeneration -%} d", "abd", [(1, 2)]),
        ("a\n{% generation %}\nb\n{% endgeneration %}\nd", "a\nb\nd", [(2, 4)]),
        (
            "{% macro f(x) %}{% generation %}{{ x }}{% endgeneration %}{% endmacro %}[{{ f(c) }}]{{ f('e') }}",
            "[c]e",
            None,
        ),
        (
            "{% for i in [1, 2] %}{% if c %}{% generation %}{{ i }}{% endgeneration %}{% endif %}{% endfor %}",
            "12",
            None,
        ),
        ("{% set x %} {% generation %} b {% endgeneration %}{% endset %}{{ x | trim }}", "b", []),
        ("no blocks {{ c }}", "no blocks c", []),
    ],
)
def test_generation_blocks_render_as_their_bodies_and_are_located(template, text, spans, worker):
    [plain] = worker.render_all(template, [{"c": "c"}])
    [marked] = worker.render_all(template, [{"c": "c"}], with_generation=True)
    assert plain.text == marked.text == text and plain.generation is None
    if spans is not None:  # else: blocks in macros and loops
        assert (marked.generation or []) == spans
    else:
        assert [text[start:end] for start, end in marked.generation] == [each for each in text if each not in "[]"]


def test_several_renderings_fail_one_by_one(worker):
    good, bad = worker.render_all("{{ 1 // n }}", [{"n": 1}, {"n": 0}])
    assert good.text == "1" and isinstance(bad, TemplateFailure) and "ZeroDivisionError" in str(bad)
    assert all(each.is_template for each in worker.render_all("{% if %}", [{}, {}]))


def test_a_worker_that_was_stopped_is_replaced(worker, monkeypatch):
    monkeypatch.setattr(template_worker, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(template_worker, "ANSWER_SECONDS", 0)
    assert render(worker, "a", {}) == "a"
    stopped = worker._worker._process
    stopped.send_signal(signal.SIGSTOP)
    # More than a pipe holds: the request cannot even be written.
    assert render(worker, "{{ b }}", {"b": "c" * 300_000}) == "c" * 300_000
    assert stopped.poll() == -signal.SIGKILL


def test_a_killed_worker_ends_its_calls_at_once(worker):
    render(worker, "a", {})
    worker._worker._process.send_signal(signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(render, worker, "a", {}) for _ in range(3)]
        time.sleep(0.1)
        begin = time.monotonic()
        worker.kill()
        # One of them was running. The others get a new process.
        failures = [error for each in waiting if (error := each.exception()) is not None]
    assert time.monotonic() - begin < 5  # not the ten seconds of a template
    assert [type(error) for error in failures] == [TemplateFailure]
