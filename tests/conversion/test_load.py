"""Checkpoint directories in: what is loaded, what is tied, what is refused, and that nothing else is touched."""

import json
import logging
import os
import pathlib
import shutil
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mtpjax
from conversion.files import CheckpointFiles
from conversion.load_plan import make_plan
from conversion.read_params import read_as
from conversion.safetensors_header import parse_json
from mtpjax import compat
from mtpjax.errors import CheckpointFileError
from mtpjax.models.params import param_shapes
from mtpjax.models.quantized import BlockScaled
from tests.golden import HERE as GOLDEN
from tests.golden import SETS


@pytest.fixture
def copy(tmp_path):
    """`copy(name)`: a golden checkpoint that may be damaged."""

    def make(name: str) -> pathlib.Path:
        target = tmp_path / name
        shutil.copytree(GOLDEN / name, target)
        for file in (target, *target.iterdir()):
            file.chmod(0o755)
        return target

    return make


def shards(path):
    return sorted(path.glob("*.safetensors"))


def rewrite(path, change):
    """`change(tensors)` in the shard that holds what it wants; the index follows."""
    index_file = path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    for shard in shards(path):
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard, metadata={"format": "pt"})
        names = [name for name, file in index["weight_map"].items() if file == shard.name]
        for name in names:
            del index["weight_map"][name]
        index["weight_map"] |= {name: shard.name for name in tensors}
    index_file.write_text(json.dumps(index))


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def refuses(path, *words):
    with pytest.raises(ValueError) as caught:
        mtpjax.load(path)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize("name", SETS)
def test_the_shapes_are_those_of_a_new_model_and_the_dtypes_those_of_the_files(name):
    model, params = mtpjax.load(GOLDEN / name)
    shapes = param_shapes(model.config, model.scan_layers)
    is_scaled = lambda leaf: isinstance(leaf, BlockScaled)
    assert jax.tree.map(jnp.shape, params, is_leaf=is_scaled) == jax.tree.map(jnp.shape, shapes)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
    assert kinds == {
        "deepseek_v3_fp8": {"float8_e4m3fn", "bfloat16", "float32"},
        "deepseek_v3_mtp2_bf16": {"bfloat16", "float32"},
        "qwen3_5_tied_bf16": {"bfloat16", "float32"},
    }.get(name, {"float32"})


@pytest.mark.slow
def test_kept_fp8_computes_what_dequantised_weights_do():
    model, kept = mtpjax.load(GOLDEN / "deepseek_v3_fp8")
    _, plain = mtpjax.load(GOLDEN / "deepseek_v3_fp8", dtype=jnp.float32)
    found = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32), kept, is_leaf=lambda leaf: isinstance(leaf, BlockScaled)
    )
    jax.tree.map(np.testing.assert_array_equal, found, plain)
    tokens = jnp.arange(12)[None] % model.config.vocab_size
    kept = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, kept)
    mine, twin = (mtpjax.forward(params, tokens, model=model).logits for params in (kept, plain))
    np.testing.assert_allclose(mine, twin, rtol=1e-5, atol=1e-4)


def test_dequantised_blocks_are_exact_at_the_edges():
    """Against float64 on the very tensor, whose last blocks are partial."""
    with CheckpointFiles(GOLDEN / "deepseek_v3_fp8") as files:
        plan = make_plan(files, dtype=np.float32)
        for path, spec in plan.specs.items():
            if not path.endswith("latent_down"):
                continue
            name = spec.slices[0].name
            values, scales = files.read(name).astype(np.float64), files.read(f"{name}_scale_inv").astype(np.float64)
            assert values.shape[0] % 128 or values.shape[1] % 128
            exact = values * np.kron(scales, np.ones((128, 128)))[: values.shape[0], : values.shape[1]]
            found = read_as(files, plan.scales, spec, tuple((0, size) for size in spec.shape), np.dtype(np.float32))
            np.testing.assert_allclose(found.T, exact, rtol=1e-6)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_fp8", "glm4_moe", "qwen3_5_moe"])
def test_a_mesh_gets_the_same_parameters(name):
    mesh = compat.make_mesh({"fsdp": 2, "expert": 2, "tensor": 2})
    _, over = mtpjax.load(GOLDEN / name, mesh=mesh)
    _, single = mtpjax.load(GOLDEN / name)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(over), jax.device_get(single))
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(over))


def test_a_missing_shard_index_or_weight_map_is_named(copy):
    path = copy("qwen3")
    shards(path)[1].unlink()
    refuses(path, "model-00002-of-00003.safetensors")
    path = copy("deepseek_v3")
    (path / "model.safetensors.index.json").write_text("{}")
    refuses(path, "weight_map")
    (path / "model.safetensors.index.json").write_text("{,")
    refuses(path, "not valid JSON")
    (path / "model.safetensors.index.json").unlink()
    refuses(path, "index.json")


@pytest.mark.parametrize("kind", ["parent", "absolute", "link", "folder", "fifo"])
def test_nothing_outside_the_directory_is_opened(kind, copy, tmp_path):
    path = copy("qwen3")
    trap = tmp_path / "trap.safetensors"
    shutil.copy(shards(path)[0], trap)
    before = os.stat(trap).st_atime_ns
    os.utime(trap, ns=(before - 10**12, before - 10**12))
    before = os.stat(trap).st_atime_ns
    first = shards(path)[0]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    if kind in ("parent", "absolute"):
        other = "../trap.safetensors" if kind == "parent" else str(trap)
        index["weight_map"] = {n: other if f == first.name else f for n, f in index["weight_map"].items()}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        first.unlink()
        {"link": lambda: first.symlink_to(trap), "folder": first.mkdir, "fifo": lambda: os.mkfifo(first)}[kind]()
    refuses(path)
    assert os.stat(trap).st_atime_ns == before


def test_a_tensor_twice_absent_or_elsewhere_is_named(copy):
    path = copy("qwen3")
    index_file = path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    name = next(iter(index["weight_map"]))
    others = [file.name for file in shards(path) if file.name != index["weight_map"][name]]
    index_file.write_text(json.dumps({"weight_map": index["weight_map"] | {name: others[0]}}))
    refuses(path, name)
    index_file.write_text(json.dumps({"weight_map": index["weight_map"] | {"model.nothing": others[0]}}))
    refuses(path, "model.nothing")
    index_file.write_text(json.dumps(index))
    shard = path / index["weight_map"][name]
    content = shard.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length].decode().rstrip()
    entry = json.dumps(json.loads(header)[name])
    header = header[:-1] + f', "{name}": {entry}}}'
    shard.write_bytes(struct.pack("<Q", len(header)) + header.encode() + content[8 + length :])
    refuses(path, name, "twice")


def test_a_key_that_comes_again_after_many_others_is_found():
    """A search that compares every key with all others would take hours here."""
    keys = ",".join(f'"{number}":0' for number in range(300_000))
    with pytest.raises(CheckpointFileError, match="has the key '299999' twice"):
        parse_json(f'{{{keys},"299999":0}}'.encode(), "x.json")


def test_unknown_tensors_are_refused_and_rotary_buffers_are_not(copy):
    path = copy("qwen3")
    rewrite(
        path,
        lambda tensors: (
            tensors.update({"model.layers.0.rotary_emb.inv_freq": np.ones(8, np.float32)})
            if "model.norm.weight" in tensors
            else None
        ),
    )
    mtpjax.load(path)
    rewrite(
        path,
        lambda tensors: (
            tensors.update({"model.layers.0.adapter": np.ones(3, np.float32)})
            if "model.norm.weight" in tensors
            else None
        ),
    )
    refuses(path, "model.layers.0.adapter")


def test_a_wrong_shape_is_named(copy):
    path = copy("qwen3")
    rewrite(
        path,
        lambda tensors: (
            tensors.update({"model.norm.weight": tensors["model.norm.weight"][:-1].copy()})
            if "model.norm.weight" in tensors
            else None
        ),
    )
    refuses(path, "model.norm.weight", "shape")


@pytest.mark.parametrize("dtype", [np.int8, np.float64])
def test_other_dtypes_are_refused(dtype, copy):
    path = copy("qwen3")
    rewrite(
        path,
        lambda tensors: (
            tensors.update({"lm_head.weight": tensors["lm_head.weight"].astype(dtype)})
            if "lm_head.weight" in tensors
            else None
        ),
    )
    refuses(path, "lm_head.weight", np.dtype(dtype).name)


def test_fp8_needs_scales_of_the_right_shape(copy):
    path = copy("deepseek_v3_fp8")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    name = next(name for name in index["weight_map"] if name.endswith("kv_a_proj_with_mqa.weight_scale_inv"))
    edit_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 128]})
    refuses(path, "weight_scale_inv", "(64, 128)")
    del index["weight_map"][name]
    shard = next(shard for shard in shards(path) if name.encode() in shard.read_bytes())
    content = shard.read_bytes()
    shard.write_bytes(content.replace(name.encode(), name.replace("scale_inv", "other_inv").encode()))
    index["weight_map"][name.replace("scale_inv", "other_inv")] = shard.name
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(path, name, "missing")


def test_configuration_and_files_must_agree_on_modules(copy, caplog):
    path = copy("deepseek_v3")
    edit_config(path, num_nextn_predict_layers=2)
    refuses(path, "MTP modules: 2 in config.json, 1 in the files")
    edit_config(path, num_nextn_predict_layers=0)
    with caplog.at_level(logging.WARNING):
        model, _ = mtpjax.load(path)
    assert model.config.num_mtp_modules == 1 and "states 0 MTP modules" in caplog.text
    model, _ = mtpjax.load(GOLDEN / "qwen3_next")  # whose configuration says nothing
    assert model.config.num_mtp_modules == 1


def test_copies_of_embedding_and_head_are_tied_or_kept_apart(copy, caplog):
    path = copy("deepseek_v3")
    with caplog.at_level(logging.INFO):
        model, params = mtpjax.load(path)
    assert not model.config.mtp_own_head and "mtp_head_0" not in params and "is tied to" in caplog.text
    head = "model.layers.4.shared_head.head.weight"
    rewrite(path, lambda tensors: tensors.update({head: tensors[head] + 1}) if head in tensors else None)
    with caplog.at_level(logging.INFO):
        model, params = mtpjax.load(path)
    assert model.config.mtp_own_head and "loaded in addition to" in caplog.text
    np.testing.assert_array_equal(params["mtp_head_0"], params["head"] + 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 2**40}, ("hidden_size",)),
        ({"hidden_size": -1}, ("hidden_size", "-1")),
        ({"hidden_size": "48"}, ("hidden_size", "'48'")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")),
        ({"model_type": "gpt2"}, ("gpt2", "deepseek_v3")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"vocab_size": 2**30}, ("shape",)),
    ],
)
def test_a_bad_configuration_is_refused_before_anything_is_allocated(changes, words, copy):
    path = copy("qwen3")
    edit_config(path, **changes)
    refuses(path, *words)


def test_remote_code_is_not_run(copy, caplog):
    path = copy("qwen3")
    (path / "modeling.py").write_text("raise SystemExit('ran')")
    edit_config(path, auto_map={"AutoModel": "modeling.Model"})
    with caplog.at_level(logging.WARNING):
        mtpjax.load(path)
    assert "auto_map" in caplog.text


@pytest.mark.parametrize(
    "header", [b'{"a": {}}', b"{" * 3000, b"\xff\xfe", b"[]", b'{"a": {"dtype": "F32", "shape": [-1]}}']
)
def test_a_damaged_header_is_refused(header, copy):
    path = copy("qwen3")
    shards(path)[0].write_bytes(struct.pack("<Q", len(header)) + header)
    refuses(path, shards(path)[0].name)


@pytest.mark.parametrize("length", [2**63, 101 << 20])
def test_a_huge_header_is_refused_unread(length, copy):
    path = copy("qwen3")
    with shards(path)[0].open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(8 + min(length, 101 << 20))
    refuses(path, "header")


def test_a_truncated_shard_is_refused(copy):
    path = copy("qwen3")
    last = shards(path)[-1]
    os.truncate(last, last.stat().st_size - 5)
    refuses(path, last.name, "truncated")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
def test_pickles_are_refused_and_never_opened(name, tmp_path):
    (tmp_path / "config.json").write_bytes((GOLDEN / "qwen3" / "config.json").read_bytes())
    os.mkfifo(tmp_path / name)  # opening it would block
    refuses(tmp_path, name, "safetensors")


def test_a_single_file_needs_no_index(tmp_path):
    tensors = {}
    for shard in shards(GOLDEN / "qwen3"):
        tensors |= load_file(shard)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((GOLDEN / "qwen3" / "config.json").read_bytes())
    _, found = mtpjax.load(tmp_path)
    _, wanted = mtpjax.load(GOLDEN / "qwen3")
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_too_large_a_model_is_refused_before_it_is_read(copy, monkeypatch):
    sizes = {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    with pytest.raises(CheckpointFileError, match="this machine has"):
        mtpjax.load(GOLDEN / "qwen3")
