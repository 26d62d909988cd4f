"""A killed run goes on from its last whole state with the same losses; damage and differences are told."""

import dataclasses
import errno
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from mtpjax import TrainConfig
from mtpjax.io import checkpoint
from mtpjax.training import run_dir, run_settings
from mtpjax.training.run_dir import RunError
from mtpjax.training.trainer import train
from mtpjax.training.yaml_config import read_train_config, to_yaml
from tests.helpers import training_runs


def state_at(step):
    return {"weights": {"a": jnp.arange(6.0).reshape(2, 3) + step}, "moments": (jnp.ones(3) * step, jnp.int32(step))}


def saved(folder, *steps, keep=9):
    for step in steps:
        assert run_dir.save_state(folder, state_at(step), step=step, keep=keep, metadata={"seconds": step / 2})
    return folder


def assert_state(folder, step):
    state, metadata = run_dir.restore_state(folder, state_at(0))
    assert metadata == {"step": step, "seconds": step / 2}
    for found, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(state_at(step)), strict=True):
        assert found.dtype == wanted.dtype and (found == wanted).all()


def test_states_come_back_and_few_stay(tmp_path):
    saved(tmp_path, 10, 20, 130, keep=2)
    assert_state(tmp_path, 130)
    assert [path.name for path in run_dir._state_folders(tmp_path)] == ["00000130", "00000020"]
    assert run_dir.restore_state(tmp_path / "empty", state_at(0)) is None


def test_what_is_half_there_is_skipped(tmp_path):
    """T5: truncated and missing files, a missing list of digests, what a killed process left behind."""
    saved(tmp_path, 10)
    newest = tmp_path / "states" / "00000020"
    for spoil in (
        lambda: (newest / "digests.json").unlink(),
        lambda: (newest / "config.json").write_text((newest / "config.json").read_text()[:30]),
        lambda: max(newest.rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0).unlink(),
    ):
        saved(tmp_path, 20)
        spoil()
        assert_state(tmp_path, 10)
    (tmp_path / "states" / ".tmp-00000030-1-abc").mkdir()
    assert_state(tmp_path, 10)


class Killed(BaseException):
    """What no code expects."""


def test_shapes_alone_restore_to_the_first_device(tmp_path):
    state, _ = run_dir.restore_state(saved(tmp_path, 10), jax.eval_shape(lambda: state_at(0)))
    assert (state["weights"]["a"] == state_at(10)["weights"]["a"]).all() and state["moments"][1] == 10


@pytest.mark.parametrize(
    "owner, name, is_done, newest",
    [
        (checkpoint, "save", False, 10),
        pytest.param(checkpoint, "write_arrays", False, 10, marks=pytest.mark.slow),
        pytest.param(checkpoint, "write_arrays", True, 10, marks=pytest.mark.slow),
        pytest.param(pathlib.Path, "rename", False, 10, marks=pytest.mark.slow),
        (pathlib.Path, "rename", True, 20),
        (run_dir, "_state_folders", False, 20),
    ],
    ids=["before saving", "begun", "written", "before the rename", "after the rename", "before older states go"],
)
def test_a_run_killed_while_saving_goes_on_from_a_whole_state(tmp_path, monkeypatch, owner, name, is_done, newest):
    """T2. What the dead process would clean up stays, and goes when the next state has been saved."""
    saved(tmp_path, 10)
    real = getattr(owner, name)

    def dies(*args, **kwargs):
        if is_done:
            real(*args, **kwargs)
        monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        raise Killed

    monkeypatch.setattr(owner, name, dies)
    with pytest.raises(Killed):
        saved(tmp_path, 20, keep=1)
    monkeypatch.undo()
    assert {int(path.name) for path in run_dir._state_folders(tmp_path)} == {10, newest}
    assert_state(tmp_path, newest)
    saved(tmp_path, newest + 10, keep=1)
    assert os.listdir(tmp_path / "states") == [f"{newest + 10:08d}"]
    assert_state(tmp_path, newest + 10)


def test_a_full_disk_costs_one_state(tmp_path, monkeypatch, caplog):
    saved(tmp_path, 10)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_arrays", full)
    assert not run_dir.save_state(tmp_path, state_at(20), step=20, keep=1, metadata={})
    assert "the state after update 20 could not be saved" in caplog.text and "No space left" in caplog.text
    monkeypatch.undo()
    assert os.listdir(tmp_path / "states") == ["00000010"]
    assert_state(tmp_path, 10)


def test_another_shape_dtype_or_tree_is_refused(tmp_path):
    saved(tmp_path, 10)
    like, had = state_at(0), r"float32\[2, 3\] instead of"
    for other, said in (
        (like | {"weights": {"a": jnp.zeros((3, 2))}}, had + r" float32\[3, 2\] for \['weights'\]"),
        (like | {"weights": {"a": jnp.zeros((2, 3), jnp.bfloat16)}}, had + r" bfloat16\[2, 3\] for "),
        (like | {"more": jnp.zeros(1)}, r"holds nothing instead of float32\[1\] for \['more'\]"),
        ({"weights": like["weights"]}, "holds unexpected arrays"),
    ):
        with pytest.raises(RunError, match=said):
            run_dir.restore_state(tmp_path, other)


def test_one_process_writes(tmp_path):
    with run_dir.lock_folder(tmp_path):
        said = subprocess.run(
            [
                sys.executable,
                "-c",
                f"from mtpjax.training import run_dir\nwith run_dir.lock_folder({str(tmp_path)!r}): pass",
            ],
            capture_output=True,
            text=True,
        ).stderr
        assert f"is being written to by process {os.getpid()} on " in said
    with run_dir.lock_folder(tmp_path):
        pass


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TrainConfig)])
def test_a_changed_setting_is_refused_or_free(name, tmp_path):
    """T7: every setting, one by one."""
    settings = dataclasses.asdict(TrainConfig())
    run_dir.begin(tmp_path, settings | {"seconds": None}, "digest", overwrite=False)
    changed = settings | {"seconds": None, name: "changed"}
    if name in run_settings.CHANGEABLE_SETTINGS:
        run_settings.check_settings(tmp_path, changed, "digest")
    else:
        with pytest.raises(RunError, match=f"different settings: {name} was .*, is 'changed'"):
            run_settings.check_settings(tmp_path, changed, "digest")
        run_settings.check_settings(tmp_path, changed, "digest", [name])


def test_other_data_and_other_runs_are_refused(tmp_path):
    run_dir.begin(tmp_path, {}, "digest", overwrite=False)
    with pytest.raises(RunError, match="different data"):
        run_settings.check_settings(tmp_path, {}, "another")
    run_settings.check_settings(tmp_path, {}, "another", ["data"])
    with pytest.raises(RunError, match="holds a run: continue it"):
        run_dir.begin(tmp_path, {}, "digest", overwrite=False)
    with pytest.raises(RunError, match=r"is not a run folder: it has no run\.json"):
        run_settings.check_settings(tmp_path / "empty", {}, "digest")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        run_settings.check_settings(tmp_path, {}, "digest")


@pytest.mark.parametrize(("owner", "name"), [(shutil, "rmtree"), (run_dir, "write_text")])
def test_a_crash_while_overwriting_leaves_no_run_to_resume(owner, name, tmp_path, monkeypatch):
    def crash(*args, **kwargs):
        raise Killed

    run_dir.begin(tmp_path, {"seed": 0}, "digest", overwrite=False)
    saved(tmp_path, 10)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crash)
        with pytest.raises(Killed):
            run_dir.begin(tmp_path, {"seed": 1}, "digest", overwrite=True)
    for seed in (0, 1):
        with pytest.raises(RunError, match=r"is not a run folder: it has no run\.json"):
            run_settings.check_settings(tmp_path, {"seed": seed}, "digest")
    run_dir.begin(tmp_path, {"seed": 1}, "digest", overwrite=False)
    assert run_dir.restore_state(tmp_path, state_at(0)) is None


SETTINGS = training_runs.SETTINGS | {"steps": 30, "save_every": 4}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return training_runs.write_corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    return training_runs.environment(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def unbroken(text, env, tmp_path_factory):
    """`unbroken(settings)`: losses of a run that nothing happens to; a process like the others, for roundings depend on

    the threads.
    """

    def run(settings):
        folder = tmp_path_factory.mktemp("unbroken")
        subprocess.run(training_runs.train_command(text, folder, settings), check=True, capture_output=True, env=env)
        losses = training_runs.read_losses(folder)
        assert list(losses) == list(range(1, settings["steps"] + 1))
        return losses

    return run


@pytest.mark.slow  # three processes; .ci/run has it beside other commands
def test_a_run_that_is_told_to_end_says_so_and_goes_on(text, env, unbroken, tmp_path):
    """T17."""
    settings = SETTINGS | {"save_every": 0}
    command = training_runs.train_command(text, tmp_path, settings)
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env, text=True)
    assert run.stderr is not None
    for line in run.stderr:
        if line.startswith("update=7 "):
            run.terminate()
            break
    said = run.communicate()[1]
    assert run.returncode == 75 and "received a stop signal and is saved at update " in said
    assert len(run_dir._state_folders(tmp_path)) == 1
    subprocess.run([*command, "--resume"], check=True, capture_output=True, env=env)
    assert training_runs.read_losses(tmp_path) == unbroken(settings)


def test_steps_that_are_not_finite_are_skipped_and_end_the_run(text, tmp_path, caplog, monkeypatch):
    """T11: a learning rate that overflows; parameters stay as they were."""
    monkeypatch.setattr("mtpjax.training.run.learning_rate_at", lambda progress, config: 1e38)
    config = TrainConfig(
        data=str(text), output=str(tmp_path), **SETTINGS | {"max_consecutive_bad_steps": 3, "warmup": 0.0}
    )
    with pytest.raises(FloatingPointError, match="3 updates in a row up to"):
        train(config, evaluations=1)
    assert "is not finite and was skipped" in caplog.text
    assert len(run_dir._state_folders(tmp_path)) == 1  # as good as it was


@pytest.mark.parametrize("name", ["joint", "recycled", "total_variation", "eagle3", "medusa", "dflash", "dspark"])
def test_recipes_are_settings(name):
    recipe = pathlib.Path(run_dir.__file__).parent / "recipes" / f"{name}.yaml"
    config = read_train_config(recipe, ["steps=3"])
    assert config.steps == 3 and config.extra_tokens == config.num_depths + 1  # no target is lost


def test_settings_are_read_key_by_key(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("steps: 5\nseconds: .inf\nlearning_rate: 1e-3\n")
    config = read_train_config(file, ["mtp_loss_scale=1e-1", "data=some/folder"])
    assert config == TrainConfig(steps=5, learning_rate=1e-3, mtp_loss_scale=0.1, data="some/folder")
    file.write_text(to_yaml(config))
    assert read_train_config(file) == config
    for pairs, said in (
        (["stepz=1"], "unknown setting stepz: did you mean steps?"),
        (["steps=x"], "steps must be an integer, not"),
        (["steps=0"], "steps must be at least 1, not 0"),
        (["steps"], "'steps' is not a key=value pair"),
        (["optimizer=sgd"], "optimizer"),
    ):
        with pytest.raises(ValueError, match=said):
            read_train_config(None, pairs)
    for content in ("[1]", "a: b: c"):
        file.write_text(content)
        with pytest.raises(ValueError, match=str(file)):
            read_train_config(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_train_config(pathlib.Path("nowhere.yaml"))
