"""Lossy acceptance rules, which accept more drafts but change the distribution of the text."""

import jax
import jax.numpy as jnp

from mtpjax.decoding.acceptance.walk import AcceptedPath, descend
from mtpjax.models.vocabulary import WHOLE, Vocabulary

MIN_THRESHOLD = 1e-9  # SGLang's lower bound for `threshold_acc`, which prevents division by zero


def threshold_tree(
    tokens: jax.Array,
    parents: jax.Array,
    p: jax.Array,
    u: jax.Array,
    *,
    threshold_single: float,
    threshold_acc: float,
    num_steps: int,
    vocabulary: Vocabulary = WHOLE,
) -> AcceptedPath:
    """Walks the tree with SGLang's thresholds (sgl-kernel's TreeSpeculativeSamplingTargetOnly).

    The rule is exact if both thresholds are 1, else lossy. All children of a node are tested with one uniform number.
    The rule accepts child x if the uniform is at most the total probability of the children tried so far, x included,
    divided by `threshold_acc`, or if p(x) alone is at least `threshold_single`. The bonus token is never one of the
    rejected children.
    """
    # cumulative_p[n]: total probability of node n and of its earlier siblings.
    p_x = vocabulary.at(p, parents, tokens)  # the root's own entry is never read
    order = jnp.arange(len(parents))
    is_tried = (parents[:, None] == parents[None, :]) & (order[:, None] >= order[None, :])
    cumulative_p = jnp.where(is_tried, p_x[None, :], 0).sum(axis=1)
    # SGLang compares with `<=`, so a uniform of exactly 0 accepts a token of probability 0. The other rules reject it.
    passes = (u[parents] <= cumulative_p / jnp.maximum(threshold_acc, MIN_THRESHOLD)) | (p_x >= threshold_single)
    path, num_accepted = descend(passes, parents, num_steps)
    # The bonus token comes from p without the children that the walk rejected. The end of a full path has no children.
    last = path[-1]
    is_rejected = (parents == last) & (num_accepted < num_steps)
    # If rounding leaves no probability, SGLang emits the last id of the vocabulary; here the token is drawn from p.
    columns = vocabulary.columns(tokens, p.shape[1])
    bonus_weights = p[last].at[jnp.where(is_rejected, columns, p.shape[1])].set(0, mode="drop")
    return AcceptedPath(path, num_accepted, jnp.where(vocabulary.sum(bonus_weights) > 0, bonus_weights, p[last]))


def typical_tree(
    tokens: jax.Array,
    parents: jax.Array,
    p: jax.Array,
    u: jax.Array | None = None,
    *,
    typical_epsilon: float,
    typical_delta: float,
    num_steps: int,
    vocabulary: Vocabulary = WHOLE,
) -> AcceptedPath:
    """Picks a path by Medusa's typical acceptance (2401.10774). Lossy.

    A draft x passes if p(x) > min(epsilon, delta exp(-H(p))), where H is the entropy in nats. The rule accepts the
    longest path on which every draft passes, or the most probable of several equally long paths. The bonus token comes
    from p after that path. The rule needs no uniforms.
    """
    # log_p_x[n]: log-probability of node n, or -inf if it does not pass.
    p_x = vocabulary.at(p, parents, tokens)  # the root's own entry is never read
    threshold = jnp.minimum(typical_epsilon, typical_delta * jnp.exp(-vocabulary.sum(jax.scipy.special.entr(p))))
    log_p_x = jnp.where(p_x > threshold[parents], jnp.log(p_x), -jnp.inf)
    is_root = jnp.arange(len(parents)) == 0
    is_node = parents >= 0

    # Scores move down one level per step, so after j steps every node at depth <= j has the log-probability of its
    # path. K steps cover the whole tree. A node that does not pass sets the scores of all its descendants to -inf.
    def step_down(_, carry):
        depth, score = carry
        return jnp.where(is_node, depth[parents] + 1, 0), jnp.where(is_node, score[parents] + log_p_x, score)

    carry = (jnp.zeros_like(parents), jnp.where(is_root, 0, -jnp.inf).astype(p.dtype))
    depth, score = jax.lax.fori_loop(0, num_steps, step_down, carry)
    # The deepest node with a finite score ends the accepted path; the highest score breaks ties.
    depth = jnp.where(jnp.isfinite(score), depth, -1)
    num_accepted = depth.max()
    best = jnp.argmax(jnp.where(depth == num_accepted, score, -jnp.inf)).astype(parents.dtype)
    # Climb to the root, then reverse the path, whose tail repeats its last node.
    upward_path = [best]
    for _ in range(num_steps):
        upward_path.append(jnp.maximum(parents[upward_path[-1]], 0))
    path = jnp.stack(upward_path)[jnp.maximum(num_accepted - jnp.arange(num_steps + 1), 0)]
    return AcceptedPath(path, num_accepted, p[best])


def relaxed_tree(
    tokens: jax.Array,
    parents: jax.Array,
    p: jax.Array,
    u: jax.Array | None = None,
    *,
    relaxed_topk: int,
    relaxed_delta: float,
    num_steps: int,
    vocabulary: Vocabulary = WHOLE,
) -> AcceptedPath:
    """Walks the tree by TensorRT-LLM's relaxed acceptance (`mtpRelaxedAcceptance`), extended to trees. Lossy.

    A draft x passes if it is among the `relaxed_topk` most probable tokens (the lower id wins a tie) and
    p(x) >= max p - `relaxed_delta`. The walk moves to the lowest-numbered child that passes, and the bonus token comes
    from p after the last such child. The rule needs no uniforms. Unlike in TensorRT-LLM, a token of probability 0 never
    passes, since the request may have banned it.
    """
    # A token's rank is the number of tokens that are more probable, or equally probable with a lower id.
    p_x = vocabulary.at(p, parents, tokens)  # the root's own entry is never read
    parent_p = p[parents]
    ranks_higher = (parent_p > p_x[:, None]) | (
        (parent_p == p_x[:, None]) & (vocabulary.ids(p.shape[1])[None, :] < tokens[:, None])
    )
    passes = (
        (vocabulary.sum(ranks_higher) < relaxed_topk) & (p_x >= vocabulary.max(parent_p) - relaxed_delta) & (p_x > 0)
    )
    # The bonus token comes from all of p, so it may be a rejected child. Only a rule that preserves the distribution
    # has to exclude rejected children.
    path, num_accepted = descend(passes, parents, num_steps)
    return AcceptedPath(path, num_accepted, p[path[-1]])
