"""Which tokens are frequent, what they cover, and files that are refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tokenizers

from mtpjax import MTPModel, init_params, presets
from mtpjax.cli.main import main
from mtpjax.data.draft_vocabulary import (
    choose_vocabulary,
    count_tokens,
    coverage,
    load_vocabulary,
    report_sizes,
    save_vocabulary,
)
from mtpjax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from mtpjax.decoding.config import DecodeConfig
from mtpjax.io.checkpoint import save_model


def test_counts_are_those_of_all_texts_however_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("mtpjax.data.draft_vocabulary.PIECE_CHARACTERS", 5)
    (tmp_path / "a.txt").write_text("ab\nab\nfünf\nabab")
    (tmp_path / "b.jsonl").write_text('{"question": "b", "answer": "bb", "category": "zzz"}\n{"turns": ["c", "d"]}\n')
    (tmp_path / "c.bin").write_bytes(b"\xff\0")
    (tmp_path / "d.jsonl").write_text('{"text": "zzz"}\n{"text": "\\ud83d"}\n')  # half a character in the second
    told = []
    files = sorted(tmp_path.iterdir())
    corpus = count_tokens(files, ByteTokenizer(), 256, progress=told.append)
    expected = np.bincount(np.frombuffer("ab\nab\nfünf\nababbbbcd".encode(), np.uint8), minlength=256)
    assert (corpus.counts == expected).all()
    assert corpus.num_files == 2 and corpus.skipped == (str(tmp_path / "c.bin"), str(tmp_path / "d.jsonl"))
    assert sum(told) == sum(file.stat().st_size for file in files)


def test_the_messages_of_conversations_are_counted(tmp_path):
    messages = [{"role": "user", "content": [{"type": "text", "text": "aa"}]}, {"role": "assistant", "content": "b"}]
    sharegpt = [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]
    (tmp_path / "a.json").write_text(json.dumps([{"messages": messages}, {"conversations": sharegpt}]))
    (tmp_path / "b.jsonl").write_text(json.dumps({"instruction": "e", "output": "f"}) + "\n")
    corpus = count_tokens(sorted(tmp_path.iterdir()), ByteTokenizer(), 256)
    assert (corpus.counts == np.bincount(np.frombuffer(b"aabcdef", np.uint8), minlength=256)).all()
    (tmp_path / "b.jsonl").write_text('{"nothing": 1}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl line 1 has no text in any of the fields turns"):
        count_tokens([tmp_path / "b.jsonl"], ByteTokenizer(), 256)


def test_the_most_frequent_are_kept_ties_by_id_and_special_ones_always():
    counts = np.array([0, 5, 7, 5, 5, 0, 9, 0])
    assert choose_vocabulary(counts, 3) == (1, 2, 6)
    assert choose_vocabulary(counts, 4, required_ids=(7,)) == (1, 2, 6, 7)
    assert choose_vocabulary(counts, 2, required_ids=(7, 0)) == (0, 7)
    assert choose_vocabulary(counts, 8) == tuple(range(8))
    assert coverage(counts, (1, 2, 6)) == 21 / 31
    for size in (0, 1, 9):
        with pytest.raises(ValueError, match=f"size {size} is outside 2..8"):
            choose_vocabulary(counts, size, required_ids=(7, 0))
    assert report_sizes(32, 256, 1) == [4, 8, 16, 32, 64, 128, 256]
    assert report_sizes(200, 256, 60) == [100, 200, 256]


def test_special_tokens_are_those_that_the_tokenizer_says(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<end>"])
    words.add_tokens(["plain"])
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path, 8)
    assert tokenizer.special_token_ids == (3,)
    (tmp_path / "text.txt").write_text("b c c")
    corpus = count_tokens([tmp_path / "text.txt"], tokenizer, 8)
    assert corpus.counts.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]


def test_a_file_comes_back_as_ids_for_decoding(tmp_path):
    counts = np.arange(10)
    path = tmp_path / "folder" / "ids.json"
    save_vocabulary(path, (0, 8, 9), counts=counts, source="x", sizes={3: 0.4})
    assert load_vocabulary(path) == (0, 8, 9)
    assert DecodeConfig(draft_vocabulary=load_vocabulary(path)).draft_vocabulary == (0, 8, 9)
    content = json.loads(path.read_text())
    assert content["coverage"] == 17 / 45 and content["size"] == 3 and content["source"] == "x"
    assert [file.name for file in path.parent.iterdir()] == ["ids.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"ids": [1]}',
        '{"format": "mtpjax-vocabulary", "vocab_size": 9, "ids": []}',
        '{"format": "mtpjax-vocabulary", "vocab_size": 9, "ids": [1, 9]}',
        '{"format": "mtpjax-vocabulary", "vocab_size": 9, "ids": [2, 1]}',
        '{"format": "mtpjax-vocabulary", "vocab_size": 9, "ids": [1, true]}',
        '{"format": "mtpjax-vocabulary", "ids": [1]}',
    ],
)
def test_damaged_vocabularies_are_refused(tmp_path, content):
    path = tmp_path / "ids.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"ids\.json is (not a vocabulary file|damaged)"):
        load_vocabulary(path)


def test_a_corpus_without_text_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="no token"):
        count_tokens([tmp_path / "empty"], ByteTokenizer(), 256)
    (tmp_path / "empty").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="line 1 is not UTF-8"):
        count_tokens([tmp_path / "empty"], ByteTokenizer(), 256)


def test_the_command_counts_and_refuses_in_one_line(tmp_path, capsys):
    narrow = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "head_dim": 4}
    model = MTPModel(dataclasses.replace(presets["tiny"], **narrow))
    save_model(tmp_path / "checkpoint", model, init_params(model, jax.random.key(0)))
    (tmp_path / "text.txt").write_text("aabbbc")

    def run(data, size):
        arguments = ["--model", str(tmp_path / "checkpoint"), "--data", str(data), "--size", str(size)]
        with pytest.raises(SystemExit) as exit_:
            main(["vocabulary", *arguments, "--output", str(tmp_path / "ids.json")])
        return exit_.value.code, capsys.readouterr()

    code, said = run(tmp_path / "text.txt", 3)
    assert max(map(len, said.out.splitlines()[:-1])) <= 80  # the last line names the file
    assert code == 0 and "83.33%" in said.out and load_vocabulary(tmp_path / "ids.json") == (0, 97, 98)
    for data, size, expected in (
        ("missing", 3, "missing does not exist"),
        (tmp_path / "text.txt", 257, "outside 1..256"),
    ):
        code, said = run(data, size)
        assert code == 2 and expected in said.err and len(said.err.strip().splitlines()) == 1
