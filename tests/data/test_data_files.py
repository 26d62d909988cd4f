"""Which files of a folder are data: text of all kinds and records, and what is left out is counted."""

import json
import os

import pytest

from mtpjax import TrainConfig
from mtpjax.data.config import Source
from mtpjax.data.data_files import list_data_files
from mtpjax.data.sources import read_source
from mtpjax.data.tokenizer import ByteTokenizer
from mtpjax.training.corpus import load_corpus

TALK = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes, what is it?"}]}


@pytest.fixture
def folder(tmp_path):
    """Text of three kinds, records of two, and what no model can read."""
    root = tmp_path / "texts"
    for name, content in {
        "a.txt": "plain text\n" * 40,
        "notes/b.md": "# heading\n" * 40,
        "c.py": "x = 1\n" * 40,
        "d.jsonl": json.dumps({"text": "a record"}) + "\n" + json.dumps(TALK) + "\n",
        "e.json": json.dumps([{"text": "an item"}]),
        ".hidden.txt": "hidden",
        ".git/objects/f": "hidden too",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (root / "utf16.txt").write_bytes("text".encode("utf-16"))
    (root / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (root / "empty.txt").touch()
    (root / "elsewhere").symlink_to(tmp_path)
    (root / "broken").symlink_to(tmp_path / "missing")
    return root


def test_a_mixed_folder_is_read_and_every_file_that_is_not_is_counted(folder, capsys):
    config = TrainConfig(data=str(folder), row_length=16, held_out_fraction=0.3)
    load_corpus(config, 256, num_depths=1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"read {folder}: 7 files, 6 documents; ")
    left_out = f"left out files of {folder}: "
    assert lines[1].startswith(left_out)
    counts, last = lines[1].removeprefix(left_out).split("; the last: ")
    assert set(counts.split(", ")) == {"2 hidden", "2 binary", "2 not a file"} and last == str(folder / "utf16.txt")
    skipped = f"skipped documents of {folder}: 1 corrupt, 1 empty; the last: {folder / 'latin.txt'} is not UTF-8 text"
    assert lines[2:] == [skipped]


@pytest.mark.parametrize("suffix", [".txt", ".md", ".rst", ".py", ".html", ""])
def test_text_files_of_every_kind_are_data_by_default(suffix, tmp_path):
    for number in range(40):
        (tmp_path / f"{number}{suffix}").write_text(f"text {number}\n" * 20)
    corpus = load_corpus(TrainConfig(data=str(tmp_path), row_length=16, held_out_fraction=0.3), 256, num_depths=1)
    assert len(corpus.held_out) > 0


def test_a_pattern_chooses_files_and_may_name_hidden_ones(folder):
    assert [file.name for file in list_data_files(folder, "*.md").paths] == ["b.md"]
    assert [file.name for file in list_data_files(folder, ".*.txt").paths] == [".hidden.txt"]


def test_a_folder_without_text_names_what_it_left_out(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no files match \*\.rst under"):
        list_data_files(tmp_path, "*.rst")
    (tmp_path / "a.png").write_bytes(b"\0")
    with pytest.raises(FileNotFoundError, match=r"no files match \* under .* \(left out: 1 binary; the last: .*"):
        list_data_files(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        list_data_files(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="neither a regular file nor a folder"):
        list_data_files(tmp_path / "pipe")


@pytest.mark.parametrize(("content", "problem"), [(b"a\0b" * 9, "contains NUL"), (b"\xe4", "UTF-8"), (b"", "is empty")])
def test_one_file_without_text_is_refused(content, problem, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"has no usable document; the last: .*file .*{problem}"):
        load_corpus(TrainConfig(data=str(file)), 256)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    [document] = read_source(Source(path=str(tmp_path)), ByteTokenizer(), vocab_size=256).documents
    assert bytes(document.tokens) == b"text"


def test_settings_of_a_source_without_effect_are_refused(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("text")
    with pytest.raises(ValueError, match=r"pattern '\*.txt' selects files in a folder, but .*book.txt is a file"):
        list_data_files(file, "*.txt")
    with pytest.raises(ValueError, match=r"pattern '\*.txt' is unused: it needs a path"):
        Source(pattern="*.txt")
    with pytest.raises(ValueError, match="field 'body' is unused: kind 'text' has no records"):
        Source(path="a", kind="text", field="body")
    with pytest.raises(ValueError, match=r"field 'body' is unused: .*book.txt has only texts"):
        read_source(Source(path=str(file), field="body"), ByteTokenizer(), vocab_size=256)


def test_the_folder_of_the_run_is_no_data(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text\n" * 99)
    config = TrainConfig(data=str(tmp_path), output=str(tmp_path / "runs" / "mine"), row_length=16)
    before = load_corpus(config, 256, num_depths=1).fingerprint
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "metrics.jsonl").write_text('{"text": "a row"}\n')
    capsys.readouterr()
    assert load_corpus(config, 256, num_depths=1).fingerprint == before  # so that the run can be resumed
    assert f"left out files of {tmp_path}: 1 of the run; the last: " in capsys.readouterr().err
