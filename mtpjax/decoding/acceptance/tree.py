"""Exact acceptance rules for trees whose children are drawn without replacement from q."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.acceptance.walk import AcceptedPath, residual
from mtpjax.decoding.draft_tree import TreeShape
from mtpjax.models.vocabulary import WHOLE, Vocabulary


def recursive_tree(
    tokens: jax.Array,
    parents: jax.Array,
    p: jax.Array,
    q: jax.Array,
    u: jax.Array,
    *,
    num_steps: int,
    tree: TreeShape,
    vocabulary: Vocabulary = WHOLE,
) -> AcceptedPath:
    """Walks the tree by recursive rejection sampling without replacement. Exact.

    At each node the rule tries the children in ascending order and accepts child x with probability min(1, p(x)/q(x)).
    After a rejection p becomes norm(max(p - q, 0)) and q becomes norm(q without x). If it rejects every child of a
    node, the bonus token comes from what remains of p (Jeon et al., 2402.14160; Sequoia, 2402.12374).

    The tree's shape is fixed, so q may have no probability left for a child, which then was not drawn. The rule tests
    such a child as a draft with a one-hot q: it accepts x with probability p(x), and removes x from p after a
    rejection. At temperature 0, where every q is one-hot, the walk follows the arg-max. The rule stays exact if such a
    child depends only on the children drawn before it.

    The rule reads two rows of [V] for each child that it tries, and tries at most num_steps * topk children.
    """
    topk = tree.topk
    # The walk's state consists of the current node, the rank of its next child, the accepted drafts, and what remains
    # of the node's p and q after earlier rejections.
    children = _children_table(parents, topk)
    depths = jnp.arange(num_steps + 1)
    full, one = _full_remainder(p[0, 0]), jnp.ones_like(p[0, 0])

    def rejected_children(node, rank):
        return jnp.where(jnp.arange(topk) < rank, tokens[children[node, :topk]], -1)

    def remaining_at(node, rank, remainder):
        token = tokens[children[node, rank]]
        return _remaining_at(remainder, *(vocabulary.at(rows, node, token) for rows in (p, q)))

    def visit(_, carry):
        # 1. Test the next child. The carry contains the child's remaining p and q, because XLA could round them
        # differently if they were computed in two places.
        node, rank, num_accepted, path, remainder, (p_x, q_x, is_drawn) = carry
        n = children[node, rank]
        is_tried = (n > 0) & (num_accepted < num_steps)
        is_accepted = is_tried & (u[n] * q_x < p_x)
        # 2. After a rejection p and q lose this child. After an acceptance the walk continues at the child, whose p
        # and q are complete.
        after_rejection, _ = _reject_child(
            remainder, one, is_drawn, rejected_children(node, rank + 1), p[node], q[node], vocabulary
        )
        remainder = jax.tree.map(
            lambda new, reduced, old: jnp.where(is_accepted, new, jnp.where(is_tried, reduced, old)),
            full,
            after_rejection,
            remainder,
        )
        # 3. Move down to an accepted child, or on to the next sibling. The path's tail repeats its newest node.
        path = jnp.where(is_accepted & (depths > num_accepted), n, path)
        rank = jnp.where(is_accepted, 0, rank + is_tried.astype(jnp.int32))
        node = jnp.where(is_accepted, n, node)
        return (
            node,
            rank,
            num_accepted + is_accepted.astype(jnp.int32),
            path,
            remainder,
            remaining_at(node, rank, remainder),
        )

    root = jnp.zeros_like(parents[0])
    path = jnp.zeros_like(parents, shape=num_steps + 1)
    carry = (root, root, root, path, full, remaining_at(root, root, full))
    # Every visit tests a new child, which bounds the number of visits. Visits after the end of the walk change nothing.
    max_visits = min(num_steps * topk, len(parents) - 1)
    node, rank, num_accepted, path, remainder, _ = jax.lax.fori_loop(0, max_visits, visit, carry)
    # The bonus token comes from what remains of p after the rejections at the last node.
    weights = _remaining_p(remainder, rejected_children(node, rank), p[node], q[node], vocabulary)
    return AcceptedPath(path, num_accepted, weights)


def traversal_tree(
    tokens: jax.Array,
    parents: jax.Array | None,
    p: jax.Array,
    q: jax.Array,
    u: jax.Array,
    *,
    num_steps: int,
    tree: TreeShape,
    vocabulary: Vocabulary = WHOLE,
) -> AcceptedPath:
    """Walks the tree by traversal verification, from the leaves to the root (2505.12398). Exact.

    Along a path w_0 = 1 and w = min(1, w p(x)/q(x)), as in `block_chain`. The rule tries leaves in post-order. It
    accepts a leaf, together with its path, with probability w, and removes a rejected leaf. At the parent of a removed
    leaf p becomes norm(max(w p - q, 0)), q becomes norm(q without x) and w becomes r / (r + 1 - w), where r is the sum
    of max(w p - q, 0). A parent that has lost all its children becomes a leaf. On a chain this is `block_chain`.

    A child for which q has no probability left gets a one-hot q, as in `recursive_tree`. The rule stays exact under the
    same condition. Averaged over x, a node contributes w p to the text: min(q, w p) through the child, and r norm(max(w
    p - q, 0)) otherwise, whatever q the next child has.

    A node's acceptance depends on its own w and on its children's tokens, not on anything below them. So w is computed
    for all nodes of a level at once, and the accepted node is the first in post-order with u < w. The number of
    sequential steps for a level is the largest number of children that any of its nodes has; each step reads two rows
    of [V] per child. The parents come from the static `tree`, because the rule is exact only if they do not depend on
    the drawn tokens.
    """
    # The static layout consists of the children of each node and the path from the root to the node.
    nodes, paths = range(len(tree.parents)), [[0]]
    children = [tree.children(node) for node in nodes]
    for node in nodes[1:]:
        paths.append([*paths[tree.parents[node]], node])
    assert max(map(len, paths)) <= num_steps + 1
    # Compute w from the root down, level by level. Within a level, process all first children, then all second
    # children, and so on. All nodes of a level that have a child of this rank are processed together.
    remainder, w = _full_remainder(p[:, 0]), jnp.ones_like(p[:, 0])
    for depth, rank in itertools.product(range(num_steps), range(max(map(len, children)))):
        level_parents = [node for node in nodes if len(paths[node]) == depth + 1 and len(children[node]) > rank]
        if not level_parents:
            continue
        parent_nodes, child_nodes = np.array(level_parents), np.array([children[node][rank] for node in level_parents])
        rejected_tokens = tokens[np.array([children[node][: rank + 1] for node in level_parents])]
        level_remainder = jax.tree.map(lambda factor, parent_nodes=parent_nodes: factor[parent_nodes], remainder)
        # Compute the child's w from what remains of the parent's p and q after its earlier siblings were rejected.
        p_x, q_x, is_drawn = _remaining_at(
            level_remainder, *(vocabulary.at(rows, parent_nodes, tokens[child_nodes]) for rows in (p, q))
        )
        w = w.at[child_nodes].set(jnp.minimum(w[parent_nodes] * (p_x / q_x), 1))
        # Compute the parent's p, q and w if this child is rejected too. They are used to test the next child or the
        # parent.
        level_remainder, r = jax.vmap(functools.partial(_reject_child, vocabulary=vocabulary))(
            level_remainder, w[parent_nodes], is_drawn, rejected_tokens, p[parent_nodes], q[parent_nodes]
        )
        remainder = jax.tree.map(
            lambda factor, new, parent_nodes=parent_nodes: factor.at[parent_nodes].set(new), remainder, level_remainder
        )
        w = w.at[parent_nodes].set(_w_after_rejection(w[parent_nodes], r))
    # Accept the first node in post-order whose uniform is below its w. The root always passes.
    order = np.array(_post_order(children))
    node = jnp.asarray(order)[jnp.argmax((u < w)[order])]  # the root's w is 1
    path_table = np.array(
        [path_of_node + path_of_node[-1:] * (num_steps + 1 - len(path_of_node)) for path_of_node in paths], np.int32
    )
    # The accepted node comes after its children in post-order, so all of them were rejected, and the bonus token comes
    # from what remains of the node's p.
    max_children = max(map(len, children))
    child_table = np.array(
        [siblings + [0] * (max_children - len(siblings)) for siblings in children], np.int32
    ).reshape(-1, max_children)
    rejected_tokens = jnp.where(jnp.asarray(child_table > 0)[node], tokens[jnp.asarray(child_table)[node]], -1)
    weights = _remaining_p(
        jax.tree.map(lambda factor: factor[node], remainder), rejected_tokens, p[node], q[node], vocabulary
    )
    num_accepted = np.array([len(path_of_node) - 1 for path_of_node in paths], np.int32)
    return AcceptedPath(jnp.asarray(path_table)[node], jnp.asarray(num_accepted)[node], weights)


class _Remainder(NamedTuple):
    """The remainder of a node's p and q after some of its children were rejected, as factors of the node's rows.

    Nothing remains at the rejected children's tokens, since a child with w p(x) >= q(x) is never rejected. Elsewhere,
    max(a p - b q, 0) remains of p and c q remains of q. Since max(w max(a p - b q, 0) - c q, 0) = max(w a p - (w b + c)
    q, 0), each rejection changes only the factors, so rows of [V] are read but never written.
    """

    a: jax.Array  # [] or one per node
    b: jax.Array
    c: jax.Array


def _full_remainder(like: jax.Array) -> _Remainder:
    """Returns the factors of a node before any child is rejected."""
    return _Remainder(jnp.ones_like(like), jnp.zeros_like(like), jnp.ones_like(like))


def _remaining_at(remainder: _Remainder, p_x: jax.Array, q_x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what remains of p and q at a child's token, given their values there, and whether the child was drawn.

    A child that was not drawn has a one-hot q, which is 1 at its token.
    """
    # A q below the smallest normal number counts as 0, so the token cannot have been drawn from it.
    tiny = jnp.finfo(q_x.dtype).tiny
    remaining_q = remainder.c * q_x
    return (
        jnp.maximum(remainder.a * p_x - remainder.b * q_x, 0),
        jnp.where(remaining_q >= tiny, remaining_q, 1),
        remaining_q >= tiny,
    )


def _reject_child(
    remainder: _Remainder, w, is_drawn, rejected_tokens: jax.Array, p: jax.Array, q: jax.Array, vocabulary: Vocabulary
) -> tuple[_Remainder, jax.Array]:
    """Rejects a child, the last of `rejected_tokens [C]`. Returns the factors and r, the mass of max(w p - q, 0)."""
    # The one-hot q of a child that was not drawn covers only its own token, which `is_rejected` removes. So b does not
    # change.
    a, b = w * remainder.a, w * remainder.b + jnp.where(is_drawn, remainder.c, 0)
    is_rejected = _is_rejected(rejected_tokens, p, vocabulary)
    r = vocabulary.sum(jnp.where(is_rejected, 0, jnp.maximum(a * p - b * q, 0)))
    # A sum below the rounding error of its terms counts as 0, and p is used instead. The probability of this case is
    # equally small. The floor also keeps the factor a below 1 / eps.
    has_mass = r > a * jnp.finfo(p.dtype).eps
    scale = jnp.where(has_mass, r, 1)
    return _Remainder(
        jnp.where(has_mass, a / scale, 1), jnp.where(has_mass, b / scale, 0), _normaliser(q, is_rejected, vocabulary)
    ), r


def _remaining_p(
    remainder: _Remainder, rejected_tokens: jax.Array, p: jax.Array, q: jax.Array, vocabulary: Vocabulary
) -> jax.Array:
    """Returns what remains of p after the children `rejected_tokens [C]` were rejected, `[V]` and unnormalised."""
    is_rejected = _is_rejected(rejected_tokens, p, vocabulary)
    return residual(jnp.where(is_rejected, 0, remainder.a * p), remainder.b * q, p, vocabulary)


def _normaliser(q: jax.Array, is_rejected: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Returns the factor that normalises q without the removed tokens; 0 if nothing is left."""
    total = vocabulary.sum(jnp.where(is_rejected, 0, q))
    tiny = jnp.finfo(q.dtype).tiny
    return jnp.where(total >= tiny, 1 / jnp.maximum(total, tiny), 0)


def _w_after_rejection(w: jax.Array, r: jax.Array) -> jax.Array:
    """Returns the new w of a node after the rejection of a child."""
    return jnp.where(w >= 1, 1, r / jnp.where(w >= 1, 1, r + 1 - w))


def _is_rejected(rejected_tokens: jax.Array, row: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Returns `[V]` bool, True for the tokens in `rejected_tokens [C]`."""
    # Use C comparisons instead of a scatter, because they fuse into the operation that reads the row.
    tokens = vocabulary.ids(len(row))
    is_rejected = jnp.zeros(len(row), bool)
    for index in range(len(rejected_tokens)):
        is_rejected |= tokens == rejected_tokens[index]
    return is_rejected


def _children_table(parents: jax.Array, topk: int) -> jax.Array:
    """Returns a table `[W, topk + 1]` of each node's children in ascending order, padded with zeros."""
    order = jnp.arange(len(parents), dtype=parents.dtype)
    # A node's rank among its siblings is the number of earlier nodes with the same parent.
    is_elder_sibling = (parents[:, None] == parents[None, :]) & (order[None, :] < order[:, None])
    # The root and unused nodes belong to no row, so their index is out of range and the scatter drops it.
    rows = jnp.where(parents >= 0, parents, len(parents))
    table = (
        jnp.zeros_like(parents, shape=(len(parents), topk))
        .at[rows, is_elder_sibling.sum(axis=1)]
        .set(order, mode="drop")
    )
    return jnp.pad(table, ((0, 0), (0, 1)))


def _post_order(children: list[list[int]], node: int = 0) -> list[int]:
    """Lists `node` and the nodes below it in post-order, with children before parents."""
    return [n for child in children[node] for n in _post_order(children, child)] + [node]
