"""Exact acceptance rules for trees whose children are drawn without replacement from q."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.acceptance.walk import Walk, residual


def recursive_tree(
    tokens: jax.Array, parents: jax.Array, p: jax.Array, q: jax.Array, u: jax.Array, *, num_steps: int, topk: int
) -> Walk:
    """Walks the tree by recursive rejection sampling without replacement. Exact.

    At each node the rule tries the children in ascending order and accepts child x with probability min(1, p(x)/q(x)).
    After a rejection p becomes norm(max(p - q, 0)) and q becomes norm(q without x). When it has rejected every child of
    a node, the bonus token comes from what remains of p (Jeon et al., 2402.14160; Sequoia, 2402.12374).

    The tree's shape is fixed, so a node can have a child for which q has no probability left: nothing was drawn for it.
    The rule tests such a child as a draft with a one-hot q: it accepts x with probability p(x), and after a rejection p
    loses x. At temperature 0, where every q is one-hot, this follows the arg-max. The rule stays exact as long as such
    a child is a function of the children drawn before it.

    Cost: it reads two rows of [V] per child tried, for at most num_steps * topk children.

    Args:
        tokens: `[W]` token of each node; node 0 is the root, the last committed token.
        parents: `[W]` parent of each node, -1 for unused nodes.
        p: `[W, V]` target distribution after each node.
        q: `[W, V]` distribution that each node's children were drawn from; rows of leaves are not read.
        u: `[W]` uniforms, one per node.
        num_steps: depth of the tree, K.
        topk: most children of a node.

    Returns:
        The accepted path, its length, and the bonus token's weights.
    """
    # The walk's state: the current node, the rank of its next child, the accepted drafts, and what earlier rejections
    # left of the node's p and q.
    children = _children_table(parents, topk)
    depths = jnp.arange(num_steps + 1)
    whole, one = _whole(p[0, 0]), jnp.ones_like(p[0, 0])

    def rejected_children(node, rank):
        return jnp.where(jnp.arange(topk) < rank, tokens[children[node, :topk]], -1)

    def shares(node, rank, left):
        token = tokens[children[node, rank]]
        return _shares(left, p[node, token], q[node, token])

    def visit(_, carry):
        # 1. Test the next child. The carry holds its remaining p and q: computed in two places, XLA could round them
        # differently.
        node, rank, count, path, left, (mine, its, is_drawn) = carry
        n = children[node, rank]
        is_tried = (n > 0) & (count < num_steps)
        is_accepted = is_tried & (u[n] * its < mine)
        # 2. After a rejection p and q lose this child. After an acceptance the walk continues at the child, whose own p
        # and q are complete.
        less, _ = _less(left, one, is_drawn, rejected_children(node, rank + 1), p[node], q[node])
        left = jax.tree.map(
            lambda new, less, left: jnp.where(is_accepted, new, jnp.where(is_tried, less, left)), whole, less, left
        )
        # 3. Move down to an accepted child, or on to the next sibling. The path's tail repeats its newest node.
        path = jnp.where(is_accepted & (depths > count), n, path)
        rank = jnp.where(is_accepted, 0, rank + is_tried)
        node = jnp.where(is_accepted, n, node)
        return node, rank, count + is_accepted, path, left, shares(node, rank, left)

    root = jnp.zeros_like(parents[0])
    path = jnp.zeros_like(parents, shape=num_steps + 1)
    carry = (root, root, root, path, whole, shares(root, root, whole))
    # Every visit tests another child, which bounds the visits of a walk. The visits behind its end change nothing.
    most = min(num_steps * topk, len(parents) - 1)
    node, rank, count, path, left, _ = jax.lax.fori_loop(0, most, visit, carry)
    # The bonus token comes from what the rejections at the last node left of p.
    return Walk(path, count, _left_of_p(left, rejected_children(node, rank), p[node], q[node]))


def traversal_tree(
    tokens: jax.Array, p: jax.Array, q: jax.Array, u: jax.Array, *, parents: tuple[int, ...], num_steps: int
) -> Walk:
    """Walks the tree by traversal verification, from the leaves to the root (2505.12398). Exact.

    Along a path w_0 = 1 and w = min(1, w p(x)/q(x)), as in `block_chain`. The rule tries leaves in post-order: it
    accepts a leaf, together with its path, with probability w, and removes a rejected one. At the parent of a removed
    leaf p becomes norm(max(w p - q, 0)), q becomes norm(q without x) and w becomes r / (r + 1 - w), where r is the sum
    of max(w p - q, 0). A parent that has lost all its children is a leaf. On a chain this is `block_chain`.

    A child for which q has no probability left gets a one-hot q, as in `recursive_tree`. The rule stays exact under the
    same condition: averaged over x, a node contributes w p to the text; min(q, w p) of it goes through the child and
    r norm(max(w p - q, 0)) remains, whatever q the next child has.

    A node's acceptance depends on its own w and on its children's tokens, not on anything below them. So w is computed
    for all nodes of a level at once, and the accepted node is the first in post-order with u < w. The number of
    sequential steps is the sum over levels of the most children that a node has there; each reads two rows of [V] per
    child. The tree's shape is static: an exact rule requires that it does not depend on the drawn tokens.

    Args:
        tokens: `[W]` token of each node; node 0 is the root, the last committed token.
        p: `[W, V]` target distribution after each node.
        q: `[W, V]` distribution that each node's children were drawn from; rows of leaves are not read.
        u: `[W]` uniforms, one per node.
        parents: parent of each node, static; -1 for the root.
        num_steps: depth of the tree, K.

    Returns:
        The accepted path, its length, and the bonus token's weights.
    """
    # Static layout of the tree: the children of each node and the path from the root to it.
    children: list[list[int]] = [
        [n for n, parent in enumerate(parents) if parent == node] for node in range(len(parents))
    ]
    ways = [[0]]
    for node in range(1, len(parents)):
        ways.append([*ways[parents[node]], node])
    assert max(map(len, ways)) <= num_steps + 1
    # Compute w from the root down: level by level, and within a level first children, then second ones, and so on. All
    # nodes of a level that have a child of this rank advance together.
    left, w = _whole(p[:, 0]), jnp.ones_like(p[:, 0])
    for depth, rank in itertools.product(range(num_steps), range(max(map(len, children)))):
        family = [node for node in range(len(parents)) if len(ways[node]) == depth + 1 and len(children[node]) > rank]
        if not family:
            continue
        above, below = np.array(family), np.array([children[node][rank] for node in family])
        gone = tokens[np.array([children[node][: rank + 1] for node in family])]
        here = jax.tree.map(lambda factor, above=above: factor[above], left)
        # The child's w, from what the rejections of its earlier siblings left of the parent's p and q.
        mine, its, is_drawn = _shares(here, p[above, tokens[below]], q[above, tokens[below]])
        w = w.at[below].set(jnp.minimum(w[above] * (mine / its), 1))
        # The parent's p, q and w if this child is rejected too. They decide about the next child, or about the parent.
        here, r = jax.vmap(_less)(here, w[above], is_drawn, gone, p[above], q[above])
        left = jax.tree.map(lambda factor, new, above=above: factor.at[above].set(new), left, here)
        w = w.at[above].set(_reduced_w(w[above], r))
    # Accept the first node in post-order whose uniform is below its w. The root always passes.
    order = np.array(_post_order(children))
    node = jnp.asarray(order)[jnp.argmax((u < w)[order])]  # the root's w is 1
    path = np.array([way + way[-1:] * (num_steps + 1 - len(way)) for way in ways], np.int32)
    # That node comes after its children in post-order, so all of them were rejected: the bonus token comes from what
    # they left of its p.
    widest = max(map(len, children))
    places = np.array([family + [0] * (widest - len(family)) for family in children], np.int32).reshape(-1, widest)
    gone = jnp.where(jnp.asarray(places > 0)[node], tokens[jnp.asarray(places)[node]], -1)
    weights = _left_of_p(jax.tree.map(lambda factor: factor[node], left), gone, p[node], q[node])
    count = np.array([len(way) - 1 for way in ways], np.int32)
    return Walk(jnp.asarray(path)[node], jnp.asarray(count)[node], weights)


class _Left(NamedTuple):
    """The remainder of a node's p and q after rejections of some children, as factors of the node's own rows.

    Nothing remains at the rejected children's tokens, since a child with w p(x) >= q(x) is never rejected. Elsewhere
    max(a p - b q, 0) remains of p, and c q of q. Since max(w max(a p - b q, 0) - c q, 0) = max(w a p - (w b + c) q, 0),
    another rejection changes only the factors: rows of [V] are read and never written.
    """

    a: jax.Array  # [] or one per node
    b: jax.Array
    c: jax.Array


def _whole(like: jax.Array) -> _Left:
    """Returns the factors of a node without rejected children."""
    return _Left(jnp.ones_like(like), jnp.zeros_like(like), jnp.ones_like(like))


def _shares(left: _Left, mine: jax.Array, its: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what remains of p and of q at a child's token, given the rows' values there, and if the child was drawn.

    A child that was not drawn has a one-hot q, so 1 stands for its q.
    """
    # Below the smallest normal number q has no probability left, so the token cannot have been drawn from it.
    least = jnp.finfo(its.dtype).tiny
    share = left.c * its
    return jnp.maximum(left.a * mine - left.b * its, 0), jnp.where(share >= least, share, 1), share >= least


def _less(left: _Left, w, is_drawn, gone: jax.Array, p: jax.Array, q: jax.Array) -> tuple[_Left, jax.Array]:
    """Rejects one more child, the last one in `gone [C]`. Returns the factors and r, the sum of max(w p - q, 0)."""
    # The one-hot q of a child that was not drawn covers only its own token. `is_gone` removes it, so b does not grow.
    a, b = w * left.a, w * left.b + jnp.where(is_drawn, left.c, 0)
    is_gone = _is_gone(gone, p)
    r = jnp.where(is_gone, 0, jnp.maximum(a * p - b * q, 0)).sum()
    # A sum below the rounding error of its terms counts as 0, and p itself replaces it. The probability of this case is
    # of the same size. The floor also keeps the factor a below 1 / eps.
    is_left = r > a * jnp.finfo(p.dtype).eps
    scale = jnp.where(is_left, r, 1)
    return _Left(jnp.where(is_left, a / scale, 1), jnp.where(is_left, b / scale, 0), _scale_of(q, is_gone)), r


def _left_of_p(left: _Left, gone: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """Returns the unnormalised `[V]` that remains of p after the children `gone [C]` were rejected."""
    return residual(jnp.where(_is_gone(gone, p), 0, left.a * p), left.b * q, p)


def _scale_of(q: jax.Array, is_gone: jax.Array) -> jax.Array:
    """Returns the factor that normalises q without the removed tokens; 0 if nothing is left."""
    total = jnp.where(is_gone, 0, q).sum()
    least = jnp.finfo(q.dtype).tiny
    return jnp.where(total >= least, 1 / jnp.maximum(total, least), 0)


def _reduced_w(w: jax.Array, r: jax.Array) -> jax.Array:
    """Returns the new w of a node after the rejection of a child."""
    return jnp.where(w >= 1, 1, r / jnp.where(w >= 1, 1, r + 1 - w))


def _is_gone(gone: jax.Array, row: jax.Array) -> jax.Array:
    """Returns `[V]` bool: the token is among `gone [C]`."""
    # C comparisons instead of a scatter: they fuse into the operation that reads the row.
    tokens = jnp.arange(len(row))
    is_gone = jnp.zeros(len(row), bool)
    for place in range(len(gone)):
        is_gone |= tokens == gone[place]
    return is_gone


def _children_table(parents: jax.Array, topk: int) -> jax.Array:
    """Returns `[W, topk + 1]`: each node's children in ascending order, then zeros."""
    order = jnp.arange(len(parents), dtype=parents.dtype)
    # A node's rank among its siblings is the number of earlier nodes with the same parent.
    is_elder_sibling = (parents[:, None] == parents[None, :]) & (order[None, :] < order[:, None])
    # The root and unused nodes have no row: their index is out of range, and the scatter drops it.
    rows = jnp.where(parents >= 0, parents, len(parents))
    table = (
        jnp.zeros_like(parents, shape=(len(parents), topk))
        .at[rows, is_elder_sibling.sum(axis=1)]
        .set(order, mode="drop")
    )
    return jnp.pad(table, ((0, 0), (0, 1)))


def _post_order(children: list[list[int]], node: int = 0) -> list[int]:
    """Lists the nodes below `node`, children before parents, and then `node` itself."""
    return [n for child in children[node] for n in _post_order(children, child)] + [node]
