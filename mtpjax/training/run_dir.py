"""A run folder: one writer, and training states under digests that a killed run goes on from.

run.json            the settings, and the fingerprint of the data
metrics.jsonl       a row per logged step and evaluation
tensorboard/        the same for TensorBoard; wandb-id the run's name at Weights & Biases; profile/ a trace
states/00000120/    parameters and optimiser after 120 updates (`mtpjax.io.checkpoint`)
checkpoint/         the model, for decoding
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.atomic import write_text
from mtpjax.errors import CheckpointError, UsageError
from mtpjax.io import checkpoint
from mtpjax.training.log import METRICS, PROFILE
from mtpjax.training.trackers import TENSORBOARD, WANDB_ID

SETTINGS, STATES, LOCK = "run.json", "states", ".lock"
# What may differ when a run goes on: none of it changes an update (accumulation, remat and mesh change its rounding).
FREE_SETTINGS = ("output", "log_every", "save_every", "keep_states", "most_bad_steps", "panel_prompts")
FREE_SETTINGS += ("tensorboard", "wandb", "profile_start", "profile_steps")
log = logging.getLogger("mtpjax.train")
Tree = TypeVar("Tree")


class RunError(UsageError):
    """A run folder that cannot be written to, or gone on with."""


@contextlib.contextmanager
def locked(folder, *, waits: bool = False) -> Iterator[pathlib.Path]:
    """Makes the folder and holds it. Raises `RunError`, naming host and process, where another one does, or `waits`.

    The lock is the kernel's: it goes with its process, however that ends.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            problem = f"{folder} is being written to by {file.read().strip() or 'another process'}"
            if not waits:
                raise RunError(problem) from None
            log.warning("%s: waiting", problem)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield folder


def begin(folder: pathlib.Path, settings: Mapping[str, Any], fingerprint: str, *, overwrite: bool) -> None:
    """Writes down what the run is. Raises `RunError` where the folder holds one that is not to be overwritten."""
    if (folder / SETTINGS).exists() and not overwrite:
        raise RunError(f"{folder} holds a run: go on with it (resume), replace it (overwrite) or choose another output")
    for name in (STATES, TENSORBOARD, PROFILE):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (METRICS, WANDB_ID):
        (folder / name).unlink(missing_ok=True)
    write_text(folder / SETTINGS, json.dumps({"settings": dict(settings), "fingerprint": fingerprint}, indent=1) + "\n")


def check_same(
    folder: pathlib.Path, settings: Mapping[str, Any], fingerprint: str, allowed_changes: Sequence[str] = ()
) -> None:
    """Raises `RunError` where a run does not go on as it began, naming each setting with both values.

    Settings in `FREE_SETTINGS` and `allowed_changes` may differ; data may only where "data" is an allowed change.
    """
    try:
        stored = json.loads((folder / SETTINGS).read_bytes())
        before, data_before = dict(stored["settings"]), stored["fingerprint"]
    except FileNotFoundError:
        raise RunError(f"{folder} holds no run to resume: {SETTINGS} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / SETTINGS} is damaged: {error}") from error
    free = {*FREE_SETTINGS, *allowed_changes}
    now = json.loads(json.dumps(dict(settings)))
    changed = [
        f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in sorted({*before, *now} - free)
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise RunError(f"{folder} began with other settings: {'; '.join(changed)}")
    if fingerprint != data_before and "data" not in free:
        raise RunError(f"{folder} began with other data: files, their order or content have changed")


def save_state(folder: pathlib.Path, state: Any, *, step: int, keep: int, metadata: Mapping[str, Any]) -> bool:
    """Writes the state after `step` updates, then removes all but the newest `keep`; says whether it could.

    What a killed process had not completed goes as well: the folder has one writer.

    A disk that is full costs this state alone: what was there stays, and the run may go on.
    """
    leaves = {f"{number:06d}": leaf for number, leaf in enumerate(jax.tree.leaves(state))}
    path = folder / STATES / f"{step:08d}"
    if not checkpoint.is_checkpoint(path):
        shutil.rmtree(path, ignore_errors=True)  # a damaged one, which was skipped
    try:
        checkpoint.save(path, {"tree": _describe_tree(state)}, leaves, metadata={"step": step, **metadata})
    except OSError as error:
        log.error("the state after step %d could not be saved, and the run goes on without: %s", step, error)
        return False
    for old in [*_states(folder)[keep:], *(folder / STATES).glob(".*")]:
        shutil.rmtree(old, ignore_errors=True)
    return True


def restore_state(folder: pathlib.Path, like: Tree) -> tuple[Tree, dict[str, Any]] | None:
    """The newest state that is whole, in the form of `like`, and its metadata; None where there is none.

    Damaged ones are skipped with a warning that names the array. Raises `RunError` where a whole one has other arrays
    than `like`.
    """
    for path in _states(folder):
        try:
            config, leaves, metadata = checkpoint.restore(path)
        except CheckpointError as error:
            log.warning("skipping a damaged state: %s", error)
            continue
        _check_tree(path, config.get("tree") if isinstance(config, dict) else None, _describe_tree(like))
        shardings = [leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in jax.tree.leaves(like)]
        arrays = [
            jnp.asarray(leaves[name]) if sharding is None else jax.device_put(leaves[name], sharding)
            for name, sharding in zip(sorted(leaves), shardings, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(like), arrays), metadata
    return None


@contextlib.contextmanager
def ending_signals() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether SIGTERM or SIGUSR1 has come; outside the main thread neither is caught."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    signals = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(which, lambda number, frame: came.append(number)) for which in signals]
    try:
        yield lambda: bool(came)
    finally:
        for which, handler in zip(signals, before, strict=True):
            signal.signal(which, handler)


def _states(folder: pathlib.Path) -> list[pathlib.Path]:
    """Newest first. What a killed process left half written has another name."""
    return sorted((path for path in (folder / STATES).glob("[0-9]*") if path.is_dir()), reverse=True)


def _describe_tree(tree: Any) -> list[list[Any]]:
    """Name, shape and dtype of every leaf."""
    return [
        [jax.tree_util.keystr(path), list(np.shape(leaf)), np.dtype(leaf.dtype).name]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _check_tree(path: pathlib.Path, found: Any, wanted: list[list[Any]]) -> None:
    if found == wanted:
        return
    found = {name: (shape, dtype) for name, shape, dtype in found or []}
    for name, shape, dtype in wanted:
        if found.get(name) != (shape, dtype):
            had = "nothing" if name not in found else "{1}{0}".format(*found[name])
            raise RunError(f"{path} holds {had} where {dtype}{shape} is wanted, at {name}")
    raise RunError(f"{path} holds arrays that are not wanted: {sorted(set(found) - {row[0] for row in wanted})}")
