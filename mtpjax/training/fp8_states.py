"""Stores hidden states in fp8 with a scale per token, in about a quarter of the space of float32.

One array holds numbers and scales, so that they are in one file and move to the device together. The D numbers of a
state (float8_e4m3fn) are followed by the four bytes of its scale (float32).
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.fp8 import as_stored

FP8, SCALE_BYTES = jnp.float8_e4m3fn, 4


@functools.partial(jax.jit, static_argnames="hidden_size")
def quantise_states(states: jax.Array, hidden_size: int) -> jax.Array:
    """Quantises states `[..., n * D]` to uint8 `[..., n * (D + 4)]`."""
    parts = states.astype(jnp.float32).reshape(*states.shape[:-1], -1, hidden_size)
    # The largest number of a state becomes the largest number of fp8.
    largest = jnp.max(jnp.abs(parts), axis=-1, keepdims=True)
    scale = jnp.maximum(largest / float(jnp.finfo(FP8).max), jnp.finfo(jnp.float32).tiny)
    values = jax.lax.bitcast_convert_type(as_stored(parts / scale, FP8), jnp.uint8)
    stored = jnp.concatenate([values, jax.lax.bitcast_convert_type(scale[..., 0], jnp.uint8)], axis=-1)
    return stored.reshape(*states.shape[:-1], -1)


def dequantise_states(stored: jax.Array, hidden_size: int) -> jax.Array:
    """Inverts `quantise_states` up to rounding; returns float32 `[..., n * D]`."""
    parts = stored.reshape(*stored.shape[:-1], -1, hidden_size + SCALE_BYTES)
    values = jax.lax.bitcast_convert_type(parts[..., :hidden_size], FP8).astype(jnp.float32)
    scale = jax.lax.bitcast_convert_type(parts[..., hidden_size:], jnp.float32)
    return (values * scale[..., None]).reshape(*stored.shape[:-1], -1)
