"""Pallas kernels beside the plain JAX that says what they mean; one function per op."""

from pallas_kernels.block_scaled_matmul import block_scaled_matmul
from pallas_kernels.rms_norm import rms_norm

__all__ = ["block_scaled_matmul", "rms_norm"]
