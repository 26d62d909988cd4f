"""`block_scaled_matmul` in plain JAX, both the reference and the form that runs if the kernel does not."""

import jax
import jax.numpy as jnp

from pallas_kernels.dequantise import dequantise
from pallas_kernels.row_product import multiply_rows, row_times_matrix


def block_scaled_matmul_reference(x, weights, scales=None, *, block=128):
    """Computes `block_scaled_matmul` in plain float32 JAX, which defines its meaning."""
    highest = jax.lax.Precision.HIGHEST
    return jnp.matmul(x.astype(jnp.float32), _dequantised(weights, scales, block), precision=highest).astype(x.dtype)


def block_scaled_matmul_xla(x, weights, scales, block):
    """Computes `block_scaled_matmul` with weights rounded to x's dtype, which tensor cores need for many rows."""

    def product():
        matrix = (weights if scales is None else _dequantised(weights, scales, block)).astype(x.dtype)
        return multiply_rows(x, matrix)

    def product_of_one_row():
        wide = row_times_matrix(x.reshape(-1), _dequantised(weights, scales, block))
        return wide.astype(x.dtype).reshape(*x.shape[:-1], -1)

    if x.size != x.shape[-1]:
        return product()
    return jax.lax.platform_dependent(cpu=product, default=product_of_one_row)


def _dequantised(weights, scales, block):
    return weights.astype(jnp.float32) if scales is None else dequantise(weights, scales, block, axis=0)
