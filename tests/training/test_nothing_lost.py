"""Whatever ends a run, what it trained can be loaded or continued."""

import dataclasses
import json
import pathlib
import random
import signal
import subprocess
import time

import numpy as np
import pytest

from mtpjax import TrainConfig, load
from mtpjax.errors import Preempted
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.training import run, run_dir, run_settings
from mtpjax.training.run_dir import RunError
from mtpjax.training.trainer import train
from tests.helpers import training_runs

NAMES = ("states", "profile", "tensorboard", "metrics.jsonl", "checkpoint")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return training_runs.write_corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture
def config(text, tmp_path):
    return TrainConfig(data=str(text), output=str(tmp_path / "out"), **training_runs.SETTINGS, steps=3)


def fail(*args, **kwargs):
    raise RuntimeError("broken")


@pytest.mark.parametrize("name", NAMES)
def test_files_of_somebody_else_are_refused_and_stay(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious").write_text("x")
    with pytest.raises(RunError, match=name):
        run_dir.begin(tmp_path, {}, "digest", overwrite=False)
    assert (tmp_path / name / "precious").read_text() == "x"


def test_overwrite_does_not_train_for_a_checkpoint_that_cannot_be_written(tmp_path):
    run_dir.begin(tmp_path, {}, "digest", overwrite=False)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "precious").write_text("x")
    with pytest.raises(RunError, match="is not a checkpoint"):
        run_dir.begin(tmp_path, {}, "digest", overwrite=True)


def test_the_state_of_another_run_is_refused(tmp_path):
    ids = []
    for name in "ab":
        (tmp_path / name).mkdir()
        ids.append(run_dir.begin(tmp_path / name, {}, "digest", overwrite=False))
    state = {"a": np.ones(2, np.float32)}
    run_dir.save_state(tmp_path / "a", state, step=4, keep=1, metadata={"seconds": 1.0, "run": ids[0]})
    (tmp_path / "a" / "states").rename(tmp_path / "b" / "states")
    assert run_settings.check_settings(tmp_path / "b", {}, "digest") == ids[1]
    with pytest.raises(RunError, match="belongs to a different run"):
        run_dir.restore_state(tmp_path / "b", state, run_id=ids[1])


@pytest.mark.parametrize("what", ["acceptance_panel", pytest.param("plot_run", marks=pytest.mark.slow)])
def test_a_failing_panel_or_plot_leaves_the_model(what, config, monkeypatch, caplog):
    monkeypatch.setattr(run, what, fail)
    if what == "plot_run":
        assert train(config, evaluations=1).panel.survival
        assert "could not be drawn: broken" in caplog.text
    else:
        with pytest.raises(RuntimeError, match="broken"):
            train(config, evaluations=1)
        assert "the trained model is in" in caplog.text
    load(config.output)
    assert CheckpointReader(pathlib.Path(config.output) / "checkpoint", verify=False).metadata["steps"] == 3


def test_a_panel_that_fails_during_the_run_saves_the_state(config, monkeypatch):
    monkeypatch.setattr(run, "acceptance_panel", fail)
    with pytest.raises(RuntimeError, match="broken"):
        train(config, evaluations=3)
    assert len(run_dir._state_folders(pathlib.Path(config.output))) == 1


@pytest.mark.slow
def test_rows_have_learning_rate_gradient_norm_tokens_and_memory(config, capsys):
    rows = [row for row in train(config, evaluations=1).history if "bits" in row]
    assert [row["tokens"] for row in rows] == [64, 128, 192]
    assert all((row["gradient_norm"] > 0 and row["learning_rate"] > 0) or row["step"] == 1 for row in rows)
    assert all(row["memory_bytes"] > 2**20 for row in rows)
    said = capsys.readouterr().err
    assert "starting at update 0 of 3" in said and "compiling the first update" in said


def test_ctrl_c_is_noted_and_a_second_one_ends_at_once():
    with run_dir.catch_stop_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def interrupt_once(command, folder, env, *, number, seconds):
    """Sends a signal to a run after some seconds, and continues it as its last line says."""
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env, text=True)
    try:
        said = run.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        run.send_signal(number)
        said = run.communicate()[1]
    assert "Traceback" not in said
    assert run.returncode in (0, 75, 130, -number), f"exit code {run.returncode}: {said}"
    if run.returncode == 75:
        assert said.strip().endswith("--resume")
    # A folder that a kill has left must be continued, and a run without a folder yet begins anew.
    is_begun = (folder / "run.json").exists()
    if number != signal.SIGKILL and run.returncode == 75:
        assert is_begun
    if (folder / "checkpoint").exists():
        load(folder)
    return is_begun


SHORT_RUN = training_runs.SETTINGS | {"steps": 20, "save_every": 5, "panel_prompts": 2}


def seconds_of_a_run(text, env, folder):
    """Of a run with its panel and plot, whose compiled functions are in the cache as for the interrupted ones."""
    for name in ("compiles", "measured"):
        begin = time.perf_counter()
        subprocess.run(
            training_runs.train_command(text, folder / name, SHORT_RUN), check=True, capture_output=True, env=env
        )
    return time.perf_counter() - begin


def check_interruptions(text, env, tmp_path, *, count, longest):
    rng = random.Random(0)
    for case in range(count):
        folder = tmp_path / str(case)
        command = training_runs.train_command(text, folder, SHORT_RUN)
        number = (signal.SIGINT, signal.SIGKILL)[case % 2]
        is_begun = interrupt_once(command, folder, env, number=number, seconds=rng.uniform(0, longest))
        subprocess.run([*command, "--resume"] if is_begun else command, check=True, capture_output=True, env=env)
        load(folder)
        assert "panel" in json.loads((folder / "checkpoint" / "config.json").read_text())["metadata"]


@pytest.mark.slow
def test_interrupted_at_random_moments_a_run_continues(text, tmp_path):
    env = training_runs.environment(tmp_path / "cache")
    # The moments cover the whole run, from the start of Python to the plot, on a machine of any speed.
    longest = seconds_of_a_run(text, env, tmp_path)
    check_interruptions(text, env, tmp_path, count=20, longest=longest)


@pytest.mark.slow
def test_ctrl_c_in_the_panel_leaves_the_model_and_a_next_step(config, monkeypatch):
    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(run, "acceptance_panel", interrupted)
        with pytest.raises(Preempted, match=r"the trained model is in .*: continue with --resume"):
            train(config, evaluations=1)
    load(config.output)
    assert train(config, evaluations=1, resume=True).panel.survival


def test_ctrl_c_during_an_update_saves_the_state(config, monkeypatch):
    real = run.learning_rate_at

    def interrupted(progress, config):
        if progress:
            signal.raise_signal(signal.SIGINT)
        return real(progress, config)

    with monkeypatch.context() as patch:
        patch.setattr(run, "learning_rate_at", interrupted)
        with pytest.raises(Preempted, match="is saved at update 2: continue with --resume"):
            train(dataclasses.replace(config, log_every=10), evaluations=1)
    assert train(dataclasses.replace(config, log_every=10), evaluations=1, resume=True).panel.survival
