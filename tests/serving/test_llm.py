"""From text to text in Python: `LLM`, against `speculative_generate` and against the server."""

import asyncio
import gc
import json
import subprocess
import sys
import threading
import weakref

import jax
import numpy as np
import pytest

import mtpjax
from mtpjax import DecodeConfig, SamplingParams, load, load_tokenizer, speculative_generate
from mtpjax.io.checkpoint import save_model
from mtpjax.serving.api.prompts import read_chat
from mtpjax.serving.api.settings import Limits
from mtpjax.serving.llm import LLM
from tests.helpers.chatml import save_tokenizer

SETTINGS = {"num_steps": 2, "num_slots": 4, "batch_sizes": (1, 4), "max_length": 128, "prefill_chunk": 16}
TEXTS = ["def ", "import os", "", "class A:\n    ", "é🙂", "x = 1\n" * 5]


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **SETTINGS) as llm:
        yield llm


def alone(checkpoint, text, **changes):
    """Returns the tokens that `speculative_generate` gives for a text."""
    model, params = load(checkpoint)
    tokens = text if isinstance(text, list) else load_tokenizer(checkpoint).encode(text)
    config = DecodeConfig(num_steps=2, prefill_chunk=16, max_length=128, stop_token_ids=(0,), **changes)
    return speculative_generate(params, [tokens], model=model, config=config).rows()[0]


def test_texts_equal_those_of_speculative_generate(llm, checkpoint):
    prompts = [text for text in TEXTS if text] + [[100, 101, 102]]
    completions = llm.generate(prompts, max_new_tokens=20)
    assert [each.tokens for each in completions] == [alone(checkpoint, each, max_new_tokens=20) for each in prompts]
    assert [each.text for each in completions] == [llm.tokenizer.decode(each.tokens) for each in completions]
    assert all(each.accept_length >= 1 for each in completions if len(each.tokens) > 1)
    assert list(completions[-1].prompt) == [100, 101, 102]


def test_a_single_text_gives_a_single_completion(llm, checkpoint):
    completion = llm.generate("def ", max_new_tokens=5)
    assert completion.tokens == alone(checkpoint, "def ", max_new_tokens=5) and completion.logprobs is None
    assert len(llm.generate("def ").tokens) == len(alone(checkpoint, "def ", max_new_tokens=128))


def test_each_prompt_may_have_its_limit(llm):
    completions = llm.generate(["def "] * 3, max_new_tokens=[1, 5, 3])
    assert [len(each.tokens) for each in completions] == [1, 5, 3]


def test_no_prompts_give_no_completions(llm):
    assert llm.generate([]) == [] and llm.chat([]) == []


def test_seeds_count_up_and_repeat(llm):
    sampling = SamplingParams(temperature=1.5, seed=3)
    first, second = llm.generate(["def "] * 2, sampling, max_new_tokens=16)
    assert first.tokens != second.tokens
    assert llm.generate("def ", SamplingParams(temperature=1.5, seed=4), max_new_tokens=16).tokens == second.tokens
    unseeded = [llm.generate("def ", SamplingParams(temperature=1.5), max_new_tokens=16).tokens for _ in range(2)]
    assert unseeded[0] != unseeded[1]
    # In a list, each seed counts as it is given.
    each = [SamplingParams(), *(SamplingParams(temperature=1.5, seed=seed) for seed in (4, 3))]
    greedy, *sampled = llm.generate(["def "] * 3, each, max_new_tokens=16)
    assert greedy.tokens == llm.generate("def ", max_new_tokens=16).tokens
    assert [each.tokens for each in sampled] == [second.tokens, first.tokens]


def test_stop_strings_end_texts_and_are_not_part_of_them(llm):
    whole = llm.generate("def ", max_new_tokens=40)
    stop = whole.text[10:13]
    assert len(stop) == 3
    stopped = llm.generate("def ", max_new_tokens=40, stop=["\x01never", stop])
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert (stopped.finish_reason, stopped.matched_stop) == ("stop", stop)
    assert stopped.tokens == whole.tokens[: len(stopped.tokens)]
    streamed = llm.stream("def ", max_new_tokens=40, stop=stop)
    assert "".join(streamed) == stopped.text and streamed.completion.finish_reason == "stop"


def test_logprobs_are_those_of_the_trunk(llm):
    completion = llm.generate("def ", max_new_tokens=8, logprobs=True)
    scores = llm.engine.score([*completion.prompt, *completion.tokens], 0).logprobs[len(completion.prompt) :]
    np.testing.assert_allclose(completion.logprobs, scores, atol=1e-4)


def test_a_stream_yields_the_whole_text_in_whole_characters(llm):
    # Draws the bytes of characters of all lengths.
    text = "aé€🙂" * 3
    bias = {byte: 30.0 for byte in text.encode()}
    sampling = SamplingParams(temperature=1.0, seed=5, logit_bias=bias)
    whole = llm.generate("def ", sampling, max_new_tokens=60)
    assert len(whole.text) < len(whole.tokens)  # some characters have several bytes
    stream = llm.stream("def ", sampling, max_new_tokens=60)
    pieces = list(stream)
    assert len(pieces) > 3 and all(pieces) and "".join(pieces) == whole.text
    assert stream.completion.tokens == whole.tokens and stream.completion.accept_length == whole.accept_length
    assert {span.level for span in stream.completion.spans} > {0}


def test_streams_can_be_awaited_side_by_side(llm):
    prompts = ["def ", "import ", "class "]

    async def read(stream):
        return "".join([piece async for piece in stream])

    async def main():
        return await asyncio.gather(*(read(llm.stream(each, max_new_tokens=24)) for each in prompts))

    assert asyncio.run(main()) == [each.text for each in llm.generate(prompts, max_new_tokens=24)]


def test_leaving_a_stream_frees_its_slot(llm):
    stream = llm.stream("def ", max_new_tokens=120)
    for _ in stream:
        break
    with pytest.raises(RuntimeError, match="has not ended"):
        stream.completion  # noqa: B018
    llm.generate("x", max_new_tokens=1)
    assert llm.engine.status().num_running == 0


CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Ünï"}]}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "<|im_end|>"},
    ],
]


@pytest.fixture(scope="module")
def chat_llm(small, tmp_path_factory):
    """A model with a tokenizer and a chat template."""
    model, params = small("grouped", "mixed", vocab_size=300)
    folder = tmp_path_factory.mktemp("chat")
    save_model(folder / "checkpoint", model, params, tokenizer=save_tokenizer(folder))
    with LLM(folder / "checkpoint", **SETTINGS) as llm:
        yield llm


def test_chat_gives_the_prompts_of_the_server(llm, chat_llm):
    for each in (llm, chat_llm):
        sizes = {"max_prompt_characters": 1000, "max_total_characters": 1000, "max_requests": 8, "max_queued": 8}
        limits = Limits(vocab_size=300, max_length=128, eos_token_ids=(), template_variables=("name",), **sizes)
        answers = each.chat(CONVERSATIONS, max_new_tokens=3, chat_template_kwargs={"name": "x"})
        for answer, messages in zip(answers, CONVERSATIONS, strict=True):
            body = {"messages": messages, "chat_template_kwargs": {"name": "x"}}
            assert list(answer.prompt) == read_chat(each.tokenizer, body, limits, add_generation_prompt=True)
        assert each.chat(CONVERSATIONS[0], max_new_tokens=3).tokens == answers[0].tokens
        assert "".join(each.stream(CONVERSATIONS[0], max_new_tokens=3)) == answers[0].text
    # Without a limit an answer may fill the context.
    answer = chat_llm.chat(CONVERSATIONS[0], ignore_eos=True)
    assert len(answer.prompt) + len(answer.tokens) == 128


@pytest.mark.parametrize(
    "messages, options, message",
    [
        ("hi", {}, "a conversation must be a list of messages"),
        ({"role": "user", "content": "hi"}, {}, "a conversation must be a list of messages"),
        (["hi"], {}, r"messages\[0\] must be an object"),
        ([[]], {}, "messages is empty"),
        ([{"role": "robot", "content": "hi"}], {}, "role must be one of"),
        ([{"role": "user"}], {}, "content is missing"),
        (CONVERSATIONS[0], {"chat_template_kwargs": {"tools": []}}, "must not set tools"),
    ],
)
def test_wrong_conversations_are_refused(messages, options, message, llm):
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, max_new_tokens=1, **options)


def test_texts_with_a_grammar_match_it(llm):
    pytest.importorskip("llguidance")
    text = llm.generate("def ", max_new_tokens=40, regex="[ab]{3}c").text
    assert len(text) == 4 and text[-1] == "c" and set(text[:3]) <= {"a", "b"}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    no_spaces = SamplingParams(logit_bias={byte: -1e3 for byte in b" \t\r\n"})
    for given in (schema, json.dumps(schema)):
        assert json.loads(llm.generate("def ", no_spaces, max_new_tokens=60, json_schema=given).text)["a"] in (1, 2)
    with pytest.raises(ValueError, match="cannot be combined"):
        llm.generate("def ", json_schema=schema, regex="a")


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        (["a", "b" * 128], {}, "request 1: .*128"),
        (["a", ""], {}, "request 1: its prompt is empty"),
        ([b"a"], {}, "a string or a list of token ids, got b'a'"),
        ([[True]], {}, "a string or a list of token ids"),
        (["a"], {"logprobs": 5}, "logprobs must be True or False, got 5"),
        (["a"], {"stop_token_ids": 5}, "stop_token_ids must be a list of token ids"),
        (["a"], {"sampling": []}, "sampling has 0 values for 1 prompts"),
        (["a"], {"sampling": {"temperature": 1}}, "sampling must be mtpjax.SamplingParams"),
        (["a"], {"temperature": 0.8}, "temperature is a sampling parameter: pass mtpjax.SamplingParams"),
        (["a"], {"sampling": SamplingParams(seed=[1])}, "seed must be one integer"),
        ([7], {}, "a string or a list of token ids, got 7"),
        ([["a"]], {}, "a string or a list of token ids"),
        ([[1, 256]], {}, "request 0: .*256"),
        (["a"], {"max_token": 3}, "unknown option max_token: did you mean max_new_tokens"),
        (["a"], {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        (["a"], {"max_new_tokens": 1.5}, "max_new_tokens must be an integer"),
        (["a", "b"], {"max_new_tokens": [1, 2, 3]}, "max_new_tokens has 3 values for 2 prompts"),
        (["a"], {"stop": ["x", ""]}, "none of them empty"),
        (["a"], {"stop_token_ids": [256]}, "256"),
        (["a", "b"], {"sampling": [SamplingParams()]}, "sampling has 1 values for 2 prompts"),
        (["a"], {"sampling": SamplingParams(temperature=[1.0, 2.0])}, "temperature"),
    ],
)
def test_wrong_prompts_and_options_are_refused_before_any_text_runs(prompts, options, message, llm):
    before = llm.engine.status().num_requests
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, **options)
    assert llm.engine.status().num_requests == before


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_step": 1}, "unknown setting num_step: did you mean num_steps"),
        ({"max_new_tokens": 8}, "not a setting of LLM: pass it to generate, chat or stream"),
        ({"num_slots": 0}, "num_slots must be at least 1"),
        ({"num_steps": 3, "topk": 2, "num_draft_tokens": 99}, "num_draft_tokens"),
        ({"drafter": "none"}, "drafter must be one of"),
    ],
)
def test_wrong_settings_are_refused(settings, message, checkpoint):
    with pytest.raises(ValueError, match=message):
        LLM(checkpoint, **settings)


def test_parameters_in_memory_and_new_ones(small, checkpoint):
    model, params = small("grouped", "mixed", vocab_size=256)
    _, others = small("grouped", vocab_size=256)
    as_numpy = jax.device_get(params)
    llm = LLM.from_params(as_numpy, model=model, tokenizer=load_tokenizer(checkpoint), **SETTINGS)
    before = llm.generate("def ", max_new_tokens=12)
    assert before.tokens == alone(checkpoint, "def ", max_new_tokens=12)
    llm.update_params(others)
    assert llm.generate("def ", max_new_tokens=12).tokens != before.tokens
    # A stream keeps it alive. Then nothing refers to it any more, so its thread ends.
    thread, gone, stream = llm.engine._thread, weakref.ref(llm), llm.stream("def ", max_new_tokens=12)
    del llm
    gc.collect()
    assert len("".join(stream)) and stream.completion.finish_reason == "length"
    del stream
    gc.collect()
    thread.join(10)
    assert gone() is None and not thread.is_alive()


def test_lookup_drafts_and_a_mesh_give_the_same_texts(llm, checkpoint):
    expected = [each.tokens for each in llm.generate(TEXTS[:2], max_new_tokens=12)]
    changes = [{"drafter": "lookup", "num_steps": None}, {"mesh": {"data": 2, "tensor": 2}, "num_steps": 0}]
    for change in changes:
        with LLM(checkpoint, **SETTINGS | {"batch_sizes": (4,)} | change) as other:
            assert [each.tokens for each in other.generate(TEXTS[:2], max_new_tokens=12)] == expected
            assert other.engine.config.num_steps == (4 if "drafter" in change else 0)


def test_threads_share_an_llm(llm):
    expected, found = llm.generate("def ", max_new_tokens=12).tokens, []
    threads = [
        threading.Thread(target=lambda: found.append(llm.generate("def ", max_new_tokens=12).tokens)) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [expected] * 6


SCRIPT = """
import os, signal, sys, threading
import mtpjax
llm = mtpjax.LLM(sys.argv[1], num_steps=2, num_slots=2, batch_sizes=(2,), max_length=250)
llm.generate(["warm", "up"], max_new_tokens=240, ignore_eos=True)
threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
completions = llm.generate(["x%d" % number for number in range(1000)], max_new_tokens=240, ignore_eos=True)
print(len(completions), completions[-1].finish_reason)
"""


def test_an_interrupted_script_gets_what_is_done_and_ends_well(checkpoint):
    done = subprocess.run([sys.executable, "-c", SCRIPT, checkpoint], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "1000 abort\n"), done.stderr
    assert "of 1000 texts ended early (abort)" in done.stderr and "Traceback" not in done.stderr


def test_the_names_are_public():
    assert mtpjax.LLM is LLM and "Engine" in mtpjax.__all__ and jax.default_backend()
