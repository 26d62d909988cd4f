"""Caches the hidden states of a frozen trunk on disk, so that drafters train without running the trunk.

    manifest.json          identity of trunk and rows, and the sha256 of every complete file
    000000.npy …           blocks of final hidden states `[rows, T, D]`; bfloat16 is stored as its bits, in uint16, and
                           fp8 with its scales (`mtpjax.training.fp8_states`)
    000000.layer2.npy …    the states that enter layer 2, for the same rows
    .lock                  held while a process checks or computes blocks

Files are written atomically, so a run that was killed continues after its last complete block. Runs with the same trunk
and rows can share a folder, even if drafters, objectives, depths, batch sizes and seeds differ. A run computes only
the layers that it reads and that the cache does not hold yet.

If a run has several processes, each computes, writes and checks other blocks, and reads only the rows of its devices.
The files do not depend on the number of processes. They must be on a file system that all processes share.
"""

import contextlib
import hashlib
import itertools
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
from jax.sharding import Mesh

from mtpjax import distributed
from mtpjax.atomic import atomic_file, write_text
from mtpjax.data.packing import Batch
from mtpjax.errors import Preempted, UsageError
from mtpjax.io.array_files import array_record
from mtpjax.io.checkpoint_format import file_digest
from mtpjax.models.forward import trunk_states
from mtpjax.models.model import MTPModel
from mtpjax.models.params import DRAFT_IDS, is_of_modules
from mtpjax.models.sharding import mesh_of
from mtpjax.models.trunk import unstack_layers
from mtpjax.safe_open import read_json_file
from mtpjax.training import run_dir
from mtpjax.training.data_parallel import shard_batch, shard_rows, sharded_trunk_states
from mtpjax.training.fp8_states import SCALE_BYTES, quantise_states
from mtpjax.training.log import progress_display

MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
BLOCK_BYTES = 1 << 26
PROGRESS_INTERVAL = 5.0  # seconds between progress lines
# Maps each key of the manifest to the words with which messages describe a difference.
MISMATCH_MESSAGES = {
    "trunk": "of a trunk with different parameters",
    "config": "of a trunk with a different configuration",
    "rows": "of different rows (data, tokenizer, row_length, extra_tokens or held_out_fraction)",
    "dtype": "in a different dtype",
}
log = logging.getLogger("mtpjax.train")


class HiddenStateCacheError(UsageError):
    """A folder holds hidden states for a different trunk or different rows, or is not a cache of hidden states."""


class HiddenStateCache:
    """Reads cached hidden states of rows `[R, T]`.

    Args:
        files: the files of each block, in order, with one file per kind of state. They are memory-mapped.
        dtype: "float32", "bfloat16" or "fp8_e4m3".
        rows_per_block: number of rows in every block except the last, which may have fewer.
    """

    def __init__(self, files: list[list[pathlib.Path]], dtype: str, rows_per_block: int):
        form = jnp.uint8 if dtype == "fp8_e4m3" else jnp.dtype(dtype)
        self.blocks = [[np.load(file, mmap_mode="r").view(form) for file in block] for block in files]
        self.rows_per_block = rows_per_block

    @property
    def row_shape(self) -> tuple[int, int]:
        """The shape of the states of one row."""
        return self.blocks[0][0].shape[1], sum(states.shape[2] for states in self.blocks[0])

    def take(self, row_indices: np.ndarray, mesh: Mesh | None = None) -> np.ndarray | jax.Array:
        """Returns the states for `row_indices [B]`, laid out as in `trunk_states`.

        The shape is `[B, T, (n + 1) * D]`, with the states of the n layers first and the final states last; in fp8,
        `[B, T, (n + 1) * (D + 4)]` (`mtpjax.training.fp8_states`). With a mesh, the states are sharded over it, and
        each process reads only the rows of its devices.
        """
        if mesh is None:
            return self._read(row_indices)
        read = lambda index: self._read(row_indices[index[0]])[(slice(None), *index[1:])]
        return shard_rows((len(row_indices), *self.row_shape), read, mesh)

    def _read(self, row_indices: np.ndarray) -> np.ndarray:
        size = self.rows_per_block
        return np.stack(
            [np.concatenate([states[n % size] for states in self.blocks[n // size]], axis=-1) for n in row_indices]
        )


def bytes_per_token(model: MTPModel, dtype: str, layer_ids: tuple[int, ...] = ()) -> int:
    """Returns how many bytes of disk space the states of one token take."""
    D = model.config.hidden_size
    return (len(layer_ids) + 1) * (D + SCALE_BYTES if dtype == "fp8_e4m3" else D * jnp.dtype(dtype).itemsize)


def open_hidden_state_cache(
    folder,
    params: dict,
    rows: Batch,
    *,
    model: MTPModel,
    batch_size: int,
    dtype: str = "float32",
    layer_ids: tuple[int, ...] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> HiddenStateCache:
    """Opens the cache in a folder, checks its blocks against their digests, and computes missing or damaged blocks.

    In float32 on a CPU, training steps give the same bits as without the cache, if the cache was computed with the same
    batch size by a run that reads the same layers. Other batch sizes round differently, and so do stacked layers, which
    runs that train MTP modules use. If another process is working on the folder, this one waits.

    Args:
        folder: the folder, which is created if it does not exist.
        rows: packed rows `[R, T]`.
        should_stop: returns whether a stop signal has arrived; called before each block.

    Raises:
        HiddenStateCacheError: the folder holds something else; the message says what differs.
        ValueError: there are more processes than rows in a pass, or several processes and the mesh axis "context".
        Preempted: a stop signal arrived. Complete blocks are kept.
    """
    mesh = mesh_of(params["embedding"])
    if jax.process_count() > 1 and mesh is not None and mesh.shape.get("context", 1) > 1:
        raise ValueError(
            "trunk_states does not support the mesh axis context with several processes: compute them in one"
        )
    if batch_size < jax.process_count():
        raise ValueError(f"trunk_states needs batch_size of at least {jax.process_count()} processes, not {batch_size}")
    identity = _cache_identity(params, rows, model, dtype)
    pass_bytes = batch_size * rows.tokens.shape[1] * bytes_per_token(model, dtype)
    # A block holds a whole number of passes, at least one. An existing manifest keeps its own block size.
    rows_per_block = batch_size * max(1, BLOCK_BYTES // pass_bytes)
    compute = _make_compute(params, model, dtype, layer_ids)
    own, count, kinds = jax.process_index(), jax.process_count(), len(layer_ids) + 1
    # The first process locks the folder and writes the manifest.
    with distributed.in_main_process(_lock_folder, folder, identity, rows_per_block) as opened:
        folder, manifest = pathlib.Path(opened[0]), opened[1]
        size, digests = manifest["rows_per_block"], manifest["blocks"]
        names = _file_names(manifest, rows, layer_ids)
        tokens = size * rows.tokens.shape[1]
        _drop_damaged_files(folder, list(itertools.chain(*names)), digests, tokens_per_file=tokens // kinds)
        missing = [number for number, files in enumerate(names) if not digests.keys() >= set(files)]
        # Each process computes a different block. Record the blocks in the manifest as soon as they are complete, so
        # that an interruption loses at most one block of each process.
        turns = [missing[first : first + count] for first in range(0, len(missing), count)]
        with _block_progress("computing the trunk's states", len(missing), tokens) as tick:
            for turn, numbers in enumerate(turns):
                if distributed.any_process(should_stop()):
                    done = len(names) - len(missing) + turn * count
                    raise Preempted(
                        f"stopped by a signal with {done} of {len(names)} blocks in {folder}: continue with resume"
                    )
                ranges = [(number * size, min((number + 1) * size, len(rows.tokens))) for number in numbers]
                states, written = _compute_blocks(compute, rows, ranges, batch_size), {}
                with distributed.raise_together(OSError(f"another process cannot write to {folder}")):
                    # Keep existing files, because another run may have mapped them.
                    if own < len(numbers):
                        parts = zip(names[numbers[own]], np.split(states, kinds, axis=-1), strict=True)
                        new = {name: np.ascontiguousarray(part) for name, part in parts if name not in digests}
                        written = {name: _write_block(folder / name, part) for name, part in new.items()}
                for each in distributed.gather_values(written):
                    digests.update(each)
                if distributed.is_main_process():
                    write_text(folder / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")
                tick(len(numbers))
        distributed.barrier("trunk states")
    return HiddenStateCache([[folder / name for name in files] for files in names], dtype, size)


def _file_names(manifest: Mapping[str, Any], rows: Batch, layer_ids: tuple[int, ...]) -> list[list[str]]:
    """Returns the names of each block's files: one per layer, then one for the final states."""
    kinds = [*(f".layer{layer}" for layer in layer_ids), ""]
    num_blocks = -(-len(rows.tokens) // manifest["rows_per_block"])
    return [[f"{number:06d}{kind}.npy" for kind in kinds] for number in range(num_blocks)]


@contextlib.contextmanager
def _lock_folder(folder, identity: dict[str, Any], rows_per_block: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Locks a folder, and yields its path and its manifest."""
    with run_dir.lock_folder(folder, wait=True) as folder:
        # Remove files that a killed process left incomplete.
        for file in folder.glob(".tmp-*"):
            file.unlink()
        yield str(folder), _open_manifest(folder, identity, rows_per_block)


class _StackedLayers:
    """A stacked parameter. Indexing it returns a function that copies out one layer."""

    def __init__(self, stacked: jax.Array):
        self.stacked = stacked

    def __getitem__(self, index: int) -> Callable[[], jax.Array]:
        return lambda: self.stacked[index]


def _cache_identity(params: dict, rows: Batch, model: MTPModel, dtype: str) -> dict[str, Any]:
    """Returns everything that determines the states: trunk, configuration, rows and dtype."""
    trunk = {name: leaf for name, leaf in params.items() if not is_of_modules(name) and name != DRAFT_IDS}
    # MTP modules train with stacked layers and other drafters with unrolled ones, so use the unrolled names for both.
    if model.scan_layers:
        stacked = jax.tree.map(_StackedLayers, trunk["trunk"])
        trunk = unstack_layers({**trunk, "trunk": stacked}, model.config)
    # Module settings do not change the trunk, but `mtp_hidden_post_norm` selects which hidden state the modules read.
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if "mtp" not in name or name == "mtp_hidden_post_norm"
    }
    # Leave out the loss mask, because runs with different targets have the same states.
    leaves = jax.tree_util.tree_leaves_with_path(trunk)
    identity = {
        "trunk": _digest({jax.tree_util.keystr(path): leaf for path, leaf in leaves}),
        "rows": _digest({"tokens": rows.tokens, "segment_ids": rows.segment_ids}),
        "dtype": dtype,
        "config": config,
    }
    # Convert through JSON, so that tuples compare equal to the lists of a stored manifest.
    return json.loads(json.dumps(identity))


def _digest(arrays: Mapping[str, Any]) -> str:
    """Returns the sha256 over the names, shapes, dtypes and bytes of arrays, or of the arrays that functions return."""
    records = {}
    for name, array in arrays.items():
        whole = distributed.gather_processes(array() if callable(array) else array)
        records[name] = array_record(np.asarray(whole))
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def _open_manifest(folder: pathlib.Path, identity: dict[str, Any], rows_per_block: int) -> dict[str, Any]:
    """Reads the manifest and checks that it matches `identity`; makes one in an empty folder."""
    path = folder / MANIFEST_FILE
    # A new folder must be empty, so that blocks never mix with the user's files.
    if not path.exists():
        if others := [file.name for file in folder.iterdir() if file.name != run_dir.LOCK_FILE]:
            raise HiddenStateCacheError(
                f"{folder} is not a cache of trunk states: it contains {others[0]}; choose a different folder"
            )
        manifest = {"of": identity, "rows_per_block": rows_per_block, "blocks": {}}
        write_text(path, json.dumps(manifest, indent=1) + "\n")
        return manifest
    # An existing manifest must have the expected form and the identity of this run.
    try:
        manifest = read_json_file(path, max_bytes=MAX_MANIFEST_BYTES)
        found, _, _ = dict(manifest["of"]), dict(manifest["blocks"]), int(manifest["rows_per_block"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise HiddenStateCacheError(
            f"{path} is damaged ({error}): remove {folder} to compute its states again"
        ) from error
    if differing := [message for name, message in MISMATCH_MESSAGES.items() if found.get(name) != identity[name]]:
        raise HiddenStateCacheError(
            f"{folder} holds states {', and '.join(differing)}: choose a different folder, or remove this one"
        )
    return manifest


def _drop_damaged_files(
    folder: pathlib.Path, names: list[str], digests: dict[str, str | None], *, tokens_per_file: int
) -> None:
    """Removes files from `digests` that are missing or differ from their digest; checks only those in `names`."""
    # Each process reads a share of the files.
    names = [name for name in names if name in digests][jax.process_index() :: jax.process_count()]
    progress, damaged = _block_progress("checking the trunk's states", len(names), tokens_per_file), []
    with ThreadPoolExecutor() as pool, progress as tick:
        for name, found in zip(names, pool.map(lambda name: file_digest(folder / name, folder), names), strict=True):
            if found != digests[name]:
                problem = "is missing" if found is None else "differs from what was written"
                log.warning("%s %s: computing it again", folder / name, problem)
                damaged.append(name)
            tick(1)
    for name in itertools.chain(*distributed.gather_values(damaged)):
        del digests[name]


def _make_compute(
    params: dict, model: MTPModel, dtype: str, layer_ids: tuple[int, ...]
) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """Returns a function from tokens and segment ids `[B, T]` to states in their stored form, on the params' mesh."""
    mesh, settings = mesh_of(params["embedding"]), {"model": model, "layer_ids": layer_ids}

    def compute(*rows: np.ndarray) -> jax.Array:
        if mesh is None:
            states = trunk_states(params, *rows, **settings)
        else:
            states = sharded_trunk_states(params, *shard_batch(rows, mesh), mesh=mesh, **settings)
        return quantise_states(states, model.config.hidden_size) if dtype == "fp8_e4m3" else states.astype(dtype)

    return compute


def _compute_blocks(
    compute: Callable[[np.ndarray, np.ndarray], jax.Array], rows: Batch, ranges: list[tuple[int, int]], batch_size: int
) -> np.ndarray:
    """Computes one block per process at once, in passes over `batch_size` rows.

    Args:
        ranges: first row and end of each block, for the processes in order. Further processes have no block.

    Returns:
        The states `[rows, T, ...]` of this process's block.
    """
    # A pass's rows are split over the devices in order, so each process gets the rows of its block.
    share, passes = batch_size // jax.process_count(), []
    ranges = ranges + [ranges[-1]] * (jax.process_count() - len(ranges))
    for first in range(0, max(end - begin for begin, end in ranges), share):
        # The last pass repeats the last row, so that all passes have one shape.
        taken = [np.minimum(np.arange(begin + first, begin + first + share), end - 1) for begin, end in ranges]
        passes.append(compute(*(array[np.concatenate(taken)] for array in (rows.tokens, rows.segment_ids))))
    begin, end = ranges[jax.process_index()]
    return np.concatenate([_own_rows(states) for states in passes])[: end - begin]


def _own_rows(states: jax.Array) -> np.ndarray:
    """Returns the rows of an array that are on this process's devices."""
    shards = [(shard.index[0].indices(len(states)), shard) for shard in states.addressable_shards]
    begin, end = min(cut[0] for cut, _ in shards), max(cut[1] for cut, _ in shards)
    own = np.empty((end - begin, *states.shape[1:]), states.dtype)
    for (first, last, _), shard in shards:
        own[(slice(first - begin, last - begin), *shard.index[1:])] = shard.data
    return own


def _write_block(path: pathlib.Path, states: np.ndarray) -> str | None:
    """Writes a block atomically and returns its digest. Raises `OSError`."""
    try:
        # The file gets its final name only when it is complete and its digest is known.
        with atomic_file(path) as unfinished:
            with unfinished.open("wb") as file:
                np.save(file, states.view(np.uint16) if states.dtype == jnp.bfloat16 else states)
            return file_digest(unfinished, unfinished.parent)
    except OSError as error:
        raise OSError(
            f"{path} of {states.nbytes} bytes cannot be written: {error}; {path.parent} keeps its complete blocks,"
            " and the next run continues after them"
        ) from error


@contextlib.contextmanager
def _block_progress(task: str, total: int, tokens_per_block: int) -> Iterator[Callable[[int], None]]:
    """Shows progress over `total` blocks. Yields a function to call with the number of blocks that are done."""
    if not total:
        yield lambda count: None
        return
    begin = shown = time.perf_counter()
    done = 0

    def tick(count: int) -> None:
        nonlocal done, shown
        done, now = done + count, time.perf_counter()
        # Print at most one line every PROGRESS_INTERVAL seconds, and one after the last block.
        if done == total or now - shown >= PROGRESS_INTERVAL:
            shown, rate = now, done * tokens_per_block / (now - begin)
            show(done / total, f"{task}: block {done} of {total} tokens/s={rate:.0f}", now - begin)

    with progress_display() as show:
        yield tick
