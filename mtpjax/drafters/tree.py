"""Builds draft trees level by level, from the scores of each level's children."""

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding import rng
from mtpjax.decoding.draft_tree import Candidates, depths_and_ancestor_mask
from mtpjax.decoding.sampling import apply_temperature, distribution
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState, Draft
from mtpjax.drafters.scoring import DraftScores
from mtpjax.models.view import read_rows
from mtpjax.models.vocabulary import Vocabulary


def extend_ancestor_mask(mask: jax.Array | None, parent: jax.Array) -> jax.Array:
    """Computes the mask that lets each node of a new level attend to its ancestors and itself.

    Args:
        mask: `[B, f, n]` bool, the previous level's mask; None for the first level.
        parent: `[B, g]` int32, the index of each new node's parent among the f nodes.

    Returns:
        `[B, g, n + g]` bool, with a column per node of the new level.
    """
    B, num_nodes = parent.shape
    self_mask = jnp.broadcast_to(jnp.eye(num_nodes, dtype=bool), (B, num_nodes, num_nodes))
    if mask is None:
        return self_mask
    return jnp.concatenate([jnp.take_along_axis(mask, parent[:, :, None], axis=1), self_mask], axis=2)


class DynamicTreeBuilder:
    """Builds a tree of the most likely nodes, for rules that accept any tree.

    A node's score is the product of the draft probabilities on its path (EAGLE-2, 2406.16858). Every level expands its
    topk best nodes. At the end, the best nodes of all levels form the tree.
    """

    def __init__(self, state: DecodeState, spec: DecodeSpec):
        self.state, self.spec, self.num_levels = state, spec, spec.num_steps
        B = len(state.length)
        self.candidates = Candidates()
        self.scores, self.parent_index = jnp.ones((B, 1)), jnp.full((B, 1), -1, jnp.int32)

    def add_level(self, level: int, scores: DraftScores) -> tuple[jax.Array, jax.Array]:
        """Adds the topk best children of each node of the previous level.

        Args:
            level: draft level of the children, from 1.
            scores: scores of the children.

        Returns:
            The tokens of the nodes to expand next, and their parents' indices in the previous level, both `[B, topk]`.
        """
        if self.spec.is_greedy and not self.state.settings.sampling.changes_logits:
            # Every row is at temperature 0 and nothing changes the logits, so the kernel finds the best tokens without
            # storing all logits.
            values, tokens, logsumexp = scores.top_tokens(self.spec.topk)
            probabilities = jnp.exp(values - logsumexp[:, :, None])
        else:
            probabilities = softmax_at_temperature(scores.logits(), self.state, scores.vocabulary)
            probabilities, tokens = scores.vocabulary.top_k(probabilities, self.spec.topk)
        self.scores, tokens, self.parent_index, parent = self.candidates.add_children(
            probabilities, tokens, self.scores, self.parent_index
        )
        return tokens, parent

    def draft(self) -> Draft:
        """Returns the tree of the best candidates of all levels."""
        tokens, parents = self.candidates.select_nodes(self.spec.num_nodes)
        pending = read_rows(self.state.tokens, self.state.length - 1, 1)
        depths, mask = depths_and_ancestor_mask(parents, self.spec.num_steps)
        return Draft(jnp.concatenate([pending, tokens], axis=1), None, parents, depths, mask)


class FixedTreeBuilder:
    """Builds a tree of fixed shape, in which each node's children are drawn without replacement.

    Rules that compare p with q stay exact only if the shape does not depend on the drawn tokens.
    """

    def __init__(self, state: DecodeState, spec: DecodeSpec):
        assert spec.tree_shape is not None
        self.state, self.shape = state, spec.tree_shape
        self.inner = self.shape.inner_levels()
        self.num_levels = len(self.inner)
        self.tokens: dict[int, jax.Array] = {0: read_rows(state.tokens, state.length - 1, 1)[:, 0]}
        self.probabilities: list[jax.Array] = []

    def add_level(self, level: int, scores: DraftScores) -> tuple[jax.Array | None, jax.Array]:
        """Draws the children of the previous level's inner nodes.

        Args:
            level: draft level of the children, from 1.
            scores: scores of the children.

        Returns:
            The tokens `[B, f]` of the drawn nodes that will have children (None at the last level), and the indices of
            their parents in the previous level.
        """
        nodes, state = self.inner[level - 1], self.state
        sampling = state.settings.sampling
        logits, vocabulary = scores.logits(), scores.vocabulary
        B, _, V = logits.shape
        # The k largest values of log q + Gumbel noise are k draws without replacement (Kool et al., 1903.06059). Rows
        # at temperature 0 get no noise, so their draws are the k best tokens.
        is_greedy = (sampling.temperature == 0)[:, None, None]
        probabilities = jnp.where(
            is_greedy, softmax_at_temperature(logits, state, vocabulary), distribution(logits, sampling, vocabulary)
        )
        self.probabilities.append(probabilities)
        round_start = jnp.broadcast_to(state.length[:, None], (B, len(nodes)))
        gumbel = rng.gumbel(sampling.seed, round_start, rng.DRAFT, jnp.array(nodes), V, vocabulary.first_id(V))
        _, drawn = vocabulary.top_k(
            jnp.log(probabilities) + jnp.where(is_greedy, 0, gumbel),
            max(len(self.shape.children(node)) for node in nodes),
        )
        # Assign the draws to the children in order. Nodes with fewer children than the widest node use only the first
        # draws.
        for column, node in enumerate(nodes):
            for rank, child in enumerate(self.shape.children(node)):
                self.tokens[child] = drawn[:, column, rank].astype(jnp.int32)
        if level == self.num_levels:
            return None, jnp.zeros((B, 0), jnp.int32)
        # The shape is static, so the inner nodes of the next level and their parents' indices are known here.
        next_nodes = self.inner[level]
        parent = [nodes.index(self.shape.parents[node]) for node in next_nodes]
        tokens = jnp.stack([self.tokens[node] for node in next_nodes], axis=1)
        return tokens, jnp.broadcast_to(jnp.array(parent, jnp.int32), tokens.shape)

    def draft(self) -> Draft:
        """Returns the tree with the distributions from which each node's children were drawn."""
        W, B = len(self.shape.parents), len(self.state.length)
        # Reorder q from the order of drawing to node order. Leaves have no children and no q; rules do not read their
        # rows.
        inner = [node for level in self.inner for node in level]
        row = [inner.index(node) if node in inner else 0 for node in range(W)]
        parents = jnp.broadcast_to(jnp.array(self.shape.parents, jnp.int32), (B, W))
        depths, mask = depths_and_ancestor_mask(parents, max(self.shape.depths))
        return Draft(
            jnp.stack([self.tokens[node] for node in range(W)], axis=1),
            jnp.concatenate(self.probabilities, axis=1)[:, np.array(row)],
            parents,
            depths,
            mask,
        )


def tree_builder(state: DecodeState, spec: DecodeSpec) -> DynamicTreeBuilder | FixedTreeBuilder:
    """Returns the builder for a call's trees."""
    return FixedTreeBuilder(state, spec) if spec.tree_shape else DynamicTreeBuilder(state, spec)


def softmax_at_temperature(logits: jax.Array, state: DecodeState, vocabulary: Vocabulary) -> jax.Array:
    """Computes the distribution that ranks candidates, the softmax without top-k, top-p or min-p.

    Args:
        logits: `[B, f, V]` adjusted logits.

    Returns:
        `[B, f, V]` at the row's temperature, or at temperature 1 for greedy rows.
    """
    temperature = state.settings.sampling.temperature[:, None, None]
    return vocabulary.softmax(apply_temperature(logits, jnp.where(temperature == 0, 1, temperature), vocabulary))
