"""Records answered by the model: against one call after the other, ended anywhere, and read back for training."""

import dataclasses
import fcntl
import gzip
import json
import os
from typing import Any

import jax
import pytest

from mtpjax import DecodeConfig, SamplingParams, generate, program_memory
from mtpjax.cli.main import main
from mtpjax.data import regeneration_output
from mtpjax.data.config import Source
from mtpjax.data.sources import read_source
from mtpjax.training import regenerate as module
from mtpjax.training.regenerate import RegenerationRequest, answer_seed, regenerate
from tests.helpers.chatml import CHATML, SPECIAL, save_tokenizer

STOP = 256 + SPECIAL.index("<|im_end|>")
TALKS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "old"}], "source": "x"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ä?"}]},
    {
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "kept", "weight": 0},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "old"},
            {"role": "user", "content": "three"},
            {"role": "assistant", "content": "older", "name": "gone"},
        ]
    },
]


@pytest.fixture(scope="module")
def rig(small, tmp_path_factory):
    """A model that writes some letters and its end token, and its tokenizer."""
    model, params = small("grouped", "mixed", vocab_size=300)
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    letters = [tokenizer.encode(letter)[0] for letter in "abcdefgh .\n"]
    sampling = SamplingParams(allowed_tokens=[*letters, STOP], logit_bias={STOP: 0.5})
    config = DecodeConfig(max_new_tokens=12, num_steps=2, prefill_chunk=16, stop_token_ids=tokenizer.eos_token_ids)
    return model, params, tokenizer, config, sampling


@pytest.fixture
def run(rig, tmp_path, monkeypatch):
    """`run(records or a file's bytes, output name, **request)` -> the records written, and the tally."""
    model, params, tokenizer, config, sampling = rig
    monkeypatch.setattr(module, "BATCHES_PER_WINDOW", 2)

    def run(content, name="answers.jsonl", *, data="data.jsonl", temperature=0.0, tokenizer=tokenizer, **changes):
        if not isinstance(content, bytes):
            content = "".join(json.dumps(record) + "\n" for record in content).encode()
        (tmp_path / data).write_bytes(content)
        asked = {"config": config, "sampling": dataclasses.replace(sampling, temperature=temperature), "batch_size": 2}
        request = RegenerationRequest(paths=[tmp_path / data], **asked | changes)
        with_model = {"model": model, "tokenizer": tokenizer, "model_digest": "m"}
        tally = regenerate(params, request, tmp_path / name, **with_model)
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()], tally

    return run


def alone(rig, prompt, *, temperature=0.0, seed=0):
    """The text of one prompt by plain decoding, and why it ended."""
    model, params, tokenizer, config, sampling = rig
    sampling = dataclasses.replace(sampling, temperature=temperature, seed=[seed])
    result = generate(params, [prompt], model=model, config=config, sampling=sampling)
    return tokenizer.decode(result.rows()[0]), result.finish_reasons[0]


def test_greedy_texts_are_those_of_plain_decoding(rig, run):
    tokenizer = rig[2]
    texts = ["def ", "a longer prompt, of two chunks", "x", "the last of five", "é"]
    written, tally = run([{"prompt": text, "category": "c", "id": number} for number, text in enumerate(texts)])
    for number, (record, text) in enumerate(zip(written, texts, strict=True)):
        answer, reason = alone(rig, tokenizer.encode(text))
        assert record == {"category": "c", "id": number, "text": text + answer, "finish_reasons": [reason]}
    assert (tally.read, tally.regenerated, tally.changed) == (5, 5, 0)
    assert {record["finish_reasons"][0] for record in written} == {"stop", "length"}
    assert tally.finished == {
        reason: sum(record["finish_reasons"] == [reason] for record in written) for reason in ("stop", "length")
    }
    assert tally.accept_length == 1 + tally.accepted / tally.rounds <= 3
    assert tally.tokens > 5 and tally.tokens_per_second > 0


def test_conversations_are_answered_turn_by_turn(rig, run):
    tokenizer = rig[2]
    written, tally = run(TALKS)
    for record, written_record in zip(TALKS, written, strict=True):
        talk, reasons = [], []
        messages = record["messages"] + [{"role": "assistant"}] * (record["messages"][-1]["role"] == "user")
        for message in messages:
            if message["role"] == "assistant" and message.get("weight") != 0:
                answer, reason = alone(rig, tokenizer.apply_chat_template(talk))
                talk.append({"role": "assistant", "content": answer})
                reasons.append(reason)
            else:
                talk.append(message)
        assert written_record == {**record, "messages": talk, "finish_reasons": reasons}
    assert sum(tally.finished.values()) == 4 and tally.cut == 0


SHAREGPT = {
    "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "old"}],
    "system": "Be brief.",
    "source": "x",
}
ALPACA = {"instruction": "Hello", "input": "", "output": "old", "system": "Be brief.", "history": [], "source": "x"}


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.jsonl.gz"])
@pytest.mark.parametrize("record", [SHAREGPT, ALPACA], ids=["sharegpt", "alpaca"])
def test_the_forms_and_files_that_training_reads_are_answered(rig, run, record, name):
    content = json.dumps([record]) if name.endswith(".json") else json.dumps(record)
    content = gzip.compress(content.encode()) if name.endswith(".gz") else content.encode()
    [written], tally = run(content, data=name)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    answer, reason = alone(rig, rig[2].apply_chat_template(talk))
    # The old answers are gone, under whichever field they were.
    messages = [*talk, {"role": "assistant", "content": answer}]
    assert written == {"source": "x", "messages": messages, "finish_reasons": [reason]}
    assert (tally.read, tally.regenerated) == (1, 1)


def test_programs_are_freed_between_windows(run, tmp_path, monkeypatch):
    cleared = []
    (tmp_path / "limit").write_text("1")
    monkeypatch.setattr(program_memory, "LIMIT_FILE", tmp_path / "limit")
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(1))
    run([{"prompt": "def "}] * 5)  # windows of four
    assert len(cleared) == 2


def test_prompts_become_conversations(rig, run):
    tokenizer = rig[2]
    written, _ = run(
        [{"question_id": 81, "category": "writing", "turns": ["Hi", "Again"]}, {"question": "2?"}], chat=True
    )
    assert [[each["role"] for each in record["messages"]] for record in written] == [
        ["user", "assistant"] * 2,
        ["user", "assistant"],
    ]
    first, second = written
    assert first["question_id"] == 81 and first["category"] == "writing"
    assert first["messages"][1]["content"] == alone(rig, tokenizer.apply_chat_template(first["messages"][:1]))[0]
    assert first["messages"][3]["content"] == alone(rig, tokenizer.apply_chat_template(first["messages"][:3]))[0]
    assert second["messages"][0]["content"] == "2?"


def test_a_documents_beginning_is_kept(rig, run):
    tokenizer = rig[2]
    text = "naïve é" * 20
    for tokens, kept in ((3, "na"), (4, "naï"), (64, text[:50])):
        changes = {} if tokens == 64 else {"prompt_tokens": tokens}
        [record], _ = run(text.encode(), f"{tokens}.jsonl", data="some.txt", **changes)
        assert record["text"] == kept + alone(rig, tokenizer.encode(kept))[0]
        assert len(tokenizer.encode(kept)) <= tokens


@pytest.mark.slow
def test_sampled_texts_depend_on_the_number_and_the_seed_alone(rig, run, tmp_path):
    tokenizer = rig[2]
    records = [*TALKS, *TALKS]
    one = run(records, "1.jsonl", temperature=0.9, batch_size=1)[0]
    assert one == run(records, "8.jsonl", temperature=0.9, batch_size=8)[0]
    assert one != run(records, "seed.jsonl", temperature=0.9, batch_size=8, seed=1)[0]
    texts = [record["messages"] for record in one]
    assert texts[:3] != texts[3:]  # the same records at other numbers
    plain = dataclasses.replace(rig[3], num_steps=0)
    [first, *_] = run(records, "plain.jsonl", temperature=0.9, config=plain)[0]
    prompt = tokenizer.apply_chat_template(TALKS[0]["messages"][:1])
    assert first["messages"][1]["content"] == alone(rig, prompt, temperature=0.9, seed=answer_seed(0, 0, 0))[0]
    assert len({answer_seed(*numbers) for numbers in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))}) == 4


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    "owner, name, period",
    [(module, "speculative_generate", 5), (os, "fsync", 2), (regeneration_output, "write_text", 2)],
    ids=["while decoding", "half a window written", "a window not noted"],
)
def test_an_ended_run_goes_on_with_the_same_bytes(run, tmp_path, monkeypatch, owner, name, period):
    records = [*TALKS, {"messages": 3}, *TALKS, *TALKS]
    unbroken, whole = run(records, "unbroken.jsonl", temperature=0.9)
    real, calls, ended = getattr(owner, name), [], 0

    def dies(*args, **kwargs):
        calls.append(args)
        if len(calls) % period == 0:
            if name == "fsync":
                os.truncate(tmp_path / "answers.jsonl", (tmp_path / "answers.jsonl").stat().st_size - 7)
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, dies)
    for _ in range(9):
        try:
            again, tally = run(records, temperature=0.9)
            break
        except Killed:
            ended += 1
    assert ended >= 2 and again == unbroken
    assert (tmp_path / "answers.jsonl").read_bytes() == (tmp_path / "unbroken.jsonl").read_bytes()
    assert dataclasses.replace(tally, seconds=0) == dataclasses.replace(whole, seconds=0)
    assert tally.skipped["corrupt"] == 1 and tally.read == 10


def test_training_reads_the_output_with_loss_on_the_answers_alone(rig, run, tmp_path):
    tokenizer = rig[2]
    written, _ = run(TALKS, temperature=0.9)
    source = json.loads((tmp_path / "answers.jsonl.about.json").read_text())["source"]
    assert source == {"path": "answers.jsonl", "kind": "chat"}
    reading = read_source(Source(path=str(tmp_path / "answers.jsonl"), kind="chat"), tokenizer, vocab_size=300)
    assert len(reading.documents) == 3 and not any(reading.skipped.values())
    for document, record in zip(reading.documents, written, strict=True):
        answers = [each for each in record["messages"] if each["role"] == "assistant" and each.get("weight") != 0]
        wanted = [token for each in answers for token in (*tokenizer.encode(each["content"]), STOP)]
        assert document.tokens[document.loss_mask[:-1]].tolist() == wanted
    written, _ = run([{"text": "abc"}], "texts.jsonl")
    reading = read_source(Source(path=str(tmp_path / "texts.jsonl"), kind="jsonl"), tokenizer, vocab_size=300)
    assert [tokenizer.decode(document.tokens) for document in reading.documents] == [written[0]["text"]]


def test_what_cannot_be_used_is_counted(rig, run):
    long = {"role": "user", "content": "x" * 260}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    records = [
        "nonsense",
        json.dumps([1]),
        json.dumps({"messages": []}),
        json.dumps({"messages": [{"content": "x"}]}),
        json.dumps({"text": "x"}),
        json.dumps({"messages": [{"role": "system", "content": "x"}]}),
        json.dumps({"messages": [long]}),
        json.dumps({"messages": [TALKS[0]["messages"][0], call]}),
        "",
        json.dumps({"messages": [*TALKS[0]["messages"], long]}),
        json.dumps(TALKS[0]),
    ]
    written, tally = run("\n".join(records).encode() + b'\n{"messages": "\xff"}')
    assert tally.skipped == {"corrupt": 6, "empty": 1, "too long": 1, "unreadable": 1}
    assert (tally.read, tally.regenerated, tally.cut) == (11, 2, 1)
    assert written[0]["messages"] == written[1]["messages"]  # cut before what is too long
    assert "11 records: 2 regenerated (1 of them cut), 9 skipped (6 corrupt, 1 empty, 1 too long, 1 unread" in str(
        tally
    )
    written, tally = run(
        [{"text": " "}, {"answer": "x"}, {"turns": []}, {"text": "x" * 260}, {"text": "ok"}], "t.jsonl"
    )
    assert tally.skipped == {"corrupt": 2, "empty": 1, "too long": 1, "unreadable": 0} and len(written) == 1


def test_answers_that_training_would_read_otherwise_are_counted_or_left_out(rig, run, tmp_path):
    """A special token that is decoded to nothing; a template that forgets earlier answers."""
    everything = SamplingParams(allowed_tokens=[256 + SPECIAL.index("<|user|>")])
    written, tally = run(TALKS, sampling=everything)
    assert tally.changed == 4 and written[0]["messages"][1]["content"] == ""
    forgetful = CHATML.replace("message.content", "message.content if loop.last or message.role != 'assistant' else ''")
    letters = SamplingParams(allowed_tokens=[rig[2].encode("a")[0]])
    _, tally = run(TALKS, "f.jsonl", tokenizer=save_tokenizer(tmp_path, forgetful), sampling=letters)
    assert (tally.regenerated, tally.skipped["unreadable"]) == (2, 1)
    refusing = "{% if messages | length > 3 %}{{ raise_exception('enough') }}{% endif %}" + CHATML
    _, tally = run(TALKS, "r.jsonl", tokenizer=save_tokenizer(tmp_path, refusing))
    assert (tally.regenerated, tally.skipped["unreadable"]) == (2, 1)


def test_only_what_was_begun_is_gone_on_with(run, tmp_path):
    run(TALKS)
    content = (tmp_path / "answers.jsonl").read_bytes()
    assert run(TALKS)[1].regenerated == 3 and (tmp_path / "answers.jsonl").read_bytes() == content
    with pytest.raises(
        ValueError, match=r"different settings: seed was 0, is 3; temperature was 0.0, is 0.5\. To start"
    ):
        run(TALKS, temperature=0.5, seed=3)
    with pytest.raises(ValueError, match="written with different settings: data was '"):
        run(TALKS[:2])
    (tmp_path / "answers.jsonl").write_bytes(content[:-1] + b" ")
    with pytest.raises(ValueError, match=r"was changed after it was written: remove it and answers\.jsonl\.about"):
        run(TALKS)
    (tmp_path / "answers.jsonl").write_bytes(content[:-1])
    with pytest.raises(ValueError, match="was changed after it was written"):
        run(TALKS)
    (tmp_path / "answers.jsonl.about.json").write_text("{")
    with pytest.raises(ValueError, match=r"answers.jsonl.about.json is damaged"):
        run(TALKS)
    with pytest.raises(ValueError, match=r"data.jsonl exists without its manifest data.jsonl.about.json"):
        run(TALKS, "data.jsonl")
    with (tmp_path / "busy.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"busy.jsonl is being written to by another process"):
            run(TALKS, "busy.jsonl")


@pytest.mark.parametrize(
    ("content", "changes", "said"),
    [
        (b"nonsense\n", {}, "contains no record: none of it is a JSON object"),
        (b'{"messages": 3}', {}, "no record could be used: 1 record: 0 regenerated, 1 skipped"),
        (b'{"text": "x"}', {"batch_size": 0}, "batch_size must be at least 1, not 0"),
        (b'{"text": "x"}', {"seed": -1}, "seed must be at least 0"),
        (b'{"text": "x"}', {"prompt_tokens": 0}, "prompt_tokens must be at least 1"),
        (b'{"text": "x"}', {"prompt_tokens": 2, "chat": True}, "messages are kept whole"),
        (b"text", {"data": "some.txt", "chat": True}, "documents are not messages"),
        (b'{"text": "x"}', {"config": DecodeConfig(max_new_tokens=256)}, "leaves no room"),
        (
            b'{"text": "x"}',
            {"config": DecodeConfig(num_steps=1, depth_policy="adaptive", depth_costs=(1.0, 1.0))},
            "depth_policy must be 'fixed'",
        ),
    ],
)
def test_bad_requests_are_told(run, content, changes, said):
    with pytest.raises(ValueError, match=said):
        run(content, **changes)


def test_files_of_two_kinds_are_told(rig, tmp_path):
    for name in ("a.jsonl", "b.txt"):
        (tmp_path / name).write_text('{"text": "x"}')
    with pytest.raises(ValueError, match=r"some files contain records \(.jsonl, .*, others plain text: select by"):
        RegenerationRequest(paths=[tmp_path / "a.jsonl", tmp_path / "b.txt"], config=rig[3])


def command(arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["regenerate", *map(str, arguments)])
    return exit_.value.code


@pytest.mark.slow  # .ci/run has the command
def test_the_command_writes_tells_and_goes_on(checkpoint, tmp_path, capsys, monkeypatch):
    folder, output = tmp_path / "texts", tmp_path / "out" / "answers.jsonl"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"file {number} with some text\n")
    monkeypatch.setattr(module, "BATCHES_PER_WINDOW", 1)
    arguments = ["--model", checkpoint, "--data", folder, "--pattern", "*.txt", "--output", output, "--batch-size", 2]
    arguments += ["--prompt-tokens", 6, "--max-new-tokens", 8, "--temperature", 0.7, "--top-p", 0.9, "--num-steps", 1]
    real, calls = module.speculative_generate, []

    def interrupted(*args, **kwargs):
        calls.append(kwargs)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "speculative_generate", interrupted)
    assert command(arguments) == 75
    said = capsys.readouterr().err
    assert "40% done: 2 records: 2 regenerated" in said and "run the same command again" in said
    assert command(arguments) == 0
    captured = capsys.readouterr()
    assert f"{output} (kind jsonl): 5 records: 5 regenerated, 0 skipped; 5 answers" in captured.out
    assert "accept length" in captured.out and "tokens/s" in captured.out
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["text"][:6] for record in records] == [f"file {number}" for number in range(5)]
    about = json.loads(output.with_name("answers.jsonl.about.json").read_text())
    assert about["settings"]["top_p"] == 0.9 and about["settings"]["num_steps"] == 1 and about["tally"]["read"] == 5
    other = [*arguments[:6], "--output", tmp_path / "other.jsonl", *arguments[8:]]
    assert command([*other, "--top-p", 2]) == 2
    assert "top_p 2.0 must be within 0..1" in capsys.readouterr().err
    assert command(other) == 0 and (tmp_path / "other.jsonl").read_bytes() == output.read_bytes()
    assert command([*arguments, "--seed", 1]) == 2
    assert "written with different settings: seed was 0, is 1" in capsys.readouterr().err
    for extra, code, text in (
        (["--data", "missing"], 2, "missing does not exist"),
        (["--model", "missing"], 3, "missing does not exist"),
        (["--batch-size", 0], 2, "batch_size must be at least 1, not 0"),
    ):
        assert command([*arguments, *extra]) == code
        error = capsys.readouterr().err.strip()
        assert text in error and len(error.splitlines()) == 1
    assert command(["--help"]) == 0 and "--prompt-tokens" in capsys.readouterr().out
    among_the_data = [*arguments[:6], "--output", folder / "answers.txt", *arguments[8:]]
    assert command(among_the_data) == command(among_the_data) == 0  # but none of it
