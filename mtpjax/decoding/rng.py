"""Randomness of a row: a function of its seed, a position, a node and a purpose, so that no neighbour changes it.

Draws of a round are keyed by the position at which the round began: keyed by their own, block verification would use
noise again that an earlier round has already conditioned on. Draws from the target alone (plain decoding and `sample`)
are keyed by the position of the token, so that both give the same text.
"""

import jax
import jax.numpy as jnp

DRAFT, ACCEPT, FINAL, TARGET = range(4)  # purposes


def threefry(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011); uint32 words.

    The numbers of `jax.extend.random.threefry_2x32`, which on a CPU is a loop of small kernels; this becomes one.
    """
    words = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter[0] + words[0], counter[1] + words[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = ((y << turn) | (y >> (32 - turn))) ^ x
        x = x + words[(group + 1) % 3]
        y = y + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def _bits(seed: jax.Array, position: jax.Array, purpose: int, node: jax.Array, size: int) -> jax.Array:
    """`[B, T, size]` uint32 from `seed [B, 2]` uint32, `position [B, T]` and `node [T]`."""
    place = position.astype(jnp.uint32)[:, :, None]
    use = (4 * node + purpose).astype(jnp.uint32)[None, :, None]
    own = threefry((seed[:, 0, None, None], seed[:, 1, None, None]), (place, jnp.broadcast_to(use, place.shape)))
    index = jnp.arange(size, dtype=jnp.uint32)[None, None, :]
    return threefry(own, (index, jnp.zeros_like(index)))[0]


def _between(bits: jax.Array) -> jax.Array:
    """float32 in (0, 1), in steps of 2^-23."""
    return ((bits >> 9).astype(jnp.float32) + 0.5) * 2**-23


def gumbel(seed: jax.Array, position: jax.Array, purpose: int, node: jax.Array, size: int) -> jax.Array:
    """Standard Gumbel noise `[B, T, size]`: `argmax(log p + noise)` is a draw from p, the k largest are k draws from p

    without replacement (Kool et al. 1903.06059).
    """
    return -jnp.log(-jnp.log(_between(_bits(seed, position, purpose, node, size))))


def uniform(seed: jax.Array, position: jax.Array, purpose: int, node: jax.Array) -> jax.Array:
    """Uniforms `[B, T]` in (0, 1)."""
    return _between(_bits(seed, position, purpose, node, 1))[:, :, 0]


def seeds_from(key: jax.Array, batch: int) -> jax.Array:
    """`[B, 2]` uint32 from a key: row b's depends on b alone."""
    rows = jax.vmap(lambda row: jax.random.bits(jax.random.fold_in(key, row), (2,), jnp.uint32))
    return rows(jnp.arange(batch))
