"""A full disk, a signal or a kill while a checkpoint is replaced: the old one stays whole, and nothing is left."""

import errno
import os
import pathlib
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from mtpjax.atomic import _lock, atomic_folder
from mtpjax.io import checkpoint, convert
from tests.golden import path

NAME = "deepseek_v3_fp8"
# A limit on the size of files fails writes as a full disk does, in every thread.
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
sys.argv = ["mtpjax", "convert", {source!r}, {target!r}]
from mtpjax.cli.main import main
main()
"""
SIGNALLED = """
import contextlib, os, sys
from mtpjax.cli import conversion
@contextlib.contextmanager
def progress(source, target):
    yield lambda count: os.kill(os.getpid(), {signal})
conversion.show_bytes_read = progress
sys.argv = ["mtpjax", "convert", {source!r}, {target!r}]
from mtpjax.cli.main import main
main()
"""


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def target(tmp_path):
    convert.to_mtpjax(path(NAME), tmp_path / "target")
    return tmp_path / "target"


def run(code, target, **values):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code.format(source=str(path(NAME)), target=str(target), **values)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


# Orbax's description of the arrays, its thread that writes it, and a chunk of a large array.
@pytest.mark.parametrize("limit", [1000, pytest.param(8000, marks=pytest.mark.slow), 40_000])
def test_a_full_disk_leaves_the_old_checkpoint_and_one_line(limit, target):
    before = content(target)
    done = run(LIMITED, target, limit=limit)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "File too large" in done.stderr or "cannot be written" in done.stderr
    assert content(target) == before and os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_old_checkpoint(number, target):
    before = content(target)
    assert run(SIGNALLED, target, signal=int(number)).returncode == 128 + number
    assert content(target) == before and os.listdir(target.parent) == ["target"]


def test_a_disk_without_room_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda folder: types.SimpleNamespace(f_frsize=4096, f_bavail=2))
    with pytest.raises(OSError, match="28,672 bytes are needed, 8,192 are free") as caught:
        checkpoint.save(tmp_path / "target", {}, {"a": np.zeros((4096,), np.float32), "b": np.zeros(1, np.float32)})
    assert caught.value.errno == errno.ENOSPC and os.listdir(tmp_path) == []


def make(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    (folder / "file").write_text(folder.name)
    return folder


def test_folders_of_killed_processes_are_removed_and_those_of_others_stay(tmp_path):
    make(tmp_path / ".tmp-target-123-0123abcd")
    make(tmp_path / ".old-target-123-0123abcd")
    others = [make(tmp_path / name) for name in (".tmp-other-123-0123abcd", ".tmp-target", "target")]
    living = make(tmp_path / ".tmp-target-124-0123abcd")
    with _lock(living) as is_locked:
        assert is_locked
        with atomic_folder(tmp_path / "target", lambda path: True) as folder:
            (folder / "file").write_text("new")
        assert sorted(os.listdir(tmp_path)) == sorted(each.name for each in [*others, living])
    assert (tmp_path / "target" / "file").read_text() == "new"


def test_a_folder_that_was_moved_away_by_a_killed_process_is_put_back(tmp_path):
    """Killed between the two renames: the next call finds the old folder at its place, also if it fails itself."""
    make(tmp_path / ".old-target-123-0123abcd")
    with pytest.raises(FileExistsError), atomic_folder(tmp_path / "target"):
        pass
    assert os.listdir(tmp_path) == ["target"] and os.listdir(tmp_path / "target") == ["file"]
