"""Randomness of a row: a function of its seed, a position, a node and a purpose, so that no neighbour changes it.

Draws of a round are keyed by the position at which the round began: keyed by their own, block verification would use
noise again that an earlier round has already conditioned on. Draws from the target alone (plain decoding and `sample`)
are keyed by the position of the token, so that both give the same text.
"""

import jax
import jax.numpy as jnp

DRAFT, ACCEPT, FINAL, TARGET = range(4)  # purposes


def _keys(seed: jax.Array, position: jax.Array, purpose: int, node: jax.Array) -> jax.Array:
    """Keys `[B, T]` from `seed [B, 2]` uint32, `position [B, T]` and `node [T]`."""

    def fold(seed, position, node):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(key, position), 4 * node + purpose)

    return jax.vmap(jax.vmap(fold, (None, 0, 0)), (0, 0, None))(seed, position, node)


def gumbel(seed: jax.Array, position: jax.Array, purpose: int, node: jax.Array, size: int) -> jax.Array:
    """Standard Gumbel noise `[B, T, size]`: `argmax(log p + noise)` is a draw from p, the k largest are k draws from p

    without replacement (Kool et al. 1903.06059).
    """
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (size,))))(_keys(seed, position, purpose, node))


def uniform(seed: jax.Array, position: jax.Array, purpose: int, node: jax.Array) -> jax.Array:
    """Uniforms `[B, T]` in [0, 1)."""
    return jax.vmap(jax.vmap(jax.random.uniform))(_keys(seed, position, purpose, node))


def seeds_from(key: jax.Array, batch: int) -> jax.Array:
    """`[B, 2]` uint32 from a key: row b's depends on b alone."""
    rows = jax.vmap(lambda row: jax.random.bits(jax.random.fold_in(key, row), (2,), jnp.uint32))
    return rows(jnp.arange(batch))
