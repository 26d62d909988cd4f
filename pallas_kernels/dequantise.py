"""Dequantises weights that are stored with one scale per block of inputs."""

import jax
import jax.numpy as jnp


def dequantise(values, scales, block, axis) -> jax.Array:
    """Multiplies stored values, such as float8_e4m3fn, by the scales of their blocks, in float32.

    `scales` has the shape of `values` except along `axis`, where it has one entry per full or partial block.
    """
    scales = jnp.repeat(scales, block, axis=axis)
    # The last block may be shorter than the others.
    scales = jax.lax.slice_in_dim(scales, 0, values.shape[axis], axis=axis % values.ndim)
    return values.astype(jnp.float32) * scales
