"""Acceptance rules: pure arithmetic on arrays, one row at a time (the loop maps them over the batch).

A round's drafts are a tree of W nodes: node 0 is the root, the pending token; `tokens [W]`, `parents [W]` (-1 for the
root and for a place that holds no node), parents before children, siblings tried in ascending order. `p [W, V]` is the
target's distribution after each node, `q` what was drafted from. A chain of K drafts has `p [K+1, V]` and `q [K, V]`:
rows j of both are what draft j+1 is judged by.

A rule decides which drafts are accepted and what the next token is drawn from. Noise `u`, uniform in [0, 1), enters in
comparisons with acceptance probabilities and nowhere else: probability 1 always accepts, probability 0 never.

Exact rules give the text the target's law. `follow` is exact however the tree came about. The ratio rules
(`token_chain`, `block_chain`, `recursive_tree`) need q as it was drawn from, and every draft they were given a q for:
whether a node is verified may not depend on what was drawn there. With p = (0.7, 0.3), q = (0.5, 0.5) and the second
token's drafts dropped, the first token comes with probability 0.85.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

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
    tokens: jax.Array, parents: jax.Array, p: jax.Array, q: jax.Array, u: jax.Array, *, num_steps: int
) -> Walk:
    """Recursive rejection of children drawn without replacement. Exact.

    `q[n]` is what node n's children were drawn from, in ascending order; a leaf's row is not read. At each node in
    turn a child x is accepted with probability min(1, p(x)/q(x)). After a rejection p becomes norm(max(p - q, 0)) and
    q becomes norm(q without x); what is left of p when no child is left gives the next token (Jeon et al., 2402.14160;
    Sequoia, 2402.12374).

    A child without probability in what is left of q was not drawn: the tree had a place for it anyway. It counts as
    the only candidate of a draft of its own, so it is accepted with probability p(x) and p loses it otherwise: at
    temperature 0, where q is one-hot, this is `follow`. Exact as long as such a child is a function of what was drawn
    before it.
    """
    V = p.shape[1]
    depths = jnp.arange(num_steps + 1)

    def visit(n, carry):
        node, count, path, target, draft = carry  # what is left of p[node] and q[node]
        token = tokens[n]
        only = jax.nn.one_hot(token, V, dtype=draft.dtype)
        proposed = jnp.where(draft[token] > 0, draft, only)
        is_tried = (parents[n] == node) & (count < num_steps)
        is_accepted = is_tried & (u[n] * proposed[token] < target[token])
        rest = _normalised(_residual(target, proposed, p[node]))
        target = jnp.where(is_accepted, p[n], jnp.where(is_tried, rest, target))
        draft = jnp.where(is_accepted, q[n], jnp.where(is_tried, _without(draft, token), draft))
        path = jnp.where(is_accepted & (depths > count), n, path)
        return jnp.where(is_accepted, n, node), count + is_accepted, path, target, draft

    start = jnp.zeros_like(parents[0])
    carry = (start, start, jnp.zeros_like(parents, shape=num_steps + 1), p[0], q[0])
    _, count, path, target, _ = jax.lax.fori_loop(1, len(parents), visit, carry)
    return Walk(path, count, target)


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


def _without(q: jax.Array, token: jax.Array) -> jax.Array:
    """What the next child is drawn from once `token` is drawn; all zero where nothing is left."""
    return _normalised(q.at[token].set(0))


def _normalised(weights: jax.Array) -> jax.Array:
    total = weights.sum()
    return weights / jnp.where(total > 0, total, 1)
