"""Parses safetensors headers, and checks every number before allocating anything.

The safetensors package is not used, because its NumPy interface cannot return fp8 tensors, it accepts a header that
lists a tensor twice, and `convert` parses headers without a file. A test compares the results with the package's.
"""

import dataclasses
import json
import math
from typing import Any

import ml_dtypes
import numpy as np

from mtpjax.errors import CheckpointFileError, printable
from mtpjax.safe_open import check_json_depth

# Supported dtypes by their name in the format; ml_dtypes provides the ones that NumPy lacks.
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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOAT32, BF16, E4M3, E8M0 = (DTYPES[name] for name in ("F32", "BF16", "F8_E4M3", "F8_E8M0"))
FLOATS = (FLOAT32, DTYPES["F16"], BF16)

# These limits are far above any real checkpoint, and prevent a damaged checkpoint from exhausting memory.
MAX_HEADER_BYTES = 32 << 20  # a tenth of this is enough for all headers of DeepSeek-V3, with 91,991 tensors
MAX_TENSORS = 500_000


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """The name, type and location of a tensor in a safetensors file."""

    name: str
    file: str
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int  # byte offset in the file
    end: int


def parse_header(content: bytes, file: str, path) -> tuple[list[TensorInfo], dict[str, str] | None]:
    """Parses the header of a safetensors file.

    Returns:
        `(tensors, metadata)`: the tensors in the order of their bytes, and the header's `__metadata__`, if any.

    Raises:
        CheckpointFileError: the header is damaged, or describes tensors that overlap, leave gaps, or have an
            unsupported dtype.
    """
    # The header is a JSON object that contains tensors by name and optional metadata.
    header = parse_json(content[8:], path)
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise CheckpointFileError(f"{path} has no safetensors header")
    metadata = header.pop("__metadata__", None)
    tensors = [_tensor(name, entry, file, path, len(content)) for name, entry in header.items()]
    # The format allows neither gaps nor overlaps, so each tensor starts where the previous one ends.
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    expected = len(content)
    for tensor in tensors:
        if tensor.begin != expected:
            raise CheckpointFileError(f"{path}: tensor {tensor.name} starts at byte {tensor.begin}, not {expected}")
        expected = tensor.end
    return tensors, metadata


def parse_json(content: bytes, path) -> Any:
    """Parses JSON from a checkpoint. Rejects duplicate keys, because parsers differ in which duplicate they keep.

    Raises:
        CheckpointFileError: the content is not JSON, or an object has a key twice.
    """

    def unique(pairs):
        # `dict` keeps only the last of several equal keys, so it is then shorter than the list of pairs.
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise CheckpointFileError(f"{path} has the key {printable(twice, 200)!r} twice")
        return result

    try:
        check_json_depth(content)
        return json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointFileError(f"{path} is not valid JSON: {str(error)[:100]}") from error


def _tensor(name: str, entry: Any, file: str, path, data_begin: int) -> TensorInfo:
    """Checks one entry of a header. Its offsets count from `data_begin`, the end of the header."""
    problem = f"{path}: tensor {name[:200]!r}"
    if not name or not name.isprintable() or len(name) > 1000:
        raise CheckpointFileError(f"{path} has an invalid tensor name {name[:100]!r}")
    try:
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        kind = entry.get("dtype") if isinstance(entry, dict) else None
        raise CheckpointFileError(
            f"{problem} has invalid shape or offsets, or an unsupported dtype ({printable(kind, 40)}); supported: "
            f"{', '.join(DTYPES)}"
        ) from error
    # Check every number before using it in arithmetic or an allocation.
    numbers = (*shape, begin, end)
    if not all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63 for number in numbers):
        raise CheckpointFileError(f"{problem} has invalid shape {shape} or byte range {begin}..{end}")
    # Shape, dtype and byte range must agree, so that reading can trust each of them.
    if begin > end or math.prod(shape) * dtype.itemsize != end - begin:
        raise CheckpointFileError(f"{problem} of shape {shape} and {dtype} does not fit its {end - begin} bytes")
    return TensorInfo(name, file, dtype, shape, data_begin + begin, data_begin + end)
