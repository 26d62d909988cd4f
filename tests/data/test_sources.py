"""Sources -> documents; what is skipped; and what the fingerprint of a run's data sees."""

import dataclasses
import json
import os

import numpy as np
import pytest

from mtpjax.data import packing
from mtpjax.data.config import Source
from mtpjax.data.sources import end_token_id, fingerprint, read_source
from mtpjax.data.tokenizer import ByteTokenizer, TokenizerError
from tests.helpers.documents import file_documents

BYTES = ByteTokenizer()


def lines_of(*records):
    return "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)


def read(path, tokenizer=BYTES, vocab_size=256, **changes):
    return read_source(Source(path=str(path), **changes), tokenizer, vocab_size=vocab_size)


def texts(reading):
    return [bytes(document.tokens).decode() for document in reading.documents]


class WordTokenizer:
    """A token per word: its length."""

    eos_token_ids = (0,)
    special_token_ids = (0,)
    digest = "words"

    def encode(self, text):
        return [len(word) for word in text.split()]


# Text and JSONL.


def test_a_folder_of_text_gives_a_document_per_file(tmp_path):
    for name, text in {"b.txt": "second é\r\n", "a/c.txt": "first", "d.md": "other"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    reading = read(tmp_path, pattern="*.txt")
    assert texts(reading) == ["first", "second é\r\n"] and set(reading.skipped.values()) == {0}
    plain = file_documents([tmp_path / "a/c.txt", tmp_path / "b.txt"])
    assert [each.name for each in reading.documents] == [each.name for each in plain]
    for document, expected in zip(reading.documents, plain, strict=True):
        assert document.tokens.dtype == expected.tokens.dtype == np.uint8
        np.testing.assert_array_equal(document.tokens, expected.tokens)
    assert texts(read(tmp_path / "d.md")) == ["other"]
    with pytest.raises(FileNotFoundError, match=r"no files match \*\.rst under"):
        read(tmp_path, pattern="*.rst")


def test_a_line_of_jsonl_gives_a_document_by_its_field(tmp_path):
    file = tmp_path / "some.jsonl"
    records = {"text": "one", "body": "1", "category": "code"}, "", {"text": "two\n", "body": "2", "category": 3}
    file.write_text("\ufeff" + lines_of(*records))
    reading = read(file, kind="jsonl")
    assert texts(reading) == ["one", "two\n"]
    assert [document.name for document in reading.documents] == [f"{file} line 1", f"{file} line 3"]
    assert [document.category for document in reading.documents] == ["code", ""]
    assert texts(read(file, kind="jsonl", field="body")) == ["1", "2"]


def test_every_tokenizer_gives_documents_without_their_end(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not")
    [document] = read(tmp_path, WordTokenizer()).documents
    assert document.tokens.dtype == np.int32 and document.tokens.tolist() == [2, 2, 2, 3]

    class Ending(WordTokenizer):
        def encode(self, text):
            return [*super().encode(text), 0]

    assert read(tmp_path, Ending()).documents[0].tokens.tolist() == [2, 2, 2, 3]

    class Endless(WordTokenizer):
        eos_token_ids = ()

    with pytest.raises(TokenizerError, match="has no end token"):
        read(tmp_path, Endless())
    assert end_token_id(BYTES) == 0


# What is skipped.

BAD = [
    ("{,", "corrupt", "is not JSON"),
    ("[1]", "corrupt", "is not a JSON object"),
    ('{"txt": "a"}', "corrupt", "has no text in field 'text'"),
    ('{"text": 3}', "corrupt", "has no text in field 'text'"),
    ('{"text": "a\\u0000b"}', "corrupt", "contains the end token 0"),
    ('{"text": "a\\ud800b"}', "corrupt", "is not JSON: 'utf-8' codec"),
    ("[" * 100_000, "corrupt", "is not JSON"),
    (b'{"text": "\xe4"}', "corrupt", "is not UTF-8"),
    ('{"text": ""}', "empty", "is empty"),
]


def test_unusable_records_are_skipped_and_counted(tmp_path):
    lines = []
    for number, (line, _, _) in enumerate(BAD):
        lines += [line if isinstance(line, bytes) else line.encode(), json.dumps({"text": f"good {number}"}).encode()]
    (tmp_path / "some.jsonl").write_bytes(b"\n".join(lines))
    reading = read(tmp_path, kind="jsonl")
    assert texts(reading) == [f"good {number}" for number in range(len(BAD))]
    assert reading.skipped == {"corrupt": 8, "empty": 1, "vocabulary": 0}


def test_the_error_names_the_json_type_of_a_line_that_is_not_an_object(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text("[1]")
    with pytest.raises(ValueError, match="line 1 is not a JSON object but a list"):
        read(file, kind="jsonl", max_skipped=0)


@pytest.mark.parametrize("line, reason, message", BAD, ids=range(len(BAD)))
def test_one_more_than_the_limit_stops_with_place_and_counts(line, reason, message, tmp_path):
    file = tmp_path / "some.jsonl"
    good = b'{"text": "good"}'
    file.write_bytes(b"\n".join([good, line if isinstance(line, bytes) else line.encode(), good]))
    assert len(read(file, kind="jsonl", max_skipped=1).documents) == 2
    with pytest.raises(ValueError, match="unusable") as raised:
        read(file, kind="jsonl", max_skipped=0)
    assert f"over 0 unusable documents (1 {reason}); the last: {file} line 2 {message}" in str(raised.value)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400 + len(str(tmp_path))


def test_unusable_files_are_skipped_and_counted(tmp_path):
    for name, content in {"good": b"x", "empty": b"", "nul": b"a\0b", "latin": b"\xe4"}.items():
        (tmp_path / name).write_bytes(content)
    reading = read(tmp_path)
    assert texts(reading) == ["x"] and reading.skipped == {"corrupt": 1, "empty": 1, "vocabulary": 0}
    assert reading.left_out == f"1 binary; the last: {tmp_path / 'nul'}"


def test_ids_outside_of_the_vocabulary_and_end_tokens_inside_are_skipped(tmp_path):
    class Ending(WordTokenizer):
        eos_token_ids = (3,)

    file = tmp_path / "some.jsonl"
    file.write_text(lines_of(*({"text": text} for text in ("a bb", "a bbbb", "ccc a", "dd", " "))))
    reading = read(file, Ending(), vocab_size=4, kind="jsonl")
    assert [document.tokens.tolist() for document in reading.documents] == [[1, 2], [2]]
    assert reading.skipped == {"corrupt": 1, "empty": 1, "vocabulary": 1}
    assert read(file, Ending(), vocab_size=5, kind="jsonl").skipped["vocabulary"] == 0


def test_a_document_longer_than_the_row_goes_on_in_the_next(tmp_path):
    (tmp_path / "long.txt").write_text("abcdefghij")
    rows = packing.pack(read(tmp_path).documents, 4, seed=0)
    assert rows.tokens.astype(np.uint8).tobytes() == b"abcdefghij\0\0" and rows.loss_mask.sum() == 11


# The fingerprint.


def fingerprint_of(sources, tokenizer=BYTES, vocab_size=256):
    readings = [read_source(source, tokenizer, vocab_size=vocab_size) for source in sources]
    return fingerprint(sources, readings, tokenizer, vocab_size=vocab_size)


@pytest.fixture
def folder(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(lines_of({"text": name, "body": "other"}))
        (tmp_path / name / "b.jsonl").write_text(lines_of({"text": "b " + name, "body": "other"}))
    return tmp_path


def sources_in(folder):
    return [Source(path=str(folder / "one"), kind="jsonl"), Source(path=str(folder / "two"), kind="jsonl", weight=2.0)]


def test_the_fingerprint_stays_where_the_data_stays(folder, tmp_path_factory):
    before = fingerprint_of(sources_in(folder))
    assert before == fingerprint_of(sources_in(folder)) and len(before) == 64
    os.utime(folder / "one" / "a.jsonl", (0, 0))
    moved = tmp_path_factory.mktemp("elsewhere") / "moved"
    folder.rename(moved)
    assert fingerprint_of(sources_in(moved)) == before


def swap(folder):
    (folder / "one").rename(folder / "aside")
    (folder / "two").rename(folder / "one")
    (folder / "aside").rename(folder / "two")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "one/a.jsonl").write_text(lines_of({"text": "two", "body": "other"})),  # the same size
        lambda folder: (folder / "one/a.jsonl").write_text((folder / "one/a.jsonl").read_text() + "\n"),
        lambda folder: (folder / "two/b.jsonl").unlink(),
        lambda folder: (folder / "two/c.jsonl").write_text(""),
        lambda folder: (folder / "one/b.jsonl").rename(folder / "one/0.jsonl"),  # another order
        lambda folder: (folder / "one/b.jsonl").rename(folder / "one/c.jsonl"),
        swap,
    ],
    ids=["content", "size", "fewer files", "more files", "order", "name", "folders swapped"],
)
def test_the_fingerprint_sees_changes_of_files(change, folder):
    before = fingerprint_of(sources_in(folder))
    change(folder)
    assert fingerprint_of(sources_in(folder)) != before


def test_the_fingerprint_sees_every_setting_and_no_two_are_alike(folder):
    one, two = sources_in(folder)
    seen = [fingerprint_of([one, two])]
    for sources in (
        [two, one],
        [one],
        [one, one],
        [one, dataclasses.replace(two, weight=3.0)],
        [one, dataclasses.replace(two, field="body")],
        [one, dataclasses.replace(two, kind="text")],
        [one, dataclasses.replace(two, pattern="a*")],
    ):
        seen.append(fingerprint_of(sources))
    seen.append(fingerprint_of([one, two], WordTokenizer()))
    seen.append(fingerprint_of([one, two], vocab_size=257))
    assert len(set(seen)) == len(seen) == 10
    loose = dataclasses.replace(two, max_skipped=5)  # changes no batch
    assert fingerprint_of([one, loose]) == seen[0]
