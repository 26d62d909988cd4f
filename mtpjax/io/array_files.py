"""Arrays of a checkpoint on disk: written and read with Orbax, or streamed in chunks with TensorStore.

Both write uncompressed zarr. Arrays that fit in memory are written by Orbax. A converted checkpoint can be larger than
memory, so its arrays are streamed: a few chunks are in memory at once, and one file holds the bytes of one chunk. An
array that a mesh splits is streamed too: its chunks are the shards, and each process writes those that it holds.
"""

import dataclasses
import hashlib
import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from mtpjax import distributed
from mtpjax.errors import CheckpointError, one_line
from mtpjax.io.checkpoint_format import DIGESTS_FILE
from mtpjax.io.disk_failures import check_space, one_line_failures

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class StreamedArray:
    """An array that is never in memory as a whole.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        chunks: the shape of a chunk. Those at the edge are smaller.
        read: returns one chunk.
        begins: first positions of the chunks that this process writes; None: the first process writes all of them.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    read: Callable[[Index], np.ndarray]
    begins: frozenset[tuple[int, ...]] | None = None

    def is_written_here(self, index: Index) -> bool:
        """Returns whether this process writes the chunk."""
        return distributed.is_main_process() if self.begins is None else _begins(index) in self.begins


def stream_parts(array: jax.Array) -> StreamedArray:
    """Describes an array that a mesh splits: its chunks are the shards, each of which one process writes.

    Args:
        array: the array; all processes that hold shards of it must write it together.
    """
    # Among the devices with the same shard, one has replica number 0.
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


def write_arrays(folder: pathlib.Path, arrays: Mapping[str, Any]) -> tuple[dict[str, dict], dict[str, str]]:
    """Writes arrays into a new folder. All processes of a run must call it.

    Returns `(records, digests)`: the entry of each array in `digests.json`, and the sha256 of the files for which it is
    already known, by file name relative to the parent of `folder`.
    """
    streams = {name: array for name, array in arrays.items() if isinstance(array, StreamedArray)}
    failed = OSError(f"{folder.parent.parent} cannot be written by another process")
    records = {}
    with distributed.raise_together(failed):
        if distributed.is_main_process():
            check_space(folder.parent, arrays)
            with one_line_failures(folder):
                records = _write_whole(folder, arrays)
                _make_stores(folder, streams)
    with distributed.raise_together(failed), one_line_failures(folder):
        digests = _write_streams(folder, streams)
    # An array's digest is the digest of its chunks' digests, in C order. A file that holds a whole chunk has exactly
    # the chunk's bytes, and so its digest; chunks at the edge are padded in their files.
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
    """Writes the arrays that are not streamed, and Orbax's description of all arrays; returns their records."""
    import orbax.checkpoint as ocp  # slow to import, so only where it is used

    checkpointer, handler = _make_checkpointer()
    # Otherwise Orbax would try to merge OCDBT files of several processes, and warn that there are none.
    handler.finalize = lambda directory: None
    whole = {name: np.asarray(array) for name, array in arrays.items() if not isinstance(array, StreamedArray)}
    # Streamed arrays are one element for Orbax.
    stand_ins = {name: np.zeros(1, arrays[name].dtype) for name in arrays.keys() - whole.keys()}
    with checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(traverse_util.unflatten_dict(whole | stand_ins, sep="/")))
    # Hashing releases the interpreter lock, so threads hash several arrays at once.
    with ThreadPoolExecutor() as pool:
        return dict(zip(whole, pool.map(array_record, whole.values()), strict=True))


def _make_stores(folder: pathlib.Path, streams: Mapping[str, StreamedArray]) -> None:
    """Replaces Orbax's one-element arrays by empty ones of the right shape and chunks."""
    import tensorstore

    for name, stream in streams.items():
        spec = array_spec(folder, name)
        shutil.rmtree(spec["kvstore"]["path"])
        dtype = "bool" if stream.dtype == np.bool_ else stream.dtype.name
        spec |= {"dtype": dtype}
        spec["metadata"] = {"shape": stream.shape, "chunks": stream.chunks, "compressor": None}
        tensorstore.open(spec, create=True, context=single_thread_context()).result()


def _write_streams(folder: pathlib.Path, streams: Mapping[str, StreamedArray]) -> dict[str, str]:
    """Writes the chunks of this process; returns their sha256 by file name relative to `folder`."""
    import tensorstore

    # zarr would omit files of chunks that are all zeros; if all files are written, a missing one means damage.
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

    # One chunk per thread is in memory. Chunks are hashed while in memory, so that files need not be read again.
    parts = [
        (name, index)
        for name, stream in streams.items()
        for index in chunk_grid(stream.shape, stream.chunks)
        if stream.is_written_here(index)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(pool.map(write, parts))


def _chunk_file(name: str, index: Index, chunks: tuple[int, ...]) -> str:
    """Returns a chunk's file, relative to the folder of the arrays: zarr numbers chunks along each axis."""
    place = ".".join(str(cut.start // size) for cut, size in zip(index, chunks, strict=True))
    return f"{name.replace('/', '.')}/{place}"


def read_arrays(folder: pathlib.Path, records: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Reads all arrays of a checkpoint into memory, without placing them on a device."""
    import orbax.checkpoint as ocp

    try:
        with _make_checkpointer()[0] as checkpointer:
            # Compare names first: Orbax would skip an array that the request does not name.
            stored = traverse_util.flatten_dict(checkpointer.metadata(folder).item_metadata.tree, sep="/")
            for name in sorted(records.keys() ^ stored.keys()):
                absent = folder if name in records else folder.with_name(DIGESTS_FILE)
                raise CheckpointError(f"array {name!r} is missing from {absent}")
            item = traverse_util.unflatten_dict(dict.fromkeys(records, 0), sep="/")
            # Request numpy arrays: Orbax would otherwise look for the devices of the saving process.
            restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in records}
            request = ocp.args.PyTreeRestore(
                item=item, restore_args=traverse_util.unflatten_dict(restore_args, sep="/")
            )
            arrays: Any = traverse_util.flatten_dict(checkpointer.restore(folder, args=request), sep="/")
            return arrays
    except CheckpointError:
        raise
    except Exception as error:  # Orbax and TensorStore raise arbitrary errors of their parsers
        raise CheckpointError(f"{folder} cannot be read: {one_line(error)}") from error


def check_record(folder: pathlib.Path, name: str, found: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """Compares an array that was read with the record that was made when it was saved."""
    for key, value in found.items():
        if value != recorded.get(key):
            raise CheckpointError(f"array {name!r} in {folder} has {key} {value}; saved was {recorded.get(key)}")


def array_record(array: np.ndarray, chunks: list[int] | None = None) -> dict[str, Any]:
    """Describes an array for `digests.json`.

    Returns `{"shape", "dtype", "sha256"}`, where the digest covers the elements in C order; for a streamed array it
    covers the digests of the chunks, and "chunks" is added.
    """
    if chunks is None:
        return _record(array, _sha256(array).hex())
    # The same digest as when the chunks were streamed.
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
    """Lists the chunks of an array in C order."""
    # Chunks in C order: the digest of an array depends on it.
    axes = [range(0, size, step) for size, step in zip(shape, chunks, strict=True)]
    for begins in itertools.product(*axes):
        yield tuple(
            slice(begin, min(begin + step, size)) for begin, step, size in zip(begins, chunks, shape, strict=True)
        )


def array_spec(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """Builds the TensorStore spec of an array in Orbax's layout.

    Returns the spec: a zarr array in the folder `a.b` for the name `a/b`.
    """
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder / name.replace("/", "."))}}


def single_thread_context():
    """Makes a TensorStore context with one copy thread and one file thread, since each thread keeps its own memory."""
    import tensorstore

    return tensorstore.Context({"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}})


def _make_checkpointer():
    """Makes an Orbax checkpointer and its handler for this process only: other processes of a run do not wait."""
    import orbax.checkpoint as ocp

    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process_{index}"
    )
    # OCDBT would mix the bytes of several arrays in shared files, and a digest could no longer identify the array.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone), handler
