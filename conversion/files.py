"""Opens a Hugging Face checkpoint directory, checks its index and headers, and reads tensors by byte ranges.

The directory is untrusted. No file outside it is opened, nothing is unpickled, and every header is checked before
memory is allocated for a tensor. Files are read with `preadv` instead of a memory map, so that a read uses no more
memory than the requested block, and a file that is truncated during reading raises an error instead of SIGBUS.
"""

import logging
import os
import pathlib
import struct
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from conversion.array_checks import count_nonfinite
from conversion.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS, TensorInfo, parse_header, parse_json
from conversion.weight_files import INDEX, PICKLE_SUFFIXES, choose_weight_files, safetensors_files
from mtpjax.errors import CheckpointFileError
from mtpjax.safe_open import (
    BLOCK_BYTES,
    allowed_root,
    is_gguf,
    list_chat_templates,
    open_inside,
    pread,
    pread_into,
)

log = logging.getLogger("mtpjax.conversion")


class TensorSource(Protocol):
    """Files from which parameters are read, either `CheckpointFiles` or files in a different format."""

    path: pathlib.Path
    tensors: dict[str, TensorInfo]

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Reads a tensor or some of its rows."""
        ...

    def read_checked(self, name: str, begin: int, end: int) -> np.ndarray:
        """Reads rows of a tensor, and counts or rejects infinite and NaN elements."""
        ...


class CheckpointFiles:
    """A checkpoint directory, open for reading. Use it as a context manager.

    Attributes:
        path: the directory.
        tensors: the location of each tensor, by name.
        headers: the raw header of each safetensors file, including the 8 bytes that store its length.
        metadata: the `__metadata__` of each safetensors file.
        sizes: the size of each safetensors file in bytes.
        index: the parsed `model.safetensors.index.json`, or None if the file does not exist.
        unread: safetensors files in the directory that are not part of the checkpoint.
    """

    unread: tuple[str, ...] = ()

    def __init__(self, directory, *, strict: bool = False, only: str | None = None):
        """Opens the files and checks their headers.

        Args:
            strict: raise an error for infinite or NaN weights instead of counting them for `report`.
            only: the only safetensors file to open. By default, all files in the index are opened.

        Raises:
            CheckpointFileError: the directory or one of its files is missing, damaged or not supported.
        """
        self.path, self.strict = pathlib.Path(directory), strict
        self._nonfinite: dict[tuple[str, int], int] = {}  # (tensor, first row) -> count
        if is_gguf(self.path) and self.path.is_file():
            raise CheckpointFileError(
                f"{self.path} is a GGUF file; convert it first: mtpjax convert {self.path} FOLDER"
            )
        if not self.path.is_dir():
            raise CheckpointFileError(f"{self.path} is not a directory")
        # Symlinks may only resolve to paths inside this folder; see `mtpjax.safe_open`.
        self._root = allowed_root(self.path)
        self._open: dict[str, int] = {}
        self.metadata: dict[str, dict[str, str] | None] = {}
        self.sizes: dict[str, int] = {}
        self.headers: dict[str, bytes] = {}
        self.index: dict[str, Any] | None = None
        self.tensors: dict[str, TensorInfo] = {}
        try:
            shards = [] if only is None else [only]
            if only is None:
                has_index = os.path.lexists(self.path / INDEX)
                shards, self.index = choose_weight_files(self.path, (self.json(INDEX) or {}) if has_index else None)
                self.unread = tuple(sorted(set(safetensors_files(self.path)) - set(shards)))
            self._read_headers(shards)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "CheckpointFiles":
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Closes all files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}

    def json(self, name: str) -> Any:
        """Reads a JSON file in the directory.

        Raises:
            CheckpointFileError: the file is missing, too large, or not JSON.
        """
        # Check the size first, so that a huge file is not read.
        descriptor = self._descriptor(name)
        size = os.fstat(descriptor).st_size
        if size > MAX_HEADER_BYTES * 4:
            raise CheckpointFileError(f"{self.path / name} has {size} bytes: too large for a JSON description")
        return parse_json(bytes(pread(descriptor, size, 0, self.path / name)), self.path / name)

    def adopt(self, file: str) -> None:
        """Adds the tensors from a file in `unread`. Tensors that are already present must be equal."""
        self.tensors = {tensor.name: tensor for tensor in self._read_header(file)} | self.tensors
        self.unread = tuple(name for name in self.unread if name != file)

    def other_files(self) -> list[str]:
        """Lists the files that are not weights, such as configuration and tokenizer.

        The list omits pickles, folders other than the one with chat templates and, with a warning, files that cannot be
        opened safely.
        """
        kept = []
        for name in [*sorted(os.listdir(self.path)), *list_chat_templates(self.path)]:
            if name.endswith((".safetensors", *PICKLE_SUFFIXES)) or (self.path / name).is_dir():
                continue
            try:
                self._descriptor(name)
            except CheckpointFileError as error:
                log.warning("left out: %s", error)
                continue
            kept.append(name)
        return kept

    def bytes_of(self, name: str) -> Iterator[memoryview]:
        """Reads a file block by block."""
        descriptor, offset = self._descriptor(name), 0
        size = os.fstat(descriptor).st_size
        while offset < size:
            block = memoryview(bytearray(min(BLOCK_BYTES, size - offset)))
            pread_into(descriptor, block, offset, self.path / name)
            yield block
            offset += len(block)

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """Reads a tensor in blocks of rows of about `BLOCK_BYTES` each."""
        tensor = self.tensors[name]
        rows = tensor.shape[0] if tensor.shape else 1
        # A block has at least one row, even if that is larger than `BLOCK_BYTES`.
        step = max(1, BLOCK_BYTES * rows // max(tensor.end - tensor.begin, 1))
        for begin in range(0, rows, step):
            yield self.read(name, begin, min(begin + step, rows))

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Reads a tensor or some of its rows.

        Args:
            begin: the first row along the first axis.
            end: one past the last row; by default, all rows from `begin` on are read.

        Returns:
            The rows, in an array that the caller may write to.
        """
        tensor = self.tensors[name]
        rows = tensor.shape[0] if tensor.shape else 1
        end = rows if end is None else end
        row_bytes = (tensor.end - tensor.begin) // max(rows, 1)
        # Read the bytes straight into the array.
        array = np.empty((end - begin, *tensor.shape[1:]) if tensor.shape else (), tensor.dtype)
        view, offset = array.reshape(-1).view(np.uint8), tensor.begin + begin * row_bytes
        pread_into(self._descriptor(tensor.file), view.data, offset, self.path / tensor.file)
        return array

    def read_checked(self, name: str, begin: int, end: int) -> np.ndarray:
        """Reads rows of a tensor, and counts infinite and NaN elements.

        Raises:
            CheckpointFileError: an element is not finite, and the files were opened with `strict`.
        """
        array = self.read(name, begin, end)
        count = count_nonfinite(array)
        if count:
            self._nonfinite[name, begin] = count
            if self.strict:
                raise CheckpointFileError(f"tensor {name} has {count} infinite or NaN elements")
        return array

    def report(self) -> None:
        """Warns about the infinite or NaN elements that `read_checked` has counted."""
        for name in dict.fromkeys(name for name, _ in self._nonfinite):
            count = sum(count for (other, _), count in self._nonfinite.items() if other == name)
            log.warning("tensor %s has %d infinite or NaN elements", name, count)

    def _read_headers(self, files: list[str]) -> None:
        """Reads all headers, and checks that the files contain the tensors in the index."""
        for file in files:
            for tensor in self._read_header(file):
                if tensor.name in self.tensors:
                    raise CheckpointFileError(f"tensor {tensor.name} is in {self.tensors[tensor.name].file} and {file}")
                self.tensors[tensor.name] = tensor
            if len(self.tensors) > MAX_TENSORS:
                raise CheckpointFileError(f"{self.path} has more than {MAX_TENSORS} tensors")
        # A single file has no index to compare with.
        if self.index is None:
            return
        for name, file in self.index["weight_map"].items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise CheckpointFileError(f"{INDEX} lists tensor {name} in {file}, which does not contain it")
        stray = sorted(self.tensors.keys() - self.index["weight_map"].keys())
        if stray:
            # Some programs add tensors, such as those of MTP modules, without updating the index.
            log.warning(
                "%s: %d tensors are in the weight files but not listed in %s; they are read: %s",
                *(self.path, len(stray), INDEX, ", ".join(stray[:3])),
            )

    def _read_header(self, file: str) -> list[TensorInfo]:
        """Reads a file's header, and checks that the tensors fill the file exactly."""
        path, descriptor = self.path / file, self._descriptor(file)
        size = self.sizes[file] = os.fstat(descriptor).st_size
        if size < 8:
            raise CheckpointFileError(f"{path} has {size} bytes, too few for a safetensors header")
        # Check the length before reading the header, so that a wrong length allocates nothing.
        (length,) = struct.unpack("<Q", pread(descriptor, 8, 0, path))
        if length > MAX_HEADER_BYTES:
            raise CheckpointFileError(f"{path} has a header of {length} bytes; at most {MAX_HEADER_BYTES} are accepted")
        if length + 8 > size:
            raise CheckpointFileError(f"{path} is truncated: {size} bytes, but its header alone has {length} bytes")
        self.headers[file] = bytes(pread(descriptor, 8 + length, 0, path))
        tensors, self.metadata[file] = parse_header(self.headers[file], file, path)
        end = tensors[-1].end if tensors else 8 + length
        # Bytes after the last tensor show that the header belongs to a different file, or that a download failed.
        if end != size:
            kind = "truncated" if end > size else "longer than its header says"
            raise CheckpointFileError(f"{path} is {kind}: {size} bytes instead of {end}")
        return tensors

    def _descriptor(self, file: str) -> int:
        """Returns a file's descriptor, and opens the file on first use."""
        if file not in self._open:
            # The descriptor stays open, so that the file that was checked is also the file that is read later.
            self._open[file] = open_inside(self.path / file, self._root)
        return self._open[file]
