"""Batch invariance, a setting that makes every kernel split its work in the same way for every batch.

By default, a kernel chooses its tiles and splits for the number of rows, which is fastest. They determine the order of
additions, so a row's last bits depend on the number of rows. Inside `batch_invariant`, every matmul processes rows in
blocks of 16, and attention splits slots into shares of a fixed size. XLA's matmuls also run in blocks of 16 rows.
"""

import contextlib

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ROWS = 16  # rows per matmul, the minimum for tensor cores
SHARE_SLOTS = 1024  # slots per share in attention

_is_on = jax.make_user_context(False)  # part of JAX's cache key, so a jitted function is traced for each value


def batch_invariant(is_on: bool = True) -> contextlib.AbstractContextManager:
    """Makes kernels that are traced inside the context batch-invariant; `is_on=False` restores the default.

    Example:
        >>> with batch_invariant():
        ...     is_batch_invariant()
        True
    """
    return _is_on(is_on)


def is_batch_invariant() -> bool:
    """Returns whether the code that currently runs or is traced is inside `batch_invariant`."""
    return _is_on.value


def map_row_blocks(function, rows):
    """Applies a row-wise function to rows [n, ...], in blocks of 16 rows inside `batch_invariant`.

    XLA then compiles matmuls of only one size.
    """
    if not is_batch_invariant():
        return function(rows)
    n, num_blocks = len(rows), pl.cdiv(len(rows), ROWS)
    padded = jnp.pad(rows, [(0, num_blocks * ROWS - n)] + [(0, 0)] * (rows.ndim - 1))
    # The barriers keep XLA from fusing the product with adjacent operations if there is only one block.
    barrier = jax.lax.optimization_barrier
    results = jax.lax.map(
        lambda block: barrier(function(barrier(block))), padded.reshape(num_blocks, ROWS, *rows.shape[1:])
    )
    return results.reshape(num_blocks * ROWS, *results.shape[2:])[:n]
