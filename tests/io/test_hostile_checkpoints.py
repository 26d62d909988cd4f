"""Checkpoints of ours that were changed by others: nothing outside the target is written, no link or device is read."""

import contextlib
import hashlib
import json
import os
import pathlib
import threading
import time

import pytest

from mtpjax import load
from mtpjax.atomic import atomic_folder
from mtpjax.errors import CheckpointError, ConfigError
from mtpjax.io import convert
from mtpjax.io.checkpoint_format import is_checkpoint
from tests.golden import path


@pytest.fixture
def ours(tmp_path):
    convert.to_mtpjax(path("qwen3"), tmp_path / "ours")
    return tmp_path / "ours"


def edit(folder: pathlib.Path, name: str, content: bytes) -> None:
    """Changes a file and its digest."""
    (folder / name).write_bytes(content)
    digests = json.loads((folder / "digests.json").read_text())
    digests["files"][name] = hashlib.sha256(content).hexdigest()
    (folder / "digests.json").write_text(json.dumps(digests))


@pytest.mark.parametrize("name", ["../escaped.safetensors", "{tmp}/escaped.safetensors", "..", "escaped.txt", ""])
def test_names_of_original_files_cannot_leave_the_target(name, ours, tmp_path):
    record = json.loads((ours / "huggingface.json").read_text())
    first, *_ = record["headers"]
    record["headers"][name.format(tmp=tmp_path)] = record["headers"].pop(first)
    edit(ours, "huggingface.json", json.dumps(record).encode())
    with pytest.raises(CheckpointError, match="not the name of a safetensors file"):
        convert.to_hugging_face(ours, tmp_path / "target" / "back")
    assert not list(tmp_path.rglob("escaped*"))


@pytest.mark.parametrize("place", ["huggingface/notes.txt", "huggingface/config.json", "huggingface.json", "params/x"])
@pytest.mark.parametrize("to", ["/dev/zero", "{tmp}/secret"])
def test_links_and_devices_are_not_read(place, to, ours, tmp_path):
    (tmp_path / "secret").write_text("{}")
    (ours / place).unlink(missing_ok=True)
    (ours / place).symlink_to(to.format(tmp=tmp_path))
    with pytest.raises(CheckpointError, match=r"not a regular file|missing or unreadable"):
        convert.to_hugging_face(ours, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_device_in_place_of_the_configuration_is_no_checkpoint(tmp_path):
    (tmp_path / "config.json").symlink_to("/dev/zero")
    assert not is_checkpoint(tmp_path)


@pytest.mark.parametrize("model_type", ["nosuch", "llama"])
def test_another_model_type_is_refused_for_a_converted_checkpoint(model_type, ours, tmp_path):
    with pytest.raises(ConfigError, match=f"'qwen3', not '{model_type}'"):
        convert.to_hugging_face(ours, tmp_path / "back", model_type=model_type)
    convert.to_hugging_face(ours, tmp_path / "back", model_type="qwen3")


def test_a_failure_leaves_no_folder_even_if_a_thread_still_writes(tmp_path):
    """As Orbax's threads do when a disk is full."""
    begun = threading.Event()

    def write(folder):
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            folder.mkdir(exist_ok=True)
            (folder / f"{time.monotonic_ns()}").write_text("x")
            begun.set()

    def write_on(folder):
        with contextlib.suppress(OSError):  # the folder was removed
            write(folder)

    threads = []

    def fail():
        with atomic_folder(tmp_path / "target") as folder:
            threads.append(threading.Thread(target=write_on, args=(folder / "part",)))
            threads[0].start()
            begun.wait()
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    threads[0].join()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_a_thread_makes_again_after_its_removal_is_removed(tmp_path):
    threads = []

    def make_again(folder):
        while folder.exists():
            time.sleep(0.001)
        time.sleep(0.05)
        folder.mkdir()

    def fail():
        with atomic_folder(tmp_path / "target") as folder:
            threads.append(threading.Thread(target=make_again, args=(folder,)))
            threads[0].start()
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    threads[0].join()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("config", None, "it has no 'config'"),
        ("metadata", None, "'metadata' is not an object"),
        ("metadata", [1], "'metadata' is not an object"),
        ("block_scaled", "x", "'block_scaled' is not an object"),
    ],
)
def test_a_damaged_description_is_named(name, value, said, ours):
    content = json.loads((ours / "config.json").read_text())
    content.pop(name, None)
    if value is not None:
        content[name] = value
    edit(ours, "config.json", json.dumps(content).encode())
    with pytest.raises(CheckpointError, match=f"config.json is damaged: {said}"):
        load(ours)
