"""The training data of a run."""

import dataclasses
import json

import numpy as np
import pytest

from mtpjax import TrainConfig, presets, train
from mtpjax.data.sources import SKIP_REASONS
from mtpjax.training.corpus import load_corpus
from tests.helpers import training_runs
from tests.helpers.chatml import CHATML, save_tokenizer


def test_runs_of_all_seeds_are_evaluated_on_the_same_held_out_rows(tmp_path):
    data = str(training_runs.write_corpus(tmp_path))
    first, second = (
        load_corpus(TrainConfig(data=data, row_length=32, held_out_fraction=0.5, seed=seed), 256) for seed in (0, 1)
    )
    assert sum(len(document.tokens) for document in first.held_out) > 2 * first.panel_rows.tokens.size  # a choice
    np.testing.assert_array_equal(first.panel_rows.tokens, second.panel_rows.tokens)


def test_one_text_file_is_data(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("".join(f"line {number}\n" for number in range(2000)))
    corpus = load_corpus(TrainConfig(data=str(file), row_length=32, held_out_fraction=0.1), 256, num_depths=1)
    [held_out] = corpus.held_out
    assert 0.09 < len(held_out.tokens) / file.stat().st_size < 0.11


def test_nothing_is_held_out_at_fraction_0(tmp_path, capsys):
    file = tmp_path / "book.txt"
    file.write_text("".join(f"line {number}\n" for number in range(2000)))
    corpus = load_corpus(TrainConfig(data=str(file), row_length=32, held_out_fraction=0.0), 256, num_depths=1)
    assert not corpus.held_out and len(corpus.panel_rows.tokens) == 32
    assert sum(int(rows.loss_mask.sum()) for rows in corpus.source_rows) == file.stat().st_size + 1
    assert "the panel measures training rows" in capsys.readouterr().err


def test_data_without_a_usable_record_names_the_field(tmp_path):
    file = tmp_path / "talks.jsonl"
    file.write_text('{"prompt": "a"}\n' * 3)
    with pytest.raises(
        ValueError, match=r"talks.jsonl has no usable document; the last: .*line 3 has no text in field 'text'"
    ):
        load_corpus(TrainConfig(data=str(file), row_length=32), 256)


def test_answers_that_cannot_be_located_are_counted_and_told(tmp_path, capsys):
    forgetful = CHATML.replace("message.content", "message.content if loop.last or message.role == 'user' else ''")
    save_tokenizer(tmp_path, forgetful)
    file = tmp_path / "talks.jsonl"
    turn = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes, what is it?"}]
    records = [{"messages": turn}, {"messages": turn * 2}, {"messages": turn * 3}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"data": str(file), "tokenizer": str(tmp_path), "row_length": 64, "held_out_fraction": 0.0}
    corpus = load_corpus(TrainConfig(**settings), 300, num_depths=1)
    assert corpus.summary["lost_answers"] == [3] and corpus.summary["skipped"] == [dict.fromkeys(SKIP_REASONS, 0)]
    assert f"skipped answers of {file}: 3 that cannot be located; the last: {file} line 3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_with_nothing_held_out_ends_with_a_panel(tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text("".join(f"line {number}\n" for number in range(500)))
    small = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24, "head_dim": 8}
    monkeypatch.setitem(presets, "narrow", dataclasses.replace(presets["tiny"], **small))
    settings = {"preset": "narrow", "data": str(tmp_path / "book.txt"), "output": str(tmp_path / "out"), "steps": 2}
    result = train(TrainConfig(**settings, batch_size=2, row_length=32, held_out_fraction=0.0))
    assert result.panel is not None and result.held_out == []
    assert not result.history[-1]["eval"]["decoded"]
