"""A few rows times a matrix, optionally fp8 with block scales; the rows of decoding."""

from pallas_kernels.block_scaled_matmul.op import (
    block_scaled_matmul,
    partial_matmul,
    partial_matmuls,
)
from pallas_kernels.block_scaled_matmul.reference import block_scaled_matmul_reference

__all__ = [
    "block_scaled_matmul",
    "block_scaled_matmul_reference",
    "partial_matmul",
    "partial_matmuls",
]
