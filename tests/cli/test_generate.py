"""`mtpjax generate`: where prompts come from, where texts end, and what is printed of them."""

import dataclasses
import io
import json
import math
import re
import sys

import jax
import numpy as np
import pytest

from mtpjax import DecodeConfig, MTPModel, forward, generate, init_params, presets
from mtpjax.cli.main import main
from mtpjax.io.checkpoint import save_model

PROMPTS = ["def f", "import os", "x", "class A", "while"]
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def small():
    """A model of bytes with random weights whose texts are ASCII, since the ids above are no tokens."""
    narrow = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8}
    model = MTPModel(dataclasses.replace(presets["tiny"], **narrow, max_position_embeddings=128, num_tokens=128))
    return model, init_params(model, jax.random.key(4))


@pytest.fixture(scope="module")
def checkpoint(small, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "checkpoint"
    save_model(path, *small)
    return path


@pytest.fixture(scope="module")
def plain(small):
    """The greedy text of each prompt, decoded alone and without drafts."""
    model, params = small
    config = DecodeConfig(max_new_tokens=NEW_TOKENS, stop_token_ids=(0,))
    return [generate(params, [list(text.encode())], model=model, config=config).rows()[0] for text in PROMPTS]


@pytest.fixture
def prompts_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    return str(file)


@pytest.fixture
def run(checkpoint, capsys):
    """Runs the command and returns the exit code, stdout and stderr."""

    def call(*arguments):
        with pytest.raises(SystemExit) as end:
            main(["generate", "--model", str(checkpoint), "--max-new-tokens", str(NEW_TOKENS), *map(str, arguments)])
        printed = capsys.readouterr()
        return end.value.code, printed.out, printed.err

    return call


def text_of(tokens):
    return bytes(token for token in tokens if token).decode()


def cut(tokens, stops):
    """Returns the text before the first stop string, and the tokens up to the one that completes it."""
    for count in range(1, len(tokens) + 1):
        text = text_of(tokens[:count])
        for stop in stops:
            if stop in text:
                return text[: text.index(stop)], tokens[:count], stop
    return text_of(tokens), tokens, 0 if tokens[-1] == 0 else None


@pytest.mark.parametrize("flags", [[], ["--temperature", "0.8", "--acceptance", "sample", "--seed", "3"]])
def test_prompts_of_a_file_end_at_stop_strings_as_plain_decoding_cut_there_does(flags, run, prompts_file, plain):
    # Two of the stop strings are of texts, so that some texts end at them: bytes are tokens, so each spans several.
    stops = [text_of(plain[0][6:9]), text_of(plain[3][11:13]), "never in a text"]
    flags = [*flags, *(f"--stop={stop}" for stop in stops)]
    code, out, err = run("--prompts", prompts_file, "--batch-size", 2, "--json", "--check", "--num-steps", 3, *flags)
    assert code == 0 and "identical to plain decoding: yes" in err and f"5 prompts in {prompts_file}" in err, err
    found = [json.loads(line) for line in out.splitlines()]
    assert [each["prompt"] for each in found] == PROMPTS and [each["id"] for each in found] == list("12345")
    for each in found:
        assert not any(stop in each["text"] for stop in stops)
    if flags[0].startswith("--stop"):
        expected = [cut(tokens, stops) for tokens in plain]
        assert [(each["text"], each["tokens"], each["matched_stop"]) for each in found] == expected
        assert {stops[0], stops[1]} <= {each["matched_stop"] for each in found}
        reasons = ["length" if matched is None else "stop" for _, _, matched in expected]
        assert [each["finish_reason"] for each in found] == reasons


def test_batches_change_no_text(run, prompts_file):
    flags = ["--temperature", "0.9", "--seed", "7", "--json"]
    texts = [run("--prompts", prompts_file, *flags, "--batch-size", size)[1] for size in (2, 8)]
    assert texts[0] == texts[1] and len(texts[0].splitlines()) == len(PROMPTS)
    # A prompt given twice gets two seeds.
    first, second = map(json.loads, run("--prompt", "x", "--prompt", "x", *flags)[1].splitlines())
    assert first["tokens"] != second["tokens"]


def test_decoding_ends_soon_after_the_stop_string(run, plain):
    stop = text_of(plain[0][4:7])
    _, out, err = run("--prompt", PROMPTS[0], "--stop", stop, "--num-steps", 0)
    assert out == PROMPTS[0] + cut(plain[0], [stop])[0] + "\n"
    tokens, behind, rounds = map(
        int, re.match(r"(\d+) tokens and (\d+) after stop strings in (\d+) rounds", err).groups()
    )
    assert tokens == len(cut(plain[0], [stop])[1]) and tokens + behind == 1 + rounds
    assert rounds <= 16 < NEW_TOKENS


def test_a_chat_prints_the_answer_alone_and_a_text_its_prompt_too(run):
    message = "hello"
    chat = run("--prompt", message, "--chat")[1]
    raw = run("--prompt", f"user: {message}\nassistant: ")[1]
    assert raw == f"user: {message}\nassistant: " + chat
    several = run("--prompt", message, "--prompt", "b\nc", "--chat")[1]
    assert several.startswith(f"[1] {message}\n{chat}[2] b\\nc\n")


def test_log_probabilities_are_those_of_the_forward_pass(run, small, plain):
    model, params = small
    _, out, _ = run("--prompt", PROMPTS[0], "--logprobs", 3, "--json")
    entries = json.loads(out)["logprobs"]
    prompt = list(PROMPTS[0].encode())
    assert [entry["id"] for entry in entries] == plain[0]
    logits = forward(params, np.array([prompt + plain[0]]), model=model).logits[0, len(prompt) - 1 : -1]
    expected = np.asarray(jax.nn.log_softmax(logits))
    for row, entry in zip(expected, entries, strict=True):
        assert math.isclose(entry["logprob"], row[entry["id"]], abs_tol=1e-4)
        order = np.argsort(-row[:128], kind="stable")[:3]
        assert [each["id"] for each in entry["top_logprobs"]] == order.tolist()
        np.testing.assert_allclose([each["logprob"] for each in entry["top_logprobs"]], row[order], atol=1e-4)
        assert entry["token"] == (chr(entry["id"]) if entry["id"] else "<token 0>")
    # For people: a line per token, whose first alternative is the token itself at temperature 0.
    table = run("--prompt", PROMPTS[0], "--logprobs", 1)[1].removeprefix(PROMPTS[0] + text_of(plain[0]) + "\n")
    assert table.splitlines()[0].split() == ["logprob", "token", "1", "most", "likely"]
    assert table.splitlines()[1].split()[0] == f"{entries[0]['logprob']:.3f}"
    assert len(table.splitlines()) == 1 + len(entries)
    assert "most likely" not in run("--prompt", PROMPTS[0], "--logprobs", 0)[1]


@pytest.mark.parametrize("given", [PROMPTS[0], PROMPTS[0] + "\n", PROMPTS[0] + "\r\n", "\ufeff" + PROMPTS[0]])
def test_a_prompt_is_read_from_standard_input(given, run, plain, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    assert run("--prompt", "-", "--json")[1].split('"tokens": ')[1].startswith(str(plain[0])[:-1])


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "standard input is empty"), (b" \n", "is empty"), (b"ab\xff", "not UTF-8 text at byte 3")],
)
def test_standard_input_without_a_text_is_one_line(content, said, run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    code, _, err = run("--prompt", "-")
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_file_of_json_lines_gives_its_prompts_and_ids(run, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question_id": 81, "turns": ["one", "two"]}\n\n{"prompt": "three"}\n')
    found = [json.loads(line) for line in run("--prompts", file, "--json")[1].splitlines()]
    assert [(each["id"], each["prompt"]) for each in found] == [("81", "one"), ("3", "three")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "use --prompt TEXT, --prompt - or --prompts FILE"),
        (["--prompt", "x", "--prompts", "FILE"], "--prompt and --prompts cannot be combined"),
        (["--prompts", "missing.txt"], "missing.txt"),
        (["--prompts", "FOLDER"], "is a folder, not a file"),
        (["--prompts", "EMPTY"], "contains no prompt, only white space"),
        (["--prompts", "BINARY"], "line 2 is not UTF-8 text"),
        (["--prompts", "-"], "--prompt - reads one prompt from standard input"),
        (["--prompt", "-", "--prompt", "-"], "--prompt - is repeated"),
        (["--prompt", "x", "--stop", ""], "--stop must not be empty"),
        (["--prompt", "x", "--logprobs", "21"], "--logprobs must be within 0..20, got 21"),
        (["--prompt", "x", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--prompt", "x", "--prompt", ""], "prompt 2 of --prompt has no tokens"),
        (["--prompt", "x", "--prompt", "y" * 128], "prompt 2 of --prompt has 128 tokens; max_length 128 leaves room"),
        (["--prompt", "x", "--temperature", "-1"], "temperature -1.0 must be within 0..inf"),
    ],
)
def test_what_cannot_be_is_one_line(flags, said, run, tmp_path):
    (tmp_path / "EMPTY").write_text(" \n\n")
    (tmp_path / "BINARY").write_bytes(b"text\n\xff\xfe\x00")
    (tmp_path / "FILE").write_text("x")
    (tmp_path / "FOLDER").mkdir()
    names = ("EMPTY", "BINARY", "FILE", "FOLDER")
    code, out, err = run(*(tmp_path / flag if flag in names else flag for flag in flags))
    assert code == 2 and said in err and err.count("\n") == 1 and not out


def test_a_backslash_in_a_stop_string_is_told(run):
    code, _, err = run("--prompt", "x", "--stop", "\\n", "--max-new-tokens", 2)
    assert code == 0 and "has a backslash: in a shell, write a newline or a tab as $'...'" in err
