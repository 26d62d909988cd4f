"""Weights of one byte with a scale for each block of inputs."""

import jax
import jax.numpy as jnp


def dequantise(values, scales, block, axis) -> jax.Array:
    """`value * scale` in float32; `scales` are shaped as `values`, but `axis` is shorter by `block`, rounded up."""
    scales = jnp.repeat(scales, block, axis=axis)
    scales = jax.lax.slice_in_dim(scales, 0, values.shape[axis], axis=axis % values.ndim)
    return values.astype(jnp.float32) * scales
