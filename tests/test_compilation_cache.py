"""The cache of compiled programs: where it is, who may write there, and that only the commands use it."""

import os
import pathlib
import subprocess
import sys

import pytest

from mtpjax import compilation_cache

VARIABLES = (
    compilation_cache.FOLDER_VARIABLE,
    compilation_cache.SWITCH_VARIABLE,
    compilation_cache.MIN_SECONDS_VARIABLE,
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An environment of a process that has not imported JAX; returns the root of its cache."""
    # `setenv` first, so that variables which `enable` sets are removed again at the end.
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "jax")
    return tmp_path / "cache" / "mtpjax" / "compiled"


def test_the_folder_is_the_users_own_and_private(fresh):
    folder = compilation_cache.enable()
    assert folder is not None and folder.parent == fresh and os.environ["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_without_xdg_it_is_below_the_home_folder(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert compilation_cache.root() == tmp_path / "home" / ".cache" / "mtpjax" / "compiled"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compilation_cache.root() == tmp_path / "home" / ".cache" / "mtpjax" / "compiled"


@pytest.mark.parametrize(
    "settings",
    [
        {"JAX_COMPILATION_CACHE_DIR": "elsewhere"},
        {"JAX_COMPILATION_CACHE_DIR": ""},
        {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        {"JAX_ENABLE_COMPILATION_CACHE": "0"},
    ],
)
def test_the_users_settings_win(settings, fresh, monkeypatch):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert compilation_cache.enable() is None
    assert {name: os.environ[name] for name in settings} == settings and not fresh.exists()


def test_a_folder_that_cannot_be_written_is_not_used(fresh, monkeypatch):
    fresh.parent.parent.mkdir()
    fresh.parent.write_text("a file in the place of the folder")
    assert compilation_cache.enable() is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ

    def fail():
        raise RuntimeError("no home folder")

    monkeypatch.setattr(compilation_cache, "root", fail)
    assert compilation_cache.enable() is None


def test_a_folder_that_others_can_write_is_not_used(fresh):
    folder = fresh / compilation_cache.machine_key()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert compilation_cache.enable() is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_each_number_of_threads_has_a_folder_and_children_follow(fresh, monkeypatch):
    """XLA compiles for the number of threads, which is not in JAX's key of a program."""
    monkeypatch.setenv("PJRT_NPROC", "1")
    one = compilation_cache.enable()
    monkeypatch.setenv("PJRT_NPROC", "2")
    compilation_cache.follow_threads()
    two = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    assert one is not None and two.parent == one.parent and two != one
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    compilation_cache.follow_threads()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "elsewhere"


def test_the_oldest_programs_are_removed_first(tmp_path):
    (tmp_path / "key").mkdir()
    for number in range(4):
        (tmp_path / "key" / f"{number}-cache").write_bytes(b"x" * 10)
        os.utime(tmp_path / "key" / f"{number}-cache", (number, number))
    compilation_cache.prune(tmp_path, 25)
    assert sorted(path.name for path in (tmp_path / "key").iterdir()) == ["2-cache", "3-cache"]
    compilation_cache.prune(tmp_path, 20)
    assert len(list((tmp_path / "key").iterdir())) == 2


@pytest.mark.slow  # three processes; .ci/run keeps programs from command to command
def test_a_command_keeps_programs_and_the_library_does_not(checkpoint, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path / "home")}
    code = "import mtpjax, jax; mtpjax.MTPModel; assert jax.config.jax_compilation_cache_dir is None"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert not (tmp_path / "cache").exists()
    command = [sys.executable, "-m", "mtpjax.cli.main", "generate", "--model", str(checkpoint), "--prompt", "def "]
    command += ["--max-new-tokens", "4"]
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    first = subprocess.run(command, capture_output=True, env=environment, check=True)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "mtpjax" / "compiled").glob("*/*-cache")}
    second = subprocess.run(command, capture_output=True, env=environment, check=True)
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "mtpjax" / "compiled").glob("*/*-cache")}
    assert kept and again == kept  # nothing was compiled again
    # Damaged files are compiled again, without a word.
    for path in kept:
        path.write_bytes(b"damaged")
    damaged = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert (damaged.stdout, damaged.stderr) == (first.stdout, first.stderr)
    assert (second.stdout, second.stderr) == (first.stdout, first.stderr)
    assert not (tmp_path / "home").exists()
