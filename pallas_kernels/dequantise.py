"""Dequantises weights that are stored with one scale per block of inputs."""

import jax
import jax.numpy as jnp


def dequantise(values, scales, block, axis) -> jax.Array:
    """Multiplies stored values, such as float8_e4m3fn, by the scale of their block, in float32.

    `scales` are shaped as `values` except along `axis`, where they have one entry per block, rounded up.
    """
    scales = jnp.repeat(scales, block, axis=axis)
    # The last block may be shorter than the others.
    scales = jax.lax.slice_in_dim(scales, 0, values.shape[axis], axis=axis % values.ndim)
    return values.astype(jnp.float32) * scales
