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
    """Recursive rejection of children drawn without replacement, at most `topk` of a node. Exact.

    `q[n]` is what node n's children were drawn from, in ascending order; a leaf's row is not read. At each node in
    turn a child x is accepted with probability min(1, p(x)/q(x)). After a rejection p becomes norm(max(p - q, 0)) and
    q becomes norm(q without x); what is left of p when no child is left gives the next token (Jeon et al., 2402.14160;
    Sequoia, 2402.12374).

    A child without probability in what is left of q was not drawn: the tree had a place for it anyway. It counts as
    the only candidate of a draft of its own, so it is accepted with probability p(x) and p loses it otherwise: at
    temperature 0, where q is one-hot, this is `follow`. Exact as long as such a child is a function of what was drawn
    before it.

    Reads two rows of [V] per child tried, of which there are at most num_steps * topk.
    """
    children = _children_table(parents, topk)
    depths = jnp.arange(num_steps + 1)
    whole, one = _whole(p[0, 0]), jnp.ones_like(p[0, 0])

    def turned_down(node, rank):
        return jnp.where(jnp.arange(topk) < rank, tokens[children[node, :topk]], -1)

    def shares(node, rank, left):
        token = tokens[children[node, rank]]
        return _shares(left, p[node, token], q[node, token])

    def visit(_, carry):
        # The next child's shares come with the carry: worked out in two places, they could differ by their rounding.
        node, rank, count, path, left, (mine, its, is_drawn) = carry
        n = children[node, rank]
        is_tried = (n > 0) & (count < num_steps)
        is_accepted = is_tried & (u[n] * its < mine)
        less, _ = _less(left, one, is_drawn, turned_down(node, rank + 1), p[node], q[node])
        left = jax.tree.map(
            lambda new, less, left: jnp.where(is_accepted, new, jnp.where(is_tried, less, left)), whole, less, left
        )
        path = jnp.where(is_accepted & (depths > count), n, path)
        rank = jnp.where(is_accepted, 0, rank + is_tried)
        node = jnp.where(is_accepted, n, node)
        return node, rank, count + is_accepted, path, left, shares(node, rank, left)

    root = jnp.zeros_like(parents[0])
    path = jnp.zeros_like(parents, shape=num_steps + 1)
    carry = (root, root, root, path, whole, shares(root, root, whole))
    most = min(num_steps * topk, len(parents) - 1)
    node, rank, count, path, left, _ = jax.lax.fori_loop(0, most, visit, carry)
    return Walk(path, count, _left_of_p(left, turned_down(node, rank), p[node], q[node]))


def traversal_tree(
    tokens: jax.Array, p: jax.Array, q: jax.Array, u: jax.Array, *, parents: tuple[int, ...], num_steps: int
) -> Walk:
    """Traversal verification of children drawn without replacement, from leaf to root (2505.12398). Exact.

    Down a path w_0 = 1 and w = min(1, w p(x)/q(x)), as in `block_chain`. The leaf of the first path is accepted, and
    the path with it, with probability w. Otherwise the leaf goes, and at its parent p becomes norm(max(w p - q, 0)), q
    becomes norm(q without x) and w becomes r / (r + 1 - w), r the sum of max(w p - q, 0); then the next path, a parent
    without children being a leaf. On a chain this is `block_chain`.

    A child without probability in what is left of q is treated as in `recursive_tree`, its q being one-hot: it has w
    p(x), and otherwise p loses it. Exact under the same condition: on average over x a node's part in the text is w p,
    of which min(q, w p) comes through the child and r norm(max(w p - q, 0)) remains, whatever the next child's q.

    What becomes of a node depends on its own w and its children's tokens, not on what is below them. So w goes down
    the tree level by level, all nodes of a level at once, and of the nodes with u < w the first in post-order is it.
    That takes as many steps as the widest families of the levels have children, and reads two rows of [V] per child.
    The shape is static: it may not depend on what was drawn anyway.
    """
    children: list[list[int]] = [
        [n for n, parent in enumerate(parents) if parent == node] for node in range(len(parents))
    ]
    ways = [[0]]
    for node in range(1, len(parents)):
        ways.append([*ways[parents[node]], node])
    assert max(map(len, ways)) <= num_steps + 1
    left, w = _whole(p[:, 0]), jnp.ones_like(p[:, 0])
    for depth, rank in itertools.product(range(num_steps), range(max(map(len, children)))):
        family = [node for node in range(len(parents)) if len(ways[node]) == depth + 1 and len(children[node]) > rank]
        if not family:
            continue
        above, below = np.array(family), np.array([children[node][rank] for node in family])
        gone = tokens[np.array([children[node][: rank + 1] for node in family])]
        here = jax.tree.map(lambda factor, above=above: factor[above], left)
        mine, its, is_drawn = _shares(here, p[above, tokens[below]], q[above, tokens[below]])
        w = w.at[below].set(jnp.minimum(w[above] * (mine / its), 1))
        here, r = jax.vmap(_less)(here, w[above], is_drawn, gone, p[above], q[above])
        left = jax.tree.map(lambda factor, new, above=above: factor.at[above].set(new), left, here)
        w = w.at[above].set(_narrowed(w[above], r))
    order = np.array(_post_order(children))
    node = jnp.asarray(order)[jnp.argmax((u < w)[order])]  # the root's w is 1
    path = np.array([way + way[-1:] * (num_steps + 1 - len(way)) for way in ways], np.int32)
    widest = max(map(len, children))
    places = np.array([family + [0] * (widest - len(family)) for family in children], np.int32).reshape(-1, widest)
    gone = jnp.where(jnp.asarray(places > 0)[node], tokens[jnp.asarray(places)[node]], -1)
    weights = _left_of_p(jax.tree.map(lambda factor: factor[node], left), gone, p[node], q[node])
    count = np.array([len(way) - 1 for way in ways], np.int32)
    return Walk(jnp.asarray(path)[node], jnp.asarray(count)[node], weights)


class _Left(NamedTuple):
    """What the children turned down so far leave of a node's p and q, as factors of its own rows.

    Off these children's tokens max(a p - b q, 0) and c q are left, at them nothing: a child with w p(x) >= q(x) is not
    turned down. As max(w max(a p - b q, 0) - c q, 0) = max(w a p - (w b + c) q, 0), rows are read and never written.
    """

    a: jax.Array
    b: jax.Array
    c: jax.Array


def _whole(like: jax.Array) -> _Left:
    return _Left(jnp.ones_like(like), jnp.zeros_like(like), jnp.ones_like(like))


def _shares(left: _Left, mine: jax.Array, its: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What is left of p and q at a child's token, from the rows' own values there, and whether q has any of it.

    Where it has none the child is the only candidate: its share is 1.
    """
    least = jnp.finfo(its.dtype).tiny
    share = left.c * its
    return jnp.maximum(left.a * mine - left.b * its, 0), jnp.where(share >= least, share, 1), share >= least


def _less(left: _Left, w, is_drawn, gone: jax.Array, p: jax.Array, q: jax.Array) -> tuple[_Left, jax.Array]:
    """What one more child leaves, the last in `gone [C]`, and r: the sum of max(w p - q, 0)."""
    a, b = w * left.a, w * left.b + jnp.where(is_drawn, left.c, 0)
    is_gone = _is_gone(gone, p)
    r = jnp.where(is_gone, 0, jnp.maximum(a * p - b * q, 0)).sum()
    # A sum below its terms' rounding is nothing. Then p itself, with a chance of that size; so a stays below 1 / eps.
    is_left = r > a * jnp.finfo(p.dtype).eps
    scale = jnp.where(is_left, r, 1)
    return _Left(jnp.where(is_left, a / scale, 1), jnp.where(is_left, b / scale, 0), _scale_of(q, is_gone)), r


def _left_of_p(left: _Left, gone: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    return residual(jnp.where(_is_gone(gone, p), 0, left.a * p), left.b * q, p)


def _scale_of(q: jax.Array, is_gone: jax.Array) -> jax.Array:
    """What makes q without the tokens gone a distribution; 0 where nothing of it is left."""
    total = jnp.where(is_gone, 0, q).sum()
    least = jnp.finfo(q.dtype).tiny
    return jnp.where(total >= least, 1 / jnp.maximum(total, least), 0)


def _narrowed(w: jax.Array, r: jax.Array) -> jax.Array:
    """w of a node that has lost a child."""
    return jnp.where(w >= 1, 1, r / jnp.where(w >= 1, 1, r + 1 - w))


def _is_gone(gone: jax.Array, row: jax.Array) -> jax.Array:
    """`[V]`: whether a token is among `gone [C]`. Few comparisons, which fuse into what reads the row."""
    tokens = jnp.arange(len(row))
    is_gone = jnp.zeros(len(row), bool)
    for place in range(len(gone)):
        is_gone |= tokens == gone[place]
    return is_gone


def _children_table(parents: jax.Array, topk: int) -> jax.Array:
    """`[W, topk + 1]`: each node's children in ascending order, 0 behind them."""
    order = jnp.arange(len(parents), dtype=parents.dtype)
    is_elder = (parents[:, None] == parents[None, :]) & (order[None, :] < order[:, None])
    rows = jnp.where(parents >= 0, parents, len(parents))
    table = jnp.zeros_like(parents, shape=(len(parents), topk)).at[rows, is_elder.sum(axis=1)].set(order, mode="drop")
    return jnp.pad(table, ((0, 0), (0, 1)))


def _post_order(children: list[list[int]], node: int = 0) -> list[int]:
    return [n for child in children[node] for n in _post_order(children, child)] + [node]
