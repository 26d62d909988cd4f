"""Weights in fp8 blocks, and matrix products with plain or fp8 weights."""

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels.block_scaled_matmul import partial_matmul, partial_matmuls
from pallas_kernels.dequantise import dequantise
from pallas_kernels.gated_matmul import gated_matmul
from pallas_kernels.partial_sums import PartialSums


class BlockScaled(flax.struct.PyTreeNode):
    """A weight as fp8 values with a float32 scale per block; `astype` dequantises it.

    DeepSeek-V3 stores `[out, in]` matrices in 128 x 128 blocks. Here a weight's axes may be factored and in any order,
    so `scales` has the same axes, but its input axis is shorter by the factor `block`. Scales repeat along other axes.
    """

    values: jax.Array  # fp8
    scales: jax.Array  # float32
    axis: int = flax.struct.field(pytree_node=False)  # the input axis, negative
    block: int = flax.struct.field(pytree_node=False)  # values per scale along the input axis

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def astype(self, dtype) -> jax.Array:
        """Dequantises to `dtype`; values and scales are multiplied in float32."""
        return dequantise(self.values, self.scales, self.block, self.axis).astype(dtype)

    def in_blocks_of(self, block: int) -> "BlockScaled":
        """Returns the same weight with smaller blocks; `block` divides the block size."""
        size = self.values.shape[self.axis]
        scales = jnp.repeat(self.scales, self.block // block, axis=self.axis)
        scales = jax.lax.slice_in_dim(scales, 0, -(-size // block), axis=self.axis % self.values.ndim)
        return self.replace(scales=scales, block=block)


def is_scaled(leaf) -> bool:
    """Returns whether a parameter is `BlockScaled`; use it as `is_leaf` in tree maps."""
    return isinstance(leaf, BlockScaled)


def matrix_product(x: jax.Array, weight: jax.Array | BlockScaled, *, implementation: str = "auto") -> jax.Array:
    """Multiplies `x [..., D]` by a weight `[D, ...]` whose other axes have total size F; returns `[..., F]`.

    The result has x's dtype. XLA first dequantises fp8 weights to an array of that dtype; the kernel does not.
    """
    return partial_product(x, weight, implementation=implementation).total()


def partial_product(x: jax.Array, weight: jax.Array | BlockScaled, *, implementation: str = "auto") -> PartialSums:
    """Computes `matrix_product` except for the final sum over parts of D, which the next op computes as it loads."""
    values, scales, block = _as_matrix(weight, x.shape[-1])
    return partial_matmul(x, values, scales, block=block, implementation=implementation)


def partial_products(x: jax.Array, weights, *, implementation: str = "auto") -> tuple[PartialSums, ...]:
    """Computes `partial_product` of the same rows with several weights, in one kernel launch."""
    matrices = [_as_matrix(weight, x.shape[-1]) for weight in weights]
    # A launch supports only one block size, so weights with different block sizes run one by one.
    if len({block for _, scales, block in matrices if scales is not None}) > 1:
        return tuple(partial_product(x, weight, implementation=implementation) for weight in weights)
    block = next((block for _, scales, block in matrices if scales is not None), 128)
    matrices = [matrix[:2] for matrix in matrices]
    return partial_matmuls(x, matrices, block=block, implementation=implementation)


def gated_product(x: jax.Array, weight: jax.Array | BlockScaled, *, implementation: str = "auto") -> jax.Array:
    """Computes SwiGLU's `silu(x @ gate) * (x @ up) [..., F]` from `x [..., D]` and stacked gate and up `[D, 2, F]`."""
    values, scales, block = _as_matrix(weight, x.shape[-1])
    return gated_matmul(x, values, scales, block=block, implementation=implementation)


def _as_matrix(weight: jax.Array | BlockScaled, D: int) -> tuple[jax.Array, jax.Array | None, int]:
    """Returns a weight `[D, ...]` as a matrix `[D, F]`, and for fp8 its scales `[blocks, F]` and block size."""
    if not isinstance(weight, BlockScaled):
        return weight.reshape(D, -1), None, 128
    # Scales are per block of inputs, so only the other axes are flattened.
    assert weight.axis == -weight.ndim, "the input axis must be the first"
    values = weight.values.reshape(D, -1)
    return values, weight.scales.reshape(-1, values.shape[1]), weight.block
