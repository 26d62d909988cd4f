"""Multiplies rows by a matrix in plain JAX."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp


def multiply_rows(x: jax.Array, matrix: jax.Array, dtype: Any = None) -> jax.Array:
    """Multiplies x [..., K] by a matrix [K, N]; returns [..., N] in x's dtype, or in `dtype`.

    Flattens x to [rows, K] first. With more axes, XLA's CPU backend copies the output gradient in transposed form to
    compute the matrix's gradient, and its product is slower.
    """
    product = jnp.matmul(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), matrix, preferred_element_type=dtype)
    return product.reshape(*x.shape[:-1], matrix.shape[-1])


@jax.custom_vjp
def transposed(matrix: jax.Array) -> jax.Array:
    """Transposes a matrix that `multiply_rows` multiplies by, such as a tied embedding.

    On a CPU, a barrier keeps XLA from fusing the gradient's transpose into the product before it, which would be
    slower. Differentiable in reverse mode only.
    """
    return matrix.T


def _transposed_backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    keep = functools.partial(jax.lax.platform_dependent, cpu=jax.lax.optimization_barrier, default=lambda array: array)
    return (keep(gradient).T,)


transposed.defvjp(lambda matrix: (matrix.T, None), _transposed_backward)


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
