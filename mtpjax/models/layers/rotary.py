"""Rotary position embedding (half-split, interleaved or partial) with linear, YaRN or Llama 3.1 scaling."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.models.config import ModelConfig
from mtpjax.models.rope_scaling import LinearScaling, Llama3Scaling, Yarn


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Computes the angle by which each channel pair rotates per position.

    The angle is `theta^(-2j/dim)`. YaRN divides the slow pairs by `factor`, with a linear ramp between the pairs that
    turn `beta_fast` and `beta_slow` times over the original length (2309.00071, as DeepSeek-V3 computes it). Llama 3.1
    uses a ramp in the number of turns, from `low_freq_factor` to `high_freq_factor`.

    Returns:
        `[P]` float32, radians, with P = rotary_dim / 2.
    """
    dim = config.rotary_dim
    plain = config.rope_theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    yarn = config.rope_scaling
    if yarn is None:
        return plain.astype(np.float32)
    if isinstance(yarn, LinearScaling):
        return (plain / yarn.factor).astype(np.float32)
    # Llama 3.1: interpolate by the number of turns over the original length.
    if isinstance(yarn, Llama3Scaling):
        turns = yarn.original_max_position_embeddings * plain / (2 * math.pi)
        fast = np.clip((turns - yarn.low_freq_factor) / (yarn.high_freq_factor - yarn.low_freq_factor), 0, 1)
        return (plain * fast + plain / yarn.factor * (1 - fast)).astype(np.float32)

    # YaRN: interpolate by the index of the pair.
    def pair_that_turns(times: float) -> float:
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    # With an extreme base or length the bounds are in reverse order; the ramp then falls, as in transformers.
    low, high = max(low, 0), min(high, dim - 1)
    slow = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0, 1)
    return (plain * (1 - slow) + plain / yarn.factor * slow).astype(np.float32)


def rotary_angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes cosines and sines `[B, T, P]` float32 for positions `[B, T]`, multiplied by YaRN's factor."""
    angles = positions[:, :, None].astype(jnp.float32) * inverse_frequencies(config)[None, None, :]
    yarn = config.rope_scaling
    ratio = yarn.rotation_factor if isinstance(yarn, Yarn) else 1.0
    return jnp.cos(angles) * ratio, jnp.sin(angles) * ratio
