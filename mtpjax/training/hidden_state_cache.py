"""The trunk's states of every packed row, on disk: modules on a frozen trunk then train without its pass.

    manifest.json   what the states are of, and the sha256 of every block that is complete
    000000.npy …    blocks of rows `[rows, T, D]`; bfloat16 as its bits, in uint16
    .lock           held while a process checks blocks or computes them

Blocks appear complete or not at all, so a process that was killed goes on where it was. Runs on the same trunk and rows
share a folder, whatever their objectives, depths, batch sizes and seeds.
"""

import contextlib
import hashlib
import json
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.atomic import new_file, write_text
from mtpjax.data.packing import Batch
from mtpjax.errors import Preempted, UsageError
from mtpjax.io.array_files import array_record
from mtpjax.io.checkpoint_format import file_digest
from mtpjax.models.model import MTPModel, is_of_modules, trunk_states
from mtpjax.training import run_dir
from mtpjax.training.log import display

MANIFEST = "manifest.json"
BLOCK_BYTES = 1 << 26
SHOW_EVERY = 5.0  # seconds
ANOTHER = {  # how the states in a folder can differ from those of a run
    "trunk": "of a trunk with other parameters",
    "config": "of a trunk with another configuration",
    "rows": "of other rows (data, tokenizer, row_length, extra_tokens or held_out_fraction)",
    "dtype": "in another dtype",
}
log = logging.getLogger("mtpjax.train")


class StatesError(UsageError):
    """A folder that holds other states than those of the run, or something else."""


class TrunkStates:
    """The states of rows `[R, T]`, read by the rows' numbers."""

    def __init__(self, files: list[pathlib.Path], dtype: str, rows_per_block: int):
        self.blocks = [np.load(file, mmap_mode="r").view(jnp.dtype(dtype)) for file in files]
        self.rows_per_block = rows_per_block

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """`[B, T, D]` of the rows of these numbers `[B]`."""
        return np.stack([self.blocks[n // self.rows_per_block][n % self.rows_per_block] for n in numbers])


def bytes_per_token(model: MTPModel, dtype: str) -> int:
    """What a token of a row takes on disk."""
    return model.config.hidden_size * jnp.dtype(dtype).itemsize


def stored_states(
    folder,
    params: dict,
    rows: Batch,
    *,
    model: MTPModel,
    batch_size: int,
    dtype: str = "float32",
    is_told_to_end: Callable[[], bool] = lambda: False,
) -> TrunkStates:
    """The states of `rows` from `folder`; what it lacks is computed, `batch_size` rows at a time.

    Steps on as many rows, in float32 on a CPU, then give the bits that they give without; passes of another width are
    within rounding.
    Every block that is there is held against its digest, once; damaged ones are told, and computed again. A process
    that finds another one at this waits for it.

    Raises `StatesError` for a folder that holds something else, naming what differs; `OSError` where a block cannot be
    written, as on a full disk: those that are complete stay; `Preempted` when told to end, between two blocks.
    """
    of = _identity(params, rows, model, dtype)
    with run_dir.locked(folder, waits=True) as folder:
        for file in folder.glob(".tmp-*"):  # of a killed process
            file.unlink()
        pass_bytes = batch_size * rows.tokens.shape[1] * bytes_per_token(model, dtype)
        manifest = _read_manifest(folder, of, batch_size * max(1, BLOCK_BYTES // pass_bytes))
        size, digests = manifest["rows_per_block"], manifest["blocks"]
        _drop_damaged(folder, digests, tokens_per_block=size * rows.tokens.shape[1])
        names = [f"{number:06d}.npy" for number in range(-(-len(rows.tokens) // size))]
        missing = [number for number, name in enumerate(names) if name not in digests]
        with _progress("computing the trunk's states", len(missing), size * rows.tokens.shape[1]) as tick:
            for number in missing:
                if is_told_to_end():
                    raise Preempted(
                        f"told to end with {len(digests)} of {len(names)} blocks in {folder}: go on with resume"
                    )
                block = Batch(*(array[number * size : (number + 1) * size] for array in rows))
                states = _compute(params, block, model, batch_size, dtype)
                digests[names[number]] = _write(folder / names[number], states)
                write_text(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
                tick()
    return TrunkStates([folder / name for name in names], dtype, size)


def _identity(params: dict, rows: Batch, model: MTPModel, dtype: str) -> dict[str, Any]:
    """All that decides the states."""
    trunk = {name: leaf for name, leaf in params.items() if not is_of_modules(name)}
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if "mtp" not in name or name == "mtp_hidden_post_norm"  # which of the two states enters the modules
    }
    leaves = jax.tree_util.tree_leaves_with_path(trunk)
    of = {
        "trunk": _digest({jax.tree_util.keystr(path): leaf for path, leaf in leaves}),
        "rows": _digest({"tokens": rows.tokens, "segment_ids": rows.segment_ids}),
        "dtype": dtype,
        "config": config,
    }
    return json.loads(json.dumps(of))


def _digest(arrays: Mapping[str, Any]) -> str:
    records = {name: array_record(np.asarray(array)) for name, array in arrays.items()}
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: pathlib.Path, of: dict[str, Any], rows_per_block: int) -> dict[str, Any]:
    """The folder's manifest; in an empty one it is made, for blocks of so many rows."""
    path = folder / MANIFEST
    if not path.exists():
        if others := [file.name for file in folder.iterdir() if file.name != run_dir.LOCK]:
            raise StatesError(f"{folder} holds no trunk's states but {others[0]}: name another folder for them")
        manifest = {"of": of, "rows_per_block": rows_per_block, "blocks": {}}
        write_text(path, json.dumps(manifest, indent=1) + "\n")
        return manifest
    try:
        manifest = json.loads(path.read_bytes())
        found, _, _ = dict(manifest["of"]), dict(manifest["blocks"]), int(manifest["rows_per_block"])
    except (ValueError, KeyError, TypeError) as error:
        raise StatesError(f"{path} is damaged ({error}): remove {folder}, and its states are computed anew") from error
    if differing := [said for name, said in ANOTHER.items() if found.get(name) != of[name]]:
        raise StatesError(f"{folder} holds states {', and '.join(differing)}: name another folder, or remove this one")
    return manifest


def _drop_damaged(folder: pathlib.Path, digests: dict[str, str | None], *, tokens_per_block: int) -> None:
    """Leaves the blocks that are what was written."""
    progress = _progress("checking the trunk's states", len(digests), tokens_per_block)
    with ThreadPoolExecutor() as pool, progress as tick:
        names = list(digests)
        for name, found in zip(names, pool.map(lambda name: file_digest(folder / name), names), strict=True):
            if found != digests[name]:
                problem = "is missing" if found is None else "differs from what was written"
                log.warning("%s %s, and is computed again", folder / name, problem)
                del digests[name]
            tick()


def _compute(params: dict, rows: Batch, model: MTPModel, batch_size: int, dtype: str) -> np.ndarray:
    """The states of a block `[rows, T, D]`, by passes of `batch_size` rows."""
    passes, last = [], len(rows.tokens) - 1
    for first in range(0, last + 1, batch_size):
        taken = np.minimum(np.arange(first, first + batch_size), last)  # the last row again to fill the last pass
        states = trunk_states(params, rows.tokens[taken], rows.segment_ids[taken], model=model)
        passes.append(states.astype(dtype))
    return np.concatenate(jax.device_get(passes))[: last + 1]


def _write(path: pathlib.Path, states: np.ndarray) -> str | None:
    """Writes a block; returns its digest. Raises `OSError`."""
    try:
        with new_file(path) as aside:
            with aside.open("wb") as file:
                np.save(file, states.view(np.uint16) if states.dtype == jnp.bfloat16 else states)
            return file_digest(aside)
    except OSError as error:
        raise OSError(
            f"{path} of {states.nbytes} bytes cannot be written: {error}; {path.parent} keeps the blocks that are"
            " complete, and the next run goes on with them"
        ) from error


@contextlib.contextmanager
def _progress(what: str, total: int, tokens_per_block: int) -> Iterator[Callable[[], None]]:
    """Gives what to call after every block."""
    if not total:
        yield lambda: None
        return
    begin = shown = time.perf_counter()
    done = 0

    def tick() -> None:
        nonlocal done, shown
        done, now = done + 1, time.perf_counter()
        if done == total or now - shown >= SHOW_EVERY:
            shown, rate = now, done * tokens_per_block / (now - begin)
            show(done / total, f"{what}: block {done} of {total} tokens/s={rate:.0f}", now - begin)

    with display() as show:
        yield tick
