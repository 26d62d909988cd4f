"""A frozen trunk's states on disk: runs with them are runs without, and the folder is believed for no other."""

import contextlib
import dataclasses
import errno
import functools
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import MTPModel, Objective, TrainConfig, compat, forward
from mtpjax.data import packing
from mtpjax.data.config import Source
from mtpjax.errors import Preempted
from mtpjax.io import checkpoint
from mtpjax.models.forward import trunk_states
from mtpjax.models.sharding import shard_params
from mtpjax.models.trunk import stack_layers
from mtpjax.training import hidden_state_cache, run_dir
from mtpjax.training.fp8_states import dequantise_states, quantise_states
from mtpjax.training.gradients import TrainSpec
from mtpjax.training.hidden_state_cache import HiddenStateCacheError, open_hidden_state_cache
from mtpjax.training.run_sizes import compute_run_sizes
from mtpjax.training.step import make_optimizer, train_step
from mtpjax.training.train_state import TrainState, init_train_state
from mtpjax.training.trainer import train

ROWS, LENGTH = 11, 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Of four rows of the small model in float32, also where rows are those of `configured`."""
    monkeypatch.setattr(hidden_state_cache, "BLOCK_BYTES", 4 * LENGTH * 32 * 4)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    tokens = rng.integers(61, size=(ROWS, LENGTH)).astype(np.int32)
    ends = np.sort(rng.integers(1, 4, size=(ROWS, LENGTH)), axis=1).astype(np.int32)
    return packing.Batch(tokens, ends, np.ones(tokens.shape, bool))


def read(folder, rows, small, *, batch_size=4, model=None, params=None, **options):
    own_model, own_params = small()
    return open_hidden_state_cache(
        folder, params or own_params, rows, model=model or own_model, batch_size=batch_size, **options
    )


def blocks(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.npy"))}


@pytest.mark.parametrize("post_norm", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_those_of_the_trunks_pass(dtype, post_norm, rows, small, tmp_path):
    model, params = small(mtp_hidden_post_norm=post_norm)
    stored = read(tmp_path, rows, small, model=model, params=params, dtype=dtype)
    output = forward(params, rows.tokens, segment_ids=rows.segment_ids, model=model)
    wanted = output.hidden if post_norm else output.hidden_prenorm
    numbers = np.array([10, 0, 3, 3, 7])
    found = stored.take(numbers)
    assert found.dtype == jnp.dtype(dtype)
    rtol = 1e-5 if dtype == "float32" else 2**-8  # sums in another order, or half a bfloat16's last place
    np.testing.assert_allclose(found.astype(np.float32), wanted[numbers], atol=1e-5, rtol=rtol)
    each = hidden_state_cache.bytes_per_token(model, dtype)
    assert sum(array.nbytes for (array,) in stored.blocks) == each * rows.tokens.size
    assert len(stored.blocks) == (3 if dtype == "float32" else 2)  # the last is not full


def test_fp8_states_have_a_scale_for_each_token(rows, small, tmp_path):
    """States of all magnitudes are right within fp8's rounding, also next to the states of a layer."""
    model, params = small()
    params = params | {"embedding": params["embedding"] * jnp.geomspace(1e-3, 1e3, 61)[:, None]}
    given = {"model": model, "params": params, "layer_ids": (0,)}
    exact, stored = (read(tmp_path / name, rows, small, dtype=name, **given) for name in ("float32", "fp8_e4m3"))
    numbers = np.array([10, 3])
    found, wanted = (cache.take(numbers).reshape(2, LENGTH, 2, -1) for cache in (stored, exact))
    assert found.dtype == np.uint8 and found[0, 0, 0].nbytes * 2 == hidden_state_cache.bytes_per_token(
        model, "fp8_e4m3", (0,)
    )
    found = dequantise_states(jnp.asarray(found), 32)
    largest = abs(wanted).max(axis=-1, keepdims=True)
    assert largest.min() < 1e-2 and largest.max() > 1e2
    # Half of the last of three bits; below the smallest normal number, half of the smallest subnormal one.
    assert (abs(found - wanted) <= np.maximum(abs(wanted) * 2**-4, largest / 448 * 2**-10) * (1 + 1e-5)).all()
    np.testing.assert_array_equal(dequantise_states(quantise_states(jnp.zeros((1, 32)), 32), 32), 0)


@pytest.mark.parametrize(
    ("axes", "attention"), [({"data": 2, "fsdp": 2}, "grouped"), ({"expert": 2, "fsdp": 2}, "latent")], ids=str
)
def test_a_mesh_and_one_device_write_and_read_the_same_folder(axes, attention, rows, small, tmp_path, monkeypatch):
    model, params = small(attention, num_mtp_modules=0)
    given = {"rows": rows, "small": small, "model": model, "layer_ids": (1,)}
    mesh = compat.make_mesh(axes)
    shards = shard_params(params, mesh)
    wanted = read(tmp_path / "one", params=params, **given).take(np.arange(ROWS))
    found = read(tmp_path / "mesh", params=shards, **given).take(np.arange(ROWS))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert blocks(tmp_path / "mesh").keys() == blocks(tmp_path / "one").keys()
    monkeypatch.setattr(hidden_state_cache, "_compute_blocks", None)
    for folder, other in (("mesh", params), ("one", shards)):
        read(tmp_path / folder, params=other, **given)


@pytest.mark.parametrize("process", [0, 1, 2])
def test_each_process_gets_the_rows_of_its_block(process, rows, monkeypatch):
    """Three processes with two blocks, of which the second is not full."""
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(hidden_state_cache, "_own_rows", lambda states: np.split(states, 3)[process])
    ranges, seen = [(0, 7), (7, 11)], []

    def compute(tokens, segment_ids):
        seen.append(len(tokens))
        return tokens

    found = hidden_state_cache._compute_blocks(compute, rows, ranges, 9)
    begin, end = ranges[min(process, 1)]
    np.testing.assert_array_equal(found, rows.tokens[begin:end])
    assert seen == [9, 9, 9]  # seven rows, three at once


def test_a_process_reads_the_rows_of_its_devices(rows, small, tmp_path, monkeypatch):
    cache, read_rows = read(tmp_path, rows, small), []
    numbers, read_whole = np.array([10, 0, 3, 7]), cache._read

    def spy(self, row_indices):
        read_rows.append(row_indices.tolist())
        return read_whole(row_indices)

    monkeypatch.setattr(type(cache), "_read", spy)
    found = cache.take(numbers, compat.make_mesh({"data": 2, "fsdp": 2}))
    np.testing.assert_array_equal(found, read_whole(numbers))
    assert sorted(read_rows) == [[0], [3], [7], [10]]
    assert found.addressable_shards[0].data.shape == (1, *cache.row_shape)


def test_states_of_other_batch_sizes_differ_by_rounding(rows, small, tmp_path):
    one, *others = [
        read(tmp_path / str(size), rows, small, batch_size=size).take(np.arange(ROWS)) for size in (1, 3, 64)
    ]
    for other in others:
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout, chunk", [("ttt", 0), ("stream", 50)])
def test_a_step_on_states_is_the_step_without_its_trunk(layout, chunk, rows, small, tmp_path):
    """The same losses and parameters, bit for bit on a CPU, and none of the trunk's arithmetic."""
    model, params = small(num_hidden_layers=3, mtp_hidden_post_norm=not chunk)
    stored = read(tmp_path, rows, small, model=model, params=params)
    optimizer = make_optimizer(TrainConfig(trains="modules"))
    objective = Objective(mix={"kl": 1.0, "end_to_end_tv": 1.0}, vocab_chunk=chunk)
    settings = {"num_depths": 2, "attention_layout": layout, "objective": objective, "trains": "modules"}
    step = jax.jit(functools.partial(train_step, spec=TrainSpec(model=model, **settings), optimizer=optimizer))

    def run(with_states):
        state, losses, flops = init_train_state(params, optimizer, "modules"), [], 0
        for numbers in (np.array([0, 5, 10, 2]), np.array([4, 4, 1, 9])):
            given = stored.take(numbers) if with_states else None
            arguments = (state, packing.select_rows(rows, numbers), 1e-2, 1.0, 1.0, given)
            flops = flops or step.lower(*arguments).compile().cost_analysis()["flops"]
            state, metrics = step(*arguments)
            losses.append(np.asarray(metrics["losses"]))
        return losses, state.params, flops

    (losses, after, flops), (plain_losses, plain_after, plain_flops) = run(True), run(False)
    jax.tree.map(np.testing.assert_array_equal, (losses, after), (plain_losses, plain_after))
    trunk = jax.jit(functools.partial(trunk_states, model=model)).lower(params, rows.tokens[:4], rows.segment_ids[:4])
    trunk_flops = trunk.compile().cost_analysis()["flops"]
    assert flops == pytest.approx(plain_flops - trunk_flops, rel=0.02)


def test_a_trained_trunk_has_no_states(rows, small):
    with pytest.raises(ValueError, match=r"trunk_states needs a frozen trunk: .* not 'detached'"):
        TrainConfig(trains="detached", trunk_states="folder")
    model, params = small()
    with pytest.raises(ValueError, match="cached trunk states need a frozen trunk, but trains='all' updates the trunk"):
        train_step(
            TrainState(params, (), jnp.int32(0)), rows, 0.0, 0.0, 1.0, np.zeros((ROWS, LENGTH, 32)),
            spec=TrainSpec(model=model, num_depths=1), optimizer=make_optimizer(TrainConfig()),
        )  # fmt: skip


def test_layers_are_read_beside_the_final_states(rows, small, tmp_path):
    model, params = small(num_hidden_layers=3, num_mtp_modules=0)
    stored = read(tmp_path, rows, small, model=model, params=params, layer_ids=(3, 0, 2))
    wanted = trunk_states(params, rows.tokens, rows.segment_ids, model=model, layer_ids=(3, 0, 2))
    np.testing.assert_allclose(stored.take(np.array([4, 0, 9])), wanted[np.array([4, 0, 9])], rtol=1e-5, atol=1e-5)


# The folder.


def test_runs_that_read_other_layers_share_a_folder(rows, small, tmp_path, monkeypatch):
    """Files that are there are read; only layers that are missing are computed."""
    model, params = small(num_hidden_layers=3)
    # As an MTP module and Medusa, EAGLE-3, and a drafter of some of its layers and a further one read it.
    whole, bare = (tmp_path / name for name in ("whole", "bare"))
    given = {"rows": rows, "small": small, "model": model, "params": params}
    read(bare, **given)
    before = blocks(bare)
    read(bare, layer_ids=(1, 2), **given)
    assert before.items() <= blocks(bare).items() and len(blocks(bare)) == 3 * len(before)
    found = read(bare, layer_ids=(2, 0), **given).take(np.arange(ROWS))
    np.testing.assert_array_equal(found, read(whole, layer_ids=(2, 0), **given).take(np.arange(ROWS)))
    # Stacked layers are the same trunk.
    monkeypatch.setattr(hidden_state_cache, "_compute_blocks", None)
    stacked = {**given, "model": model.clone(scan_layers=True), "params": stack_layers(params, model.config)}
    assert read(bare, **stacked).take(np.array([3])).shape == (1, LENGTH, 32)
    assert read(bare, layer_ids=(0, 1, 2), **given).take(np.array([3])).shape == (1, LENGTH, 4 * 32)


def test_a_folder_is_computed_once(rows, small, tmp_path, monkeypatch, capsys):
    read(tmp_path, rows, small)
    assert "computing the trunk's states: block 3 of 3 tokens/s=" in capsys.readouterr().err
    monkeypatch.setattr(hidden_state_cache, "_compute_blocks", None)
    other_targets = rows._replace(loss_mask=~rows.loss_mask)
    model, params = small()
    more_modules = {**params, "mtp_0": jax.tree.map(jnp.zeros_like, params["mtp_0"]), "mtp_1": params["mtp_0"]}
    grown = MTPModel(dataclasses.replace(model.config, num_mtp_modules=2, mtp_chaining="trunk"))
    read(tmp_path, other_targets, small, batch_size=5, model=grown, params=more_modules)
    assert "checking the trunk's states: block 3 of 3" in capsys.readouterr().err


def test_damaged_blocks_are_computed_again(rows, small, tmp_path, caplog):
    read(tmp_path, rows, small)
    whole = blocks(tmp_path)
    spoilt = bytearray(whole["000000.npy"])
    spoilt[700] ^= 1
    (tmp_path / "000000.npy").write_bytes(spoilt)
    (tmp_path / "000001.npy").unlink()
    (tmp_path / "000002.npy").write_bytes(whole["000002.npy"][:-1])
    read(tmp_path, rows, small)
    assert blocks(tmp_path) == whole
    said = [record.message.replace(str(tmp_path), "") for record in caplog.records]
    assert said == [
        f"/00000{number}.npy {what}: computing it again"
        for number, what in enumerate(("differs from what was written", "is missing", "differs from what was written"))
    ]


def test_other_trunks_rows_and_dtypes_are_refused(rows, small, tmp_path):
    model, params = small()
    read(tmp_path, rows, small)
    before = blocks(tmp_path)
    other = {**params, "embedding": params["embedding"].at[3, 1].add(1e-3)}
    turned = MTPModel(dataclasses.replace(model.config, rope_theta=9999.0))
    unnormed = MTPModel(dataclasses.replace(model.config, mtp_hidden_post_norm=False))
    tokens = rows.tokens.copy()
    tokens[5, 5] += 1
    for changes, said in (
        ({"params": other}, "of a trunk with different parameters: choose a different folder, or remove this one"),
        ({"model": turned}, "of a trunk with a different configuration"),
        ({"model": unnormed}, "of a trunk with a different configuration"),
        ({"rows": rows._replace(tokens=tokens)}, r"of different rows \(data, tokenizer, "),
        ({"rows": rows._replace(segment_ids=rows.segment_ids + 1)}, "of different rows"),
        ({"rows": packing.select_rows(rows, np.arange(10))}, "of different rows"),
        ({"dtype": "bfloat16", "params": other}, "different parameters, and in a different dtype"),
    ):
        with pytest.raises(HiddenStateCacheError, match=f"{tmp_path} holds states .*{said}"):
            read(tmp_path, **{"rows": rows, "small": small, **changes})
    assert blocks(tmp_path) == before
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(HiddenStateCacheError, match=r"manifest\.json is damaged"):
        read(tmp_path, rows, small)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(HiddenStateCacheError, match="is not a cache of trunk states: it contains 00000"):
        read(tmp_path, rows, small)


def test_blocks_that_were_complete_are_kept(rows, small, tmp_path, monkeypatch):
    """When the disk is full, the process ends, or is told to end."""
    (tmp_path / "whole").mkdir()
    read(tmp_path / "whole", rows, small)
    save, folder, rooms = np.save, tmp_path / "part", iter([True, False])

    def fill_up(file, array):
        if next(rooms):
            return save(file, array)
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", fill_up)
    with pytest.raises(OSError, match=r"000001\.npy of 8192 bytes cannot be written: .*No space left"):
        read(folder, rows, small)
    monkeypatch.undo()
    monkeypatch.setattr(hidden_state_cache, "BLOCK_BYTES", 1)  # blocks stay as large as they are
    assert sorted(file.name for file in folder.iterdir()) == [".lock", "000000.npy", "manifest.json"]
    with pytest.raises(Preempted, match="2 of 3 blocks"):
        read(folder, rows, small, should_stop=iter([False, True]).__next__)
    (folder / "000002.npy").write_bytes(b"of a process that ended before it wrote the digest down")
    (folder / ".tmp-000002.npy-1").write_bytes(b"half")
    computed, compute = [], hidden_state_cache._compute_blocks
    monkeypatch.setattr(hidden_state_cache, "_compute_blocks", lambda *given: computed.append(0) or compute(*given))
    read(folder, rows, small)
    assert len(computed) == 1
    assert blocks(folder) == blocks(tmp_path / "whole") and not list(folder.glob(".tmp-*"))


def test_a_second_process_waits(tmp_path, caplog):
    order = []

    def second():
        with run_dir.lock_folder(tmp_path, wait=True):
            order.append("second")

    thread = threading.Thread(target=second)
    with run_dir.lock_folder(tmp_path):
        thread.start()
        while "waiting" not in caplog.text:
            thread.join(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


# Whole runs.


@pytest.fixture(scope="module")
def origin(small, tmp_path_factory):
    """A trunk to begin from, and two folders of text."""
    folder = tmp_path_factory.mktemp("origin")
    model, params = small(vocab_size=256, num_mtp_modules=0)
    checkpoint.save_model(folder / "trunk", model, params)
    for name in ("a", "b"):
        (folder / name).mkdir()
        for number in range(30):
            (folder / name / f"{number}.py").write_text(f"def {name}_{number}(x):\n    return {number}\n")
    return folder


def configured(origin, output, num_sources=1, **changes):
    sources = [Source(path=str(origin / "a")), Source(path=str(origin / "b"), weight=2.0)]
    settings = {
        "init_from": str(origin / "trunk"), "trains": "modules", "sources": sources[:num_sources],
        "output": str(output), "held_out_fraction": 0.2, "steps": 6, "batch_size": 2, "row_length": 13,
        "extra_tokens": 3, "num_depths": 2, "log_every": 1, "panel_prompts": 0,
    }  # fmt: skip
    return TrainConfig(**settings | changes)


def losses(result):
    return [row["bits"] for row in result.history if "bits" in row]


def assert_same(result, plain):
    assert losses(result) == losses(plain)
    jax.tree.map(np.testing.assert_array_equal, result.params, plain.params)


@pytest.mark.slow
def test_runs_of_all_seeds_and_objectives_share_a_folder(origin, tmp_path, monkeypatch):
    """On two sources; the second run finds all there is."""
    pytest.importorskip("grain")
    folder = tmp_path / "states"
    train(configured(origin, tmp_path / "first", num_sources=2, trunk_states=str(folder)), evaluations=1)
    monkeypatch.setattr(hidden_state_cache, "_compute_blocks", None)
    changes = {"num_sources": 2, "seed": 1, "objective": Objective(mix={"lk_hybrid": 1.0}, vocab_chunk=100)}
    config = configured(origin, tmp_path / "stored", trunk_states=str(folder), **changes)
    assert_same(train(config, evaluations=1), train(configured(origin, tmp_path / "plain", **changes), evaluations=1))
    sizes = compute_run_sizes(config)
    stored = sum(np.load(file, mmap_mode="r").nbytes for file in folder.glob("*.npy"))
    assert sizes["bytes of the trunk's states"] == stored
    assert sizes["bytes of the trunk's states, each token"] == 4 * 32


@pytest.mark.slow
def test_a_run_that_is_told_to_end_goes_on_with_its_states(origin, tmp_path, monkeypatch):
    """While they are computed, and while it trains."""
    config = configured(origin, tmp_path / "run", trunk_states=str(tmp_path / "states"))
    plain = train(configured(origin, tmp_path / "plain"), evaluations=1)

    def told_after(questions, said, *, resume):
        counter = itertools.count()
        monkeypatch.setattr(
            run_dir, "catch_stop_signals", lambda: contextlib.nullcontext(lambda: next(counter) >= questions)
        )
        with pytest.raises(Preempted, match=said):
            train(config, evaluations=1, resume=resume)
        monkeypatch.undo()

    told_after(2, r"stopped by a signal with 2 of \d+ blocks in .*states: continue with resume", resume=False)
    rest = -(-compute_run_sizes(config)["rows"] // 4) - 2
    told_after(rest + 3, "is saved at update 4", resume=True)
    assert_same(train(config, evaluations=1, resume=True), plain)
