"""Safetensors files out: tensors written block by block behind a header that is made, or repeated."""

import json
import pathlib
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from conversion.files import INDEX, NAMES, SINGLE, CheckpointFileError, Tensor

SHARD_BYTES = 5 << 30  # of a new shard; Hugging Face's own limit


class Entry(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def entry_of(tensor: Tensor) -> Entry:
    """A tensor to be written as it was read."""
    return Entry(tensor.name, tensor.dtype, tensor.shape)


class Shard(NamedTuple):
    """A file to be written. `entries` in the order of their bytes."""

    file: str
    header: bytes
    entries: tuple[Entry, ...]


def shard(file: str, entries: Iterable[Entry], metadata: dict[str, str] | None) -> Shard:
    """A file of these tensors, in their order, under a new header."""
    entries, place, header = tuple(entries), 0, {}
    if metadata is not None:
        header["__metadata__"] = metadata
    for entry in entries:
        offsets = [place, place + entry.nbytes]
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        place += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Shard(file, struct.pack("<Q", len(text)) + text, entries)


def new_shards(entries: Iterable[Entry], most: int = SHARD_BYTES) -> list[Shard]:
    """Tensors over files of `most` bytes, or of one tensor, named as Hugging Face does."""
    groups: list[list[Entry]] = [[]]
    room = most
    for entry in entries:
        if groups[-1] and entry.nbytes > room:
            groups.append([])
            room = most
        groups[-1].append(entry)
        room -= entry.nbytes
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    return [shard(name, group, {"format": "pt"}) for name, group in zip(names, groups, strict=True)]


def index_of(shards: Iterable[Shard]) -> bytes:
    """The index file of some shards."""
    shards = list(shards)
    total = sum(entry.nbytes for shard in shards for entry in shard.entries)
    places = {entry.name: shard.file for shard in shards for entry in shard.entries}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def write_shards(
    folder: pathlib.Path,
    shards: Iterable[Shard],
    blocks: Callable[[Entry], Iterator[np.ndarray]],
    progress: Callable[[int], object] | None = None,
) -> None:
    """Writes the files; `blocks` gives a tensor's rows, piece after piece. `progress` hears of bytes."""
    for shard in shards:
        with open(folder / shard.file, "xb") as file:
            file.write(shard.header)
            for entry in shard.entries:
                begin = file.tell()
                for block in _ahead(blocks(entry)):
                    assert block.dtype == entry.dtype, (entry, block.dtype)
                    file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
                    if progress:
                        progress(block.nbytes)
                if file.tell() - begin != entry.nbytes:
                    raise CheckpointFileError(f"tensor {entry.name} came to {file.tell() - begin} bytes: {entry}")


def _ahead(blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The same blocks, each made while the one before is written."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = pool.submit(next, blocks, None)
            yield block


def copy_files(folder: pathlib.Path, content: Callable[[str], Iterator[memoryview]], names: Iterable[str]) -> None:
    for name in names:
        with open(folder / name, "xb") as file:
            file.writelines(content(name))


def write_index(folder: pathlib.Path, shards: list[Shard]) -> None:
    if len(shards) > 1 or shards[0].file != SINGLE:
        (folder / INDEX).write_bytes(index_of(shards))
