"""Pallas kernels beside the plain JAX that says what they mean; one function per op."""

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.verify_attention import verify_attention

__all__ = ["grouped_matmul", "rms_norm", "verify_attention"]
