"""Pallas kernels beside the plain JAX that says what they mean; one function per op."""

from pallas_kernels.head_top_k import head_top_k
from pallas_kernels.rms_norm import rms_norm

__all__ = ["head_top_k", "rms_norm"]
