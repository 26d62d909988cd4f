"""Threads of XLA on a CPU: XLA has as many as it is told, and small models get one."""

import os
import subprocess
import sys

import pytest

from mtpjax.checkpoint import save_model
from mtpjax.commands.common import set_threads
from mtpjax.threads import num_threads, suitable_threads

COUNT = """
import pathlib
from mtpjax.threads import limit_threads, num_threads
limit_threads({count})
import jax
jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((512, 512))))
names = [file.read_text() for file in pathlib.Path("/proc/self/task").glob("*/comm")]
print(sum("XLAEigen" in name for name in names), num_threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists a process's threads")
@pytest.mark.parametrize("count", [1, 3])
def test_xla_has_as_many_threads_as_it_is_told(count):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # no eight devices
    command = [sys.executable, "-c", COUNT.format(count=count)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(count)] * 2


def test_a_small_model_gets_one_thread_unless_the_environment_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    weights = tmp_path / "model.safetensors"
    for size, threads in (((16 << 20) - 1, 1), (16 << 20, 0)):
        with weights.open("wb") as file:
            file.truncate(size)
        assert suitable_threads(tmp_path) == threads
    weights.unlink()
    monkeypatch.setenv("PJRT_NPROC", "3")
    assert suitable_threads(tmp_path) == 0 and num_threads() == 3


def test_of_a_run_the_checkpoint_alone_counts(tmp_path, small, monkeypatch):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    model, params = small("grouped", "random")
    save_model(tmp_path / "checkpoint", model, params)
    with (tmp_path / "state").open("wb") as file:
        file.truncate(64 << 20)
    assert suitable_threads(tmp_path) == 1


def test_threads_below_none_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="threads must be 0 or more, not -1"):
        set_threads(str(tmp_path), -1)
