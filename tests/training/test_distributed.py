"""Runs over a mesh and in several processes: the losses of one device, states that go on elsewhere, lost processes."""

import contextlib
import dataclasses
import functools
import signal
import socket
import subprocess
import time

import jax
import numpy as np
import pytest

from mtpjax import TrainConfig, check_acceptance, compat, distributed, load, load_drafter, train
from mtpjax.data import packing
from mtpjax.io.checkpoint import save_model
from mtpjax.training import hidden_state_cache
from mtpjax.training.data_parallel import shard_batch
from mtpjax.training.log import read_metrics
from mtpjax.training.run_dir import METRICS_FILE, RunError
from mtpjax.training.yaml_config import read_train_config, to_yaml
from tests.helpers import training_runs

SETTINGS = training_runs.SETTINGS | {"steps": 10, "batch_size": 4, "save_every": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return str(training_runs.write_corpus(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    """The losses of a run on one device that nothing happens to."""
    config = TrainConfig(data=text, output=str(tmp_path_factory.mktemp("unbroken")), **SETTINGS)
    return training_runs.losses(train(config, evaluations=1).history)


def assert_close(found, expected):
    """Rounding grows from step to step: Adam divides small gradients by themselves."""
    assert list(found) == list(expected)
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-4)


@pytest.mark.slow
def test_a_run_on_a_mesh_goes_on_with_one_device(text, unbroken, tmp_path):
    mesh = {"data": 2, "fsdp": 2}
    config = TrainConfig(data=text, output=str(tmp_path), **SETTINGS, mesh=mesh)
    result = train(config, evaluations=1)
    assert_close(training_runs.losses(result.history), unbroken)
    embedding = result.params["embedding"]
    assert embedding.addressable_shards[0].data.size == embedding.size // 2
    single = dataclasses.replace(config, mesh=())
    with pytest.raises(RunError, match=r"mesh was \[\[.data., 2\], \[.fsdp., 2\]\], is \[\]"):
        train(single, resume=True)
    again = train(single, evaluations=1, resume=True, allowed_changes=["mesh"])
    assert_close(training_runs.losses(again.history), unbroken)


def test_processes_take_every_row_once():
    """T9: two for the first updates of an epoch, then one."""
    rows = packing.Batch(*(np.arange(48, dtype=np.int32).reshape(24, 2) for _ in range(3)))
    mesh, seen = compat.make_mesh({"data": 2}), []
    stream = packing.shuffled_batches(rows, 4, seed=0)
    for _ in range(2):
        batch = shard_batch(next(stream), mesh)
        hosts = [np.asarray(shard.data) for shard in batch.tokens.addressable_shards]
        assert [len(taken) for taken in hosts] == [2, 2]
        seen += [row for taken in hosts for row in taken[:, 0]]
    stream = packing.shuffled_batches(rows, 4, seed=0, start=2)
    for _ in range(4):
        seen += list(next(stream).tokens[:, 0])
    assert sorted(seen) == list(rows.tokens[:, 0])


class Processes:
    """Two processes that train together, by the command line."""

    def __init__(self, folder, text, axis="data", **changes):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.text, self.output, self.settings = text, folder / "run", SETTINGS | changes
        self.environment = training_runs.environment(folder / "cache")
        self.both = [
            self.start("--mesh", f"{axis}=2", "--nnodes", "2", "--node-rank", str(rank), "--dist-init-addr", address)
            for rank in (0, 1)
        ]

    def start(self, *more):
        command = [*training_runs.train_command(self.text, self.output, self.settings), *more]
        return subprocess.Popen(
            command, env=self.environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def losses(self):
        return training_runs.read_losses(self.output)

    def metrics(self):
        return read_metrics(self.output / METRICS_FILE)

    def wait_for(self, step):
        deadline = time.monotonic() + 120
        while max(self.losses(), default=0) < step:
            ended = [process for process in self.both if process.poll() is not None]
            assert not ended and time.monotonic() < deadline, [process.communicate()[1][-3000:] for process in ended]
            time.sleep(0.02)

    def goes_on_alone(self):
        run = self.start("--resume", "--allow-config-change", "mesh")
        error = run.communicate(timeout=120)[1]
        assert run.returncode == 0, error[-3000:]
        return self.losses()

    def end(self):
        for process in self.both:
            process.kill()
            process.communicate()


@pytest.fixture
def launch(text, tmp_path):
    with contextlib.ExitStack() as stack:

        def start(folder=tmp_path, **changes):
            run = Processes(folder, text, **changes)
            stack.callback(run.end)
            return run

        yield start


@pytest.mark.slow  # three processes; .ci/run has it beside other commands
def test_a_process_that_dies_ends_the_others_and_the_run_goes_on_with_one(launch, unbroken):
    """T9, T20."""
    run = launch(steps=10, axis="fsdp")
    run.wait_for(5)
    run.both[1].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    error = run.both[0].communicate(timeout=60)[1]
    print(f"the other ended after {time.monotonic() - begin:.1f} s")
    assert run.both[0].returncode == 75, error[-3000:]
    assert "mtpjax train: another process of this run has ended or cannot be reached" in error
    assert_close(run.goes_on_alone(), unbroken)


@pytest.mark.slow
def test_processes_that_split_the_model_train_evaluate_and_save_it(launch, unbroken):
    """T9."""
    run = launch(axis="fsdp", panel_prompts=2)
    errors = [process.communicate(timeout=200)[1] for process in run.both]
    assert [process.returncode for process in run.both] == [0, 0], errors
    assert_close(run.losses(), unbroken)
    rows = [row["eval"] for row in run.metrics() if "eval" in row]
    assert rows[-1]["decoded"]["overall"]["greedy"]["real"] >= 1
    # The model of both drafts in one process as it did, and its arrays are in parts.
    assert check_acceptance(run.output, *load(run.output)) == []
    embedding = run.output / "checkpoint" / "params" / "embedding"
    assert len([file for file in embedding.iterdir() if file.name[0] != "."]) == 2


@pytest.mark.slow
def test_processes_train_a_drafter_on_states_that_they_share(launch, small, text, tmp_path, monkeypatch):
    """Two processes write the states that one reads, and read those of one; and a killed one loses nothing."""
    save_model(tmp_path / "trunk", *small(vocab_size=256, num_mtp_modules=0))
    settings = {"drafter": "eagle3", "init_from": str(tmp_path / "trunk"), "draft_vocab_size": 40, "panel_prompts": 2}
    alone = functools.partial(TrainConfig, data=text, plot_formats=(), **SETTINGS | settings)
    config = alone(output=str(tmp_path / "one"), trunk_states=str(tmp_path / "of-one"))
    result = train(config, evaluations=1)
    # Two processes, from the first block to the drafter's files.
    run = launch(axis="fsdp", trunk_states=tmp_path / "of-two", plot_formats="[]", **settings)
    errors = [process.communicate(timeout=300)[1] for process in run.both]
    assert [process.returncode for process in run.both] == [0, 0], errors
    assert "computing the trunk's states" in errors[0]
    assert_close(run.losses(), training_runs.losses(result.history))
    drafter, draft_params = load_drafter(run.output, model=result.model)
    assert drafter == result.drafter
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), draft_params, result.draft_params)
    panels = [[row["eval"] for row in rows if "eval" in row][-1] for rows in (run.metrics(), result.history)]
    found, wanted = (panel["decoded"]["overall"]["greedy"]["real"] for panel in panels)
    assert found == pytest.approx(wanted)
    # One process reads all blocks of two.
    names = {file.name for file in (tmp_path / "of-one").iterdir()}
    assert names == {file.name for file in (tmp_path / "of-two").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(hidden_state_cache, "_compute_blocks", None)
        train(alone(output=str(tmp_path / "again"), trunk_states=str(tmp_path / "of-two"), steps=1), evaluations=1)
    # Two processes read all blocks of one, until one is killed. The other goes on.
    settings |= {"panel_prompts": 0, "plot_formats": "[]", "trunk_states": tmp_path / "of-one"}
    run = launch(folder=tmp_path / "killed", **settings)
    run.wait_for(5)
    run.both[1].send_signal(signal.SIGKILL)
    error = run.both[0].communicate(timeout=60)[1]
    assert run.both[0].returncode == 75 and "computing the trunk's states" not in error, error[-3000:]
    assert_close(run.goes_on_alone(), training_runs.losses(result.history))


@pytest.mark.slow
def test_a_process_that_is_told_to_end_ends_all_of_them(launch, unbroken):
    """T17 in two processes: the second gets the signal."""
    run = launch()
    run.wait_for(3)
    run.both[1].send_signal(signal.SIGTERM)
    errors = [process.communicate(timeout=60)[1] for process in run.both]
    assert [process.returncode for process in run.both] == [75, 75], errors
    assert_close(run.goes_on_alone(), unbroken)


def test_meshes_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    for changes, said in (
        ({"mesh": {"tensor": 2}}, "mesh axis 'tensor' is not one of data, fsdp, expert, context"),
        ({"mesh": {"data": 0}}, "mesh axis data must be at least 1, not 0"),
        ({"mesh": {"data": 3}}, r"batch_size 8 is not a multiple of 3 \(accumulation 1 x mesh {'data': 3}\)"),
        ({"accumulation": 5}, "batch_size 8 is not a multiple of 5"),
        ({"accumulation": 0}, "accumulation must be at least 1, not 0"),
        ({"remat": "all"}, "remat 'all' is not one of auto, none, attention, layers"),
        ({"dtype": "float16"}, "dtype 'float16' is not one of float32, bfloat16"),
        ({"profile_steps": -1}, "profile_steps must be at least 0, not -1"),
    ):
        with pytest.raises(ValueError, match=said):
            TrainConfig(**changes)
    config = TrainConfig(mesh={"data": 16}, batch_size=16, output=str(tmp_path))
    with pytest.raises(ValueError, match=r"the mesh {'data': 16} covers 16 devices, but JAX has 8"):
        train(config)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"the mesh {} covers 1 devices, but JAX has 8"):
        train(TrainConfig(output=str(tmp_path)))
    with pytest.raises(ValueError, match=r"seconds 9.0 is unsupported with several processes"):
        train(TrainConfig(output=str(tmp_path), mesh={"data": 8}, seconds=9.0))


def test_a_rank_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="node-rank and dist-init-addr must be set together"):
        distributed.connect(2, 1)
    with pytest.raises(ValueError, match=r"node-rank 2 is outside 0\.\.1"):
        distributed.connect(2, 2, "localhost:1")


def test_settings_of_scale_are_read_and_printed(tmp_path):
    pairs = ["accumulation=1", "remat=layers", "dtype=bfloat16", "wandb=drafts"]
    config = read_train_config(None, pairs, flags={"mesh": {"data": 2, "fsdp": 4}})
    assert config == TrainConfig(mesh={"data": 2, "fsdp": 4}, remat="layers", dtype="bfloat16", wandb="drafts")
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    assert read_train_config(tmp_path / "run.yaml") == config
