"""What several kernels share: weights of one byte in scaled blocks, and the loads that the L2 cache answers."""

import jax
import jax.numpy as jnp


def dequantise(values, scales, block, axis) -> jax.Array:
    """`value * scale` in float32; `scales` are shaped as `values`, but `axis` is shorter by `block`, rounded up."""
    scales = jnp.repeat(scales, block, axis=axis)
    scales = jax.lax.slice_in_dim(scales, 0, values.shape[axis], axis=axis % values.ndim)
    return values.astype(jnp.float32) * scales


L2_SHARE = 4 * 2**20  # bytes of an array that stay in the L2 cache: it has 50 MB on an H100, 4 on each die of an MI300X


def loads_from_l2(*arrays: tuple[int, int]) -> dict[str, str]:
    """A kernel's `metadata`: of the bytes that it declares, those loaded again of arrays that stay in the L2 cache.

    Of each array: its bytes, and how many times the programs together load them. Memory is asked for them once, if they
    are no more than `L2_SHARE`. Weights and caches are never among them.
    """
    return {"from_l2": str(sum(nbytes * (times - 1) for nbytes, times in arrays if nbytes <= L2_SHARE))}
