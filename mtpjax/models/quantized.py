"""Weights kept in fp8 blocks, as some checkpoints hold them, and the product with a weight of either kind."""

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels import block_scaled_matmul
from pallas_kernels.dequantise import dequantise


class BlockScaled(flax.struct.PyTreeNode):
    """A weight as fp8 `values` and a float32 scale for each block: `astype` gives what a layer computes with.

    DeepSeek-V3's 128 x 128 blocks of `[out, in]`. The weight's axes may be factored and in any order, so `scales` has
    the same axes, with the input axis (`axis`, from the end) shorter by `block`, and the others written out.
    """

    values: jax.Array
    scales: jax.Array
    axis: int = flax.struct.field(pytree_node=False)
    block: int = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def astype(self, dtype) -> jax.Array:
        """`value * scale`, multiplied in float32."""
        return dequantise(self.values, self.scales, self.block, self.axis).astype(dtype)

    def in_blocks_of(self, block: int) -> "BlockScaled":
        """The same weight in smaller blocks, of a divisor of their size."""
        size = self.values.shape[self.axis]
        scales = jnp.repeat(self.scales, self.block // block, axis=self.axis)
        scales = jax.lax.slice_in_dim(scales, 0, -(-size // block), axis=self.axis % self.values.ndim)
        return self.replace(scales=scales, block=block)


def is_scaled(leaf) -> bool:
    """For `is_leaf` of tree maps over parameters."""
    return isinstance(leaf, BlockScaled)


def matrix_product(x: jax.Array, weight: jax.Array | BlockScaled, *, implementation: str = "auto") -> jax.Array:
    """`x [..., D] @ weight [D, ...]` -> `[..., F]` in x's dtype, the weight's other axes flattened.

    Without a kernel the weight is cast to x's dtype first, which writes fp8 out once more in x's dtype.
    """
    D = x.shape[-1]
    if not isinstance(weight, BlockScaled):
        return block_scaled_matmul(x, weight.reshape(D, -1), implementation=implementation)
    assert weight.axis == -weight.ndim, "scales are along the input axis"
    values = weight.values.reshape(D, -1)
    scales = weight.scales.reshape(-1, values.shape[1])
    return block_scaled_matmul(x, values, scales, block=weight.block, implementation=implementation)
