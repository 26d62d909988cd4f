"""Checks that a run killed at any point resumes bit for bit, and that flipped bits in its states are detected.

    python -m experiments.correctness.check_resume [--kills 50] [--bits 200]

A small run of `mtpjax train` is killed (SIGKILL) at random moments, some of them while a state is being written, and
resumed after each kill. Its losses must equal the losses of an undisturbed run, bit for bit. Then single bits of its
newest state are flipped, one at a time: restoring must fall back to the previous state, or return what was saved.
Prints one line per kill; the exit code is 1 if anything differs.
"""

import argparse
import contextlib
import logging
import math
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mtpjax import MTPModel, TrainConfig, init_params, presets
from mtpjax.training import run_dir
from mtpjax.training.step import make_optimizer
from mtpjax.training.train_state import TrainState, init_train_state
from tests.helpers.training_runs import SETTINGS, environment, read_losses, train_command, write_corpus

STEPS_PER_KILL = 10  # enough for a run to outlive its kills, which come at most 4 steps or one saved state apart
LONGEST_START, LONGEST_SAVE = 3.0, 0.3  # maximum seconds until a kill
PATIENCE = 120.0


def kill_and_go_on(
    command: list[str],
    folder: pathlib.Path,
    *,
    kills: int,
    steps: int,
    seed: int,
    env: dict[str, str],
    say: Callable[[str], Any] = lambda line: None,
) -> Counter[str]:
    """Kills the run this many times, then lets it end. Returns how many kills came during startup, steps and saves.

    Raises `RuntimeError`, with the output of the run, if it ends by itself too early or with an error.
    """
    draw, fell = random.Random(seed), Counter()
    for number in range(kills):
        left, reached = _left_behind(folder), max(read_losses(folder), default=0)
        with _started(command, folder, env) as process:
            has_come = _moment(draw, folder, steps)
            deadline = time.monotonic() + PATIENCE
            while not has_come() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.002)
            process.kill()
            error = process.communicate()[1]
        if process.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the run ended by itself with {process.returncode}: {error[-2000:]}")
        losses = read_losses(folder)
        saving, stepping = _left_behind(folder) - left, max(losses, default=0) != reached
        fell["saving" if saving else "stepping" if stepping else "starting"] += 1
        newest = max((state.name for state in _states(folder)), default="none")
        say(f"kill {number + 1}/{kills}: {dict(fell)}, newest state {newest}, step {max(losses, default=0)} of {steps}")
    with _started(command, folder, env) as process:
        error = process.communicate()[1]
    if process.returncode:
        raise RuntimeError(f"the last run failed with {process.returncode}: {error[-2000:]}")
    return fell


def flip_bits(folder: pathlib.Path, like: Any, *, bits: int, seed: int) -> Counter[str]:
    """Flips this many single bits in the newest state, one at a time, going through its files in rotation.

    Returns how many were `found` (the previous state was restored), `harmless` (what was saved came back) or `silent`.
    """
    saved, metadata = _restored(folder, like)
    newest = max(_states(folder))
    files = [file for file in sorted(newest.rglob("*")) if file.is_file() and file.stat().st_size]
    draw, outcomes = random.Random(seed), Counter()
    for number in range(bits):
        file = files[number % len(files)]
        whole = file.read_bytes()
        place = draw.randrange(len(whole))
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
        state, found = _restored(folder, like)
        file.write_bytes(whole)
        is_same = all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(saved)))
        outcomes["found" if found["step"] < metadata["step"] else "harmless" if is_same else "silent"] += 1
    return outcomes


def _restored(folder: pathlib.Path, like: Any) -> tuple[Any, dict[str, Any]]:
    restored = run_dir.restore_state(folder, like)
    if restored is None:
        raise RuntimeError(f"{folder} holds no complete state")
    return restored


def _states(folder: pathlib.Path) -> list[pathlib.Path]:
    return list((folder / run_dir.STATES_FOLDER).glob("[0-9]*"))


def _left_behind(folder: pathlib.Path) -> set[pathlib.Path]:
    """Returns the states that are incomplete."""
    return set((folder / run_dir.STATES_FOLDER).glob(".tmp-*"))


@contextlib.contextmanager
def _started(command: list[str], folder: pathlib.Path, env: dict[str, str]):
    """Runs the training in its own process, resuming it if it exists; the process does not outlive the block."""
    command = [*command, "--resume"] if (folder / run_dir.SETTINGS_FILE).exists() else command
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _moment(draw: random.Random, folder: pathlib.Path, steps: int) -> Callable[[], bool]:
    """Returns a condition for a random moment during startup, after some steps, or while a state is written."""
    kind = draw.choices(["starting", "stepping", "saving"], [1, 2, 2])[0]
    if kind == "starting":
        begin, wait = time.monotonic(), draw.random() * LONGEST_START
        return lambda: time.monotonic() >= begin + wait
    before = _left_behind(folder)
    reach = min(max(read_losses(folder), default=0) + draw.randint(1, 4), steps - 1)
    wait = draw.random() * (LONGEST_SAVE if kind == "saving" else 0.05)
    come = math.inf

    def has_come() -> bool:
        nonlocal come
        if come == math.inf:
            is_saving = bool(_left_behind(folder) - before)
            if is_saving if kind == "saving" else max(read_losses(folder), default=0) >= reach:
                come = time.monotonic()
        return time.monotonic() >= come + wait

    return has_come


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="number of kills (default: %(default)s)")
    parser.add_argument("--bits", type=int, default=200, help="number of flipped bits (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed for the moments and bits (default: %(default)s)")
    options = parser.parse_args(argv)
    logging.getLogger("mtpjax").setLevel(logging.ERROR)  # warnings about the states that are skipped
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"{line} ({time.monotonic() - begin:.0f} s)", flush=True)

    steps = STEPS_PER_KILL * max(options.kills, 5)
    settings = {"steps": steps, "save_every": 4}
    with tempfile.TemporaryDirectory() as work:
        corpus, env = write_corpus(pathlib.Path(work, "text")), environment(pathlib.Path(work, "cache"))
        unbroken, killed = pathlib.Path(work, "unbroken"), pathlib.Path(work, "killed")
        subprocess.run(train_command(corpus, unbroken, settings), check=True, capture_output=True, env=env)
        say(f"unbroken run of {steps} steps")
        command = train_command(corpus, killed, settings)
        fell = kill_and_go_on(command, killed, kills=options.kills, steps=steps, seed=options.seed, env=env, say=say)
        wanted, losses = read_losses(unbroken), read_losses(killed)
        different = sum(losses.get(step) != bits for step, bits in wanted.items())
        say(f"{len(wanted)} losses, {different} of them not bit-equal")
        outcomes = flip_bits(killed, _state_like(SETTINGS), bits=options.bits, seed=options.seed)
    kinds = ", ".join(f"{fell[kind]} while {kind}" for kind in ("starting", "stepping", "saving"))
    found = ", ".join(f"{outcomes[kind]} {kind}" for kind in ("found", "harmless", "silent"))
    say(f"{options.kills} kills ({kinds}): {different} of {len(wanted)} losses differ; {options.bits} bits: {found}")
    return int(different > 0 or len(losses) != steps or outcomes["silent"] > 0)


def _state_like(settings: dict[str, Any]) -> TrainState:
    """Returns the shapes and dtypes of the run's state."""
    config = TrainConfig(**settings)
    model = MTPModel(presets[config.preset], scan_layers=True)

    def first() -> TrainState:
        return init_train_state(init_params(model, jax.random.key(config.seed)), make_optimizer(config))

    return jax.eval_shape(first)


if __name__ == "__main__":
    sys.exit(main())
