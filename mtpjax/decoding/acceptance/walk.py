"""The result of an acceptance rule, and the walk down a tree that several rules share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtpjax.models.vocabulary import WHOLE, Vocabulary


class AcceptedPath(NamedTuple):
    """The accepted path of one row's tree of depth S, and the distribution of the bonus token."""

    path: jax.Array  # [S+1] int32, node at each depth; entries past `num_accepted` repeat the last accepted node
    num_accepted: jax.Array  # [] int32, accepted drafts
    weights: jax.Array  # [V] unnormalised distribution of the bonus token


def match_tree(
    tokens: jax.Array, parents: jax.Array, target_tokens: jax.Array, *, num_steps: int
) -> tuple[jax.Array, jax.Array]:
    """Walks down the tree along the target's tokens.

    The walk is exact for any tree, because the text consists of the target's tokens. With the arg-max after each node
    this is greedy verification (SpecInfer, 2305.09781); with a draw from `p[n]` it is sample-and-match.

    Args:
        tokens: `[W]` drafted tokens.
        parents: `[W]` parent of each node.
        target_tokens: `[W]` the target's token after each node.
        num_steps: depth of the tree.

    Returns:
        The path `[num_steps + 1]` and the number of accepted drafts. The bonus token is the target's token after the
        path's last node.
    """
    return descend(tokens == target_tokens[parents], parents, num_steps)


def descend(passes: jax.Array, parents: jax.Array, num_steps: int) -> tuple[jax.Array, jax.Array]:
    """Walks to the lowest-numbered child that passes, until no child passes.

    Args:
        passes: `[W]` bool, True where a node is acceptable given its parent.
        parents: `[W]` parent of each node.
        num_steps: depth of the tree, S.

    Returns:
        The path `[S+1]` and the number of accepted drafts.
    """

    # One step per level. Where no child passes, the walk stays at its node for the remaining steps.
    def step(node, _):
        is_next = passes & (parents == node)
        node = jnp.where(is_next.any(), jnp.argmax(is_next), node).astype(parents.dtype)
        return node, node

    root = jnp.zeros_like(parents[:1])
    _, nodes = jax.lax.scan(step, root[0], length=num_steps, unroll=True)
    path = jnp.concatenate([root, nodes])
    # Every move to a new node accepts one draft; staying at a node accepts none.
    return path, (path[1:] != path[:-1]).sum().astype(jnp.int32)


def residual(p: jax.Array, q: jax.Array, fallback: jax.Array, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """Computes the residual of the target's distribution after a draft is rejected.

    Args:
        p: `[V]` target distribution, possibly scaled.
        q: `[V]` draft distribution, possibly scaled.
        fallback: `[V]` returned if rounding leaves no probability mass.
        vocabulary: how the columns are split over devices.

    Returns:
        `[V]` unnormalised `max(p - q, 0)`.
    """
    rest = jnp.maximum(p - q, 0)
    return jnp.where(vocabulary.sum(rest) > 0, rest, fallback)
