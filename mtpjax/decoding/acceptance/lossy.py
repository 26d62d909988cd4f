"""Lossy acceptance rules: they accept more drafts and change the distribution of the text."""

import jax
import jax.numpy as jnp

from mtpjax.decoding.acceptance.walk import Walk, descend

LEAST_THRESHOLD = 1e-9  # SGLang's floor of `threshold_acc`, against division by zero


def threshold_tree(
    tokens: jax.Array, parents: jax.Array, p: jax.Array, u: jax.Array, *, single: float, acc: float, num_steps: int
) -> Walk:
    """SGLang's thresholds (sgl-kernel's TreeSpeculativeSamplingTargetOnly). Exact with both at 1, lossy below.

    One coin `u[n]` per node that the walk stands on. Child x is accepted if the coin is at most the probability of the
    children tried so far, x included, divided by `acc`, or if p(x) alone is at least `single`. Rejected children are
    left out of the draw of the next token, with acc < 1 too.
    """
    mass = p[parents, tokens]  # the root's own is never looked at
    order = jnp.arange(len(parents))
    is_tried = (parents[:, None] == parents[None, :]) & (order[:, None] >= order[None, :])
    tried = jnp.where(is_tried, mass[None, :], 0).sum(axis=1)
    # SGLang's comparison: a coin of exactly 0 accepts what has no probability, where the other rules' never does.
    passes = (u[parents] <= tried / jnp.maximum(acc, LEAST_THRESHOLD)) | (mass >= single)
    path, count = descend(passes, parents, num_steps)
    last = path[-1]
    is_rejected = (parents == last) & (count < num_steps)
    # Where nothing is left by rounding SGLang gives the last id of the vocabulary; here p.
    rest = p[last].at[jnp.where(is_rejected, tokens, p.shape[1])].set(0, mode="drop")
    return Walk(path, count, jnp.where(rest.sum() > 0, rest, p[last]))


def typical_tree(
    tokens: jax.Array, parents: jax.Array, p: jax.Array, *, epsilon: float, delta: float, num_steps: int
) -> Walk:
    """Medusa's typical acceptance (2401.10774). Lossy.

    A draft x passes if p(x) > min(epsilon, delta exp(-H(p))), H the entropy in nats. Of the paths on which every draft
    passes the longest is accepted, among several the likeliest; the next token comes from p after it.
    """
    mass = p[parents, tokens]  # the root's own is never looked at
    least = jnp.minimum(epsilon, delta * jnp.exp(-jax.scipy.special.entr(p).sum(axis=-1)))
    own = jnp.where(mass > least[parents], jnp.log(mass), -jnp.inf)
    is_root = jnp.arange(len(parents)) == 0
    is_node = parents >= 0

    def deepen(_, carry):
        depth, score = carry
        return jnp.where(is_node, depth[parents] + 1, 0), jnp.where(is_node, score[parents] + own, score)

    carry = (jnp.zeros_like(parents), jnp.where(is_root, 0, -jnp.inf).astype(p.dtype))
    depth, score = jax.lax.fori_loop(0, num_steps, deepen, carry)
    depth = jnp.where(jnp.isfinite(score), depth, -1)
    count = depth.max()
    best = jnp.argmax(jnp.where(depth == count, score, -jnp.inf)).astype(parents.dtype)
    rising = [best]
    for _ in range(num_steps):
        rising.append(jnp.maximum(parents[rising[-1]], 0))
    path = jnp.stack(rising)[jnp.maximum(count - jnp.arange(num_steps + 1), 0)]
    return Walk(path, count, p[best])


def relaxed_tree(
    tokens: jax.Array, parents: jax.Array, p: jax.Array, *, topk: int, delta: float, num_steps: int
) -> Walk:
    """TensorRT-LLM's relaxed acceptance (`mtpRelaxedAcceptance`), from chains to trees. Lossy.

    A draft x passes if it is among the topk likeliest tokens (of equal ones the lower id) and p(x) >= max p - delta.
    The walk goes to the lowest-numbered child that passes; the next token comes from p after it. Unlike there, a token
    without probability never passes: it may be one that the request bans.
    """
    mass = p[parents, tokens]  # the root's own is never looked at
    rows = p[parents]
    is_ahead = (rows > mass[:, None]) | ((rows == mass[:, None]) & (jnp.arange(p.shape[1])[None, :] < tokens[:, None]))
    passes = (is_ahead.sum(axis=1) < topk) & (mass >= rows.max(axis=1) - delta) & (mass > 0)
    path, count = descend(passes, parents, num_steps)
    return Walk(path, count, p[path[-1]])
