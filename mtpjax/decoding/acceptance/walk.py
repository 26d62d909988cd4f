"""The result of an acceptance rule, and the plain walk down a tree that several rules share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Walk(NamedTuple):
    """The accepted path of one row's tree of depth S, and where the bonus token comes from."""

    path: jax.Array  # [S+1] node at each depth; past `count` the last accepted node is repeated
    count: jax.Array  # [] int32, accepted drafts
    weights: jax.Array  # [V] unnormalised distribution of the bonus token


def follow(tokens: jax.Array, parents: jax.Array, choices: jax.Array, *, num_steps: int) -> tuple[jax.Array, jax.Array]:
    """Walks down the tree along the target's own choices.

    Exact for any tree, however it was chosen, because the text is the choices themselves. With the arg-max after each
    node this is greedy verification (SpecInfer, 2305.09781); with a draw from `p[n]` it is sample-and-match.

    Args:
        tokens: `[W]` drafted tokens.
        parents: `[W]` parent of each node.
        choices: `[W]` the target's token after each node.
        num_steps: depth of the tree.

    Returns:
        The path `[num_steps + 1]` and the number of accepted drafts. The bonus token is `choices[path[count]]`.
    """
    return descend(tokens == choices[parents], parents, num_steps)


def descend(passes: jax.Array, parents: jax.Array, num_steps: int) -> tuple[jax.Array, jax.Array]:
    """Walks to the lowest-numbered child that passes, until none does.

    Args:
        passes: `[W]` bool, True where a node is acceptable given its parent.
        parents: `[W]` parent of each node.
        num_steps: depth of the tree, S.

    Returns:
        The path `[S+1]` and the number of accepted drafts.
    """

    def step(node, _):
        is_next = passes & (parents == node)
        node = jnp.where(is_next.any(), jnp.argmax(is_next), node).astype(parents.dtype)
        return node, node

    root = jnp.zeros_like(parents[:1])
    _, nodes = jax.lax.scan(step, root[0], length=num_steps, unroll=True)
    path = jnp.concatenate([root, nodes])
    return path, (path[1:] != path[:-1]).sum().astype(jnp.int32)


def residual(p: jax.Array, q: jax.Array, fallback: jax.Array) -> jax.Array:
    """Computes `max(p - q, 0)`, or returns `fallback` where rounding leaves nothing of it."""
    rest = jnp.maximum(p - q, 0)
    return jnp.where(rest.sum() > 0, rest, fallback)
