"""Multiplies one row by a matrix in plain JAX, for GPUs."""

import math

import jax
import jax.numpy as jnp


def row_times_matrix(row: jax.Array, matrix: jax.Array) -> jax.Array:
    """Multiplies a single row [K] by a matrix [K, N] as a sum over the matrix's rows, in float32.

    On a GPU, XLA fuses this sum with the operation that produces the matrix, such as a slice of a stack or a
    dequantisation, so the stored weights are read once and the matrix is not written to memory. `jnp.matmul` with a
    single row may write all elementwise products to memory.
    """
    K = len(row)
    # Use up to 16 partial sums, so that a narrow matrix gives a GPU enough blocks. The barrier keeps XLA from merging
    # the two sums into one.
    parts = math.gcd(K, 16)
    products = row.astype(jnp.float32)[:, None] * matrix.astype(jnp.float32)
    return jax.lax.optimization_barrier(products.reshape(parts, K // parts, -1).sum(axis=1)).sum(axis=0)
