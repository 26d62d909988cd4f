"""Random numbers per row, as a pure function of (row seed, position, node, purpose).

A row's noise does not depend on other rows, the batch size or a restart. Draws that belong to a round are keyed by the
position at which the round started. Keying them by the token's position would reuse noise that an earlier round has
already conditioned on, which would bias block verification. Draws that depend only on the target (plain decoding and
the rule `sample`) are keyed by the token's position, so both produce the same text from the same seed.
"""

import jax
import jax.numpy as jnp

# Purposes: draft a token, accept it, draw the bonus token, draw from the target.
DRAFT, ACCEPT, BONUS, TARGET = range(4)


def threefry(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Computes Threefry-2x32 with 20 rounds.

    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. The result equals
    `jax.extend.random.threefry_2x32`, which XLA's CPU backend compiles to a loop; this form fuses into one kernel.

    Args:
        key: two uint32 arrays, the words of the key.
        counter: two uint32 arrays, the words of the counter, which broadcast against the key.

    Returns:
        Two uint32 arrays of the broadcast shape.
    """
    # The third key word and its constant are part of the Threefish key schedule.
    words = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter[0] + words[0], counter[1] + words[1]
    # Five groups of four rounds. A round adds, rotates and XORs; two key words are added after each group.
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x = x + words[(group + 1) % 3]
        y = y + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def _bits(
    seed: jax.Array, position: jax.Array, purpose: int, node: jax.Array, size: int, first: jax.Array | int = 0
) -> jax.Array:
    """Returns random bits `[B, T, size]` uint32 for `seed [B, 2]` uint32, `position [B, T]` and `node [T]`."""
    # Node and purpose share one counter word. Its two lowest bits are enough for the four purposes.
    position_word = position.astype(jnp.uint32)[:, :, None]
    node_word = (4 * node + purpose).astype(jnp.uint32)[None, :, None]
    # Derive a key for this draw from the row's seed, then use the index in the vocabulary as the counter under that
    # key.
    draw_key = threefry(
        (seed[:, 0, None, None], seed[:, 1, None, None]),
        (position_word, jnp.broadcast_to(node_word, position_word.shape)),
    )
    index = (jnp.arange(size, dtype=jnp.uint32) + jnp.uint32(first))[None, None, :]
    return threefry(draw_key, (index, jnp.zeros_like(index)))[0]


def _to_unit_interval(bits: jax.Array) -> jax.Array:
    """Converts uint32 bits to float32 in the open interval (0, 1), in steps of 2^-23."""
    return ((bits >> 9).astype(jnp.float32) + 0.5) * 2**-23


def gumbel(
    seed: jax.Array, position: jax.Array, purpose: int, node: jax.Array, size: int, first: jax.Array | int = 0
) -> jax.Array:
    """Draws standard Gumbel noise.

    `argmax(log p + noise)` is a draw from p; the top k are k draws without replacement (Kool et al., 1903.06059).

    Args:
        seed: `[B, 2]` uint32.
        position: `[B, T]` position that keys the draw; see the module's docstring.
        purpose: `DRAFT`, `ACCEPT`, `BONUS` or `TARGET`.
        size: vocabulary size V.
        first: the first token id, for a device that draws the noise for a shard of the vocabulary.

    Returns:
        `[B, T, V]` float32.
    """
    return -jnp.log(-jnp.log(_to_unit_interval(_bits(seed, position, purpose, node, size, first))))


def uniform(seed: jax.Array, position: jax.Array, purpose: int, node: jax.Array) -> jax.Array:
    """Draws uniforms `[B, T]` float32 in the open interval (0, 1); arguments as in `gumbel`."""
    return _to_unit_interval(_bits(seed, position, purpose, node, 1))[:, :, 0]


def seeds_from_key(key: jax.Array, batch: int) -> jax.Array:
    """Derives row seeds `[B, 2]` uint32 from a `jax.random` key. The seed of row b depends only on the key and b."""
    rows = jax.vmap(lambda row: jax.random.bits(jax.random.fold_in(key, row), (2,), jnp.uint32))
    return rows(jnp.arange(batch))
