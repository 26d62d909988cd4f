"""Exact acceptance rules for chains of drafts: greedy, token-wise rejection sampling, and block verification."""

import jax
import jax.numpy as jnp

from mtpjax.decoding.acceptance.walk import residual
from mtpjax.models.vocabulary import WHOLE, Vocabulary


def match_chain(drafts: jax.Array, target_tokens: jax.Array) -> jax.Array:
    """Counts the accepted drafts, which are the longest prefix that equals the target's tokens.

    Target token j follows drafts 1..j, so target tokens 0..n are the n accepted drafts and the bonus token.

    Args:
        drafts: `[B, K]` drafted tokens.
        target_tokens: `[B, K+1]` the target's tokens.

    Returns:
        `[B]` int32 accepted drafts per row.
    """
    # Target token j tests draft j+1. The cumulative product turns every match after the first mismatch into 0.
    matches = drafts == target_tokens[:, : drafts.shape[1]]
    return jnp.cumprod(matches, axis=1).sum(axis=1).astype(jnp.int32)


def token_chain(
    drafts: jax.Array,
    p: jax.Array,
    q: jax.Array,
    u: jax.Array,
    num_drafted: jax.Array | None = None,
    *,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[jax.Array, jax.Array]:
    """Accepts drafts one by one, each with probability min(1, p(x)/q(x)).

    The first rejection ends the walk, and the bonus token comes from max(p - q, 0). Without a rejection it comes from p
    (Leviathan et al., 2211.17192, algorithm 1; Chen et al., 2302.01318, algorithm 2).

    Args:
        num_drafted: `[]` int32 number of drafts before the padding. None: all K were drafted.
    """
    position = jnp.arange(drafts.shape[0])
    # u < p/q, written without a division so that q = 0 needs no special case.
    p_x, q_x = (vocabulary.at(rows, position, drafts) for rows in (p, q))
    is_accepted = u * q_x < p_x
    if num_drafted is not None:
        is_accepted &= position < num_drafted
    num_accepted = jnp.cumprod(is_accepted).sum().astype(jnp.int32)
    proposed = _proposed(q, position, num_drafted)[num_accepted]
    return num_accepted, residual(p[num_accepted], proposed, p[num_accepted], vocabulary)


def block_chain(
    drafts: jax.Array,
    p: jax.Array,
    q: jax.Array,
    u: jax.Array,
    num_drafted: jax.Array | None = None,
    *,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[jax.Array, jax.Array]:
    """Accepts a prefix of the chain by block verification (Sun et al., 2403.10444).

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i)/q(x_i)), the first i drafts pass with probability
    h_i = r_i / (r_i + 1 - w_i), where r_i is the sum of max(w_i p - q, 0) after them; h_K = w_K. The rule accepts the
    longest prefix that passes. The bonus token comes from max(w p - q, 0), or from p if all K drafts are accepted. In
    expectation, the rule accepts at least as many drafts as `token_chain`.

    Args:
        num_drafted: `[]` int32 number of drafts before the padding. None: all K were drafted.
    """
    position = jnp.arange(drafts.shape[0])
    # A sampled draft has q > 0. The floor keeps the division finite where q underflows.
    p_x, q_x = (vocabulary.at(rows, position, drafts) for rows in (p, q))
    ratios = p_x / jnp.maximum(q_x, jnp.finfo(q.dtype).tiny)

    # w_i: joint likelihood ratio of the first i drafts, clipped to 1 after every step.
    def narrow(w, ratio):
        w = jnp.minimum(w * ratio, 1)
        return w, w

    _, w = jax.lax.scan(narrow, jnp.ones_like(p[0, 0]), ratios, unroll=True)
    w = jnp.concatenate([jnp.ones_like(p[0, :1]), w])  # [K+1]
    # r_i: the target's probability mass that the next draft does not cover. After the last draft it is w_i.
    proposed = _proposed(q, position, num_drafted)
    r = vocabulary.sum(jnp.maximum(w[:, None] * p - proposed, 0))  # [K+1]
    # Test every prefix with its own uniform, and accept the longest that passes. `u (r + 1 - w) < r` is `u < h` without
    # a division. After the last draft q is 0, so r_K = w_K and h_K = w_K.
    passes = (w[1:] >= 1) | (u * (r[1:] + 1 - w[1:]) < r[1:])
    if num_drafted is not None:
        passes &= position < num_drafted
    num_accepted = jnp.max(jnp.where(passes, position + 1, 0), initial=0).astype(jnp.int32)
    rest = residual(w[num_accepted] * p[num_accepted], proposed[num_accepted], p[num_accepted], vocabulary)
    return num_accepted, rest


def _proposed(q: jax.Array, position: jax.Array, num_drafted: jax.Array | None) -> jax.Array:
    """Returns each draft's q as `[K+1, V]`, with 0 where nothing was drafted, so that the residual there is p."""
    if num_drafted is not None:
        q = jnp.where((position < num_drafted)[:, None], q, 0)
    return jnp.pad(q, ((0, 1), (0, 0)))
