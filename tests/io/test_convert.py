"""Hugging Face -> mtpjax -> Hugging Face: the same bytes; and that a target is complete or absent."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mtpjax
from conversion.export_mtp import export_mtp
from conversion.files import CheckpointFiles
from mtpjax import ModelConfig, MTPModel, init_params, presets
from mtpjax.errors import CheckpointError, CheckpointFileError, ConfigError
from mtpjax.io import checkpoint, convert
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.models.quantized import is_scaled
from tests.golden import SETS, path


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def assert_same_params(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert jax.tree.map(lambda leaf: leaf.dtype, found) == jax.tree.map(lambda leaf: leaf.dtype, wanted)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """`converted(name)`: a golden checkpoint as one of ours."""
    folder = tmp_path_factory.mktemp("ours")

    def make(name):
        target = folder / name
        if not target.exists():
            convert.to_mtpjax(path(name), target)
        return target

    return make


@pytest.mark.parametrize("name", SETS)
def test_the_way_there_and_back_gives_the_same_bytes(name, converted, tmp_path):
    convert.to_hugging_face(converted(name), tmp_path / "back")
    assert content(tmp_path / "back") == content(path(name))


@pytest.mark.parametrize("name", SETS)
def test_a_converted_checkpoint_loads_as_the_original(name, converted):
    model, params = mtpjax.load(converted(name))
    original, wanted = mtpjax.load(path(name))
    assert model.config == original.config
    assert_same_params(params, wanted)


def test_named_chat_templates_go_there_and_back(tmp_path):
    source = pathlib.Path(shutil.copytree(path("qwen3_next"), tmp_path / "source"))
    name = pathlib.Path("additional_chat_templates", "tool_use.jinja")
    (source / name).parent.mkdir()
    (source / name).write_text("x")
    convert.to_mtpjax(source, tmp_path / "ours")
    assert (tmp_path / "ours" / "huggingface" / name).read_text() == "x"
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "back" / name).read_text() == "x"


@pytest.mark.slow
def test_several_chunks_are_one_array(tmp_path, monkeypatch):
    monkeypatch.setattr("conversion.tensor_slice.BLOCK_BYTES", 2000)
    source = path("deepseek_v3_fp8")
    convert.to_mtpjax(source, tmp_path / "ours")
    records = CheckpointReader(tmp_path / "ours").records
    assert any(record["chunks"] != record["shape"] for record in records.values())
    assert_same_params(mtpjax.load(tmp_path / "ours")[1], mtpjax.load(source)[1])
    for block in (700, 3000):
        monkeypatch.setattr("conversion.tensor_slice.BLOCK_BYTES", block)
        convert.to_hugging_face(tmp_path / "ours", tmp_path / f"back {block}")
        assert content(tmp_path / f"back {block}") == content(source)


def test_a_flipped_bit_in_a_chunk_is_found(converted, tmp_path):
    copy = pathlib.Path(shutil.copytree(converted("deepseek_v3_fp8"), tmp_path / "copy"))
    chunk = next(file for file in copy.rglob("params/*experts*/*") if file.stat().st_size > 1000)
    data = bytearray(chunk.read_bytes())
    data[500] ^= 4
    chunk.write_bytes(data)
    with pytest.raises(CheckpointError, match="differs from what was saved"):
        convert.to_hugging_face(copy, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_dtype_is_cast_and_the_configuration_says_so(tmp_path):
    source = path("deepseek_v3_fp8")
    convert.to_mtpjax(source, tmp_path / "ours", dtype=ml_dtypes.bfloat16)
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "back")
    with CheckpointFiles(tmp_path / "back") as files, CheckpointFiles(source) as original:
        kinds = {str(tensor.dtype) for tensor in files.tensors.values()}
        scales = {name for name in original.tensors if name.endswith("_scale_inv")}
        assert kinds == {"bfloat16"} and files.tensors.keys() == original.tensors.keys() - scales
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert_same_params(mtpjax.load(tmp_path / "back")[1], mtpjax.load(source, dtype=jnp.bfloat16)[1])


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_a_model_of_our_own_is_written_as_the_family_that_describes_it(name, tmp_path, key):
    narrow = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    narrow |= {"head_dim": 8} if name == "tiny" else {}
    model = MTPModel(dataclasses.replace(presets[name], **narrow))
    params = init_params(model, key)
    checkpoint.save_model(tmp_path / "ours", model, params)
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "there")
    found, again = mtpjax.load(tmp_path / "there")
    assert found.config == model.config
    assert_same_params(again, params)
    with pytest.raises(ConfigError, match="no supported family can describe this model"):
        convert.to_hugging_face(tmp_path / "ours", tmp_path / "other", model_type="qwen3_next")


def plain_trunk(tmp_path):
    """A Llama of two layers without MTP modules: its tensors, and where it lies."""
    model = MTPModel(
        ModelConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    )
    checkpoint.save_model(tmp_path / "plain", model, init_params(model, jax.random.key(1)))
    convert.to_hugging_face(tmp_path / "plain", tmp_path / "llama")
    return load_file(tmp_path / "llama" / "model.safetensors"), tmp_path / "llama"


KILLED = """
import os, signal, sys
from conversion import export_mtp
from mtpjax.io import convert
seen = 0
def progress(count):
    global seen
    seen += 1
    if seen == 40:
        os.kill(os.getpid(), signal.SIGKILL)
{call}
"""


@pytest.mark.parametrize(
    "call",
    [
        "convert.to_mtpjax({source!r}, {target!r}, progress=progress)",
        "convert.to_hugging_face({ours!r}, {target!r}, progress=progress)",
        "export_mtp.export_mtp({source!r}, {target!r}, progress=progress)",
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_killed_run_leaves_the_target_absent_or_as_it_was(call, is_first, converted, tmp_path):
    name, target = "deepseek_v3_fp8", tmp_path / "target"
    before = {}
    if not is_first:
        if "to_mtpjax" in call:
            shutil.copytree(converted(name), target)
        elif "export" in call:
            export_mtp(path(name), target)
        else:
            target.mkdir()
        before = {file: file.read_bytes() for file in target.rglob("*") if file.is_file()}
    call = call.format(source=str(path(name)), ours=str(converted(name)), target=str(target))
    done = subprocess.run([sys.executable, "-c", KILLED.format(call=call)], env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == -signal.SIGKILL
    assert target.exists() != is_first
    assert {file: file.read_bytes() for file in target.rglob("*") if file.is_file()} == before


def test_a_full_disk_leaves_nothing(converted, tmp_path):
    def progress(count):
        raise OSError(28, "No space left on device")

    for function, source in ((convert.to_mtpjax, path), (convert.to_hugging_face, converted)):
        with pytest.raises(OSError, match="No space"):
            function(source("deepseek_v3_fp8"), tmp_path / "target", progress=progress)
        assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_replaced(converted, tmp_path):
    original = shutil.copytree(path("deepseek_v3_fp8"), tmp_path / "original")
    with pytest.raises(FileExistsError, match="is not overwritten"):
        convert.to_hugging_face(converted("deepseek_v3_fp8"), original)
    assert content(original) == content(path("deepseek_v3_fp8"))
    (tmp_path / "thesis.tex").write_text("years of work")
    for function, source in ((convert.to_mtpjax, path), (convert.to_hugging_face, converted)):
        with pytest.raises(FileExistsError, match="remove it, or choose a different path"):
            function(source("deepseek_v3_fp8"), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_numbers_that_are_not_finite_are_counted_or_refused(tmp_path, caplog):
    _, source = plain_trunk(tmp_path)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = np.array(tensors[name])
    tensors[name][3, 4:6] = np.nan, np.inf
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert.to_mtpjax(source, tmp_path / "ours")
    assert f"tensor {name} has 2 infinite or NaN elements" in caplog.text
    with pytest.raises(CheckpointFileError, match="2 infinite or NaN elements"):
        convert.to_mtpjax(source, tmp_path / "strict", strict=True)
    assert not (tmp_path / "strict").exists()


def test_norms_that_hold_one_plus_w_are_taken_as_they_are(tmp_path, caplog):
    """Zero-centred weights of some converted files have been shifted: the same logits from either."""
    source = pathlib.Path(shutil.copytree(path("qwen3_5_tied_bf16"), tmp_path / "shifted"))
    with CheckpointFiles(source) as files:
        tensors = {name: files.read(name).astype(np.float32) for name in files.tensors}
    for name in tensors:
        if name.endswith(("norm.weight", "layernorm.weight", "embedding.weight", "hidden.weight")):
            is_plain = "linear_attn" in name or "visual" in name or "embed_tokens" in name
            tensors[name] = tensors[name] + (0 if is_plain else 1)
    for file in source.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    tokens = jnp.arange(12)[None]
    shifted, plain = mtpjax.load(source, dtype=jnp.float32), mtpjax.load(path("qwen3_5_tied_bf16"), dtype=jnp.float32)
    assert "the files store 1 + w" in caplog.text and not shifted[0].config.zero_centred_norm
    found, wanted = (mtpjax.forward(params, tokens, model=model) for model, params in (shifted, plain))
    np.testing.assert_allclose(found.logits, wanted.logits, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(found.mtp_logits[0], wanted.mtp_logits[0], rtol=1e-4, atol=1e-3)


def test_kept_fp8_can_be_saved_and_restored(tmp_path):
    model, params = mtpjax.load(path("deepseek_v3_fp8"))
    checkpoint.save_model(tmp_path / "ours", model, params)
    _, again = mtpjax.load(tmp_path / "ours")
    assert any(is_scaled(leaf) for leaf in jax.tree.leaves(again, is_leaf=is_scaled))
    assert_same_params(again, params)
