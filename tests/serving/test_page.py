"""The page shows the server's state and a chat whose text is coloured by draft level, and markup stays text."""

import dataclasses

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from mtpjax.serving.api.page_routes import TokenRate
from tests.helpers import chatml
from tests.helpers.api_client import api_client, chat, completion, events
from tests.helpers.api_server import serve
from tests.helpers.browser import open_browser
from tests.helpers.fake_engine import REPLY, FakeEngine

MARKUP = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'> & done"


class BusyEngine(FakeEngine):
    """Reports a load, and counts that grow with every status: four passes, ten tokens."""

    num_reads = 0

    def status(self):
        self.num_reads += 1
        num_steps, load = 4 * self.num_reads, {"num_slots": 8, "num_pages": 96, "num_used_pages": 12, "page_size": 16}
        accepted = (3 * self.num_reads, 2 * self.num_reads, self.num_reads)
        counts = {"num_prompt_tokens": 200, "num_cached_tokens": 50, "num_preempted": 2, "num_requests": 7}
        counts |= {"num_steps": num_steps, "proposed": (num_steps,) * 3, "accepted": accepted}
        counts |= {"num_new_tokens": num_steps + sum(accepted), "num_aborted": 3, "num_failed": 1}
        return dataclasses.replace(super().status(), **load, **counts)


def draft_levels(response):
    """Returns the text and level of each span of a stream."""
    choices = [choice for event in events(response)[:-1] for choice in event["choices"]]
    return [(span["text"], span["level"]) for choice in choices for span in choice.get("draft_levels", ())]


def test_the_page_and_its_files_need_no_key_and_allow_no_foreign_code():
    with api_client(api_keys=("key",)) as (client, _):
        for path, media_type in {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}.items():
            response = client.get(path)
            assert response.status_code == 200 and response.headers["content-type"].startswith(media_type)
            policy = response.headers["content-security-policy"]
            assert "default-src 'self'" in policy and "unsafe" not in policy and "http" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            assert "http://" not in response.text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in response.text and "innerHTML" not in response.text
        assert client.get("/status.json").status_code == 401
        assert client.get("/status.json", headers={"Authorization": "Bearer key"}).status_code == 200
        assert client.post("/").status_code == 405


def test_the_state_is_that_of_the_engine():
    with api_client(BusyEngine()) as (client, engine):
        body = client.get("/status.json").json()
        assert (body["model"], body["num_slots"], body["proposed"], body["accepted"]) == (
            "tiny",
            8,
            [4, 4, 4],
            [3, 2, 1],
        )
        assert body["accept_length"] == 2.5 and body["tokens_per_second"] is None
    with api_client() as (client, engine):
        engine.status = lambda: dataclasses.replace(FakeEngine.status(engine), num_steps=0)
        assert client.get("/status.json").json()["accept_length"] is None  # no NaN, which JSON lacks


def test_tokens_per_second_do_not_depend_on_the_readers():
    rate = TokenRate()
    assert rate.read(0.0, 100) is None
    assert rate.read(0.1, 110) is None  # too short a time to measure
    for tenth in range(10, 100):
        assert rate.read(tenth / 10, 100 + 10 * tenth) == pytest.approx(100)
    assert rate.read(60.0, 5000) is None  # nobody has read for a minute
    assert rate.read(61.0, 5000) == 0


@pytest.mark.parametrize("make", [completion, chat])
def test_a_stream_tells_the_draft_level_of_each_token(make):
    with api_client(FakeEngine(reply="plain text")) as (client, _):
        spans = draft_levels(make(client, stream=True, return_draft_levels=True))
    # Passes of 1, 3, 2, 1, ... tokens. The first token repeats the prompt's last.
    assert "".join(text for text, _ in spans) == ("i" if make is completion else " ") + "plain text"
    assert [level for _, level in spans] == [0, 1, 2, 0, 1, 0, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("stop", [None, "café", ["🙂 c", "—"], [" ok?!"]])
def test_levels_cover_the_text_also_where_it_is_held_back(stop):
    with api_client() as (client, _):
        plain = completion(client, stop=stop).json()["choices"][0]["text"]
        spans = draft_levels(completion(client, stop=stop, stream=True, return_draft_levels=True))
    assert "".join(text for text, _ in spans) == plain
    # A character of several bytes has the level of its last byte, in whatever chunk it comes.
    levels = ([0, 1, 2, 0, 1, 0] * 20)[: len(("i" + REPLY).encode())]
    expected = [levels[len(("i" + REPLY)[: place + 1].encode()) - 1] for place in range(len(plain))]
    assert [level for text, level in spans for _ in text] == expected


def test_levels_come_only_if_asked_for():
    with api_client() as (client, _):
        assert "draft_levels" not in completion(client, stream=True).text
        response = completion(client, return_draft_levels=True)
        assert response.status_code == 400 and response.json()["error"]["param"] == "return_draft_levels"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(chromium):
    yield chromium
    chromium.open("about:blank")
    chromium.console_errors()  # of the page after its server has ended


def send(browser, text):
    """Sends a message and waits for the end of its answer."""
    browser.type("#prompt", text)
    browser.click("#send")
    browser.wait(lambda: browser.run("return document.querySelector('#send').disabled === false"))


def is_live(browser):
    return browser.text("#connection") == "live"


def test_the_browser_shows_the_state(browser):
    with serve(BusyEngine()) as address:
        browser.open(f"{address}/")
        browser.wait(lambda: "–" not in browser.texts("#tiles dd"))
        assert is_live(browser) and browser.text("#model") == "tiny"
        tiles = dict(zip(browser.texts("#tiles dt"), browser.texts("#tiles dd"), strict=True))
        assert tiles["Running / slots"] == "0 / 8" and tiles["Pages used / total"] == "12 / 96"
        assert tiles["Accept length"] == "2.50" and tiles["Prefix-cache hits"] == "25 %"
        assert (tiles["Preemptions"], tiles["Aborted / failed"]) == ("2", "3 / 1")
        assert browser.texts("#bars .share") == ["75 %", "50 %", "25 %"]
        assert "L" in browser.run("return document.querySelector('#chart .line').getAttribute('d')")
        assert browser.text("#chart-text") == "last value 2.50"
    browser.wait(lambda: browser.text("#connection") == "the server does not answer")


def test_the_browser_shows_an_answer_in_the_colours_of_its_drafts_and_markup_as_text(browser):
    with serve(FakeEngine(reply=MARKUP, delay=0.01, max_length=1000)) as address:
        browser.open(f"{address}/")
        browser.wait(lambda: is_live(browser))
        send(browser, "Say <b>something</b>")
        # The answer begins with the template's last token.
        assert browser.text("#log .answer") == " " + MARKUP
        assert browser.text("#log .user") == "Say <b>something</b>"
        assert browser.run("return document.querySelectorAll('#log img, #log script, #log b').length") == 0
        assert browser.run("return window.broken") is None
        # The text consists of passes of 1, 3 and 2 tokens.
        assert browser.texts("#log .level-2")[:2] == [MARKUP[1], MARKUP[7]]
        assert browser.run("return document.querySelectorAll('#log .level-3').length") == 0
        colours = "return getComputedStyle(document.querySelector(arguments[0])).backgroundColor"
        assert browser.run(colours, "#log .level-1") != browser.run(colours, "#log .level-2")
        num_tokens = len(MARKUP) + 2
        num_passes = -(-num_tokens // 2)
        assert browser.text("#log .counts").startswith(f"{num_tokens} tokens in {num_passes} passes, accept length ")
        assert not browser.console_errors()


def test_stop_ends_an_answer_in_order(browser):
    engine = FakeEngine(reply="long " * 2000, delay=0.02, max_length=20_000)
    with serve(engine) as address:
        browser.open(f"{address}/")
        browser.run("document.querySelector('#max-tokens').value = ''")  # as many as fit
        browser.type("#prompt", "Hi\ue007")  # Enter sends
        browser.wait(lambda: "long" in "".join(browser.texts("#log .answer")))
        browser.click("#stop")
        browser.wait(lambda: browser.texts("#log .counts"))
        assert browser.text("#log .counts").endswith(", stopped")
        assert engine.wait_until_idle() and engine.reasons == ["abort"]


def test_the_chat_works_with_a_key_and_without_a_chat_template(browser, tmp_path):
    tokenizer = chatml.save_tokenizer(tmp_path)
    tokenizer.chat_templates.templates.clear()
    engine = FakeEngine()
    with serve(engine, tokenizer, api_keys=("sécret",)) as address:
        browser.open(f"{address}/")
        browser.wait(lambda: "API key" in browser.text("#connection"))
        browser.type("#key", "sécret")
        browser.wait(lambda: is_live(browser))
        send(browser, "Hi")
        assert engine.requests[-1].prompt == tuple(tokenizer.encode("Hi"))  # continued as it is
        assert browser.texts("#log .counts") and not browser.texts("#log .error")
        assert browser.run("return document.querySelector('#template').checked") is False


def test_errors_are_told_and_the_message_is_kept(browser):
    engine = FakeEngine(max_requests=1)
    with serve(engine) as address:
        engine.max_requests = 0  # another request has the only place
        browser.open(f"{address}/")
        send(browser, "Hi")
        assert "too many requests" in browser.text("#log .error")
        assert browser.run("return document.querySelector('#prompt').value") == "Hi"
