"""Trees of drafts: which nodes there are, who descends from whom.

Nodes are in topological order, node 0 the root: the pending token. `parents[n] < n`, and -1 for the root.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import top_k

FIRST_RATE = 0.6  # chance that a node's first child is the one accepted
NEXT_RATE = 0.3  # and of each later child, to that of the one before


class Candidates:
    """All children that a free tree's levels offered: flat lists that grow level by level, each topk per node.

    SGLang's construction: a candidate's score is the product of the draft's probabilities on its way; the topk best of
    a level are drafted on; of all, the best become the tree.
    """

    def __init__(self):
        self.scores: list[jax.Array] = []  # [B, C] float32 per level
        self.tokens: list[jax.Array] = []
        self.parents: list[jax.Array] = []  # flat index of the parent, -1 for the root
        self.count = 0

    def offer(self, probabilities: jax.Array, tokens: jax.Array, scores: jax.Array, places: jax.Array):
        """Of a level's nodes, the likeliest children `[B, f, topk]`, the nodes' `scores` and flat `places [B, f]`.

        Returns the topk best: scores, tokens, flat places `[B, topk]`, and which node each descends from.
        """
        B, _, topk = tokens.shape
        scores = (scores[:, :, None] * probabilities).reshape(B, -1)
        tokens = tokens.astype(jnp.int32).reshape(B, -1)
        self.scores.append(scores)
        self.tokens.append(tokens)
        self.parents.append(jnp.repeat(places, topk, axis=1))
        kept, index = top_k(scores, topk)
        first, self.count = self.count, self.count + scores.shape[1]
        return kept, jnp.take_along_axis(tokens, index, axis=1), first + index, index // topk

    def select(self, num_nodes: int) -> tuple[jax.Array, jax.Array]:
        """Tokens `[B, num_nodes - 1]` and parents `[B, num_nodes]` of the tree of the best candidates.

        A child's score is at most its parent's and its flat index larger, so that every node's parent is there.
        """
        scores, tokens, parents = (jnp.concatenate(part, axis=1) for part in (self.scores, self.tokens, self.parents))
        _, chosen = top_k(scores, num_nodes - 1)
        chosen = jnp.sort(chosen, axis=1)
        parent = jnp.take_along_axis(parents, chosen, axis=1)
        node = 1 + (chosen[:, None, :] < parent[:, :, None]).sum(axis=2)
        node = jnp.where(parent < 0, 0, node)
        root = jnp.full((len(node), 1), -1, jnp.int32)
        return jnp.take_along_axis(tokens, chosen, axis=1), jnp.concatenate([root, node.astype(jnp.int32)], axis=1)


def ancestry(parents: jax.Array, num_steps: int) -> tuple[jax.Array, jax.Array]:
    """Of trees `parents [B, W]` at most `num_steps` deep: depths `[B, W]`, and who is on whose way.

    `[B, W, W]`: entry (n, m) says that m is n or one of its ancestors.
    """
    W = parents.shape[1]
    itself = jnp.arange(W)[None]
    node = jnp.broadcast_to(itself, parents.shape)
    is_on = jnp.zeros((*parents.shape, W), bool)
    for _ in range(num_steps + 1):
        is_on |= node[:, :, None] == itself[:, None]
        node = jnp.where(node >= 0, jnp.take_along_axis(parents, jnp.maximum(node, 0), axis=1), -1)
    return is_on.sum(axis=2).astype(jnp.int32) - 1, is_on


@dataclasses.dataclass(frozen=True)
class Shape:
    """A tree fixed before anything is drawn: for rules that may not choose nodes by what they are."""

    parents: tuple[int, ...]

    @property
    def depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def topk(self) -> int:
        """Most children of a node."""
        return max(map(self.parents.count, self.parents[1:]), default=0)

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def levels(self) -> list[list[int]]:
        """Per depth below the last, its nodes that have children."""
        depths = self.depths
        inner = sorted(set(self.parents[1:]))
        return [[node for node in inner if depths[node] == depth] for depth in range(max(depths))]


@functools.cache
def fixed_shape(topk: int, num_steps: int, num_nodes: int) -> Shape:
    """The `num_nodes` nodes most likely to be accepted, if each child's chance were that of its rank.

    The greedy form of Sequoia's choice (2402.12374): a node's value is the product of the rates on its way. A node has
    at most `topk` children; nodes come level by level.
    """
    ways: dict[tuple[int, ...], float] = {(): 1.0}
    chosen: list[tuple[int, ...]] = []
    while len(chosen) < num_nodes:
        way = max(ways, key=lambda way: ways[way])
        value = ways.pop(way)
        chosen.append(way)
        if len(way) < num_steps:
            ways[(*way, 0)] = value * FIRST_RATE
        if way and way[-1] + 1 < topk:
            ways[(*way[:-1], way[-1] + 1)] = value * NEXT_RATE
    order = sorted(chosen, key=lambda way: (len(way), way))
    return Shape(tuple(order.index(way[:-1]) if way else -1 for way in order))
