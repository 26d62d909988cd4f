"""Batch invariance: a setting under which every kernel splits its work in one fixed way, whatever the batch.

By default a kernel chooses its tiles and splits by the number of rows, which is fastest. Tiles and splits determine the
order of additions, so a row's last bits depend on the number of rows. Within `batch_invariant` every matmul takes rows
in blocks of 16, and attention splits slots into shares of a fixed size. Matmuls in XLA run in blocks of 16 rows, too.
"""

import contextlib

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ROWS = 16  # per matmul: the fewest rows that tensor cores multiply
SHARE_SLOTS = 1024  # slots per share in attention

_is_on = jax.make_user_context(False)  # part of JAX's cache key, so a jitted function is traced for each value


def batch_invariant(is_on: bool = True) -> contextlib.AbstractContextManager:
    """Makes kernels traced inside the context batch-invariant; with `is_on` False restores the default.

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
    """Applies a row-wise function to rows [n, ...]; within `batch_invariant` in blocks of 16 rows.

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
