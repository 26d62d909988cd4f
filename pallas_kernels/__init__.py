"""Pallas kernels beside the plain JAX that says what they mean; one function per op."""

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.rms_norm import rms_norm

__all__ = ["grouped_matmul", "rms_norm"]
