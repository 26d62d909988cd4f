"""Manages the run folder, which has a lock for its single writer, settings, and training states to resume from.

run.json            settings, data fingerprint and run identifier
model.yaml          the architecture, for use in other runs (`model=FOLDER/model.yaml`)
metrics.jsonl       one row per logged step and evaluation
tensorboard/        the same rows for TensorBoard
wandb-id            id of the run at Weights & Biases
profile/            traces from JAX's profiler
states/00000120/    parameters and optimiser state after 120 updates (`mtpjax.io.checkpoint`, with digests)
checkpoint/         the trained model, for decoding
drafter/            instead of `checkpoint/`: a drafter trained on a frozen trunk (`mtpjax.load_drafter`)
.lock               held while a process writes here
"""

import contextlib
import fcntl
import json
import logging
import os
import pathlib
import shutil
import signal
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from mtpjax import distributed
from mtpjax.atomic import write_text
from mtpjax.drafters.methods import DRAFTER_FOLDER
from mtpjax.errors import CheckpointError, UsageError
from mtpjax.evaluation.plot_style import FORMATS
from mtpjax.io import checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader, own_share
from mtpjax.safe_open import read_json_file

SETTINGS_FILE, STATES_FOLDER, LOCK_FILE = "run.json", "states", ".lock"
METRICS_FILE, PROFILE_FOLDER, TENSORBOARD_FOLDER, WANDB_ID_FILE = "metrics.jsonl", "profile", "tensorboard", "wandb-id"
# The name of the plot has no suffix; each format adds its own.
CHECKPOINT_FOLDER, PLOT_NAME, MODEL_FILE = "checkpoint", "panel", "model.yaml"
# Holds the old settings while a run is being replaced. If the process dies, this file shows that the other files belong
# to a run.
REPLACED_FILE = ".replaced-run.json"
MAX_SETTINGS_BYTES = 64 << 20  # maximum size of run.json
OWN_NAMES = (STATES_FOLDER, TENSORBOARD_FOLDER, PROFILE_FOLDER, METRICS_FILE, WANDB_ID_FILE, CHECKPOINT_FOLDER)
OWN_NAMES += (DRAFTER_FOLDER, *(f"{PLOT_NAME}.{each}" for each in FORMATS), MODEL_FILE)
log = logging.getLogger("mtpjax.train")
Tree = TypeVar("Tree")


class RunError(UsageError):
    """A run folder is in use, is damaged, or does not match the run to resume."""


@contextlib.contextmanager
def lock_folder(folder, *, wait: bool = False) -> Iterator[pathlib.Path]:
    """Makes a folder and locks it for this process.

    Args:
        wait: wait for another process that holds the lock, instead of failing.

    Raises:
        RunError: another process holds the lock; the message names its host and process.
    """
    # The kernel releases this lock when its process ends, even if killed, so locks never go stale.
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            problem = f"{folder} is being written to by {file.read().strip() or 'another process'}"
            if not wait:
                raise RunError(problem) from None
            log.warning("%s: waiting", problem)
            fcntl.flock(file, fcntl.LOCK_EX)
        # Tell other processes who holds the lock.
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield folder


def begin(folder: pathlib.Path, settings: Mapping[str, Any], fingerprint: str, *, overwrite: bool) -> str:
    """Starts a new run in a folder by removing the files of an old run and writing `run.json`.

    If the process ends in between, the folder holds no run, and resuming is rejected.

    Returns:
        The identifier of the new run, which is also stored in its states.

    Raises:
        RunError: `overwrite` is not set and the folder holds a run, or foreign files that a run would replace; or
            `check_outputs` rejects the folder.
    """
    check_outputs(folder)
    if (folder / SETTINGS_FILE).exists() and not overwrite:
        raise RunError(
            f"{folder} holds a run: continue it (resume), replace it (overwrite) or choose a different output"
        )
    is_ours = (folder / SETTINGS_FILE).exists() or (folder / REPLACED_FILE).exists()
    foreign = [name for name in OWN_NAMES if (folder / name).exists()]
    if foreign and not is_ours and not overwrite:
        raise RunError(
            f"{folder} holds {', '.join(foreign)} but no {SETTINGS_FILE}, so it is not an mtpjax run: choose a"
            " different output, or replace these files (overwrite)"
        )
    # Old states must not be resumed with new settings, and old settings must not remain without their states. So move
    # the old settings away first and write the new ones last. In between, the folder holds no run.
    if (folder / SETTINGS_FILE).exists():
        (folder / SETTINGS_FILE).replace(folder / REPLACED_FILE)
    for name in (STATES_FOLDER, TENSORBOARD_FOLDER, PROFILE_FOLDER, DRAFTER_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (METRICS_FILE, WANDB_ID_FILE):
        (folder / name).unlink(missing_ok=True)
    run_id = uuid.uuid4().hex
    content = {"settings": dict(settings), "fingerprint": fingerprint, "run": run_id}
    write_text(folder / SETTINGS_FILE, json.dumps(content, indent=1) + "\n")
    (folder / REPLACED_FILE).unlink(missing_ok=True)
    return run_id


def read_run_file(folder: pathlib.Path, *names: str) -> tuple[Any, ...]:
    """Reads `run.json`.

    Returns:
        The settings, and the values of `names`, which can be "fingerprint" (of the data) and "run" (the identifier).

    Raises:
        RunError: there is no such file, or it is damaged.
    """
    try:
        stored = read_json_file(folder / SETTINGS_FILE, max_bytes=MAX_SETTINGS_BYTES)
        return dict(stored["settings"]), *(stored[name] for name in names)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{folder} is not a run folder: it has no {SETTINGS_FILE}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / SETTINGS_FILE} is damaged: {type(error).__name__}: {error}") from error


def check_outputs(folder: pathlib.Path) -> None:
    """Checks before the first update that the trained model can be written at the end.

    Raises:
        RunError: `checkpoint` or `drafter` exists, but is neither empty nor a checkpoint or drafter.
    """
    for name, kind in ((CHECKPOINT_FOLDER, "checkpoint"), (DRAFTER_FOLDER, "drafter")):
        path = folder / name
        is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        is_ours = checkpoint.is_checkpoint(path) if kind == "checkpoint" else (path / "config.json").is_file()
        if not is_free and not is_ours:
            raise RunError(f"{path} exists and is not a {kind}: move it away or choose a different output")


def save_state(folder: pathlib.Path, state: Any, *, step: int, keep: int, metadata: Mapping[str, Any]) -> bool:
    """Saves a training state, then deletes all but the newest `keep` states. All processes of a run must call it.

    Returns True if the state was saved, and False after an error such as a full disk. After an error, older states
    are kept and training may continue.
    """
    leaves = {f"{number:06d}": leaf for number, leaf in enumerate(jax.tree.leaves(state))}
    path = state_path(folder, step)
    is_main_process = distributed.is_main_process()
    # If the run resumed from an older state, a damaged state of this step may still be there.
    if is_main_process and not checkpoint.is_checkpoint(path):
        shutil.rmtree(path, ignore_errors=True)
    try:
        checkpoint.save(path, {"tree": _describe_tree(state)}, leaves, metadata={"step": step, **metadata})
    except OSError as error:
        log.error("the state after update %d could not be saved; the run continues without it: %s", step, error)
        return False
    # Only now remove old states and hidden leftovers of a killed process. Because of the lock, no other process writes.
    if is_main_process:
        for old in [*_state_folders(folder)[keep:], *(folder / STATES_FOLDER).glob(".*")]:
            shutil.rmtree(old, ignore_errors=True)
    return True


def state_path(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Returns the folder of a training state."""
    return folder / STATES_FOLDER / f"{step:08d}"


def restore_state(folder: pathlib.Path, like: Tree, *, run_id: str | None = None) -> tuple[Tree, dict[str, Any]] | None:
    """Restores the newest complete state. Skips damaged states with a warning that names the damaged array.

    Args:
        like: a state with the structure, shapes, dtypes and shardings to restore. Leaves without a sharding, such as
            results of `jax.eval_shape`, are placed on the first device.
        run_id: identifier of the run; None: do not check it.

    Returns:
        The state and its metadata; None if there is no complete state.

    Raises:
        RunError: a complete state belongs to a different run, or its arrays do not match `like`.
    """
    for path in _state_folders(folder):
        try:
            # All processes skip the same states, even if only one cannot read its shard.
            with distributed.raise_together(CheckpointError(f"another process cannot read {path}")):
                return _restore_from(path, like, run_id)
        except CheckpointError as error:
            log.warning("skipping a damaged state: %s", error)
    return None


def _restore_from(path: pathlib.Path, like: Tree, run_id: str | None) -> tuple[Tree, dict[str, Any]]:
    """Restores a state as `restore_state` does; raises `CheckpointError` if it is damaged."""
    reader = CheckpointReader(path, verify=own_share())
    metadata, config = reader.metadata, reader.config
    if not isinstance(metadata.get("step"), int) or not isinstance(metadata.get("seconds"), (int, float)):
        raise CheckpointError(f"{path} does not record its step and seconds")
    # Resuming from a state with different settings, seed or data would silently give wrong numbers.
    if run_id is not None and metadata.get("run") != run_id:
        raise RunError(f"{path} belongs to a different run: remove it, or restore the states of this run")
    # Leaves are stored by index, so check that the names, shapes and dtypes match those of `like` before assigning any.
    _check_tree(path, config.get("tree") if isinstance(config, dict) else None, _describe_tree(like))
    # Each array gets the sharding of its leaf in `like`, since a resumed run may have a different mesh. Plain shapes
    # have no sharding.
    leaves, default = jax.tree.leaves(like), jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    arrays = [
        reader.place(name, lambda shape, leaf=leaf: leaf.sharding or default)
        for name, leaf in zip(sorted(reader.records), leaves, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(like), arrays), metadata


class StopSignals:
    """Records stop signals. Call the object to find out whether one has arrived.

    Attributes:
        received: the signal numbers received so far.
        is_immediate: raise `KeyboardInterrupt` at the next signal instead of recording it. The trainer sets it once
            all trained parameters are saved.
    """

    def __init__(self):
        self.received: list[int] = []
        self.is_immediate = False

    def __call__(self) -> bool:
        """Returns whether a signal has arrived."""
        return bool(self.received)

    def handle(self, number: int, frame: Any) -> None:
        """Records a signal. The training loop then saves and stops between updates. A second Ctrl-C stops at once."""
        del frame
        is_repeated = number == signal.SIGINT and signal.SIGINT in self.received
        self.received.append(number)
        if self.is_immediate or is_repeated:
            raise KeyboardInterrupt


@contextlib.contextmanager
def catch_stop_signals() -> Iterator[StopSignals]:
    """Catches SIGINT (Ctrl-C), and the signals SIGTERM and SIGUSR1, which schedulers send before they end a job."""
    stop = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(which, stop.handle) for which in signals]
    try:
        yield stop
    finally:
        for which, handler in zip(signals, before, strict=True):
            signal.signal(which, handler)


def _state_folders(folder: pathlib.Path) -> list[pathlib.Path]:
    """Lists the folders of saved states, newest first. Incomplete ones have hidden names and are not listed."""
    return sorted((path for path in (folder / STATES_FOLDER).glob("[0-9]*") if path.is_dir()), reverse=True)


def _describe_tree(tree: Any) -> list[list[Any]]:
    """Returns the name, shape and dtype of every leaf."""
    return [
        [jax.tree_util.keystr(path), list(np.shape(leaf)), np.dtype(leaf.dtype).name]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _check_tree(path: pathlib.Path, found: Any, wanted: list[list[Any]]) -> None:
    """Raises `RunError` for the first array that differs in name, shape or dtype."""
    if found == wanted:
        return
    found = {name: (shape, dtype) for name, shape, dtype in found or []}
    for name, shape, dtype in wanted:
        if found.get(name) != (shape, dtype):
            had = "nothing" if name not in found else "{1}{0}".format(*found[name])
            raise RunError(f"{path} holds {had} instead of {dtype}{shape} for {name}")
    raise RunError(f"{path} holds unexpected arrays: {sorted(set(found) - {row[0] for row in wanted})}")
