"""The rotation of rotary position embeddings (RoPE, 2104.09864), in plain JAX."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array], *, interleaved: bool) -> jax.Array:
    """Rotates the first 2P channels of each head.

    Args:
        x: `[B, T, N, H]`.
        angles: cosines and sines, `[B, T, P]` each.
        interleaved: pairs are channels (2j, 2j+1). False: channels (j, j+P).

    Returns:
        `[B, T, N, H]`. Interleaved pairs are returned as halves, as in transformers; this does not change products of
        two rotated vectors.
    """
    cos, sin = (table[:, :, None, :] for table in angles)
    turned, passed = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    turned = turned.astype(jnp.float32)
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else jnp.split(turned, 2, axis=-1)
    halves = rotate_pairs(first, second, cos, sin)
    return jnp.concatenate([half.astype(x.dtype) for half in halves] + [passed], axis=-1)


def rotate_pairs(first, second, cos, sin) -> tuple[jax.Array, jax.Array]:
    """Rotates pairs by their angles, in JAX and inside kernels; arrays are float32 and broadcast."""
    return first * cos - second * sin, second * cos + first * sin
