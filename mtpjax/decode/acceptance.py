"""Acceptance rules: pure arithmetic on arrays."""

import jax
import jax.numpy as jnp


def accept_greedy(drafts: jax.Array, choices: jax.Array) -> jax.Array:
    """Accepted drafts per row, `[B]`: the longest prefix of `drafts [B, K]` equal to the trunk's `choices [B, K+1]`.

    Choice j is the trunk's arg-max after drafts 1..j, so choices 0..n are the n accepted drafts and the bonus token.
    Exact for greedy decoding.
    """
    matches = drafts == choices[:, : drafts.shape[1]]
    return jnp.cumprod(matches, axis=1).sum(axis=1).astype(jnp.int32)
