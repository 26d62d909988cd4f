"""Dequantizes and quantizes streams of block-scaled fp8 tensors in DeepSeek-V3's format."""

from collections.abc import Iterator

import numpy as np

from conversion.files import CheckpointFiles
from conversion.read_params import ScaleMap, decode_scales, dequantize, encode_scales, read_scale_blocks
from conversion.safetensors_header import BF16, E4M3, E8M0, FLOAT32
from mtpjax.safe_open import BLOCK_BYTES

FP8_MAX = 448.0  # the largest finite float8_e4m3fn


def dequantized_blocks(files: CheckpointFiles, scales: ScaleMap, name: str, dtype=BF16) -> Iterator[np.ndarray]:
    """Reads a tensor in blocks of rows, and dequantizes it if it has scales.

    Args:
        dtype: dtype for dequantized tensors. Tensors without scales keep their dtype.
    """
    if name not in scales.names:
        yield from files.blocks(name)
        return
    rows, columns = files.tensors[name].shape
    # Read whole blocks of rows, so that each row of scales is needed only once.
    side = scales.block[0]
    step = max(1, BLOCK_BYTES // (side * columns * 4)) * side
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        part = read_scale_blocks(files, scales.names[name], begin // side, -(-end // side))
        part = np.repeat(part, side, axis=0)[: end - begin]
        yield dequantize(files.read_checked(name, begin, end), part, 1, scales.block[1], 0).astype(dtype)


def quantized_blocks(
    blocks: Iterator[np.ndarray], block: tuple[int, int], scale_dtype: np.dtype = FLOAT32
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Quantizes the rows of a tensor to fp8 with one scale per block.

    Args:
        blocks: the tensor's rows in order, in blocks of any size.
        block: rows and columns that share a scale.
        scale_dtype: dtype of the scales in the file. Scales are rounded to it before values are divided by them.

    Yields:
        `(values, scales)`: float8_e4m3fn rows, and the scales of their blocks in `scale_dtype`. Each pair covers at
        least one row of blocks.
    """
    rows, columns = block
    rest: np.ndarray | None = None
    for part in blocks:
        # Hold back rows until their blocks are complete.
        part = part.astype(np.float32)
        rest = part if rest is None else np.concatenate([rest, part])
        whole = len(rest) // rows * rows
        if whole:
            yield _quantize(rest[:whole], rows, columns, scale_dtype)
            rest = rest[whole:]
    # The last blocks may have fewer rows than the others.
    if rest is not None and len(rest):
        yield _quantize(rest, rows, columns, scale_dtype)


def _quantize(values: np.ndarray, rows: int, columns: int, scale_dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes rows as in DeepSeek-V3. A block's scale is its largest magnitude / 448, or 1 for a block of zeros."""
    height, width = values.shape
    # Pad to whole blocks with zeros, which do not change the largest magnitude.
    grid = -(-height // rows), -(-width // columns)
    padded = np.zeros((grid[0] * rows, grid[1] * columns), np.float32)
    padded[:height, :width] = np.abs(values)
    largest = padded.reshape(grid[0], rows, grid[1], columns).max(axis=(1, 3))
    scales = np.where(largest > 0, largest / FP8_MAX, 1.0).astype(np.float32)
    # Exponents (e8m0) represent powers of two. Round scales up, so that no value overflows.
    if scale_dtype in (np.uint8, E8M0):
        scales = np.exp2(np.ceil(np.log2(scales))).astype(np.float32)
    stored = encode_scales(scales, scale_dtype)
    scales = decode_scales(stored)
    # Divide each value by its block's scale, and round only once, to fp8.
    spread = np.repeat(np.repeat(scales, rows, axis=0), columns, axis=1)[:height, :width]
    return np.clip(values / spread, -FP8_MAX, FP8_MAX).astype(E4M3), stored
