"""Acceptance rules: pure arithmetic on arrays, one row at a time (the loop maps them over the batch).

A round's drafts are a tree of W nodes: node 0 is the root, the pending token; `tokens [W]`, `parents [W]` (-1 for the
root and for a place that holds no node), parents before children, siblings tried in ascending order. `p [W, V]` is the
target's distribution after each node, `q` what was drafted from. A chain of K drafts has `p [K+1, V]` and `q [K, V]`:
rows j of both are what draft j+1 is judged by.

A rule decides which drafts are accepted and what the next token is drawn from. Noise `u`, uniform in [0, 1), enters in
comparisons with acceptance probabilities and nowhere else: probability 1 always accepts, probability 0 never.

Exact rules give the text the target's law. `follow` is exact however the tree came about. The ratio rules
(`token_chain`, `block_chain`, `recursive_tree`, `traversal_tree`) need q as it was drawn from, and every draft they
were given a q for: whether a node is verified may not depend on what was drawn there. With p = (0.7, 0.3), q = (0.5,
0.5) and the second token's drafts dropped, the first token comes with probability 0.85.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LEAST_THRESHOLD = 1e-9  # SGLang's, for `threshold_acc`


class Walk(NamedTuple):
    """What a rule made of one row's tree of depth S."""

    path: jax.Array  # [S+1] node at each depth of the accepted path; behind `count` the last one repeated
    count: jax.Array  # [] accepted drafts
    weights: jax.Array  # [V] what the next token is drawn from, not normalised


def accept_greedy(drafts: jax.Array, choices: jax.Array) -> jax.Array:
    """Accepted drafts per row, `[B]`: the longest prefix of `drafts [B, K]` equal to the trunk's `choices [B, K+1]`.

    Choice j is the trunk's arg-max after drafts 1..j, so choices 0..n are the n accepted drafts and the bonus token.
    Exact for greedy decoding.
    """
    matches = drafts == choices[:, : drafts.shape[1]]
    return jnp.cumprod(matches, axis=1).sum(axis=1).astype(jnp.int32)


def follow(tokens: jax.Array, parents: jax.Array, choices: jax.Array, *, num_steps: int) -> tuple[jax.Array, jax.Array]:
    """Path and count of the walk that goes where `choices [W]` point: the next token is `choices[path[-1]]`.

    Exact for any tree, however chosen: the text is the choices along the path. With the arg-max after each node this is
    greedy verification (SpecInfer, 2305.09781), with a draw from `p[n]` sample-and-match.
    """
    return _descend(tokens == choices[parents], parents, num_steps)


def token_chain(drafts: jax.Array, p: jax.Array, q: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Accepted drafts and the next token's weights by rejection, token by token. Exact.

    Draft x from q is accepted with probability min(1, p(x)/q(x)); after the first rejection the next token comes from
    max(p - q, 0), after none from p (Leviathan et al., 2211.17192, algorithm 1; Chen et al., 2302.01318, algorithm 2).
    """
    K = drafts.shape[0]
    place = jnp.arange(K)
    is_accepted = u * q[place, drafts] < p[place, drafts]
    count = jnp.cumprod(is_accepted).sum().astype(jnp.int32)
    proposed = jnp.pad(q, ((0, 1), (0, 0)))[count]  # nothing after the last draft
    return count, _residual(p[count], proposed, p[count])


def block_chain(drafts: jax.Array, p: jax.Array, q: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Accepted drafts and the next token's weights by rejection of the block as a whole. Exact.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i)/q(x_i)), the first i drafts pass with probability h_i = r_i / (r_i + 1
    - w_i), r_i the sum of max(w_i p - q, 0) after them; h_K = w_K. The longest run that passes is accepted; the next
    token comes from max(w p - q, 0), after all K from p (Sun et al., 2403.10444). In
    expectation never fewer drafts than `token_chain`.
    """
    K = drafts.shape[0]
    place = jnp.arange(K)
    ratios = p[place, drafts] / jnp.maximum(q[place, drafts], jnp.finfo(q.dtype).tiny)

    def narrow(w, ratio):
        w = jnp.minimum(w * ratio, 1)
        return w, w

    _, w = jax.lax.scan(narrow, jnp.ones_like(p[0, 0]), ratios, unroll=True)
    w = jnp.concatenate([jnp.ones_like(p[0, :1]), w])  # [K+1]
    proposed = jnp.pad(q, ((0, 1), (0, 0)))
    r = jnp.maximum(w[:, None] * p - proposed, 0).sum(axis=-1)  # [K+1]
    passes = (w[1:] >= 1) | (u * (r[1:] + 1 - w[1:]) < r[1:])  # without proposals r_K = w_K, so the last passes by w_K
    count = jnp.max(jnp.where(passes, place + 1, 0), initial=0).astype(jnp.int32)
    return count, _residual(w[count] * p[count], proposed[count], p[count])


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


def threshold_tree(
    tokens: jax.Array, parents: jax.Array, p: jax.Array, u: jax.Array, *, single: float, acc: float, num_steps: int
) -> Walk:
    """SGLang's thresholds (sgl-kernel's TreeSpeculativeSamplingTargetOnly). Exact with both at 1, lossy below.

    One coin `u[n]` per node that the walk stands on. Child x is accepted if the coin is at most the probability of the
    children tried so far, x included, divided by `acc`, or if p(x) alone is at least `single`. Rejected children are
    left out of the draw of the next token, with acc < 1 too.
    """
    mass = p[parents, tokens]  # the root's own is never looked at
    order = jnp.arange(len(parents))
    is_tried = (parents[:, None] == parents[None, :]) & (order[:, None] >= order[None, :])
    tried = jnp.where(is_tried, mass[None, :], 0).sum(axis=1)
    # SGLang's comparison: a coin of exactly 0 accepts what has no probability, where the other rules' never does.
    passes = (u[parents] <= tried / jnp.maximum(acc, LEAST_THRESHOLD)) | (mass >= single)
    path, count = _descend(passes, parents, num_steps)
    last = path[-1]
    is_rejected = (parents == last) & (count < num_steps)
    # Where nothing is left by rounding SGLang gives the last id of the vocabulary; here p.
    rest = p[last].at[jnp.where(is_rejected, tokens, p.shape[1])].set(0, mode="drop")
    return Walk(path, count, jnp.where(rest.sum() > 0, rest, p[last]))


def typical_tree(
    tokens: jax.Array, parents: jax.Array, p: jax.Array, *, epsilon: float, delta: float, num_steps: int
) -> Walk:
    """Medusa's typical acceptance (2401.10774). Lossy.

    A draft x passes if p(x) > min(epsilon, delta exp(-H(p))), H the entropy in nats. Of the paths on which every draft
    passes the longest is accepted, among several the likeliest; the next token comes from p after it.
    """
    mass = p[parents, tokens]  # the root's own is never looked at
    least = jnp.minimum(epsilon, delta * jnp.exp(-jax.scipy.special.entr(p).sum(axis=-1)))
    own = jnp.where(mass > least[parents], jnp.log(mass), -jnp.inf)
    is_root = jnp.arange(len(parents)) == 0
    is_node = parents >= 0

    def deepen(_, carry):
        depth, score = carry
        return jnp.where(is_node, depth[parents] + 1, 0), jnp.where(is_node, score[parents] + own, score)

    carry = (jnp.zeros_like(parents), jnp.where(is_root, 0, -jnp.inf).astype(p.dtype))
    depth, score = jax.lax.fori_loop(0, num_steps, deepen, carry)
    depth = jnp.where(jnp.isfinite(score), depth, -1)
    count = depth.max()
    best = jnp.argmax(jnp.where(depth == count, score, -jnp.inf)).astype(parents.dtype)
    rising = [best]
    for _ in range(num_steps):
        rising.append(jnp.maximum(parents[rising[-1]], 0))
    path = jnp.stack(rising)[jnp.maximum(count - jnp.arange(num_steps + 1), 0)]
    return Walk(path, count, p[best])


def relaxed_tree(
    tokens: jax.Array, parents: jax.Array, p: jax.Array, *, topk: int, delta: float, num_steps: int
) -> Walk:
    """TensorRT-LLM's relaxed acceptance (`mtpRelaxedAcceptance`), from chains to trees. Lossy.

    A draft x passes if it is among the topk likeliest tokens (of equal ones the lower id) and p(x) >= max p - delta.
    The walk goes to the lowest-numbered child that passes; the next token comes from p after it. Unlike there, a token
    without probability never passes: it may be one that the request bans.
    """
    mass = p[parents, tokens]  # the root's own is never looked at
    rows = p[parents]
    is_ahead = (rows > mass[:, None]) | ((rows == mass[:, None]) & (jnp.arange(p.shape[1])[None, :] < tokens[:, None]))
    passes = (is_ahead.sum(axis=1) < topk) & (mass >= rows.max(axis=1) - delta) & (mass > 0)
    path, count = _descend(passes, parents, num_steps)
    return Walk(path, count, p[path[-1]])


def _descend(passes: jax.Array, parents: jax.Array, num_steps: int) -> tuple[jax.Array, jax.Array]:
    """Path `[S+1]` and count of the walk to the lowest-numbered child that `passes [W]`, until none does."""

    def step(node, _):
        is_next = passes & (parents == node)
        node = jnp.where(is_next.any(), jnp.argmax(is_next), node).astype(parents.dtype)
        return node, node

    root = jnp.zeros_like(parents[:1])
    _, nodes = jax.lax.scan(step, root[0], length=num_steps, unroll=True)
    path = jnp.concatenate([root, nodes])
    return path, (path[1:] != path[:-1]).sum().astype(jnp.int32)


def _residual(p: jax.Array, q: jax.Array, fallback: jax.Array) -> jax.Array:
    """max(p - q, 0), or `fallback` where rounding leaves nothing of it."""
    rest = jnp.maximum(p - q, 0)
    return jnp.where(rest.sum() > 0, rest, fallback)


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
    return _residual(jnp.where(_is_gone(gone, p), 0, left.a * p), left.b * q, p)


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
