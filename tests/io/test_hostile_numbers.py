"""Numbers and types in configurations that the files do not bear out: one line, before anything large is built."""

import json
import shutil
import time

import pytest

from mtpjax import load
from mtpjax.errors import CheckpointError
from mtpjax.io import convert
from tests.golden import path
from tests.io.test_hostile_checkpoints import edit

NUMBERS = [2**63, 2**31, 10**6, -1, 0, 1.5, "x", None, [], True, float("inf"), "\x1b[31m", "y" * 1_000_000]


def refused(folder) -> str:
    """Loads a checkpoint that must be refused in one short, printable line, soon."""
    begin = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert time.monotonic() - begin < 20
    message = str(caught.value)
    assert message.isprintable() and len(message) < 2200
    return message


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads"])
def test_numbers_of_a_hugging_face_configuration(key, tmp_path):
    folder = shutil.copytree(path("qwen3"), tmp_path / "copy")
    content = json.loads((folder / "config.json").read_text())
    for value in NUMBERS:
        (folder / "config.json").write_text(json.dumps({**content, key: value}))
        refused(folder)


def test_experts_are_bounded_before_their_names_are_listed(tmp_path):
    folder = shutil.copytree(path("deepseek_v3"), tmp_path / "copy")
    content = json.loads((folder / "config.json").read_text())
    for value in (2**31, 10**6):
        (folder / "config.json").write_text(json.dumps({**content, "n_routed_experts": value}))
        assert "n_routed_experts" in refused(folder)


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "hidden_size", "num_mtp_modules"])
def test_numbers_of_our_own_configuration(key, tmp_path):
    convert.to_mtpjax(path("qwen3"), tmp_path / "ours")
    content = json.loads((tmp_path / "ours" / "config.json").read_text())
    # The digest is right: the file was changed by somebody who can compute one.
    for value in NUMBERS if key != "num_mtp_modules" else [2**31, 10**6, 7, -1, 1.5, "x", None]:
        changed = content | {"config": content["config"] | {key: value}}
        edit(tmp_path / "ours", "config.json", json.dumps(changed).encode())
        assert key in refused(tmp_path / "ours") or not isinstance(value, int)


@pytest.mark.parametrize("record", [{}, {"shape": [2]}, {"dtype": "F8_X", "shape": [2], "data_offsets": [0, 4]}, 3, []])
def test_records_of_a_header_without_shape_or_known_dtype(record, tmp_path):
    folder = shutil.copytree(path("qwen3"), tmp_path / "copy")
    shard = sorted(folder.glob("*.safetensors"))[0]
    content = shard.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[next(name for name in header if name != "__metadata__")] = record
    changed = json.dumps(header).encode()
    shard.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
    assert "has invalid shape or offsets, or an unsupported dtype" in refused(folder)


@pytest.mark.parametrize("index", [[], 3, {"weight_map": []}, {"weight_map": {"a": 3}}])
def test_an_index_that_is_no_map(index, tmp_path):
    folder = shutil.copytree(path("qwen3"), tmp_path / "copy")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors.index.json" in refused(folder)


@pytest.mark.parametrize(
    "record", [{}, {"headers": {}}, {"model_type": "qwen3"}, {"headers": [], "model_type": "qwen3"}]
)
def test_a_record_of_the_original_files_without_its_parts(record, tmp_path):
    convert.to_mtpjax(path("qwen3"), tmp_path / "ours")
    edit(tmp_path / "ours", "huggingface.json", json.dumps(record).encode())
    with pytest.raises(CheckpointError, match=r"huggingface\.json"):
        convert.to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert not (tmp_path / "back").exists()
