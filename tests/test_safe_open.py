"""Untrusted files: JSON that nests too deeply, files that are no regular files, text for messages."""

import json
import os

import pytest

from conversion.safetensors_header import parse_json as parse_checkpoint_json
from mtpjax.errors import CheckpointError, CheckpointFileError, UnsafeFileError, UsageError, printable
from mtpjax.io import checkpoint_format
from mtpjax.safe_open import open_regular, parse_json, read_json_file


@pytest.mark.parametrize("depth, is_accepted", [(64, True), (65, False), (900, False), (100_000, False)])
def test_the_depth_of_json_is_bounded(depth, is_accepted):
    content = "[" * depth + "]" * depth
    if is_accepted:
        assert parse_json(content) == json.loads(content)
    else:
        with pytest.raises(ValueError, match="nested more than 64 deep"):
            parse_json(content.encode())


def test_brackets_in_strings_and_beside_each_other_do_not_nest():
    value = {"a": '\\"[' * 500, "b": [[1], {"c": "\\"}] * 200}
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("content", [b'"' + b"\\" * 100_001, b"[" * 65 + b'"' * 3, b"\xff", b"{,", b"1" * 5000])
def test_what_is_not_json_is_one_line(content):
    with pytest.raises(ValueError) as raised:
        parse_json(content)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 200


def test_pipes_devices_and_large_files_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(UnsafeFileError, match="is not a regular file"):
            open_regular(path)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        open_regular(tmp_path)
    (tmp_path / "large.json").write_text("[1, 2]")
    assert read_json_file(tmp_path / "large.json", max_bytes=6) == [1, 2]
    with pytest.raises(UnsafeFileError, match="larger than 5 bytes"):
        read_json_file(tmp_path / "large.json", max_bytes=5)


def test_text_for_messages_is_printable_and_bounded():
    assert printable("é a\x1b[2J\n\x00\u202e") == "é a\\x1b[2J\\n\\x00\\u202e"
    for text in ("x" * 30_000_000, "\x1b" * 30_000_000):
        assert len(printable(text, 200)) <= 220 and printable(text, 200).isprintable()
    assert printable("a" * 5000 + "b").endswith("b")


@pytest.mark.parametrize("kind", [UsageError, CheckpointError])
def test_errors_are_one_printable_bounded_line(kind):
    message = str(kind("config.json: bad \x1b[31m" + "x" * 10_000_000))
    assert message.startswith("config.json: bad \\x1b[31m") and len(message) < 2100


def test_deep_headers_and_configurations_of_checkpoints_are_refused(tmp_path):
    deep = b"[" * 900 + b"]" * 900
    with pytest.raises(CheckpointFileError, match="nested more than 64 deep"):
        parse_checkpoint_json(deep, "config.json")
    content = json.dumps({"format": checkpoint_format.FORMAT, "config": "CONFIG"}).encode().replace(b'"CONFIG"', deep)
    (tmp_path / "config.json").write_bytes(content)
    assert checkpoint_format.read_config(tmp_path) is None


def test_a_pipe_as_configuration_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert checkpoint_format.read_config(tmp_path) is None
