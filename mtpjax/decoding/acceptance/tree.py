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

    At each node the children are tried in ascending order. Child x is accepted with probability min(1, p(x)/q(x)).
    After a rejection p becomes norm(max(p - q, 0)) and q becomes norm(q without x). When every child of a node is
    rejected, the rest of p gives the bonus token (Jeon et al., 2402.14160; Sequoia, 2402.12374).

    The tree's shape is fixed, so a node can hold a child that has no probability left in q: nothing was drawn for it.
    Such a child is tested as a draft with a one-hot q: it is accepted with probability p(x), and after a rejection p
    loses x. At temperature 0, where every q is one-hot, this follows the arg-max. The rule stays exact as long as such
    a child is a function of the children drawn before it.

    Cost: two rows of [V] per child tried, for at most num_steps * topk children.

    Args:
        tokens: `[W]` token of each node; node 0 is the root, the last committed token.
        parents: `[W]` parent of each node, -1 for unused nodes.
        p: `[W, V]` target distribution after each node.
        q: `[W, V]` distribution that each node's children were drawn from; rows of leaves are not read.
        u: `[W]` uniforms, one per node.
        num_steps: most nodes on a path, K.
        topk: most children of a node.

    Returns:
        The accepted path, its length, and the bonus token's weights.
    """
    children = _children_table(parents, topk)
    depths = jnp.arange(num_steps + 1)
    whole, one = _whole(p[0, 0]), jnp.ones_like(p[0, 0])

    def rejected_children(node, rank):
        return jnp.where(jnp.arange(topk) < rank, tokens[children[node, :topk]], -1)

    def shares(node, rank, left):
        token = tokens[children[node, rank]]
        return _shares(left, p[node, token], q[node, token])

    def visit(_, carry):
        # 1. Test the next child. Its shares of p and q come with the carry: computed in two places, XLA could round
        # them differently.
        node, rank, count, path, left, (mine, its, is_drawn) = carry
        n = children[node, rank]
        is_tried = (n > 0) & (count < num_steps)
        is_accepted = is_tried & (u[n] * its < mine)
        # 2. After a rejection p and q lose this child; after an acceptance the walk starts afresh at the child.
        less, _ = _less(left, one, is_drawn, rejected_children(node, rank + 1), p[node], q[node])
        left = jax.tree.map(
            lambda new, less, left: jnp.where(is_accepted, new, jnp.where(is_tried, less, left)), whole, less, left
        )
        # 3. Entries of the path behind the newest node repeat it.
        path = jnp.where(is_accepted & (depths > count), n, path)
        rank = jnp.where(is_accepted, 0, rank + is_tried)
        node = jnp.where(is_accepted, n, node)
        return node, rank, count + is_accepted, path, left, shares(node, rank, left)

    root = jnp.zeros_like(parents[0])
    path = jnp.zeros_like(parents, shape=num_steps + 1)
    carry = (root, root, root, path, whole, shares(root, root, whole))
    # Every visit rejects one child or goes one level down, so this many visits reach the end of every walk.
    most = min(num_steps * topk, len(parents) - 1)
    node, rank, count, path, left, _ = jax.lax.fori_loop(0, most, visit, carry)
    return Walk(path, count, _left_of_p(left, rejected_children(node, rank), p[node], q[node]))


def traversal_tree(
    tokens: jax.Array, p: jax.Array, q: jax.Array, u: jax.Array, *, parents: tuple[int, ...], num_steps: int
) -> Walk:
    """Walks the tree by traversal verification, from the leaves to the root (2505.12398). Exact.

    Along a path w_0 = 1 and w = min(1, w p(x)/q(x)), as in `block_chain`. Leaves are tried in post-order: a leaf is
    accepted, together with its path, with probability w. A rejected leaf is removed. At its parent p becomes
    norm(max(w p - q, 0)), q becomes norm(q without x) and w becomes r / (r + 1 - w), where r is the sum of
    max(w p - q, 0). A parent that has lost all its children is a leaf. On a chain this is `block_chain`.

    A child without probability left in q is treated as in `recursive_tree`, with a one-hot q. The rule stays exact
    under the same condition: averaged over x, a node contributes w p to the text; min(q, w p) of it goes through the
    child and r norm(max(w p - q, 0)) remains, whatever q the next child has.

    A node's fate depends on its own w and on its children's tokens, not on anything below them. So w is computed level
    by level for all nodes of a level at once, and the accepted node is the first in post-order with u < w. This takes
    as many steps as the largest families of the levels have children, and reads two rows of [V] per child. The tree's
    shape is static: an exact rule requires that it does not depend on the drawn tokens.

    Args:
        tokens: `[W]` token of each node; node 0 is the root, the last committed token.
        p: `[W, V]` target distribution after each node.
        q: `[W, V]` distribution that each node's children were drawn from; rows of leaves are not read.
        u: `[W]` uniforms, one per node.
        parents: parent of each node, static; -1 for the root.
        num_steps: most nodes on a path, K.

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
    # Go down level by level, and at each level through the children of all its nodes: first children, second ones, ...
    left, w = _whole(p[:, 0]), jnp.ones_like(p[:, 0])
    for depth, rank in itertools.product(range(num_steps), range(max(map(len, children)))):
        family = [node for node in range(len(parents)) if len(ways[node]) == depth + 1 and len(children[node]) > rank]
        if not family:
            continue
        above, below = np.array(family), np.array([children[node][rank] for node in family])
        gone = tokens[np.array([children[node][: rank + 1] for node in family])]
        here = jax.tree.map(lambda factor, above=above: factor[above], left)
        # The child's w, from what its elder siblings' rejections left of the parent's p and q.
        mine, its, is_drawn = _shares(here, p[above, tokens[below]], q[above, tokens[below]])
        w = w.at[below].set(jnp.minimum(w[above] * (mine / its), 1))
        # What is left at the parent if this child is rejected too.
        here, r = jax.vmap(_less)(here, w[above], is_drawn, gone, p[above], q[above])
        left = jax.tree.map(lambda factor, new, above=above: factor.at[above].set(new), left, here)
        w = w.at[above].set(_reduced_w(w[above], r))
    # Accept the first node in post-order that passes its coin.
    order = np.array(_post_order(children))
    node = jnp.asarray(order)[jnp.argmax((u < w)[order])]  # the root's w is 1
    path = np.array([way + way[-1:] * (num_steps + 1 - len(way)) for way in ways], np.int32)
    # The bonus token comes from the rest of p after all of that node's children were rejected.
    widest = max(map(len, children))
    places = np.array([family + [0] * (widest - len(family)) for family in children], np.int32).reshape(-1, widest)
    gone = jnp.where(jnp.asarray(places > 0)[node], tokens[jnp.asarray(places)[node]], -1)
    weights = _left_of_p(jax.tree.map(lambda factor: factor[node], left), gone, p[node], q[node])
    count = np.array([len(way) - 1 for way in ways], np.int32)
    return Walk(jnp.asarray(path)[node], jnp.asarray(count)[node], weights)


class _Left(NamedTuple):
    """The rest of a node's p and q after some of its children were rejected, as factors of the node's own rows.

    At the rejected children's tokens nothing is left, since a child with w p(x) >= q(x) is never rejected. Elsewhere
    the rest is max(a p - b q, 0) and c q. Since max(w max(a p - b q, 0) - c q, 0) = max(w a p - (w b + c) q, 0),
    another rejection changes only the factors: rows of [V] are read and never written.
    """

    a: jax.Array  # [] or one per node
    b: jax.Array
    c: jax.Array


def _whole(like: jax.Array) -> _Left:
    return _Left(jnp.ones_like(like), jnp.zeros_like(like), jnp.ones_like(like))


def _shares(left: _Left, mine: jax.Array, its: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the rest of p and of q at a child's token, given the rows' values there, and if the child was drawn.

    A child that was not drawn has a one-hot q, so its share of q is 1.
    """
    least = jnp.finfo(its.dtype).tiny
    share = left.c * its
    return jnp.maximum(left.a * mine - left.b * its, 0), jnp.where(share >= least, share, 1), share >= least


def _less(left: _Left, w, is_drawn, gone: jax.Array, p: jax.Array, q: jax.Array) -> tuple[_Left, jax.Array]:
    """Returns the rest after one more rejection, of the last child in `gone [C]`, and r, the sum of max(w p - q, 0)."""
    a, b = w * left.a, w * left.b + jnp.where(is_drawn, left.c, 0)
    is_gone = _is_gone(gone, p)
    r = jnp.where(is_gone, 0, jnp.maximum(a * p - b * q, 0)).sum()
    # A sum below the rounding error of its terms counts as 0, and p itself takes its place. The chance of reaching this
    # case is of the same size, and the factor a stays below 1 / eps.
    is_left = r > a * jnp.finfo(p.dtype).eps
    scale = jnp.where(is_left, r, 1)
    return _Left(jnp.where(is_left, a / scale, 1), jnp.where(is_left, b / scale, 0), _scale_of(q, is_gone)), r


def _left_of_p(left: _Left, gone: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
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
    is_elder_sibling = (parents[:, None] == parents[None, :]) & (order[None, :] < order[:, None])
    rows = jnp.where(parents >= 0, parents, len(parents))
    table = (
        jnp.zeros_like(parents, shape=(len(parents), topk))
        .at[rows, is_elder_sibling.sum(axis=1)]
        .set(order, mode="drop")
    )
    return jnp.pad(table, ((0, 0), (0, 1)))


def _post_order(children: list[list[int]], node: int = 0) -> list[int]:
    return [n for child in children[node] for n in _post_order(children, child)] + [node]
