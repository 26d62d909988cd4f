"""JSONL files that are continued after a process was killed."""

import errno
import os

import pytest

from mtpjax.data.jsonl_writer import JsonlWriter, read_resumable_records

LINES = b'{"step": 1}\n{"step": 2, "text": "\xc3\xa9"}\n'


def records_of(path, **options):
    return [record for _, record in read_resumable_records(path, **options)]


def test_a_file_cut_anywhere_continues_to_the_same_bytes(tmp_path):
    path = tmp_path / "rows.jsonl"
    for size in range(len(LINES) + 1):
        path.write_bytes(LINES[:size])
        with JsonlWriter(path) as writer:
            kept = writer.resume()
            assert len(kept) == LINES[:size].count(b"\n")
            writer.append([{"step": 1}, {"step": 2, "text": "é"}][len(kept) :])
            assert writer.size == len(LINES)
        assert path.read_bytes() == LINES


def test_records_behind_the_first_that_is_not_kept_are_cut_off(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES + b'{"step": 3}\n')
    with JsonlWriter(path) as writer:
        assert writer.resume(lambda record: record["step"] < 2) == [{"step": 1}]
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_reader_beside_the_writer_sees_complete_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert records_of(path) == []
    path.write_bytes(LINES[:-1])
    assert records_of(path) == [{"step": 1}]


@pytest.mark.parametrize("line", [b"nonsense", b"[1]", b'{"other": 1}', b"\xff", b"[" * 100_000])
def test_a_damaged_line_is_told_or_skipped_and_stays(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    content = b'{"step": 1}\n' + line + b'\n{"step": 3}\n'
    path.write_bytes(content)
    with JsonlWriter(path) as writer:
        with pytest.raises(ValueError, match=r"rows\.jsonl line 2 is damaged: remove that line to continue"):
            writer.resume(required=["step"])
        assert path.read_bytes() == content
        assert writer.resume(required=["step"], skip_damaged=True) == [{"step": 1}, {"step": 3}]
    assert path.read_bytes() == content


def test_two_writers_exclude_each_other(tmp_path):
    path = tmp_path / "rows.jsonl"
    with JsonlWriter(path), pytest.raises(ValueError, match=r"rows\.jsonl is being written to by another process"):
        JsonlWriter(path)
    JsonlWriter(path).__exit__()


def test_a_record_without_a_json_form_leaves_the_file_unchanged(tmp_path):
    path = tmp_path / "rows.jsonl"
    with JsonlWriter(path, allow_nan=False) as writer:
        with pytest.raises(ValueError):
            writer.append([{"step": 1}, {"step": float("nan")}])
        assert writer.size == 0 == path.stat().st_size


def test_a_failed_sync_raises_and_the_next_process_continues(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"

    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, JsonlWriter(path) as writer:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError):
            writer.append([{"step": 1}])
    with JsonlWriter(path) as writer:
        assert writer.resume() == [{"step": 1}]
