"""Loads and masks shared by the gated delta rule kernels."""

import jax.numpy as jnp

from pallas_kernels.backend import triton as plt


def bounds_mask(shape, limits):
    """Returns a mask that is true where every index is below its limit, or None if it would be true everywhere.

    A mask that is always true would still cost comparisons and registers.
    """
    mask = None
    for axis, (size, limit) in enumerate(zip(shape, limits, strict=True)):
        if isinstance(limit, int) and size <= limit:
            continue
        inside = jnp.expand_dims(jnp.arange(size) < limit, tuple(other for other in range(len(shape)) if other != axis))
        mask = inside if mask is None else mask & inside
    return mask if mask is None else jnp.broadcast_to(mask, shape)


def load_in_bounds(ref, shape, limits):
    """Loads a ref of this shape in its dtype, with 0 at and beyond the limits, where memory is not read."""
    mask = bounds_mask(shape, limits)
    return plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=0.0)


def num_bytes(*arrays) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)
