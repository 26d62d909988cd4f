"""Counts infinite and NaN elements in arrays, and compares streams of blocks byte by byte."""

from collections.abc import Iterator

import numpy as np

# For each dtype, an unsigned type of the same width, the smallest bit pattern that is infinite or NaN, and a mask that
# removes the sign. float8_e4m3fn has no infinity and only one NaN.
_NONFINITE = {
    "float32": (np.uint32, 0x7F800000, 0x7FFFFFFF),
    "float16": (np.uint16, 0x7C00, 0x7FFF),
    "bfloat16": (np.uint16, 0x7F80, 0x7FFF),
    "float8_e4m3fn": (np.uint8, 0x7F, 0x7F),
}


def count_nonfinite(array: np.ndarray) -> int:
    """Counts the infinite and NaN elements in an array of weights.

    Args:
        array: any shape; float32, float16, bfloat16 or float8_e4m3fn.

    Returns:
        The count, which is 0 for every other dtype.
    """
    if array.dtype.name not in _NONFINITE or not array.size:
        return 0
    # Compare bit patterns, because NumPy's isfinite would first cast bfloat16 and fp8 to float32.
    kind, least, mask = _NONFINITE[array.dtype.name]
    bits = array.reshape(-1).view(kind) & kind(mask)
    return int(np.count_nonzero(bits >= least)) if bits.max() >= least else 0


def streams_equal(ours: Iterator[np.ndarray], theirs: Iterator[np.ndarray]) -> bool:
    """Compares two streams of blocks, which may be cut in different places.

    Returns:
        True if both streams have the same dtype and the same bytes.
    """
    left: list[np.ndarray] = [np.empty(0), np.empty(0)]
    while True:
        # Refill the side that has run out of elements.
        for side, stream in enumerate((ours, theirs)):
            if not left[side].size:
                block = next(stream, None)
                left[side] = np.empty(0) if block is None else block.reshape(-1)
        # Compare as many elements as both sides have. The streams are equal if both end at the same time.
        count = min(left[0].size, left[1].size)
        if not count:
            return not max(left[0].size, left[1].size)
        one, two = left[0][:count], left[1][:count]
        if one.dtype != two.dtype or one.tobytes() != two.tobytes():
            return False
        left = [left[0][count:], left[1][count:]]
