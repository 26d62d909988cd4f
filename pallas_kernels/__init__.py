"""Pallas kernels beside the plain JAX that says what they mean; one function per op."""

from pallas_kernels.linear_cross_entropy import linear_cross_entropy, linear_total_variation
from pallas_kernels.rms_norm import rms_norm

__all__ = ["linear_cross_entropy", "linear_total_variation", "rms_norm"]
