"""Results that do not depend on the batch: a setting under which every kernel splits its work in one fixed way.

By default a kernel chooses its tiles and shares by the number of rows, which is fastest. Tiles and shares determine the
order of additions, so the last bits of a row depend on the number of rows. Within `batch_invariant` every product takes
rows in blocks of 16 and attention takes shares of a fixed number of slots. Products that no kernel computes run in
blocks of 16 rows too.
"""

import contextlib

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ROWS = 16  # of every product: the fewest that tensor cores multiply
SHARE_SLOTS = 1024  # slots of a share of attention

_is_on = jax.make_user_context(False)  # part of the key of JAX's caches, so a jitted function is traced for each value


def batch_invariant(is_on: bool = True) -> contextlib.AbstractContextManager:
    """Makes the kernels that are traced inside the context independent of the batch; False is the default behaviour.

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
    """Applies a function of any number of rows [n, ...] row by row, within `batch_invariant` in blocks of 16.

    So XLA compiles only one size of product.
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
