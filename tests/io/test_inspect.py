"""What `mtpjax inspect` says, and that it reads no weights."""

import json
import math
import pathlib
import shutil

import jax
import pytest

import mtpjax
from conversion.files import CheckpointFiles
from mtpjax import compat
from mtpjax.cli.main import main
from mtpjax.io import convert
from mtpjax.io.inspect import format_lines, inspect
from tests.golden import SETS, path


def run(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["inspect", *map(str, arguments)])
    return exit_.value.code, capsys.readouterr()


@pytest.mark.parametrize("name", SETS)
def test_the_facts_are_those_of_the_loaded_model(name):
    facts = inspect(path(name))
    _, params = mtpjax.load(path(name))
    assert facts["bytes_of_parameters"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert facts["missing"] == facts["extra"] == []
    assert facts["bytes"] == sum(file.stat().st_size for file in path(name).glob("*.safetensors"))
    assert sum(kind["tensors"] for kind in facts["dtypes"].values()) == facts["tensors"]
    counted = facts["parameters"]["trunk"] + facts["parameters"]["mtp"]
    values = jax.tree.map(lambda leaf: leaf.shape, params, is_leaf=mtpjax.models.quantized.is_scaled)
    assert counted == sum(math.prod(shape) for shape in jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, tuple)))


def test_memory_per_device_is_what_a_mesh_holds():
    axes = {"expert": 2, "tensor": 4}
    _, params = mtpjax.load(path("deepseek_v3_fp8"), mesh=compat.make_mesh(axes))
    device = jax.devices()[0]
    held = [
        shard.data.nbytes
        for leaf in jax.tree.leaves(params)
        for shard in leaf.addressable_shards
        if shard.device == device
    ]
    assert inspect(path("deepseek_v3_fp8"), mesh=axes)["bytes_per_device"] == sum(held)


def test_no_weights_are_read(monkeypatch):
    read = CheckpointFiles.read
    sizes = []

    def watched(files, name, begin=0, end=None):
        sizes.append(files.tensors[name].end - files.tensors[name].begin)
        return read(files, name, begin, end)

    monkeypatch.setattr(CheckpointFiles, "read", watched)
    inspect(path("qwen3_5_tied_bf16"))
    assert max(sizes, default=0) < 1000  # norms, to see whether they have been shifted


def test_our_checkpoints_are_described_too(tmp_path):
    convert.to_mtpjax(path("deepseek_v3_fp8"), tmp_path / "ours")
    ours, theirs = inspect(tmp_path / "ours"), inspect(path("deepseek_v3_fp8"))
    for key in ("parameters", "bytes_of_parameters", "configuration"):
        assert ours[key] == theirs[key]


def test_the_command_prints_lines_or_json(capsys):
    code, captured = run([path("deepseek_v3_fp8"), "--mesh", "expert=4,tensor=2"], capsys)
    assert code == 0
    text = " ".join(captured.out.split())
    for word in ("deepseek_v3", "12 experts, 4 per token", "F8_E4M3", "weight_block_size", "expert=4,tensor=2"):
        assert word in text
    code, captured = run([path("deepseek_v3_fp8"), "--json"], capsys)
    assert code == 0 and json.loads(captured.out)["configuration"]["num_mtp_modules"] == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("deepseek_v3", "layers 4 latent_attention; "),
        ("deepseek_v32", "layers 4 sparse_latent_attention; "),
        ("qwen3", "full_attention; dense"),
        ("qwen3_next", "4 linear_attention, 1 full_attention; "),
    ],
)
def test_the_real_kind_of_attention_is_printed_within_80_columns(name, said):
    lines = format_lines(inspect(path(name)))
    assert said in " ".join(" ".join(lines).split())
    assert all(len(line) <= 80 for line in lines if str(path(name)) not in line)


def test_what_is_missing_or_unknown_is_listed(tmp_path, capsys):
    copy = pathlib.Path(shutil.copytree(path("deepseek_v3_fp8"), tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    code, captured = run([copy], capsys)
    assert code == 3 and "missing tensors" in captured.out and "model.layers.5." in captured.out
    (copy / "config.json").write_text(json.dumps(config))
    for file in copy.glob("*.safetensors*"):
        file.write_bytes(file.read_bytes().replace(b"layers.4.enorm", b"layers.4.other"))
    facts = inspect(copy)
    assert facts["missing"] == ["model.layers.4.enorm.weight"] and facts["extra"] == ["model.layers.4.other.weight"]
    assert any("extra tensors" in line for line in format_lines(facts))


@pytest.mark.parametrize("mesh", ["tensor", "tensor=0", "heads=2", "tensor=x"])
def test_a_mesh_that_is_none_is_refused(mesh, capsys):
    code, captured = run([path("deepseek_v3_fp8"), "--mesh", mesh], capsys)
    assert code == 2 and mesh in captured.err


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, capsys):
    code, captured = run([tmp_path / "nothing"], capsys)
    assert code == 3 and captured.err.startswith(f"mtpjax inspect: {tmp_path / 'nothing'} does not exist")
    code, captured = run([tmp_path], capsys)
    assert code == 3 and "contains no safetensors" in captured.err
