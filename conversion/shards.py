"""Writes safetensors files block by block, so that a tensor is never in memory as a whole.

The safetensors package is not used, because its `save_file` needs whole arrays, reorders tensors and writes a new
header, whereas a converted checkpoint must reproduce the original header byte for byte.
"""

import json
import pathlib
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from conversion.safetensors_header import DTYPE_NAMES, TensorInfo
from conversion.weight_files import INDEX, SINGLE
from mtpjax.errors import CheckpointFileError

SHARD_BYTES = 5 << 30  # the maximum size of a shard, as on Hugging Face


class TensorEntry(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Shard(NamedTuple):
    """A safetensors file to write."""

    file: str
    header: bytes  # including the 8 bytes that store its length
    entries: tuple[TensorEntry, ...]  # in the order of their bytes


def entry_of(tensor: TensorInfo) -> TensorEntry:
    """Returns an entry that writes a tensor with the same name, dtype and shape."""
    return TensorEntry(tensor.name, tensor.dtype, tensor.shape)


def make_shard(file: str, entries: Iterable[TensorEntry], metadata: dict[str, str] | None) -> Shard:
    """Makes a shard with a new header.

    Args:
        metadata: the `__metadata__` of the header, which transformers expects to be `{"format": "pt"}`.
    """
    entries, place, header = tuple(entries), 0, {}
    if metadata is not None:
        header["__metadata__"] = metadata
    for entry in entries:
        # Offsets count from the end of the header.
        offsets = [place, place + entry.nbytes]
        header[entry.name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        place += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces after the header align the tensors to 8 bytes, as the safetensors package does.
    text += b" " * (-len(text) % 8)
    return Shard(file, struct.pack("<Q", len(text)) + text, entries)


def split_into_shards(entries: Iterable[TensorEntry], max_bytes: int = SHARD_BYTES) -> list[Shard]:
    """Distributes tensors over files, whose names are as on Hugging Face.

    Args:
        max_bytes: the maximum size of a file. A tensor that is larger gets a separate file.
    """
    # Fill the files in order. A tensor that does not fit starts the next file.
    groups: list[list[TensorEntry]] = [[]]
    room = max_bytes
    for entry in entries:
        if groups[-1] and entry.nbytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(entry)
        room -= entry.nbytes
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    return [make_shard(name, group, {"format": "pt"}) for name, group in zip(names, groups, strict=True)]


def write_shards(
    folder: pathlib.Path,
    shards: Iterable[Shard],
    blocks: Callable[[TensorEntry], Iterator[np.ndarray]],
    progress: Callable[[int], object] | None = None,
) -> None:
    """Writes safetensors files.

    Args:
        folder: an existing folder that does not contain the files.

    Raises:
        CheckpointFileError: `blocks` yields more or fewer bytes than the entry has.
    """
    for shard in shards:
        # Mode "x" fails if the file exists, so a shard never overwrites another file.
        with open(folder / shard.file, "xb") as file:
            file.write(shard.header)
            for entry in shard.entries:
                begin = file.tell()
                # The next block is read and converted while this one is written.
                for block in _prefetched(blocks(entry)):
                    assert block.dtype == entry.dtype, (entry, block.dtype)
                    file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
                    if progress:
                        progress(block.nbytes)
                if file.tell() - begin != entry.nbytes:
                    raise CheckpointFileError(
                        f"tensor {entry.name} has {entry.nbytes} bytes, but {file.tell() - begin} were written"
                    )


def _prefetched(blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the same blocks, but computes each block in a thread while the caller uses the previous one."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = pool.submit(next, blocks, None)
            yield block


def copy_files(folder: pathlib.Path, content: Callable[[str], Iterator[memoryview]], names: Iterable[str]) -> None:
    """Writes files block by block into an existing folder that does not contain them."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        with open(folder / name, "xb") as file:
            file.writelines(content(name))


def write_index(folder: pathlib.Path, shards: list[Shard]) -> None:
    """Writes `model.safetensors.index.json`, unless the only shard is `model.safetensors`."""
    if len(shards) == 1 and shards[0].file == SINGLE:
        return
    # Hugging Face's loaders read `weight_map`; `total_size` counts tensors without headers.
    total = sum(entry.nbytes for shard in shards for entry in shard.entries)
    places = {entry.name: shard.file for shard in shards for entry in shard.entries}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
