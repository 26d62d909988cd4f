import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mtpjax import compat
from mtpjax.errors import CheckpointError
from mtpjax.io import checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader

CONFIG = {"hidden_size": 64, "rope": {"theta": 1e4}, "layers": ["full", "latent"]}
METADATA = {"step": 3}


@pytest.fixture(scope="module")
def params():
    key = jax.random.key(0)
    return {
        "embedding": jax.random.normal(key, (33, 16)),
        "block": {
            "kernel": jax.random.normal(key, (64, 16)).astype(jnp.bfloat16),
            "quantized": jnp.linspace(-2, 2, 40).reshape(5, 8).astype(jnp.float8_e4m3fn),
            "nested": {
                "scale": jnp.float32(2.5),
                "steps": np.arange(7, dtype=np.int32),
                "mask": jnp.array([True, False]),
            },
        },
    }


@pytest.fixture(scope="module")
def saved(params, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    checkpoint.save(path, CONFIG, params, metadata=METADATA)
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved, tmp_path / "copy"))


def assert_bit_equal(restored, expected):
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for found, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert isinstance(found, jax.Array) and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_what_is_saved_is_restored_to_the_bit(saved, params, capfd):
    config, restored, metadata = checkpoint.restore(saved)
    assert (config, metadata) == (CONFIG, METADATA)
    assert_bit_equal(restored, params)
    assert capfd.readouterr().err == ""


def test_saving_is_silent_and_leaves_nothing_beside_the_checkpoint(params, tmp_path, capfd):
    checkpoint.save(tmp_path / "runs" / "one", CONFIG, params)
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == ["one"]
    assert checkpoint.restore(tmp_path / "runs" / "one")[2] == {}
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_arrays_sharded_over_devices_restore_where_there_is_one(tmp_path):
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    array = jnp.arange(len(jax.devices()) * 6, dtype=jnp.bfloat16).reshape(-1, 3)
    checkpoint.save(tmp_path / "saved", {}, {"kernel": jax.device_put(array, sharding)})
    program = (
        "import sys, jax, numpy as np; from mtpjax.io import checkpoint\n"
        "kernel = checkpoint.restore(sys.argv[1])[1]['kernel']\n"
        "assert len(jax.devices()) == len(kernel.devices()) == 1\n"
        "print(kernel.dtype, np.asarray(kernel).tobytes().hex())"
    )
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, tmp_path / "saved"],
        env=environment, cwd=pathlib.Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == (f"bfloat16 {np.asarray(array).tobytes().hex()}", "")


@pytest.fixture(scope="module")
def split(params, tmp_path_factory):
    """The embedding's columns, and the kernel's rows and columns, saved from a mesh that splits them."""
    path = tmp_path_factory.mktemp("split") / "checkpoint"
    mesh = compat.make_mesh({"fsdp": 4, "tensor": 2})
    block = {"kernel": _on(params["block"]["kernel"], mesh, "fsdp", "tensor")}
    tree = {"embedding": _on(params["embedding"], mesh, None, "tensor"), "block": block}
    checkpoint.save(path, CONFIG, tree | {"steps": _on(np.arange(3, dtype=np.int32), mesh, None)})
    return path


def _on(array, mesh, *axes):
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))


def test_an_array_that_a_mesh_splits_is_written_as_its_parts(split, params):
    sizes = {str(file.relative_to(split / "params")): file.stat().st_size for file in files_of(split / "params")}
    parts = {name: size for name, size in sizes.items() if name.startswith("block.kernel/") and "zarray" not in name}
    assert parts == {f"block.kernel/{row}.{column}": 64 * 16 * 2 // 8 for row in range(4) for column in range(2)}
    restored = checkpoint.restore(split)[1]
    expected = {"embedding": params["embedding"], "block": {"kernel": params["block"]["kernel"]}}
    assert_bit_equal(restored, expected | {"steps": jnp.arange(3, dtype=jnp.int32)})


def test_parts_are_read_onto_another_mesh_and_no_more_than_a_device_holds(split, params, monkeypatch):
    read, sizes = CheckpointReader.read, []

    def counting(reader, name, index):
        array = read(reader, name, index)
        sizes.append((name, array.size))
        return array

    monkeypatch.setattr(CheckpointReader, "read", counting)
    mesh = compat.make_mesh({"tensor": 2}, jax.devices()[:2])
    reader, kernel = CheckpointReader(split), params["block"]["kernel"]
    for axes in ((None, "tensor"), ("tensor",), ()):
        placed = reader.place("block/kernel", lambda shape, axes=axes: NamedSharding(mesh, PartitionSpec(*axes)))
        assert placed.sharding.spec == PartitionSpec(*axes)
        assert_bit_equal(placed, kernel)
    assert sizes == [("block/kernel", kernel.size)] * 3  # each part once, both devices' in one box


# Damage.


@pytest.mark.parametrize("seed", range(2))
def test_a_flipped_bit_of_a_part_is_found(split, tmp_path, seed):
    rng, copy = random.Random(seed), pathlib.Path(shutil.copytree(split, tmp_path / "copy"))
    file = rng.choice([file for file in files_of(copy) if file.parent.name == "block.kernel"])
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file.parent.name}/{file.name} of array 'block/kernel' differs"):
        CheckpointReader(copy)


@pytest.mark.parametrize("key, value", [("shape", [64, 32]), ("dtype", "float16")])
def test_parts_unlike_their_record_are_refused(split, tmp_path, key, value):
    copy = pathlib.Path(shutil.copytree(split, tmp_path / "copy"))
    digests = json.loads((copy / "digests.json").read_text())
    found = digests["arrays"]["block/kernel"][key]
    digests["arrays"]["block/kernel"][key] = value
    (copy / "digests.json").write_text(json.dumps(digests))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(CheckpointError) as error:
        CheckpointReader(copy).place("block/kernel", lambda shape: here)
    assert f"'block/kernel' in {copy / 'params'} has {key} {found}; expected {value}" in str(error.value)


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_in_any_file_is_found(copy, seed):
    rng = random.Random(seed)
    for file in files_of(copy):
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            checkpoint.restore(copy)
        file.write_bytes(content)
    checkpoint.restore(copy)


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_truncated_or_missing_file_is_found_and_named(copy, damage):
    for file in files_of(copy):
        content = file.read_bytes()
        file.unlink()
        if damage == "truncated":
            file.write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointError, match=file.name):
            checkpoint.restore(copy)
        file.write_bytes(content)


def test_the_message_names_the_array_and_its_file(copy, capfd):
    [file] = [file for file in files_of(copy) if file.match("block.kernel/0.0")]
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(CheckpointError, match=r"block\.kernel/0\.0 of array 'block/kernel' differs"):
        checkpoint.restore(copy)
    assert capfd.readouterr().err == ""  # no parser met it


@pytest.mark.parametrize("key, value", [("shape", [16, 64]), ("dtype", "float16"), ("sha256", "0" * 64)])
def test_an_array_unlike_its_record_is_refused_with_both_values(copy, key, value):
    digests = json.loads((copy / "digests.json").read_text())
    found = digests["arrays"]["block/kernel"][key]
    digests["arrays"]["block/kernel"][key] = value
    (copy / "digests.json").write_text(json.dumps(digests))
    with pytest.raises(CheckpointError) as error:
        checkpoint.restore(copy)
    assert f"'block/kernel' in {copy / 'params'} has {key} {found}; expected {value}" in str(error.value)


@pytest.mark.parametrize("name, absent", [("block/kernel", "digests.json"), ("block/other", "params")])
def test_a_tree_unlike_its_record_is_refused(copy, name, absent):
    digests = json.loads((copy / "digests.json").read_text())
    record = digests["arrays"].pop("block/kernel")
    digests["arrays"] |= {"block/kernel": record, "block/other": record} if absent == "params" else {}
    (copy / "digests.json").write_text(json.dumps(digests))
    with pytest.raises(CheckpointError, match=f"array '{name}' is missing from .*{absent}"):
        checkpoint.restore(copy)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model_type": "deepseek_v3"}', "\xff"])
def test_another_folder_is_no_checkpoint(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
    assert not checkpoint.is_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"it has no config\.json with format 'mtpjax-checkpoint'"):
        checkpoint.restore(tmp_path)


def test_a_newer_version_is_recognised_and_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"version": 2}))
    assert checkpoint.is_checkpoint(copy)
    with pytest.raises(CheckpointError, match="has version 2, not 1"):
        checkpoint.restore(copy)


# Overwriting, and failing on the way.


def test_a_checkpoint_is_replaced_by_a_later_one(copy, params):
    later = {"embedding": params["embedding"] + 1}
    checkpoint.save(copy, {"hidden_size": 32}, later)
    config, restored, metadata = checkpoint.restore(copy)
    assert (config, metadata) == ({"hidden_size": 32}, {})
    assert_bit_equal(restored, later)
    assert [entry.name for entry in copy.parent.iterdir()] == [copy.name]


def fail(*_, **__):
    raise OSError("disk full")


def fail_after_the_arrays(write, *arguments):
    write(*arguments)
    fail()


@pytest.mark.parametrize("moment", ["before the arrays", "after the arrays", "at the digests", "at the rename"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_failed_save_leaves_what_was_there(copy, params, monkeypatch, moment, is_first):
    write, rename = checkpoint.write_arrays, pathlib.Path.rename

    def fail_for_the_new(source, target):
        return fail() if source.name.startswith(".tmp-") and not target.name.startswith(".") else rename(source, target)

    name, failing = {
        "before the arrays": ("mtpjax.io.checkpoint.write_arrays", fail),
        "after the arrays": ("mtpjax.io.checkpoint.write_arrays", lambda *args: fail_after_the_arrays(write, *args)),
        "at the digests": ("mtpjax.io.checkpoint.file_digest", fail),
        "at the rename": ("pathlib.Path.rename", fail_for_the_new),
    }[moment]
    if is_first:
        shutil.rmtree(copy)
    with monkeypatch.context() as patch:
        patch.setattr(name, failing)
        with pytest.raises(OSError, match="disk full"):
            checkpoint.save(copy, {}, {"other": jnp.ones(3)})
    if not is_first:
        assert_bit_equal(checkpoint.restore(copy)[1], params)
    assert [entry.name for entry in copy.parent.iterdir()] == ([] if is_first else [copy.name])


def test_a_folder_that_is_not_ours_is_not_replaced(tmp_path, params):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="is not overwritten"):
        checkpoint.save(tmp_path, CONFIG, params)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    "bad, problem",
    [
        ({}, "no array"),
        ([np.ones(2)], "must be nested dicts"),
        ({"a": {"b": [np.ones(2)]}}, "'a/b'.* is a list"),
        ({"a": {}}, "is a dict"),
        ({"a.b": np.ones(2)}, "key 'a.b'"),
        ({"a": np.zeros((0, 2), np.float32)}, r"shape \(0, 2\)"),
        ({"a": np.zeros(2, np.float64)}, "dtype <f8"),
        ({"a": np.zeros(2, ">f4")}, "dtype >f4"),
        ({"a": np.array(["text"])}, "dtype <U4"),
    ],
)
def test_params_that_could_not_come_back_are_refused(tmp_path, bad, problem):
    with pytest.raises(ValueError, match=problem):
        checkpoint.save(tmp_path / "new", {}, bad)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config, error", [({"loss": float("nan")}, ValueError), ({"shape": np.ones(2)}, TypeError)])
def test_a_config_that_is_no_json_is_refused(tmp_path, params, config, error):
    with pytest.raises(error, match="JSON"):
        checkpoint.save(tmp_path / "new", config, params)
    assert list(tmp_path.iterdir()) == []
