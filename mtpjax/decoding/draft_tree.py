"""Chooses the nodes of draft trees, and computes the ancestor masks that verification needs.

A dynamic tree (`Candidates`) keeps the nodes with the highest draft probabilities. A fixed tree (`TreeShape`) is chosen
before any token is drawn, because ratio rules stay exact only if the tree does not depend on the drafted tokens.

Nodes are in topological order, so `parents[n] < n`. Node 0 is the root, which is the pending token; its parent is -1.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.top_k import top_k

FIRST_CHILD_RATE = 0.6  # assumed chance that a node's first child is accepted
NEXT_CHILD_RATE = 0.3  # assumed chance of each later child, relative to the one before


class Candidates:
    """Candidate nodes of a dynamic tree, in flat lists that grow level by level.

    This is the construction of EAGLE-2 (2406.16858) and SGLang. A candidate's score is the product of the draft
    probabilities on its path. Drafting expands the topk best candidates of each level. At the end the best candidates
    of all levels become the tree.
    """

    def __init__(self):
        self.scores: list[jax.Array] = []  # [B, C] float32 per level
        self.tokens: list[jax.Array] = []  # [B, C] int32 per level
        self.parents: list[jax.Array] = []  # [B, C] flat index of the parent candidate, -1 for the root
        self.num_candidates = 0  # candidates so far at all levels; flat indices follow the order of addition

    def add_children(
        self, probabilities: jax.Array, tokens: jax.Array, scores: jax.Array, parent_index: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Adds the children of one level's nodes and picks the children to expand.

        Args:
            probabilities: `[B, f, topk]` draft probabilities of each node's most likely children.
            tokens: `[B, f, topk]` tokens of these children.
            scores: `[B, f]` the nodes' own scores.
            parent_index: `[B, f]` the nodes' flat indices.

        Returns:
            Scores, tokens and flat indices of the topk best children, and the index of each child's parent among the f
            nodes; all `[B, topk]`.
        """
        B, _, topk = tokens.shape
        # 1. Record all f * topk children. A child's score is its parent's score times its own draft probability.
        scores = (scores[:, :, None] * probabilities).reshape(B, -1)
        tokens = tokens.astype(jnp.int32).reshape(B, -1)
        self.scores.append(scores)
        self.tokens.append(tokens)
        self.parents.append(jnp.repeat(parent_index, topk, axis=1))
        # 2. Pick the topk best children of the whole level, so every level costs one module pass over topk nodes.
        best_scores, best = top_k(scores, topk)
        first_index, self.num_candidates = self.num_candidates, self.num_candidates + scores.shape[1]
        return best_scores, jnp.take_along_axis(tokens, best, axis=1), first_index + best, best // topk

    def select_nodes(self, num_nodes: int) -> tuple[jax.Array, jax.Array]:
        """Picks the W = `num_nodes` best candidates of all levels, root included, and numbers them as tree nodes.

        Returns:
            Tokens `[B, W-1]` of all nodes except the root, and parents `[B, W]` int32.
        """
        scores, tokens, parents = (jnp.concatenate(part, axis=1) for part in (self.scores, self.tokens, self.parents))
        # 1. Take the W-1 highest scores. A child scores at most as much as its parent and has a larger flat index, and
        #    `top_k` breaks ties towards the lower index. So the parent of every chosen candidate is chosen too, and the
        #    result is a tree.
        _, chosen = top_k(scores, num_nodes - 1)
        # 2. Sort by flat index, which puts parents before children.
        chosen = jnp.sort(chosen, axis=1)
        # 3. Convert the parents' flat indices to node numbers by counting the chosen candidates before each parent.
        parent = jnp.take_along_axis(parents, chosen, axis=1)
        node = 1 + (chosen[:, None, :] < parent[:, :, None]).sum(axis=2)
        node = jnp.where(parent < 0, 0, node)
        root = jnp.full((len(node), 1), -1, jnp.int32)
        return jnp.take_along_axis(tokens, chosen, axis=1), jnp.concatenate([root, node.astype(jnp.int32)], axis=1)


def depths_and_ancestor_mask(parents: jax.Array, num_steps: int) -> tuple[jax.Array, jax.Array]:
    """Computes the depths and the ancestor mask of trees.

    Args:
        parents: `[B, W]` int32, -1 for the root.
        num_steps: upper bound on the depth of the trees.

    Returns:
        Depths `[B, W]` int32, and the mask `[B, W, W]` bool: entry (n, m) is True if m is n or an ancestor of n.
    """
    W = parents.shape[1]
    index = jnp.arange(W)[None]
    node = jnp.broadcast_to(index, parents.shape)
    mask = jnp.zeros((*parents.shape, W), bool)
    # All nodes climb towards the root at the same time, one parent per iteration, and mark each node that they visit.
    # The root's parent, -1, marks nothing.
    for _ in range(num_steps + 1):
        mask |= node[:, :, None] == index[:, None]
        node = jnp.where(node >= 0, jnp.take_along_axis(parents, jnp.maximum(node, 0), axis=1), -1)
    # A node at depth d has d ancestors and itself in its row of the mask.
    return mask.sum(axis=2).astype(jnp.int32) - 1, mask


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """A tree that is fixed before any token is drawn.

    Ratio rules for trees need one, because they are exact only if a node's position in the tree does not depend on the
    token drawn there.

    Attributes:
        parents: parent of each node, with parents before children; -1 for the root.
    """

    parents: tuple[int, ...]

    @property
    def depths(self) -> list[int]:
        """Depth of each node; the root has depth 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def topk(self) -> int:
        """Largest number of children that a node has."""
        return max(map(self.parents.count, self.parents[1:]), default=0)

    def children(self, node: int) -> list[int]:
        """Returns a node's children in ascending order."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def inner_levels(self) -> list[list[int]]:
        """Returns the nodes that have children, as one list for each level except the deepest."""
        depths = self.depths
        inner = sorted(set(self.parents[1:]))
        return [[node for node in inner if depths[node] == depth] for depth in range(max(depths))]


@functools.cache
def choose_tree_shape(topk: int, num_steps: int, num_nodes: int) -> TreeShape:
    """Chooses the nodes that are most likely to be accepted, under assumed acceptance rates per child rank.

    This is the greedy form of Sequoia's construction (2402.12374): a node's value is the product of the rates on its
    path. A node has at most `topk` children, and the depth is at most `num_steps`. Nodes are in level order and include
    the root.
    """
    # A node's key is its path, the tuple of child ranks from the root. The frontier maps the nodes that may be added
    # next to their values. These are the nodes whose parent and earlier siblings are chosen.
    frontier: dict[tuple[int, ...], float] = {(): 1.0}
    chosen: list[tuple[int, ...]] = []
    while len(chosen) < num_nodes:
        path = max(frontier, key=lambda path: frontier[path])
        value = frontier.pop(path)
        chosen.append(path)
        # A chosen node adds its first child and its next sibling to the frontier. Both have lower values, so taking the
        # most valuable node each time yields the best tree of this size.
        if len(path) < num_steps:
            frontier[(*path, 0)] = value * FIRST_CHILD_RATE
        if path and path[-1] + 1 < topk:
            frontier[(*path[:-1], path[-1] + 1)] = value * NEXT_CHILD_RATE
    # Number the nodes level by level, because drafting processes one level per pass.
    order = sorted(chosen, key=lambda path: (len(path), path))
    return TreeShape(tuple(order.index(path[:-1]) if path else -1 for path in order))
