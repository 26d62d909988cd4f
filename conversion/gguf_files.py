"""Reads a GGUF file as if it were a Hugging Face directory, and dequantizes its tensors row by row.

Tensors become float32, unless every matrix in the file is bfloat16. In that case, norms and routers, which llama.cpp
stores in float32, become bfloat16 again. `gguf.quants` dequantizes tensors. As in `conversion.files`, only regular
files are opened, and sizes are checked before memory is allocated.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from conversion.files import CheckpointFiles
from conversion.gguf_config import ROPE_FACTORS, describe_config
from conversion.gguf_header import GGUFHeader, parse_header
from conversion.gguf_names import named_tensors, read_rows
from conversion.gguf_tokenizer import tokenizer_files
from conversion.safetensors_header import BF16, TensorInfo
from conversion.shards import TensorEntry, make_shard
from mtpjax.errors import CheckpointFileError, install_extra
from mtpjax.hub import resolve
from mtpjax.safe_open import is_gguf, open_inside, pread

WEIGHTS_FILE = "model.safetensors"  # the name of the safetensors file that a directory would have
ROUTER, CORRECTION_BIAS = ".ffn_gate_inp.weight", ".exp_probs_b.bias"  # suffixes of tensor names


def open_checkpoint(path, *, strict: bool = False) -> CheckpointFiles:
    """Opens a Hugging Face directory or a GGUF file.

    Args:
        path: the directory, the file, or a Hugging Face Hub repository (`mtpjax.hub`).

    Raises:
        CheckpointFileError: the checkpoint is missing, damaged or not supported.
    """
    path = resolve(path)
    return GGUFFiles(path, strict=strict) if is_gguf(path) else CheckpointFiles(path, strict=strict)


class GGUFFiles(CheckpointFiles):
    """A GGUF file, open for reading, with the attributes and methods of a checkpoint directory."""

    def __init__(self, path, *, strict: bool = False):
        """Opens the file and checks its header.

        Raises:
            CheckpointFileError: the file is missing, truncated or damaged, or the `gguf` package is missing.
            ConfigError: its architecture is not supported.
            TokenizerError: its tokenizer is not supported.
        """
        self._quants = _import_gguf()
        self.path, self.strict = pathlib.Path(path), strict
        self._nonfinite, self._open, self.metadata, self.index = {}, {}, {WEIGHTS_FILE: {"format": "pt"}}, None
        # The user chose this file, so its symlinks are followed, but it must still be a regular file.
        self._file = self._open[""] = open_inside(self.path, pathlib.Path("/"))
        try:
            blocks = {int(kind): sizes for kind, sizes in self._quants.GGML_QUANT_SIZES.items()}
            self._header = parse_header(self._file, self.path, blocks)
            # This checks the architecture, so it must come before the tensors are named.
            self._json = self._describe(self._header)
            self._named = named_tensors(self._header, self._json["config.json"])
            self.sizes = {self.path.name: os.fstat(self._file).st_size}
            self.tensors = self._tensor_infos()
        except BaseException:
            self.close()
            raise
        # Make the header that a safetensors file with these tensors would have in a directory.
        entries = [TensorEntry(tensor.name, tensor.dtype, tensor.shape) for tensor in self.tensors.values()]
        self.headers = {WEIGHTS_FILE: make_shard(WEIGHTS_FILE, entries, {"format": "pt"}).header}

    def stored_types(self) -> dict[str, dict[str, int]]:
        """Counts tensors and bytes by llama.cpp's type, such as "Q4_1". Types are in descending order of bytes."""
        kinds: dict[str, dict[str, int]] = {}
        for tensor in self._header.tensors.values():
            kind = kinds.setdefault(self._quants.GGMLQuantizationType(tensor.kind).name, {"tensors": 0, "bytes": 0})
            kind["tensors"] += 1
            kind["bytes"] += tensor.end - tensor.begin
        return dict(sorted(kinds.items(), key=lambda item: -item[1]["bytes"]))

    def json(self, name: str) -> Any:
        """Returns the content of a JSON file that a directory would have."""
        if name not in self._json:
            raise CheckpointFileError(f"{self.path} has no content for {name}")
        return self._json[name]

    def other_files(self) -> list[str]:
        """Lists the JSON files that describe the model and the tokenizer."""
        return sorted(self._json)

    def bytes_of(self, name: str) -> Iterator[memoryview]:
        """Returns one of `other_files` as JSON."""
        yield memoryview(json.dumps(self.json(name)).encode())

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Reads and dequantizes a tensor or some of its rows.

        Args:
            begin: the first row along the first axis.
            end: one after the last row; by default, all rows from `begin` on.
        """
        info, named = self.tensors[name], self._named[name]
        end = info.shape[0] if end is None else end
        rows = read_rows(named, self._header, self._dequantize, begin, end)
        return np.ascontiguousarray(rows, dtype=info.dtype)

    def _dequantize(self, source: str, begin: int, end: int) -> np.ndarray:
        """Reads rows in the file's order. All axes except the last count as rows."""
        tensor = self._header.tensors[source]
        if not tensor.shape[1:]:
            # With only one axis, blocks run along it, so read the whole tensor, which is small.
            return self._values(tensor, tensor.begin, tensor.end - tensor.begin, tensor.shape)[begin:end]
        size = (tensor.end - tensor.begin) // math.prod(tensor.shape[:-1])
        return self._values(tensor, tensor.begin + begin * size, (end - begin) * size, (end - begin, tensor.shape[-1]))

    def _values(self, tensor, offset: int, count: int, shape: tuple[int, ...]) -> np.ndarray:
        content = pread(self._file, count, offset, self.path)
        # Blocks run along the last axis, so each row has a whole number of blocks.
        raw = np.frombuffer(content, np.uint8).reshape(*shape[:-1], -1)
        kind = self._quants.GGMLQuantizationType(tensor.kind)
        if kind.name in ("F32", "F16"):
            return raw.view(np.float32 if kind.name == "F32" else np.float16)
        try:
            return self._quants.quants.dequantize(raw, kind)
        except NotImplementedError as error:
            raise CheckpointFileError(
                f"{self.path}: tensor {tensor.name!r} has type {kind.name}, which the gguf package cannot dequantize"
            ) from error

    def _describe(self, header: GGUFHeader) -> dict[str, Any]:
        """Converts the metadata to the JSON files that a directory would have."""
        factors = header.tensors.get(ROPE_FACTORS)
        files = tokenizer_files(header.metadata)
        ends = files["generation_config.json"] if files else {}
        values = None
        if factors is not None and len(factors.shape) == 1 and factors.shape[0] <= 4096:
            values = self._values(factors, factors.begin, factors.end - factors.begin, factors.shape)
        return {"config.json": describe_config(header, ends, values), **files}

    def _tensor_infos(self) -> dict[str, TensorInfo]:
        """Lists the tensors as the header of a safetensors file would."""
        # llama.cpp stores routers in float32, whatever the file's quantization type.
        matrices = [tensor for tensor in self._header.tensors.values() if len(tensor.shape) > 1]
        kinds = {tensor.kind for tensor in matrices if not tensor.name.endswith(ROUTER)}
        is_bf16 = kinds == {int(self._quants.GGMLQuantizationType.BF16)}
        infos, begin = {}, 0
        for named in self._named.values():
            # In bfloat16 checkpoints, the router's correction bias is float32.
            is_bias = named.sources[0].endswith(CORRECTION_BIAS)
            dtype = BF16 if is_bf16 and not is_bias else np.dtype(np.float32)
            end = begin + math.prod(named.shape) * dtype.itemsize
            infos[named.name] = TensorInfo(named.name, WEIGHTS_FILE, dtype, named.shape, begin, end)
            begin = end
        return infos


def _import_gguf():
    """Imports the `gguf` package, or raises an error that says how to install it."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise CheckpointFileError(f"GGUF files need the gguf package: {install_extra('gguf')}") from error
    return gguf
