"""Reads weights that are stored with one scale for each block of inputs."""

import jax
import jax.numpy as jnp


def dequantise(values, scales, block, axis) -> jax.Array:
    """Multiplies stored values by the scale of their block, in float32.

    Args:
        values: Stored weights of any floating dtype, such as float8_e4m3fn.
        scales: Floating, shaped as `values` except along `axis`, where it has one entry per block, rounded up.
        block: Number of neighbouring values along `axis` that share a scale.
        axis: Axis of the blocks.

    Returns:
        float32 weights, shaped as `values`.
    """
    scales = jnp.repeat(scales, block, axis=axis)
    # The last block may be shorter than the others.
    scales = jax.lax.slice_in_dim(scales, 0, values.shape[axis], axis=axis % values.ndim)
    return values.astype(jnp.float32) * scales
