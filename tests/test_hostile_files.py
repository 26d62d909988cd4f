"""Every file that a user may hand in is read with a bound: JSON that nests deeply, pipes and devices are one line."""

import json
import os
import time

import pytest

from conversion.safetensors_header import parse_json
from mtpjax.data.jsonl_writer import JsonlWriter, read_resumable_records
from mtpjax.errors import CheckpointFileError
from mtpjax.evaluation import profile_file
from mtpjax.io.huggingface_files import count_token_ids
from mtpjax.training import compare, hidden_state_cache, run_settings
from mtpjax.training.log import MetricsLog, read_metrics
from mtpjax.training.yaml_config import read_yaml

# How each file is read, given its folder and name.
READERS = {
    "profile.json": lambda folder, name: profile_file.read(folder / name),
    "acceptance.json": lambda folder, name: profile_file.read_acceptance(folder / name),
    "run.json": lambda folder, name: compare.read_run(folder),
    "manifest.json": lambda folder, name: hidden_state_cache._open_manifest(folder, {}, 1),
    "config.yaml": lambda folder, name: read_yaml(folder / name),
}
SETTINGS = {"run.json": lambda folder, name: run_settings.check_settings(folder, {}, "x")}
CASES = [*READERS.items(), *SETTINGS.items()]


@pytest.mark.parametrize(("name", "read"), CASES)
def test_deep_json_is_one_line(name, read, tmp_path):
    (tmp_path / name).write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError) as caught:
        read(tmp_path, name)
    assert name in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(("name", "read"), CASES)
def test_a_pipe_or_device_is_refused_at_once(name, read, kind, tmp_path):
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="is not a regular file"):
        read(tmp_path, name)


def test_records_of_a_pipe_are_neither_read_nor_written(tmp_path):
    os.mkfifo(tmp_path / "cells.jsonl")
    with pytest.raises(ValueError, match="is not a regular file"):
        next(read_resumable_records(tmp_path / "cells.jsonl"))
    with pytest.raises(ValueError, match="is not a regular file"):
        JsonlWriter(tmp_path / "cells.jsonl")


@pytest.mark.parametrize("row", ['{"bits": [2.0]}', '{"step": "x"}', '{"step": null}', '{"step": NaN}', "[1]", "{"])
def test_rows_of_metrics_without_a_step_are_left_out(row, tmp_path):
    whole = '{"step": 1, "bits": [2.0]}\n'
    (tmp_path / "metrics.jsonl").write_text(f"{whole}{row}\n{whole}")
    assert read_metrics(tmp_path / "metrics.jsonl") == [json.loads(whole)] * 2
    with MetricsLog(tmp_path, step=1) as log:
        assert log.history == [json.loads(whole)] * 2
    with MetricsLog(tmp_path, step=0) as log:
        assert log.history == []


def test_a_deep_tokenizer_has_no_count(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert count_token_ids(tmp_path) is None


def test_a_manifest_of_infinite_blocks_is_damaged(tmp_path):
    (tmp_path / "manifest.json").write_text('{"of": {}, "blocks": {}, "rows_per_block": 1e999}')
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        hidden_state_cache._open_manifest(tmp_path, {}, 1)


def test_yaml_aliases_that_expand_without_bound_are_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"run\.yaml cannot be read: the aliases expand to more than 1048576 bytes"):
        read_yaml(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text("a: " + "x" * (1 << 20))
    with pytest.raises(ValueError, match="larger than 1048576 bytes"):
        read_yaml(tmp_path / "run.yaml")


def test_keys_that_occur_twice_are_found_in_linear_time():
    pairs = [f"{json.dumps(f'{number}')}: 0" for number in range(60_000)]
    begin = time.perf_counter()
    with pytest.raises(CheckpointFileError, match="has the key '59999' twice"):
        parse_json(f"{{{', '.join(pairs)}, {pairs[-1]}}}".encode(), "config.json")
    assert time.perf_counter() - begin < 10  # the square of the number takes more than a minute


def test_a_key_that_occurs_twice_is_printable_and_short():
    key = json.dumps("\x1b[31m" + "x" * 10_000_000)
    with pytest.raises(CheckpointFileError) as caught:
        parse_json(f"{{{key}: 1, {key}: 2}}".encode(), "config.json")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400
