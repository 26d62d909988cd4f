"""Threads of XLA on a CPU: XLA has as many as it is told, and small models get one."""

import os
import subprocess
import sys

import pytest

from mtpjax.cli.common import set_threads
from mtpjax.host import choose_num_threads, num_threads, raise_descriptor_limit
from mtpjax.io.checkpoint import save_model
from mtpjax.io.checkpoint_format import checkpoint_bytes

COUNT = """
import pathlib, sys
from mtpjax.cli.common import set_threads
set_threads(sys.argv[1], int(sys.argv[2]))
import jax
from mtpjax.host import num_threads
jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((512, 512))))
names = [file.read_text() for file in pathlib.Path("/proc/self/task").glob("*/comm")]
print(sum("XLAEigen" in name for name in names), num_threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists a process's threads")
@pytest.mark.parametrize(("asked", "environment", "count"), [(0, {}, 1), (3, {}, 3), (0, {"PJRT_NPROC": "2"}, 2)])
def test_xla_has_as_many_threads_as_it_is_told(asked, environment, count, tmp_path, small):
    save_model(tmp_path / "checkpoint", *small("grouped", "random"))
    inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC", "NPROC")}
    command = [sys.executable, "-c", COUNT, str(tmp_path), str(asked)]
    result = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(count)] * 2


@pytest.mark.parametrize("name", ["PJRT_NPROC", "NPROC"])
def test_a_small_model_gets_one_thread_unless_the_environment_says_otherwise(name, tmp_path, monkeypatch):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setenv("NPROC", "all of them")
    weights = tmp_path / "model.safetensors"
    for size, threads in (((16 << 20) - 1, 1), (16 << 20, 0)):
        with weights.open("wb") as file:
            file.truncate(size)
        assert choose_num_threads(checkpoint_bytes(tmp_path)) == threads
    weights.unlink()
    monkeypatch.setenv(name, "3")
    assert choose_num_threads(checkpoint_bytes(tmp_path)) == 0 and num_threads() == 3


def test_of_a_run_the_checkpoint_alone_counts(tmp_path, small, monkeypatch):
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    save_model(tmp_path / "checkpoint", *small("grouped", "random"))
    with (tmp_path / "state").open("wb") as file:
        file.truncate(64 << 20)
    assert choose_num_threads(checkpoint_bytes(tmp_path)) == 1


def test_threads_below_none_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="threads must be at least 0, got -1"):
        set_threads(str(tmp_path), -1)


def test_a_server_may_open_as_many_files_as_the_system_allows():
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[1]), limits[1]))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
