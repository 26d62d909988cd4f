"""Reads parameters, or parts of them, from a checkpoint's tensors, and dequantizes block-scaled fp8.

fp8 checkpoints (DeepSeek-V3) store `[out, in]` weights as float8_e4m3fn, with one scale per block of usually 128 x 128.
Scales are floats, or powers of two stored as exponents (e8m0). A parameter has one scale per block along its input
axis, and repeats the scales along the rows, so that any transposition of the weight also applies to its scales.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from conversion.files import TensorSource
from conversion.safetensors_header import E4M3, E8M0, FLOAT32
from conversion.tensor_slice import ParamSpec, TensorSlice, copy_into
from mtpjax.errors import CheckpointFileError

_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)  # looking values up is faster than casting

Index = tuple[tuple[int, int], ...]  # (begin, end) along each axis of a parameter
ReadPart = Callable[[Index], np.ndarray]
MakeArray = Callable[[str, ParamSpec, np.dtype, ReadPart], Any]  # path, spec, dtype, read -> an array


@dataclasses.dataclass(frozen=True)
class ScaleMap:
    """The names and the block size of the scales of fp8 tensors."""

    names: dict[str, str]  # fp8 tensor -> its scale tensor
    block: tuple[int, int] = (0, 0)  # rows and columns of a tensor that share a scale; unused without fp8


def scale_spec(spec: ParamSpec, scales: ScaleMap) -> ParamSpec:
    """Describes a parameter's scales.

    Returns:
        A spec with one entry per block along the input axis. The other axes are as in the parameter.
    """
    # Along the input axis, there is one scale per block. Along the other axes, scales are repeated.
    shape = list(spec.shape)
    shape[spec.in_axis] = -(-shape[spec.in_axis] // scales.block[1])
    return dataclasses.replace(spec, shape=tuple(shape))


def read_as(files: TensorSource, scales: ScaleMap, spec: ParamSpec, index: Index, dtype: np.dtype) -> np.ndarray:
    """Reads a part of a parameter and casts it. fp8 values are scaled in float32 and rounded once."""

    def rows(piece: TensorSlice, begin: int, end: int) -> np.ndarray:
        values = files.read_checked(piece.name, begin, end)
        if piece.name not in scales.names:
            return values
        # `rows` reads all columns of a tensor, so the scales do not need to be cut.
        return dequantize(values, _read_scale_rows(files, scales, piece.name, begin, end), 1, scales.block[1], 0)

    return _assemble(spec, index, dtype, rows)


def dequantize(values: np.ndarray, scales: np.ndarray, axis: int, block: int, begin: int) -> np.ndarray:
    """Multiplies fp8 values by their scales.

    Args:
        values: float8_e4m3fn, any shape; may be a part of a larger array along `axis`.
        scales: float32, with the same axes as `values`, and one entry per block along `axis` of the whole array.
        axis: the axis along which `block` elements share a scale.
        begin: the index in the whole array at which `values` starts along `axis`.
    """
    # Repeat each scale for the elements of its block, and cut out the part that `values` covers.
    part = (slice(None),) * axis + (slice(begin, begin + values.shape[axis]),)
    return _E4M3_VALUES.take(values.view(np.uint8)) * np.repeat(scales, block, axis=axis)[part]


def read_values(files: TensorSource, spec: ParamSpec, index: Index) -> np.ndarray:
    """Reads a part of a parameter in its tensors' dtype, without applying scales."""
    dtype = files.tensors[spec.slices[0].name].dtype
    return _assemble(spec, index, dtype, lambda piece, begin, end: files.read_checked(piece.name, begin, end))


def read_scales(files: TensorSource, scales: ScaleMap, spec: ParamSpec, index: Index) -> np.ndarray:
    """Reads the float32 scales for a part of a parameter. The scales of each block are repeated for its rows."""
    rows = lambda piece, begin, end: _read_scale_rows(files, scales, piece.name, begin, end)
    return _assemble(scale_spec(spec, scales), index, FLOAT32, rows)


def _read_scale_rows(files: TensorSource, scales: ScaleMap, name: str, begin: int, end: int) -> np.ndarray:
    """Reads the scales for rows of an fp8 tensor, with one row of scales for each row of the tensor."""
    # Repeat each row of scales for the rows of its block, then cut out the requested rows.
    side = scales.block[0]
    first = begin // side
    blocks = read_scale_blocks(files, scales.names[name], first, -(-end // side))
    return np.repeat(blocks, side, axis=0)[begin - first * side : end - first * side]


def read_scale_blocks(files: TensorSource, name: str, begin: int, end: int) -> np.ndarray:
    """Reads rows of a scale tensor as float32.

    Raises:
        CheckpointFileError: an exponent is 255, which is NaN.
    """
    scales = decode_scales(stored := files.read_checked(name, begin, end))
    if stored.dtype in (np.uint8, E8M0) and np.isnan(scales).any():
        raise CheckpointFileError(f"tensor {name} contains exponents (e8m0), and some are 255, which is NaN")
    return scales


def decode_scales(stored: np.ndarray) -> np.ndarray:
    """Converts stored scales to float32.

    Args:
        stored: floats, or exponents (e8m0) as float8_e8m0fnu or as bytes: 2^(x - 127).
    """
    return (stored.view(E8M0) if stored.dtype == np.uint8 else stored).astype(np.float32)


def encode_scales(scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Inverts `decode_scales`.

    Args:
        dtype: dtype of the scales in the file. For exponents, `scales` must be powers of two.
    """
    return scales.astype(E8M0).view(np.uint8) if dtype == np.uint8 else scales.astype(dtype)


def _assemble(
    spec: ParamSpec, index: Index, dtype: np.dtype, rows: Callable[[TensorSlice, int, int], np.ndarray]
) -> np.ndarray:
    """Assembles a part of a parameter from rows of its tensors, with only a few blocks in memory at once."""
    # Each slice fills one rectangle of the part. Together, the slices cover the part.
    out = _aligned([end - begin for begin, end in index], dtype)
    for piece in spec.slices:
        for block in piece.blocks(dtype.itemsize):
            # Read only the blocks that overlap the part.
            overlap = _overlap(block, spec, index)
            if overlap is not None:
                narrow, local, target = overlap
                copy_into(out[target], narrow.read(rows(narrow, *narrow.rows))[local])
    return out


def _aligned(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """Allocates an array aligned to 64 bytes, which JAX's CPU backend uses without a copy."""
    size = math.prod(shape) * dtype.itemsize
    # Allocate slightly more, and start at the first aligned byte.
    buffer = np.empty(size + 64, np.uint8)
    begin = -buffer.ctypes.data % 64
    return buffer[begin : begin + size].view(dtype).reshape(shape)


def _overlap(piece: TensorSlice, spec: ParamSpec, index: Index):
    """Intersects a slice with a part of the parameter.

    Returns the slice with only the needed rows, an index into the values that it reads, and an index into the part, or
    None if the slice and the part do not overlap.
    """
    local, target = [], []
    narrow = piece
    for axis, (place, size, (begin, end)) in enumerate(zip(piece.target, spec.shape, index, strict=True)):
        # If the slice has a single index along this axis, such as an expert, it must be inside the part.
        if not isinstance(place, slice):
            if not begin <= place < end:
                return None
            target.append(place - begin)
            continue
        # Otherwise, the slice has a range along this axis, so intersect the two ranges.
        first, last, _ = place.indices(size)
        low, high = max(first, begin), min(last, end)
        if low >= high:
            return None
        target.append(slice(low - begin, high - begin))
        # Along the tensor's rows, read only the intersection. Along other axes, cut off the rest after reading.
        if axis == piece.rows_axis:
            narrow = piece.narrowed(low - first, high - first)
            local.append(slice(None))
        else:
            local.append(slice(low - first, high - first))
    return narrow, tuple(local), tuple(target)
