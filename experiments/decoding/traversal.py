"""Compares how many drafts traversal verification (2505.12398) and recursive rejection accept, by exact enumeration.

Traversal verification tries a tree's paths from leaf to root. With w along a path as in block verification, a leaf and
its whole path are accepted with probability w. Otherwise the leaf is removed. Then its parent's p becomes norm(max(w p
- q, 0)), the parent's q loses the leaf, the parent's w becomes r / (r + 1 - w) with r the sum of max(w p - q, 0), and
the next path is tried.

    python -m experiments.decoding.traversal
"""

import itertools

import numpy as np

ROOT, CERTAIN = np.zeros(1, np.int64), np.ones(1)  # the empty prefix, reached with w = 1

SHAPES = {  # children of each node, level by level
    "1,1": (1, 1),  # chains: block verification compared with token by token
    "1,1,1": (1, 1, 1),
    "2,1": (2, 1),
    "2,2": (2, 2),
    "3,1": (3, 1),
    "3,2": (3, 2),
    "3,3": (3, 3),
    "1,2": (1, 2),
    "2,1,1": (2, 1, 1),
    "2,2,1": (2, 2, 1),
    "3,1,1": (3, 1, 1),
    "2,2,2": (2, 2, 2),
}


class Pair:
    """Tables `[V^level, V]` over V tokens for a target, and for a drafter that mixes noise into the target."""

    def __init__(self, rng, *, V, depth, alpha, mixing):
        self.V = V
        self.p = [rng.dirichlet(np.full(V, alpha), V**level) for level in range(depth + 1)]
        self.q = [(1 - mixing) * p + mixing * rng.dirichlet(np.full(V, alpha), len(p)) for p in self.p]


def overlap(pair):
    return np.mean([np.minimum(p, q).sum(axis=-1).mean() for p, q in zip(pair.p[:-1], pair.q[:-1], strict=True)])


def remove(q, token):
    q = q.copy()
    q[np.arange(len(q)), token] = 0
    total = q.sum(axis=-1, keepdims=True)
    return q / np.where(total > 0, total, 1)


def rest_of(weights, fallback):
    total = weights.sum(axis=-1, keepdims=True)
    return np.where(total > 0, weights / np.where(total > 0, total, 1), fallback)


def arrangements(q, num_children):
    """Returns the ordered draws `[A, k]` without replacement from `q [N, V]`, and their probabilities `[N, A]`."""
    V = q.shape[1]
    tokens = np.array(list(itertools.permutations(range(V), num_children)))
    prob, left = np.ones((len(q), len(tokens))), np.ones((len(q), len(tokens)))
    for k in range(num_children):
        own = q[:, tokens[:, k]]
        prob *= own / left
        left = np.maximum(left - own, 1e-300)
    return tokens, prob


def by_recursion(pair, shape, level=0):
    """Returns the expected number of accepted drafts below each prefix of this level, `[V^level]`."""
    V, p, q = pair.V, pair.p[level], pair.q[level]
    if level == len(shape):
        return np.zeros(len(p))
    below = by_recursion(pair, shape, level + 1).reshape(-1, V)
    tokens, prob = arrangements(q, shape[level])
    expected = np.zeros(len(p))
    for prefix in range(len(p)):
        N = len(tokens)
        target, draft = np.repeat(p[prefix][None], N, 0), np.repeat(q[prefix][None], N, 0)
        arriving = prob[prefix].copy()
        for k in range(shape[level]):
            x = tokens[:, k]
            mine, its = target[np.arange(N), x], draft[np.arange(N), x]
            accepted = np.minimum(1, mine / np.maximum(its, 1e-300))
            expected[prefix] += (arriving * accepted * (1 + below[prefix, x])).sum()
            arriving *= 1 - accepted
            target = rest_of(np.maximum(target - draft, 0), p[prefix])
            draft = remove(draft, x)
    return expected


def by_traversal(pair, shape, prefix=ROOT, w=CERTAIN, level=0):
    """Returns the probability that a path through each node `prefix [N]` is accepted, and its expected depth.

    The nodes are reached with `w [N]`. Both results are averaged over the drafts below the node. The depth counts from
    the node and is weighted by the probability. Removing a child changes its parent only through the child's token, so
    the drafts below different children may be summed one child at a time.
    """
    V = pair.V
    if level == len(shape):
        return w, np.zeros_like(w)
    p, q = pair.p[level][prefix], pair.q[level][prefix]
    tokens, prob = arrangements(q, shape[level])
    N, A = prob.shape
    tokens = np.broadcast_to(tokens, (N, *tokens.shape)).reshape(N * A, -1)
    target, draft = (np.repeat(table, A, axis=0) for table in (p, q))
    own, start, arriving = np.repeat(w, A), np.repeat(prefix, A), prob.reshape(-1).copy()
    chance, depth = np.zeros(N * A), np.zeros(N * A)
    everyone = np.arange(N * A)
    for k in range(shape[level]):
        x = tokens[:, k]
        ratio = target[everyone, x] / np.maximum(draft[everyone, x], 1e-300)
        found, deeper = by_traversal(pair, shape, start * V + x, np.minimum(1, own * ratio), level + 1)
        chance += arriving * found
        depth += arriving * (found + deeper)
        arriving = arriving * (1 - found)
        rest = np.maximum(own[:, None] * target - draft, 0)
        r = rest.sum(axis=-1)
        target = rest_of(rest, target)
        draft = remove(draft, x)
        own = np.where(own >= 1, 1, r / np.maximum(r + 1 - own, 1e-300))
    chance += arriving * own  # with no child left, the node itself is a leaf
    return chance.reshape(N, A).sum(axis=1), depth.reshape(N, A).sum(axis=1)


def text_law(pair, shape):
    """Returns the text's distribution under traversal verification, summed draft by draft, to check the sums above."""
    V, p, q = pair.V, pair.p, pair.q
    parents, levels = [-1], [0]
    for level, width in enumerate(shape):
        for node in [n for n, at in enumerate(levels) if at == level]:
            parents += [node] * width
            levels += [level + 1] * width
    W, S = len(parents), len(shape)
    children = [[c for c in range(W) if parents[c] == n] for n in range(W)]
    order = []

    def visit(node):
        for child in children[node]:
            visit(child)
        order.append(node)

    visit(0)
    law = np.zeros(V ** (S + 1))
    expected = 0.0
    for drawn in itertools.product(range(V), repeat=W - 1):
        token, code, prob = (0, *drawn), [0] * W, 1.0
        for n in range(1, W):
            code[n] = code[parents[n]] * V + token[n]
            row = q[levels[n] - 1][code[parents[n]]].copy()
            row[[token[m] for m in children[parents[n]] if m < n]] = 0
            prob *= row[token[n]] / row.sum() if row.sum() > 0 else 0
        if not prob:
            continue
        target = [p[levels[n]][code[n]] for n in range(W)]
        draft = [q[levels[n]][code[n]] for n in range(W)]
        w, arriving = [1.0] + [np.nan] * (W - 1), prob
        for n in order:
            fresh = [n]  # nodes that are on a path for the first time
            while np.isnan(w[fresh[-1]]):
                fresh.append(parents[fresh[-1]])
            for above, m in itertools.pairwise(reversed(fresh)):
                w[m] = min(1.0, w[above] * target[above][token[m]] / draft[above][token[m]])
            mass = arriving * w[n]  # w of the root stays 1
            expected += mass * levels[n]
            part = (mass * target[n])[None, :]
            tail = np.zeros((V ** levels[n], V))
            tail[code[n]] = part
            for level in range(levels[n] + 1, S + 1):
                tail = tail.reshape(-1, 1) * p[level]
            law += tail.reshape(-1)
            arriving *= 1 - w[n]
            if n:
                up = parents[n]
                rest = np.maximum(w[up] * target[up] - draft[up], 0)
                r = rest.sum()
                target[up] = rest / r if r > 0 else target[up]
                draft[up] = remove(draft[up][None], np.array([token[n]]))[0]
                w[up] = 1.0 if w[up] >= 1 else r / max(r + 1 - w[up], 1e-300)
    return law, expected


def target_law(pair):
    law = np.ones((1, 1))
    for table in pair.p:
        law = law.reshape(-1, 1) * table
    return law.reshape(-1)


def check():
    rng = np.random.default_rng(0)
    for shape in ((2,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 2)):
        for _ in range(3):
            pair = Pair(rng, V=3, depth=len(shape), alpha=0.7, mixing=0.6)
            law, expected = text_law(pair, shape)
            error = np.abs(law - target_law(pair)).max()
            gap = expected - by_traversal(pair, shape)[1][0]
            assert error < 1e-12 and abs(gap) < 1e-12, (shape, error, gap)


def main():
    check()
    print("law and bookkeeping checked, tree by tree")
    rng = np.random.default_rng(1)
    print(f"{'shape':8} {'mixing':>6} {'overlap':>8} {'recursive':>9} {'traversal':>9} {'gain':>7} {'text':>7}")
    gains = {}
    for name, shape in SHAPES.items():
        V, pairs = (8, 8) if len(shape) == 2 else (6, 3)
        if shape == (2, 2, 2):
            V = 5
        for mixing in (0.2, 0.4, 0.6):
            rows = []
            for _ in range(pairs):
                pair = Pair(rng, V=V, depth=len(shape), alpha=0.4, mixing=mixing)
                rows.append((overlap(pair), by_recursion(pair, shape)[0], by_traversal(pair, shape)[1][0]))
            near, base, new = np.mean(rows, axis=0)
            gain, text = 100 * (new / base - 1), 100 * ((1 + new) / (1 + base) - 1)
            kind = f"{'chains' if max(shape) == 1 else 'trees'} of depth {len(shape)}"
            gains.setdefault(kind, []).append((gain, text))
            print(f"{name:8} {mixing:6.1f} {near:8.3f} {base:9.4f} {new:9.4f} {gain:6.2f}% {text:6.2f}%", flush=True)
    for kind, rows in gains.items():
        gain, text = np.mean(rows, axis=0)
        print(f"{kind}: {gain:.2f} % more accepted drafts, {text:.2f} % more tokens per round, on average")


if __name__ == "__main__":
    main()
