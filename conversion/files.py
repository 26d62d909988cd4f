"""Safetensors files in a directory: headers checked before anything is allocated, tensors read by byte ranges.

Nothing outside the directory is opened, nothing is unpickled, and no more is in memory than was asked for.
"""

import dataclasses
import json
import logging
import math
import os
import pathlib
import struct
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from mtpjax.errors import CheckpointFileError, UnsafeFileError
from mtpjax.safe_open import open_inside, root_of

log = logging.getLogger("mtpjax.conversion")

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BOOL": np.dtype(bool),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

LARGEST_HEADER = 32 << 20  # bytes; DeepSeek-V3's 91,991 tensors need a tenth, over all shards
MOST_TENSORS = 500_000
BLOCK = 4 << 20  # bytes that are in memory at once of what is read, written or put in another order
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".gguf")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies."""

    name: str
    file: str
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int  # of its bytes, in the file
    end: int


class Files:
    """A checkpoint directory, open for reading. Use as a context manager.

    `strict` refuses weights that are not finite; otherwise they are counted, and `report` warns of them. `only` names
    the one file to take.
    """

    def __init__(self, directory, *, strict: bool = False, only: str | None = None):
        self.path, self.strict = pathlib.Path(directory), strict
        self._not_finite: dict[tuple[str, int], int] = {}  # name, first row -> how many
        if not self.path.is_dir():
            raise CheckpointFileError(f"{self.path} is no directory")
        self._root = root_of(self.path)
        self._open: dict[str, int] = {}
        self.metadata: dict[str, dict[str, str] | None] = {}  # of each file
        self.sizes: dict[str, int] = {}  # bytes of each file
        self.headers: dict[str, bytes] = {}  # of each file, its length in front
        self.index: dict[str, Any] | None = None
        self.tensors: dict[str, Tensor] = {}
        try:
            self._read_headers(self._shards() if only is None else [only])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}

    def json(self, name: str) -> Any:
        """The content of a JSON file of the directory."""
        descriptor = self._descriptor(name)
        size = os.fstat(descriptor).st_size
        if size > LARGEST_HEADER * 4:
            raise CheckpointFileError(f"{self.path / name} has {size} bytes: too large to be a description")
        return _parse_json(_pread(descriptor, size, 0, self.path / name), self.path / name)

    def others(self) -> list[str]:
        """The files beside the weights: configuration, tokenizer, text. What is no file or leads out is left out."""
        kept = []
        for name in sorted(os.listdir(self.path)):
            if name.endswith((".safetensors", *PICKLES)) or (self.path / name).is_dir():
                continue
            try:
                self._descriptor(name)
            except CheckpointFileError as error:
                log.warning("left out: %s", error)
                continue
            kept.append(name)
        return kept

    def bytes_of(self, name: str) -> Iterator[memoryview]:
        """The content of a file, block by block."""
        descriptor, offset = self._descriptor(name), 0
        size = os.fstat(descriptor).st_size
        while offset < size:
            block = memoryview(bytearray(min(BLOCK, size - offset)))
            _pread_into(descriptor, block, offset, self.path / name)
            yield block
            offset += len(block)

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """A tensor by blocks of rows."""
        tensor = self.tensors[name]
        rows = tensor.shape[0] if tensor.shape else 1
        step = max(1, BLOCK * rows // max(tensor.end - tensor.begin, 1))
        for begin in range(0, rows, step):
            yield self.read(name, begin, min(begin + step, rows))

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """A tensor, or its rows `begin..end` along the first axis: a writable array of their own."""
        tensor = self.tensors[name]
        rows = tensor.shape[0] if tensor.shape else 1
        end = rows if end is None else end
        row = (tensor.end - tensor.begin) // max(rows, 1)
        array = np.empty((end - begin, *tensor.shape[1:]) if tensor.shape else (), tensor.dtype)
        view = array.reshape(-1).view(np.uint8)
        _pread_into(self._descriptor(tensor.file), view.data, tensor.begin + begin * row, self.path / tensor.file)
        return array

    def read_checked(self, name: str, begin: int, end: int) -> np.ndarray:
        """`read`, and a look whether every number is finite."""
        array = self.read(name, begin, end)
        count = count_not_finite(array)
        if count:
            self._not_finite[name, begin] = count
            if self.strict:
                raise CheckpointFileError(f"tensor {name} holds {count} numbers that are not finite")
        return array

    def report(self) -> None:
        """Warns of weights that were read and are not finite."""
        for name in dict.fromkeys(name for name, _ in self._not_finite):
            count = sum(count for (other, _), count in self._not_finite.items() if other == name)
            log.warning("tensor %s holds %d numbers that are not finite", name, count)

    def _shards(self) -> list[str]:
        """The safetensors files, in the index's order, or the one there is."""
        if _exists(self.path / INDEX):
            self.index = self.json(INDEX)
            weight_map = self.index.get("weight_map") if isinstance(self.index, dict) else None
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointFileError(f"{self.path / INDEX} has no weight_map")
            files = list(dict.fromkeys(weight_map.values()))
            for file in files:
                if not isinstance(file, str) or file != os.path.basename(file) or not file or "\0" in file:
                    raise CheckpointFileError(f"{self.path / INDEX} names {file!r}, which is no file of the directory")
            missing = [file for file in files if not _exists(self.path / file)]
            if missing:
                raise CheckpointFileError(
                    f"{self.path} lacks {len(missing)} of {len(files)} shards: {', '.join(missing)}"
                )
            return sorted(files)
        if _exists(self.path / SINGLE):
            return [SINGLE]
        found = sorted(file.name for file in self.path.iterdir())
        shards = [name for name in found if name.endswith(".safetensors")]
        if shards:
            raise CheckpointFileError(f"{self.path} has {len(shards)} shards and no {INDEX}")
        other = [name for name in found if name.endswith(PICKLES)]
        if other:
            raise CheckpointFileError(
                f"{self.path} holds {other[0]}: only safetensors are read; convert it with its own tools first"
            )
        raise CheckpointFileError(f"{self.path} holds no safetensors")

    def _read_headers(self, files: list[str]) -> None:
        for file in files:
            for tensor in self._read_header(file):
                if tensor.name in self.tensors:
                    raise CheckpointFileError(f"tensor {tensor.name} is in {self.tensors[tensor.name].file} and {file}")
                self.tensors[tensor.name] = tensor
            if len(self.tensors) > MOST_TENSORS:
                raise CheckpointFileError(f"{self.path} holds over {MOST_TENSORS} tensors")
        if self.index is None:
            return
        for name, file in self.index["weight_map"].items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise CheckpointFileError(f"{INDEX} puts tensor {name} into {file}, where it is not")
        stray = sorted(self.tensors.keys() - self.index["weight_map"].keys())
        if stray:
            raise CheckpointFileError(f"{len(stray)} tensors are in the shards but not in {INDEX}: {stray[0]}")

    def _read_header(self, file: str) -> list[Tensor]:
        path, descriptor = self.path / file, self._descriptor(file)
        size = self.sizes[file] = os.fstat(descriptor).st_size
        if size < 8:
            raise CheckpointFileError(f"{path} has {size} bytes: no safetensors header")
        (length,) = struct.unpack("<Q", _pread(descriptor, 8, 0, path))
        if length > LARGEST_HEADER:
            raise CheckpointFileError(f"{path} has a header of {length} bytes; the most is {LARGEST_HEADER}")
        if length + 8 > size:
            raise CheckpointFileError(f"{path} is truncated: {size} bytes, and its header alone has {length}")
        self.headers[file] = _pread(descriptor, 8 + length, 0, path)
        tensors, self.metadata[file] = parse_header(self.headers[file], file, path)
        end = tensors[-1].end if tensors else 8 + length
        if end != size:
            kind = "truncated" if end > size else "longer than its header says"
            raise CheckpointFileError(f"{path} is {kind}: {size} bytes instead of {end}")
        return tensors

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            try:
                self._open[file] = open_inside(self.path / file, self._root)
            except UnsafeFileError as error:
                raise CheckpointFileError(str(error)) from error
        return self._open[file]


def same_content(ours: Iterator[np.ndarray], theirs: Iterator[np.ndarray]) -> bool:
    """Whether two streams of blocks, cut in their own ways, hold the same."""
    left: list[np.ndarray] = [np.empty(0), np.empty(0)]
    streams = (ours, theirs)
    while True:
        for side, stream in enumerate(streams):
            if not left[side].size:
                block = next(stream, None)
                left[side] = np.empty(0) if block is None else block.reshape(-1)
        count = min(left[0].size, left[1].size)
        if not count:
            return not max(left[0].size, left[1].size)
        one, two = left[0][:count], left[1][:count]
        if one.dtype != two.dtype or one.tobytes() != two.tobytes():
            return False
        left = [left[0][count:], left[1][count:]]


EXPONENTS = {  # the bits that are all set in what is not finite (and in e4m3fn, which has no infinity, of NaN)
    "float32": (np.uint32, 0x7F800000, 0x7FFFFFFF),
    "float16": (np.uint16, 0x7C00, 0x7FFF),
    "bfloat16": (np.uint16, 0x7F80, 0x7FFF),
    "float8_e4m3fn": (np.uint8, 0x7F, 0x7F),
}


def count_not_finite(array: np.ndarray) -> int:
    """How many numbers are infinite or NaN; 0 for other than the weights' dtypes."""
    if array.dtype.name not in EXPONENTS or not array.size:
        return 0
    kind, least, mask = EXPONENTS[array.dtype.name]
    bits = array.reshape(-1).view(kind) & kind(mask)
    return int(np.count_nonzero(bits >= least)) if bits.max() >= least else 0


def parse_header(content: bytes, file: str, path) -> tuple[list[Tensor], dict[str, str] | None]:
    """The tensors of a safetensors header (its length included) in the order of their bytes, and its metadata."""
    header = _parse_json(content[8:], path)
    if not isinstance(header, dict) or len(header) > MOST_TENSORS:
        raise CheckpointFileError(f"{path} has no safetensors header")
    metadata = header.pop("__metadata__", None)
    tensors = [_tensor(name, entry, file, path, len(content)) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    place = len(content)
    for tensor in tensors:
        if tensor.begin != place:
            raise CheckpointFileError(f"{path}: tensor {tensor.name} begins at byte {tensor.begin}, not {place}")
        place = tensor.end
    return tensors, metadata


def _exists(path: pathlib.Path) -> bool:
    return os.path.lexists(path)


def _pread(descriptor: int, count: int, offset: int, path) -> bytes:
    buffer = bytearray(count)
    _pread_into(descriptor, memoryview(buffer), offset, path)
    return bytes(buffer)


def _pread_into(descriptor: int, view: memoryview, offset: int, path) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done : done + (1 << 30)]], offset + done)
        if not count:
            raise CheckpointFileError(f"{path} ended at byte {offset + done} while it was read")
        done += count


def _parse_json(content: bytes, path) -> Any:
    def unique(pairs):
        result = dict(pairs)
        if len(result) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in result if names.count(name) > 1)
            raise CheckpointFileError(f"{path} names {twice!r} twice")
        return result

    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointFileError(f"{path} is no JSON: {str(error)[:100]}") from error


def _tensor(name: str, entry: Any, file: str, path, data: int) -> Tensor:
    problem = f"{path}: tensor {name[:200]!r}"
    if not name or not name.isprintable() or len(name) > 1000:
        raise CheckpointFileError(f"{path} names a tensor {name[:100]!r}")
    try:
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointFileError(f"{problem} has no known dtype, shape and place") from error
    numbers = (*shape, begin, end)
    if not all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63 for number in numbers):
        raise CheckpointFileError(f"{problem} has shape {shape} at {begin}..{end}")
    if begin > end or math.prod(shape) * dtype.itemsize != end - begin:
        raise CheckpointFileError(f"{problem} of shape {shape} and {dtype} does not fit its {end - begin} bytes")
    return Tensor(name, file, dtype, shape, data + begin, data + end)
