"""One row times a matrix in plain JAX, for GPUs."""

import math

import jax
import jax.numpy as jnp


def row_times_matrix(row: jax.Array, matrix: jax.Array) -> jax.Array:
    """Multiplies a single row [K] by a matrix [K, N] as a sum over the matrix's rows, in float32.

    On a GPU, XLA fuses this sum with the operation that makes the matrix, such as a slice of a stack or a
    dequantisation, so the stored weights are read once and no matrix is written. `jnp.matmul` of a single row may write
    out all products.
    """
    K = len(row)
    # Up to 16 partial sums, so that a narrow matrix gives a GPU enough blocks. The barrier keeps XLA from merging the
    # two sums into one.
    parts = math.gcd(K, 16)
    products = row.astype(jnp.float32)[:, None] * matrix.astype(jnp.float32)
    return jax.lax.optimization_barrier(products.reshape(parts, K // parts, -1).sum(axis=1)).sum(axis=0)
