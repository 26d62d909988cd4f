"""Data in the forms that other projects document: suffixes decide how files are read, fields what records are."""

import gzip
import json
import os

import numpy as np
import pytest

from mtpjax.data.config import Source
from mtpjax.data.sources import read_source
from mtpjax.data.tokenizer import ByteTokenizer
from mtpjax.errors import UnsafeFileError

# OpenAI's fine-tuning guide, "chat format".
OPENAI = {
    "messages": [
        {"role": "system", "content": "Marv is a factual chatbot that is also sarcastic."},
        {"role": "user", "content": "What's the capital of France?"},
        {"role": "assistant", "content": "Paris, as if everyone doesn't know that already."},
    ]
}
# LLaMA-Factory, data/README.md, "ShareGPT format".
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "user instruction"},
        {"from": "function_call", "value": "tool arguments"},
        {"from": "observation", "value": "tool result"},
        {"from": "gpt", "value": "model response"},
    ],
    "system": "system prompt (optional)",
}
# Stanford Alpaca, alpaca_data.json: its fields; `system` and `history` are LLaMA-Factory's.
ALPACA = {"instruction": "Add the numbers.", "input": "1, 2", "output": "3"}
ALPACA_HISTORY = {**ALPACA, "input": "", "system": "Be short.", "history": [["1 + 1", "2"]]}
EXPECTED = [
    (
        OPENAI,
        "system: Marv is a factual chatbot that is also sarcastic.\nuser: What's the capital of France?\n"
        "assistant: Paris, as if everyone doesn't know that already.\0",
    ),
    (
        SHAREGPT,
        "system: system prompt (optional)\nuser: user instruction\nassistant: tool arguments\0"
        "tool: tool result\nassistant: model response\0",
    ),
    (ALPACA, "user: Add the numbers.\n1, 2\nassistant: 3\0"),
    (ALPACA_HISTORY, "system: Be short.\nuser: 1 + 1\nassistant: 2\0user: Add the numbers.\nassistant: 3\0"),
    ({"text": "plain"}, "plain"),
]
RECORDS = [record for record, _ in EXPECTED]


def texts(path, **changes):
    reading = read_source(Source(path=str(path), max_skipped=0, **changes), ByteTokenizer(), vocab_size=256)
    return [document.tokens.astype(np.uint8).tobytes().decode() for document in reading.documents]


def write(path, records):
    """Writes records in the format of the path's suffix."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    elif path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_text(lines)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"])
@pytest.mark.parametrize("record, expected", EXPECTED, ids=["openai", "sharegpt", "alpaca", "history", "text"])
def test_every_form_is_read_from_every_format(name, record, expected, tmp_path):
    assert texts(write(tmp_path / name, [record] * 3)) == [expected] * 3
    if expected.endswith("\0"):
        assert texts(tmp_path / name, kind="chat") == [expected] * 3


def test_a_folder_of_several_formats_is_read_by_suffix(tmp_path):
    write(tmp_path / "a.jsonl", RECORDS)
    write(tmp_path / "b.jsonl.gz", [{"text": "gz"}])
    (tmp_path / "c.txt").write_text('{"text": 1}\n')
    assert texts(tmp_path) == [*(text for _, text in EXPECTED), "gz", '{"text": 1}\n']
    assert texts(tmp_path, kind="text", pattern="*.jsonl")[0].startswith('{"messages"')


USER, OLD, NEW = ("user", "q"), ("assistant", "old"), ("assistant", "new")


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"weight": False}, {"train": False}], ids=str)
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")], ids=["openai", "sharegpt"])
def test_an_answer_that_is_marked_is_no_target(keys, mark, tmp_path):
    talk = [dict(zip(keys, turn, strict=True)) for turn in (USER, OLD, USER, NEW)]
    talk[1] |= mark
    talk[3] |= {"weight": 1, "train": True}
    file = write(tmp_path / "a.jsonl", [{"messages": talk}])
    [document] = read_source(Source(path=str(file)), ByteTokenizer(), vocab_size=256).documents
    assert bytes(document.tokens[document.loss_mask[:-1]].astype(np.uint8)) == b"new\0"


def test_a_system_text_beside_the_messages_is_the_first_message(tmp_path):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    system = {"role": "system", "content": "Be brief."}
    plain = texts(write(tmp_path / "plain.jsonl", [{"messages": [system, *messages]}]))
    assert texts(write(tmp_path / "beside.jsonl", [{"messages": messages, "system": "Be brief."}])) == plain
    assert texts(write(tmp_path / "both.jsonl", [{"messages": [system, *messages], "system": "Be brief."}])) == plain


REFUSED = [
    ({"prompt": "a"}, "has no text in field 'text', and no 'messages', 'conversations' or 'instruction'"),
    ({"messages": "a"}, "has no 'messages', which must be a list"),
    ({"messages": [{"content": "a"}]}, "item 1 has no 'role'"),
    ({"messages": [{"role": "user", "content": 3}]}, "'messages' item 1: 'content' is a number, not text"),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, "'conversations' item 1: 'from' is 'narrator'"),
    ({"conversations": [{"from": "human"}]}, "'conversations' item 1: 'value' is missing"),
    ({"conversations": [{"from": "human", "value": "a"}, 3]}, "'conversations' item 2 is a number, not an object"),
    ({"messages": [{"role": "assistant", "content": "a", "weight": "0"}]}, "item 1: 'weight' is '0', not 0 or 1"),
    ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, "item 1: 'weight' is 0.5, not 0 or 1"),
    ({"messages": [{"role": "assistant", "content": "a", "train": "no"}]}, "'train' is 'no', not true or false"),
    ({"conversations": [{"from": "gpt", "value": "a", "weight": "0"}]}, "item 1: 'weight' is '0', not 0 or 1"),
    ({"messages": [{"role": "user", "content": "a"}], "system": ["b"]}, "'system' is a list, not text"),
    ({"instruction": "a"}, "'output' is missing"),
    ({"instruction": "a", "output": ["b"]}, "'output' is a list, not text"),
    ({"instruction": "a", "output": "b", "history": [["c"]]}, "'history' is not a list of pairs"),
]


@pytest.mark.parametrize("record, problem", REFUSED)
def test_a_refused_record_names_its_field(record, problem, tmp_path):
    with pytest.raises(ValueError, match="unusable") as raised:
        texts(write(tmp_path / "a.jsonl", [record]))
    assert f"the last: {tmp_path / 'a.jsonl'} line 1 " in str(raised.value) and problem in str(raised.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.json"])
def test_a_damaged_file_is_one_line(name, tmp_path):
    content = write(tmp_path / name, RECORDS[:1] * 50).read_bytes()
    for damaged in (content[: len(content) // 2], b"no such format"):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{name} is not ") as raised:
            texts(tmp_path / name)
        assert str(raised.value).isprintable()


def test_a_path_that_is_missing_or_no_file_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl does not exist"):
        texts(tmp_path / "nowhere.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", "/dev/zero"):
        with pytest.raises((ValueError, UnsafeFileError), match="regular file"):
            texts(path)
