"""Parses a GGUF file's header, which contains its metadata and the type and location of every tensor.

The file is untrusted, so each length and count is compared with the remaining bytes before anything is allocated. The
`gguf` package's reader is not used, because it makes several objects per vocabulary entry and does not check counts.
However, its tables of quantization types and its dequantization are used (`conversion.gguf_files`).
"""

import dataclasses
import math
import os
import struct
from typing import Any

import numpy as np

from mtpjax.errors import CheckpointFileError

MAX_ITEMS = 1 << 21  # maximum number of strings in all arrays; Gemma's vocabulary and merges have 780,000
MAX_STRING_BYTES = 8 << 20
MAX_ARRAY_BYTES = 64 << 20
MAX_KEYS, MAX_TENSORS, MAX_AXES = 1 << 16, 1 << 20, 4
SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8"}
SCALARS |= {12: "<f8"}  # NumPy dtypes by value type number; 7 is a boolean
STRING, ARRAY, BOOL, FLOAT32 = 8, 9, 7, 6
BUFFER_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """The type and location of a tensor in a GGUF file."""

    name: str
    shape: tuple[int, ...]  # rows first, the reverse of the order in the file
    kind: int  # number of the quantization type
    begin: int  # byte offset in the file
    end: int


@dataclasses.dataclass(frozen=True)
class GGUFHeader:
    """The parsed header of a GGUF file."""

    metadata: dict[str, Any]  # numbers, strings, numpy arrays, lists of strings
    tensors: dict[str, GGUFTensor]


def parse_header(descriptor: int, path, block_sizes: dict[int, tuple[int, int]]) -> GGUFHeader:
    """Parses the header of an open GGUF file, and checks that its tensors are inside the file.

    Args:
        block_sizes: elements and bytes per block by quantization type, as in the `gguf` package.

    Raises:
        CheckpointFileError: the file is truncated or damaged, or has an unsupported version.
    """
    cursor = _Cursor(descriptor, path)
    if cursor.take(4) != b"GGUF":
        raise CheckpointFileError(f"{path} is not a GGUF file: it does not start with GGUF")
    version = cursor.number("<I")
    if version not in (2, 3):
        raise CheckpointFileError(f"{path} has GGUF version {version}; supported: 2 and 3, little-endian")
    num_tensors, num_keys = cursor.number("<Q"), cursor.number("<Q")
    if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        raise CheckpointFileError(
            f"{path} has {num_tensors} tensors and {num_keys} keys in its header; at most {MAX_TENSORS} and {MAX_KEYS} "
            "are accepted"
        )
    # Each metadata entry is a key, a value type and a value.
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise CheckpointFileError(f"{path} has the key {key!r} twice")
        metadata[key] = cursor.value(cursor.number("<I"))
    # Each tensor has a name, axes, a type and an offset, which counts from the aligned end of the header.
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise CheckpointFileError(f"{path}: general.alignment is {alignment!r}, not an integer from 1 to {1 << 20}")
    start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise CheckpointFileError(f"{path} has the tensor {name!r} twice")
        begin = start + offset
        end = begin + _tensor_bytes(name, shape, kind, block_sizes, path)
        if end > cursor.size:
            raise CheckpointFileError(
                f"{path} is truncated: tensor {name!r} ends at byte {end}, but the file has {cursor.size} bytes"
            )
        tensors[name] = GGUFTensor(name, shape, kind, begin, end)
    return GGUFHeader(metadata, tensors)


def _tensor_entry(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    """Reads the name, shape, quantization type and offset of a tensor."""
    name, num_axes = cursor.string(), cursor.number("<I")
    if num_axes > MAX_AXES:
        raise CheckpointFileError(
            f"{cursor.path}: tensor {name!r} has {num_axes} axes; at most {MAX_AXES} are accepted"
        )
    shape = tuple(cursor.number("<Q") for _ in range(num_axes))[::-1]
    return name, shape, cursor.number("<I"), cursor.number("<Q")


def _tensor_bytes(name: str, shape: tuple[int, ...], kind: int, block_sizes, path) -> int:
    """Computes the size of a tensor in the file. Blocks run along the last axis."""
    if kind not in block_sizes:
        raise CheckpointFileError(f"{path}: tensor {name!r} has the unsupported quantization type {kind}")
    elements, size = block_sizes[kind]
    if not shape or not all(shape) or shape[-1] % elements:
        raise CheckpointFileError(
            f"{path}: tensor {name!r} has shape {list(shape)}; its last axis must be a multiple of {elements}"
        )
    return math.prod(shape) // elements * size


class _Cursor:
    """Reads values in order from a file, through a buffer of `BUFFER_BYTES`."""

    def __init__(self, descriptor: int, path):
        self.descriptor, self.path = descriptor, path
        self.size, self.offset = os.fstat(descriptor).st_size, 0
        self._buffer, self._begin = b"", 0
        self._items = MAX_ITEMS

    def take(self, count: int) -> bytes:
        """Returns the next bytes. Raises an error if the file does not have that many."""
        if count > self.size - self.offset:
            raise CheckpointFileError(
                f"{self.path} is truncated: {count} bytes expected at byte {self.offset}; it has {self.size} bytes"
            )
        place = self.offset - self._begin
        if place + count > len(self._buffer):
            self._buffer = os.pread(self.descriptor, max(count, BUFFER_BYTES), self.offset)
            self._begin, place = self.offset, 0
        content = self._buffer[place : place + count]
        if len(content) < count:
            raise CheckpointFileError(f"{self.path} is truncated: it changed while it was read")
        self.offset += count
        return content

    def number(self, form: str):
        """Returns the next number, whose `struct` format is `form`."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        """Returns the next string, which is stored as its length and UTF-8 bytes."""
        count = self.number("<Q")
        if count > MAX_STRING_BYTES:
            raise CheckpointFileError(
                f"{self.path}: a string of {count} bytes before byte {self.offset}; limit: {MAX_STRING_BYTES}"
            )
        # Some vocabularies contain bytes that are not UTF-8. With this handler, different bytes give different strings.
        return self.take(count).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        """Returns the next value of a type, which can be a number, a boolean, a string, or an array of these."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array(self.number("<I"), self.number("<Q"))
        if kind not in SCALARS:
            raise CheckpointFileError(f"{self.path}: unknown value type {kind} before byte {self.offset}")
        dtype = np.dtype(SCALARS[kind])
        value = np.frombuffer(self.take(dtype.itemsize), dtype)[0]
        # Use the shortest decimal for a float32, such as 1e-05 (as in configurations), not 9.999999747378752e-06.
        if kind == FLOAT32:
            return float(str(value))
        return bool(value) if kind == BOOL else value.item()

    def _array(self, kind: int, count: int) -> Any:
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind])
            if count * dtype.itemsize > MAX_ARRAY_BYTES:
                raise CheckpointFileError(
                    f"{self.path}: the array of {count} numbers at byte {self.offset} is too large: at most"
                    f" {MAX_ARRAY_BYTES} bytes are accepted"
                )
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind != STRING:
            raise CheckpointFileError(f"{self.path}: unsupported array type {kind} before byte {self.offset}")
        # Every string needs at least the 8 bytes that store its length.
        self._items -= count
        if self._items < 0 or count * 8 > self.size - self.offset:
            raise CheckpointFileError(
                f"{self.path}: an array of {count} strings before byte {self.offset} does not fit; at most {MAX_ITEMS}"
                f" strings are accepted, and {self.size - self.offset} bytes are left"
            )
        return [self.string() for _ in range(count)]
