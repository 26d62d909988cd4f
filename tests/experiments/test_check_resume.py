"""The check of resumed runs finds every flipped bit and every difference; a killed run goes on bit for bit."""

import subprocess

import jax.numpy as jnp
import pytest

from experiments.correctness import check_resume
from mtpjax.io import checkpoint
from mtpjax.training import run_dir


def state_at(step):
    return {"weights": {"a": jnp.arange(6.0).reshape(2, 3) + step}, "moments": (jnp.ones(3) * step, jnp.int32(step))}


@pytest.fixture
def folder(tmp_path):
    """A run with two saved states."""
    for step in (10, 20):
        assert run_dir.save_state(tmp_path, state_at(step), step=step, keep=9, metadata={"seconds": step / 2})
    return tmp_path


def test_a_flipped_bit_anywhere_costs_one_state(folder, caplog):
    """T4: 40 random bits of the newest state, over all its files; the command flips 200."""
    assert check_resume.flip_bits(folder, state_at(0), bits=40, seed=0) == {"found": 40}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 40 and all("skipping a damaged state" in line and "00000020" in line for line in said)
    state, metadata = run_dir.restore_state(folder, state_at(0))
    assert metadata == {"step": 20, "seconds": 10} and (state["weights"]["a"] == state_at(20)["weights"]["a"]).all()


def test_flipped_bits_that_restoring_lets_through_are_told(folder, monkeypatch):
    found = [(20, 20), (20, 20), (21, 20), (10, 10)]  # steps of the restored arrays, and of their metadata
    answers = iter([(state_at(content), {"step": step}) for content, step in found])
    monkeypatch.setattr(run_dir, "restore_state", lambda folder, like: next(answers))
    outcomes = check_resume.flip_bits(folder, state_at(0), bits=3, seed=0)
    assert outcomes == {"harmless": 1, "silent": 1, "found": 1}


@pytest.mark.slow  # .ci/run runs the command itself
def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    """T1: killed at random moments, some of them while a state is written."""
    settings = check_resume.SETTINGS | {"steps": 5 * check_resume.STEPS_PER_KILL, "save_every": 4}
    text, env = check_resume.write_corpus(tmp_path / "text"), check_resume.environment(tmp_path / "cache")
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    # A process like the others: rounding depends on the number of threads.
    subprocess.run(check_resume.train_command(text, unbroken, settings), check=True, capture_output=True, env=env)
    command = check_resume.train_command(text, killed, settings)
    fell = check_resume.kill_and_go_on(command, killed, kills=5, steps=settings["steps"], seed=1, env=env)
    assert fell.total() == 5
    losses = check_resume.read_losses(killed)
    assert list(losses) == list(range(1, settings["steps"] + 1))
    assert losses == check_resume.read_losses(unbroken)
    assert checkpoint.is_checkpoint(killed / "checkpoint")
