"""Stores a checkpoint's arrays on disk, either whole with Orbax or streamed in chunks with TensorStore.

Both write uncompressed zarr, which TensorStore reads. Orbax writes arrays that fit in memory. A converted checkpoint
can be larger than memory, so its arrays are streamed, with only a few chunks in memory at once and one file per chunk.
An array that is sharded over a mesh is also streamed. Its chunks are the shards, and each process writes the shards
that it holds.
"""

import dataclasses
import hashlib
import itertools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from mtpjax import distributed
from mtpjax.errors import CheckpointError
from mtpjax.io.disk_failures import check_space, one_line_failures
from mtpjax.models.quantized import BlockScaled, is_scaled

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class StreamedArray:
    """An array that is never in memory as a whole.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        chunks: the shape of a chunk. Chunks at the edges may be smaller.
        read: returns one chunk.
        begins: the start indices of the chunks that this process writes. If None, the main process writes all chunks.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    read: Callable[[Index], np.ndarray]
    begins: frozenset[tuple[int, ...]] | None = None

    def is_written_here(self, index: Index) -> bool:
        """Returns whether this process writes a chunk."""
        return distributed.is_main_process() if self.begins is None else _begins(index) in self.begins


def stream_parts(array: jax.Array) -> StreamedArray:
    """Makes a `StreamedArray` from a sharded array. Its chunks are the shards, each of which one process writes."""
    # Of the devices that hold the same shard, exactly one has replica id 0.
    parts = {
        tuple(cut.start or 0 for cut in shard.index): shard.data
        for shard in array.addressable_shards
        if shard.replica_id == 0
    }
    chunks = array.sharding.shard_shape(array.shape)
    read = lambda index: np.asarray(parts[_begins(index)])
    return StreamedArray(array.shape, np.dtype(array.dtype), chunks, read, frozenset(parts))


def _begins(index: Index) -> tuple[int, ...]:
    return tuple(cut.start for cut in index)


def nest(leaves: Mapping[str, Any], scaled: Mapping[str, Sequence[int]] | None = None) -> dict[str, Any]:
    """Nests leaves by flat name, such as `{"a/b": leaf}`, and joins the arrays of quantized parameters.

    Args:
        scaled: `[axis, block]` by name, for each `BlockScaled` whose leaves are `name/values` and `name/scales`.
    """
    leaves = dict(leaves)
    for name, (axis, block) in (scaled or {}).items():
        values, scales = leaves.pop(f"{name}/values"), leaves.pop(f"{name}/scales")
        leaves[name] = BlockScaled(values, scales, axis=axis, block=block)
    return traverse_util.unflatten_dict(leaves, sep="/")


def flatten_arrays(params: Any) -> tuple[dict[str, np.ndarray | jax.Array | StreamedArray], dict[str, list[int]]]:
    """Flattens parameters for saving, and rejects leaves that would not restore to the same bits.

    Args:
        params: nested dicts of jax or numpy arrays, `StreamedArray` or `BlockScaled`; the keys are non-empty strings
            without "/" or ".".

    Returns:
        `(arrays, scaled)`, where `arrays` are this process's arrays and streamed arrays by flat name, and `scaled` is
        the argument of `nest`. Arrays that are sharded over a mesh are streamed.
    """
    arrays, scaled = {}, {}
    for name, leaf in _flatten(params).items():
        if is_scaled(leaf):
            scaled[name] = [leaf.axis, leaf.block]
            parts = {f"{name}/values": leaf.values, f"{name}/scales": leaf.scales}
        else:
            parts = {name: leaf}
        arrays |= {part: _array_to_save(part, array) for part, array in parts.items()}
    if not arrays:
        raise ValueError("params contain no array")
    return arrays, scaled


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Lists the leaves of nested dicts by flat name. An empty dict below the root is a leaf."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"params must be nested dicts of arrays, not {type(tree).__name__}")
    leaves = {}
    for key, value in tree.items():
        # Keys become folder and file names.
        if not isinstance(key, str) or not key or "/" in key or "." in key:  # Orbax joins names with "."
            raise ValueError(f"params key {key!r} under {prefix!r} must be a non-empty string without '/' or '.'")
        is_leaf = not isinstance(value, Mapping) or not value
        leaves |= {f"{prefix}{key}": value} if is_leaf else _flatten(value, f"{prefix}{key}/")
    return leaves


def _array_to_save(name: str, leaf: Any) -> np.ndarray | jax.Array | StreamedArray:
    # PRNG keys are arrays too, but their bits are meaningless without their implementation.
    is_array = isinstance(leaf, (jax.Array, np.ndarray, StreamedArray))
    if not is_array or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ValueError(f"params[{name!r}] is a {type(leaf).__name__}; a checkpoint holds jax or numpy arrays")
    if not math.prod(leaf.shape):
        raise ValueError(f"params[{name!r}] has shape {leaf.shape}; Orbax cannot store an array without elements")
    # JAX converts foreign byte orders and, by default, 64-bit types, so these would not restore to the same bits.
    dtype = np.dtype(leaf.dtype)
    if not dtype.isnative or not _is_jax_dtype(dtype):
        raise ValueError(f"params[{name!r}] has dtype {dtype.str} ({dtype}); JAX would not restore it")
    # Arrays stay on their devices until they are written. Only one copy of a replicated array is written.
    if isinstance(leaf, jax.Array):
        return leaf.addressable_data(0) if leaf.is_fully_replicated else stream_parts(leaf)
    return leaf


def write_arrays(folder: pathlib.Path, arrays: Mapping[str, Any]) -> tuple[dict[str, dict], dict[str, str]]:
    """Writes arrays into a new folder. All processes of a run must call it.

    Returns `(records, digests)`, where `records` are the arrays' entries for `digests.json`, and `digests` are the
    sha256 digests known so far, by file name relative to the parent of `folder`.
    """
    streams = {name: array for name, array in arrays.items() if isinstance(array, StreamedArray)}
    failed = OSError(f"another process cannot write {folder.parent.parent}")
    records = {}
    with distributed.raise_together(failed):
        if distributed.is_main_process():
            check_space(folder.parent, arrays)
            with one_line_failures(folder):
                records = _write_whole(folder, arrays)
                _make_stores(folder, streams)
    with distributed.raise_together(failed), one_line_failures(folder):
        digests = _write_streams(folder, streams)
    # A streamed array's digest covers the digests of its chunks, in C order. The file of a full chunk contains exactly
    # the chunk's bytes, so it has the same digest; files of chunks at the edges are padded.
    written = {file: digest for each in distributed.gather_values(digests) for file, digest in each.items()}
    known = {}
    for name, stream in streams.items():
        total = hashlib.sha256()
        for index in chunk_grid(stream.shape, stream.chunks):
            file = _chunk_file(name, index, stream.chunks)
            total.update(bytes.fromhex(written[file]))
            if all(cut.stop - cut.start == size for cut, size in zip(index, stream.chunks, strict=True)):
                known[f"{folder.name}/{file}"] = written[file]
        records[name] = _record(stream, total.hexdigest(), stream.chunks)
    return {name: records[name] for name in arrays if name in records}, known


def _write_whole(folder: pathlib.Path, arrays: Mapping[str, Any]) -> dict[str, dict]:
    """Writes the arrays that are not streamed, and Orbax's metadata for all arrays. Returns their digest entries."""
    import orbax.checkpoint as ocp  # slow to import, so it is imported only where it is used

    # Only this process takes part, because the others must not wait for it.
    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process_{index}"
    )
    # OCDBT would mix the bytes of several arrays in shared files, so a file's digest could not identify an array.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone)
    # By default, Orbax would try to merge the OCDBT files of several processes, and warn that there are none.
    handler.finalize = lambda directory: None
    whole = {name: np.asarray(array) for name, array in arrays.items() if not isinstance(array, StreamedArray)}
    # Orbax writes one element in place of each streamed array.
    stand_ins = {name: np.zeros(1, arrays[name].dtype) for name in arrays.keys() - whole.keys()}
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(traverse_util.unflatten_dict(whole | stand_ins, sep="/")))
    # Hashing releases the interpreter lock, so threads hash several arrays at once.
    with ThreadPoolExecutor() as pool:
        return dict(zip(whole, pool.map(array_record, whole.values()), strict=True))


def _make_stores(folder: pathlib.Path, streams: Mapping[str, StreamedArray]) -> None:
    """Replaces Orbax's one-element arrays with empty ones that have the right shape and chunks."""
    import tensorstore

    for name, stream in streams.items():
        spec = array_spec(folder, name)
        shutil.rmtree(spec["kvstore"]["path"])
        spec["dtype"] = "bool" if stream.dtype == np.bool_ else stream.dtype.name
        spec["metadata"] = {"shape": stream.shape, "chunks": stream.chunks, "compressor": None}
        tensorstore.open(spec, create=True, context=single_thread_context()).result()


def _write_streams(folder: pathlib.Path, streams: Mapping[str, StreamedArray]) -> dict[str, str]:
    """Writes this process's chunks. Returns their sha256 digests by file name relative to `folder`."""
    import tensorstore

    # By default, zarr omits files of all-zero chunks. Write them too, so that a missing file means damage.
    options, context = {"store_data_equal_to_fill_value": True}, single_thread_context()
    stores = {
        name: tensorstore.open(array_spec(folder, name) | options, open=True, context=context).result()
        for name in streams
    }

    def write(part):
        name, index = part
        array = np.ascontiguousarray(streams[name].read(index))
        stores[name][index].write(array, can_reference_source_data_indefinitely=True).result()
        return _chunk_file(name, index, streams[name].chunks), _sha256(array).hex()

    # Each thread holds one chunk in memory and hashes it there, so that files need not be read again.
    parts = [
        (name, index)
        for name, stream in streams.items()
        for index in chunk_grid(stream.shape, stream.chunks)
        if stream.is_written_here(index)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(pool.map(write, parts))


def _chunk_file(name: str, index: Index, chunks: tuple[int, ...]) -> str:
    """Returns the path of a chunk's file in the arrays' folder. zarr numbers the chunks along each axis."""
    place = ".".join(str(cut.start // size) for cut, size in zip(index, chunks, strict=True))
    return f"{name.replace('/', '.')}/{place}"


def check_record(folder: pathlib.Path, name: str, found: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """Compares the properties that were read for an array with its entry in `digests.json`."""
    for key, value in found.items():
        if value != recorded.get(key):
            raise CheckpointError(f"array {name!r} in {folder} has {key} {value}; expected {recorded.get(key)}")


def array_record(array: np.ndarray, chunks: list[int] | None = None) -> dict[str, Any]:
    """Returns an array's entry for `digests.json`.

    The entry is `{"shape", "dtype", "sha256"}`, where the digest covers the elements in C order. For a streamed array,
    the digest covers the digests of the chunks, and the entry also has "chunks".
    """
    if chunks is None:
        return _record(array, _sha256(array).hex())
    # Compute the same digest as when the chunks were streamed.
    total = hashlib.sha256()
    for index in chunk_grid(array.shape, chunks):
        total.update(_sha256(np.ascontiguousarray(array[index])))
    return _record(array, total.hexdigest(), chunks)


def _record(array, digest: str, chunks=None) -> dict[str, Any]:
    record = {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": digest}
    return record if chunks is None else record | {"chunks": list(chunks)}


def _sha256(array: np.ndarray) -> bytes:
    """Hashes the elements in C order, without a copy of a contiguous array."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).digest()


def chunk_grid(shape, chunks) -> Iterator[Index]:
    """Yields the chunks of an array in C order. The array's digest depends on this order."""
    axes = [range(0, size, step) for size, step in zip(shape, chunks, strict=True)]
    for begins in itertools.product(*axes):
        yield tuple(
            slice(begin, min(begin + step, size)) for begin, step, size in zip(begins, chunks, shape, strict=True)
        )


def array_spec(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """Returns the TensorStore spec for an array. In Orbax's layout, the zarr array `a/b` is in the folder `a.b`."""
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder / name.replace("/", "."))}}


def single_thread_context():
    """Makes a TensorStore context with one thread for copies and one for files, because each thread uses memory."""
    import tensorstore

    return tensorstore.Context({"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}})


def _is_jax_dtype(dtype) -> bool:
    """Returns whether JAX supports the dtype; float64 is supported only with jax_enable_x64."""
    # `canonicalize_dtype` returns the dtype that JAX would use instead.
    is_number = jnp.issubdtype(dtype, np.number) or dtype == np.bool_
    return is_number and jax.dtypes.canonicalize_dtype(dtype) == dtype
