"""Pallas kernels beside the plain JAX that says what they mean; one function per op."""

from pallas_kernels.gated_delta import gated_delta, gated_delta_replay, gated_delta_steps, gated_delta_verify
from pallas_kernels.rms_norm import rms_norm

__all__ = ["gated_delta", "gated_delta_replay", "gated_delta_steps", "gated_delta_verify", "rms_norm"]
