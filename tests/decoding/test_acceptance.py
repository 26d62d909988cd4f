"""The rules by exact enumeration: the law of the text, what mutants do to it, and plain Python twins.

A target p(.|prefix) and a drafter q(.|prefix) are tables over a few tokens. The real functions run over all drafts,
each with the probability that it is drawn, and over all outcomes of the noise: a rule compares u[n] with one number,
found by bisection of the rule itself, so two values per node, just below it and just above, stand for all of [0, 1).
Uniforms are multiples of 2^-24, so these probabilities are exact. What a round leaves open is drawn from the target.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.decoding.acceptance import tree as tree_rules
from mtpjax.decoding.acceptance.chain import block_chain, token_chain
from mtpjax.decoding.acceptance.lossy import relaxed_tree, threshold_tree, typical_tree
from mtpjax.decoding.acceptance.tree import recursive_tree, traversal_tree
from mtpjax.decoding.acceptance.walk import AcceptedPath, match_tree
from mtpjax.decoding.draft_tree import TreeShape

UNIT = 2**24  # uniforms are multiples of 1/UNIT
MARGIN = 512  # of them: the same arithmetic in two programs differs by some roundings, the more the less is left of p
TOLERANCE = 2e-6  # of a probability: a few float32 roundings
CAUGHT = 1e-3  # a mutant moves some probability by more

CHAINS = {1: [-1, 0], 2: [-1, 0, 1], 3: [-1, 0, 1, 2]}
TREES = {
    "2": [-1, 0, 0],
    "3": [-1, 0, 0, 0],
    "2,1": [-1, 0, 0, 1, 2],
    "1,2": [-1, 0, 1, 1],
    "uneven": [-1, 0, 0, 1, 1, 2],
    "one branch goes on": [-1, 0, 0, 2, 2],
    "2,1,1 on one side": [-1, 0, 0, 1, 3],
}


def depths(parents):
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    return np.array(depth)


# Rules with the same arguments: (tokens, parents, p, q, u, shape) -> AcceptedPath; `parents` is in the static shape


def as_tree(rule):
    """A chain rule as a tree rule."""

    def run(tokens, parents, p, q, u, shape):
        count, weights = rule(tokens[1:], p, q[:-1], u[1:])
        return AcceptedPath(jnp.minimum(jnp.arange(len(shape)), count), count, weights)

    return run


token, block = as_tree(token_chain), as_tree(block_chain)


def recursive(tokens, parents, p, q, u, shape):
    return recursive_tree(tokens, parents, p, q, u, num_steps=int(depths(shape).max()), tree=TreeShape(tuple(shape)))


def traversal(tokens, parents, p, q, u, shape):
    return traversal_tree(tokens, parents, p, q, u, num_steps=int(depths(shape).max()), tree=TreeShape(tuple(shape)))


# Tables: p[level] and q[level] are [C, V^level, V] for C cases; a prefix is a number in base V


def dirichlet(rng, shape, V, alpha=0.7):
    return rng.dirichlet(np.full(V, alpha), shape)


def normalised(table):
    total = table.sum(axis=-1, keepdims=True)
    return np.where(total > 0, table / np.where(total > 0, total, 1), 1 / table.shape[-1]).astype(np.float32)


def one_hot(table):
    return np.eye(table.shape[-1], dtype=np.float32)[table.argmax(axis=-1)]


def closeness(p, other, kind, rng):
    V = p.shape[-1]
    half = rng.permuted(np.broadcast_to(np.arange(V), p.shape), axis=-1) < (V + 1) // 2
    return {
        "random": (p, other),
        "close": (p, 0.8 * p + 0.2 * other),
        "equal": (p, p),
        "disjoint": (p * half, other * ~half),
        "one-hot": (one_hot(p), one_hot(p + other)),
        "one-hot q": (p, one_hot(other)),
        "one-hot p": (one_hot(p), other),
        "zeros in p": (p * half, other),
        "zeros in q": (p, other * half),
        "zeros in both": (p * half, other * rng.permuted(half, axis=-1)),
    }[kind]


KINDS = (
    "random",
    "close",
    "equal",
    "disjoint",
    "one-hot",
    "one-hot q",
    "one-hot p",
    "zeros in p",
    "zeros in q",
    "zeros in both",
)


def make_tables(V, num_steps, kinds=KINDS, seed=0):
    rng = np.random.default_rng(seed)
    p, q = [], []
    for level in range(num_steps + 1):
        pairs = [closeness(dirichlet(rng, V**level, V), dirichlet(rng, V**level, V), kind, rng) for kind in kinds]
        p.append(np.stack([normalised(pair[0]) for pair in pairs]))
        q.append(np.stack([normalised(pair[1]) for pair in pairs]))
    return p, q[:-1]


# Enumeration


def draft_trees(parents, drawn, V):
    """All trees of this shape whose siblings differ: tokens and prefixes `[N, W]`, probabilities `[C, N]`.

    Siblings are drawn one by one from what is left of `drawn`; where nothing is left the lowest id comes.
    """
    depth = depths(parents)
    tokens = np.array([(0, *rest) for rest in itertools.product(range(V), repeat=len(parents) - 1)], np.int32)
    elders = [[m for m in range(1, n) if parents[m] == parents[n]] for n in range(len(parents))]
    for n in range(1, len(parents)):
        tokens = tokens[(tokens[:, elders[n]] != tokens[:, n : n + 1]).all(axis=1)]
    code = np.zeros_like(tokens)
    prob = np.ones((len(drawn[0]), len(tokens)))
    for n in range(1, len(parents)):
        prefix = code[:, parents[n]]
        code[:, n] = prefix * V + tokens[:, n]
        left = drawn[depth[n] - 1][:, prefix].astype(np.float64)  # [C, N, V]
        is_taken = (tokens[:, elders[n], None] == np.arange(V)).any(axis=1)  # [N, V]
        left = np.where(is_taken, 0, left)
        lowest = np.eye(V)[(~is_taken).argmax(axis=1)]
        total = left.sum(axis=-1, keepdims=True)
        left = np.where(total > 0, left / np.where(total > 0, total, 1), lowest)
        prob *= left[:, np.arange(len(tokens)), tokens[:, n]]
    return tokens, code, prob


def rows_of(tables, code, depth):
    """`[C, N, W, V]`: the table's row after each node; uniform behind the last level, where nothing was drawn."""
    C, V = tables[0].shape[0], tables[0].shape[-1]
    filler = np.full((C, *code.shape[:1], V), 1 / V, np.float32)
    return np.stack([tables[d][:, code[:, n]] if d < len(tables) else filler for n, d in enumerate(depth)], axis=2)


@functools.cache
def outcomes_of(rule, shape):
    """All outcomes of `rule`'s noise on trees of this shape, compiled: walks and thresholds for `[C, N]` trees."""
    W = len(shape)
    is_ancestor = np.zeros((W, W), bool)
    for n in range(1, W):
        is_ancestor[n] = is_ancestor[shape[n]]
        is_ancestor[n, shape[n]] = True
    is_accepted = np.array([(False, *bits) for bits in itertools.product([True, False], repeat=W - 1)])

    def run_one(tokens, parents, p, q):
        def run(u):
            return rule(tokens, parents, p, q, u.astype(jnp.float32) / UNIT, shape)

        def threshold(n, is_above):  # how many values of u[n] accept node n when the walk comes to it
            def halve(_, bounds):
                low, high = bounds
                middle = (low + high) // 2
                u = jnp.where(jnp.arange(W) == n, middle, jnp.where(is_above, 0, UNIT - 1))
                is_in = (run(u).path == n).any()
                return jnp.where(is_in, middle + 1, low), jnp.where(is_in, high, middle)

            low, _ = jax.lax.fori_loop(0, 25, halve, (jnp.int32(0), jnp.int32(UNIT)))
            return jnp.minimum(low, UNIT)

        accepting = jnp.concatenate([jnp.zeros(1, jnp.int32), jax.vmap(threshold)(jnp.arange(1, W), is_ancestor[1:])])
        u = jnp.where(is_accepted, accepting[None, :] - MARGIN, accepting[None, :] + MARGIN)
        return jax.vmap(run)(jnp.clip(u, 0, UNIT - 1)), accepting

    run_all = jax.jit(jax.vmap(jax.vmap(run_one, in_axes=(0, 0, 0, 0)), in_axes=(None, 0, 0, 0)))

    def outcomes(tokens, parents, p, q):
        walk, accepting = jax.tree.map(np.asarray, run_all(tokens, parents, p, q))
        chance = accepting[:, :, None, 1:] / UNIT
        return walk, np.where(is_accepted[:, 1:], chance, 1 - chance).prod(axis=-1)

    return outcomes


def text_law(p, code, depth, prob, walk):
    """Law of the first S+1 tokens `[C, V^(S+1)]`: the accepted path, the next token, then the target's own draws."""
    C, V, num_steps = p[0].shape[0], p[0].shape[-1], len(p) - 1
    is_possible = prob > 0
    case, tree = np.nonzero(is_possible)[:2]
    prob, walk = prob[is_possible], jax.tree.map(lambda array: array[is_possible], walk)
    assert np.isfinite(walk.weights).all() and (walk.weights >= 0).all()
    np.testing.assert_array_equal(depth[walk.path], np.minimum(np.arange(num_steps + 1), walk.num_accepted[:, None]))
    weights = walk.weights.astype(np.float64)
    mass = prob[:, None] * weights / weights.sum(axis=-1, keepdims=True)
    end = code[tree, walk.path[:, -1]]
    law = 0
    for count in range(num_steps + 1):
        part = np.zeros((C, V**count, V))
        at = walk.num_accepted == count
        np.add.at(part, (case[at], end[at]), mass[at])
        for level in range(count + 1, num_steps + 1):
            part = part.reshape(C, -1, 1) * p[level].astype(np.float64)
        law = law + part.reshape(C, -1)
    return law


def target_law(p):
    law = np.ones((p[0].shape[0], 1, 1))
    for table in p:
        law = law.reshape(len(law), -1, 1) * table.astype(np.float64)
    return law.reshape(len(law), -1)


def enumerate_rule(rule, shape, p, q, drawn=None, prune=None):
    """Largest error of the text's law and expected accepted drafts, both `[C]`.

    `drawn` are the tables that drafts really come from (q). `prune(tokens, code)` tells which nodes `[N, W]` are
    dropped before verification.
    """
    depth, V = depths(shape), p[0].shape[-1]
    tokens, code, prob = draft_trees(shape, drawn or q, V)
    parents = np.broadcast_to(np.array(shape, np.int32), (len(p[0]), *tokens.shape))
    if prune is not None:
        parents = np.where(prune(tokens, code), -1, parents)
    walk, chance = outcomes_of(rule, tuple(shape))(tokens, parents, rows_of(p, code, depth), rows_of(q, code, depth))
    prob = prob[:, :, None] * chance
    np.testing.assert_allclose(prob.sum(axis=(1, 2)), 1, atol=1e-9)
    law = text_law(p, code, depth, prob, walk)
    return np.abs(law - target_law(p)).max(axis=1), (prob * walk.num_accepted).sum(axis=(1, 2))


def enumerate_follow(shape, p, drawn, prune=None):
    """The same for `match_tree` with choices drawn from p: all drafts, all choices."""
    depth, V = depths(shape), p[0].shape[-1]
    tokens, code, prob = draft_trees(shape, drawn, V)
    parents = np.broadcast_to(np.array(shape, np.int32), tokens.shape)
    if prune is not None:
        parents = np.where(prune(tokens, code), -1, parents)
    choices = np.array(list(itertools.product(range(V), repeat=len(shape))), np.int32)
    run = functools.partial(match_tree, num_steps=int(depth.max()))
    path, count = jax.jit(jax.vmap(jax.vmap(run, in_axes=(None, None, 0)), in_axes=(0, 0, None)))(
        tokens, parents, choices
    )
    path, count = np.asarray(path), np.asarray(count)  # [N, P, S+1] and [N, P]
    rows = rows_of(p, code, depth).astype(np.float64)  # [C, N, W, V]
    for n in range(len(shape)):
        prob = (prob if n else prob[:, :, None]) * rows[:, :, n][:, :, choices[:, n]]
    last = np.take_along_axis(choices[None], path[:, :, -1:], axis=2)[:, :, 0]
    walk = AcceptedPath(path, count, np.eye(V)[last])
    walk = jax.tree.map(lambda array: np.broadcast_to(array, (len(prob), *array.shape)), walk)
    law = text_law(p, code, depth, prob, walk)
    return np.abs(law - target_law(p)).max(axis=1), (prob * walk.num_accepted).sum(axis=(1, 2))


# The target's law


@pytest.mark.parametrize("K", CHAINS)
@pytest.mark.parametrize("rule", [token, block, recursive, traversal], ids=lambda rule: rule.__name__)
def test_a_chain_has_the_targets_law(rule, K):
    error, _ = enumerate_rule(rule, CHAINS[K], *make_tables({1: 5, 2: 4, 3: 3}[K], K))
    assert error.max() < TOLERANCE, dict(zip(KINDS, error, strict=True))


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("rule", [recursive, traversal], ids=lambda rule: rule.__name__)
def test_a_tree_has_the_targets_law(rule, name):
    shape = TREES[name]
    V = 4 if len(shape) < 5 else 3
    error, _ = enumerate_rule(rule, shape, *make_tables(V, int(depths(shape).max())))
    assert error.max() < TOLERANCE, dict(zip(KINDS, error, strict=True))


@pytest.mark.parametrize("shape", [CHAINS[2], CHAINS[3], TREES["3"], TREES["2,1"], TREES["1,2"]], ids=str)
def test_following_draws_of_the_target_has_its_law(shape):
    p, q = make_tables(3, int(depths(shape).max()))
    error, _ = enumerate_follow(shape, p, q)
    assert error.max() < TOLERANCE, dict(zip(KINDS, error, strict=True))


# Pruning by what was drawn


def drop_unlikely(shape, q, least):
    """Drops nodes whose path has little probability under q's first case: what a tree ranked by value amounts to."""
    depth = depths(shape)

    def prune(tokens, code):
        value = np.ones(tokens.shape)
        for n in range(1, len(shape)):
            own = q[depth[n] - 1][0][code[:, shape[n]], tokens[:, n]]
            value[:, n] = value[:, shape[n]] * own
        return value < least

    return prune


@pytest.mark.parametrize("name", ["2", "2,1"])
def test_pruning_by_value_keeps_the_law_where_choices_are_followed_and_breaks_it_under_ratios(name):
    shape = TREES[name]
    p, q = make_tables(3, int(depths(shape).max()), kinds=["random"])
    prune = drop_unlikely(shape, q, 0.3)
    assert enumerate_follow(shape, p, q, prune)[0].max() < TOLERANCE
    assert enumerate_rule(recursive, shape, p, q, prune=prune)[0].max() > CAUGHT


def test_a_dropped_second_token_makes_the_first_come_with_085():
    p, q = jnp.array([[0.7, 0.3]] * 2), jnp.array([[0.5, 0.5]])

    def chance_of_first(count, weights):
        return jnp.where(count > 0, 0.0, weights[0] / weights.sum())

    # The first token drafted is verified and, as 0.5 < 0.7, always accepted; the second one is not even submitted.
    count, _ = token_chain(jnp.array([0]), p, q, jnp.array([1 - 1 / UNIT]))
    assert count == 1
    count, weights = token_chain(jnp.zeros(0, jnp.int32), p[:1], q[:0], jnp.zeros(0))
    np.testing.assert_allclose(0.5 + 0.5 * chance_of_first(count, weights), 0.85, atol=1e-7)
    # The same with the node left out of a tree: text A comes with 0.85, so the law of the text is wrong by 0.15 at A.
    tables = [np.array([[[0.7, 0.3]]], np.float32), np.array([[[1, 0], [1, 0]]], np.float32)]
    drafts = [np.array([[[0.5, 0.5]]], np.float32)]
    error, _ = enumerate_rule(recursive, [-1, 0], tables, drafts, prune=lambda tokens, code: tokens == 1)
    np.testing.assert_allclose(error, 0.15, atol=1e-6)


# Mutants


def resampled_from_p(rule):
    def run(*args):
        walk, p = rule(*args), args[2]
        return walk._replace(weights=p[walk.path[-1]])

    return run


def with_one_hot_q(rule, *, in_residual):
    """q forgotten: 1 at each draft, in the ratio alone or in the residual too. Chains."""

    def run(tokens, parents, p, q, u, shape):
        hot = jnp.eye(q.shape[1])[jnp.roll(tokens, -1)]
        walk = rule(tokens, parents, p, hot, u, shape)
        rest = jnp.maximum(p[walk.num_accepted] - q[walk.num_accepted], 0)
        weights = jnp.where((walk.num_accepted < len(shape) - 1) & (rest.sum() > 0), rest, p[walk.num_accepted])
        return walk if in_residual else walk._replace(weights=weights)

    return run


def below_09(rule):
    return lambda tokens, parents, p, q, u, shape: rule(tokens, parents, p, q, 0.9 * u, shape)


def same(rule):
    return rule


RULES = {
    "token": (token, CHAINS[2]),
    "block": (block, CHAINS[2]),
    "recursive": (recursive, TREES["2"]),
    "traversal": (traversal, TREES["2"]),
}
MUTANTS = {
    "resample from p": (resampled_from_p, None),
    "threshold 0.9": (below_09, None),
    "temperature 2 drawn, 1 given": (same, lambda table: normalised(np.sqrt(table))),
    "arg-max drawn, q given": (same, one_hot),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("rule", RULES)
def test_mutants_are_caught(rule, name):
    change, redraw = MUTANTS[name]
    function, shape = RULES[rule]
    p, q = make_tables(4, int(depths(shape).max()), kinds=["random", "close"])
    drawn = [redraw(table) for table in q] if redraw else q
    error, _ = enumerate_rule(change(function), shape, p, q, drawn=drawn)
    assert error.min() > CAUGHT, error


@pytest.mark.parametrize("rule", ["token", "block"])
def test_q_forgotten_is_caught_in_the_ratio_and_is_sample_and_match_everywhere(rule):
    """Judged as if it were certain, a draft is accepted with p(x) and taken out of p: exact however it was drawn."""
    function, shape = RULES[rule]
    p, q = make_tables(4, 2, kinds=["random", "close"])
    assert enumerate_rule(with_one_hot_q(function, in_residual=False), shape, p, q)[0].min() > CAUGHT
    assert enumerate_rule(with_one_hot_q(function, in_residual=True), shape, p, q)[0].max() < TOLERANCE


@pytest.mark.parametrize("rule", [recursive, traversal], ids=lambda rule: rule.__name__)
def test_children_without_replacement_need_q_without_what_was_drawn(rule, monkeypatch):
    monkeypatch.setattr(tree_rules, "_normaliser", lambda q, is_gone, vocabulary: jnp.ones_like(q[0]))
    p, q = make_tables(4, 1, kinds=["random", "close"])
    error, _ = enumerate_rule(lambda *args: rule(*args), TREES["3"], p, q)
    assert error.min() > CAUGHT, error


def test_a_node_that_lost_a_child_needs_another_w(monkeypatch):
    monkeypatch.setattr(tree_rules, "_w_after_rejection", lambda w, r: w)
    for shape in (CHAINS[2], TREES["1,2"]):
        p, q = make_tables(3, 2, kinds=["random", "close"])
        error, _ = enumerate_rule(lambda *args: traversal(*args), shape, p, q)
        assert error.min() > CAUGHT, error


# How much is accepted


def test_block_verification_never_accepts_fewer_than_token_by_token():
    for K, V in ((2, 4), (3, 3)):
        p, q = make_tables(V, K, kinds=["random", "close"] * 16 + ["zeros in p", "zeros in q"] * 4, seed=K)
        _, by_block = enumerate_rule(block, CHAINS[K], p, q)
        _, by_token = enumerate_rule(token, CHAINS[K], p, q)
        assert (by_block >= by_token - TOLERANCE).all()
        assert by_block.mean() > 1.005 * by_token.mean()


@pytest.mark.parametrize("rule, chain", [(recursive, token), (traversal, block)], ids=["recursive", "traversal"])
def test_a_tree_rule_is_a_chains_on_a_chain(rule, chain):
    rng = np.random.default_rng(0)
    count, K, V = 300, 5, 4
    p = dirichlet(rng, (count, K + 1), V).astype(np.float32)
    q = (0.7 * p + 0.3 * dirichlet(rng, p.shape[:2], V)).astype(np.float32)
    tokens = np.array([[rng.choice(V, p=row / row.sum()) for row in rows] for rows in np.roll(q, 1, 1)], np.int32)
    u = rng.random(tokens.shape, np.float32)
    parents = np.broadcast_to(np.arange(-1, K, dtype=np.int32), tokens.shape)
    walk, twin = (
        jax.jit(jax.vmap(functools.partial(rule, shape=tuple(range(-1, K)))))(tokens, parents, p, q, u)
        for rule in (rule, chain)
    )
    assert set(np.asarray(walk.num_accepted)) == set(range(K + 1))
    np.testing.assert_array_equal(walk.path, twin.path)
    np.testing.assert_array_equal(walk.num_accepted, twin.num_accepted)
    np.testing.assert_allclose(walk.weights, twin.weights / twin.weights.sum(axis=1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize("name", TREES)
def test_traversal_never_accepts_fewer_than_recursive_rejection(name):
    shape = TREES[name]
    V = 4 if len(shape) < 5 else 3
    tables = make_tables(V, int(depths(shape).max()))  # as above: nothing new is compiled
    _, by_path = enumerate_rule(traversal, shape, *tables)
    _, by_node = enumerate_rule(recursive, shape, *tables)
    assert (by_path >= by_node - TOLERANCE).all()
    assert depths(shape).max() == 1 or (by_path - by_node).max() > 1e-4


@pytest.mark.parametrize("name", ["2", "2,1"])
def test_recursive_rejection_accepts_more_than_following(name):
    shape = TREES[name]
    p, q = make_tables(3, int(depths(shape).max()), kinds=["random", "close"] * 8, seed=1)
    _, by_ratio = enumerate_rule(recursive, shape, p, q)
    _, by_match = enumerate_follow(shape, p, q)
    assert by_ratio.mean() > 1.02 * by_match.mean()


@pytest.mark.parametrize("rule", [token, block, recursive, traversal], ids=lambda rule: rule.__name__)
def test_one_draft_is_accepted_as_often_as_p_and_q_overlap(rule):
    p, q = make_tables(5, 1)
    _, accepted = enumerate_rule(rule, CHAINS[1], p, q)
    distance = np.abs(p[0].astype(np.float64) - q[0]).sum(axis=(1, 2)) / 2
    np.testing.assert_allclose(accepted, 1 - distance, atol=TOLERANCE)


# Random trees, and temperature 0


def random_trees(count, W, V, num_steps, seed=0, alpha=0.3):
    """Trees of varying shape whose siblings differ, places without a node among them, with rows p and coins u."""
    rng = np.random.default_rng(seed)
    tokens, parents = np.zeros((count, W), np.int32), np.full((count, W), -1, np.int32)
    for row in range(count):
        depth, taken = {0: 0}, set()
        for n in range(1, W):
            above = int(rng.choice([m for m in depth if depth[m] < num_steps]))
            token = int(rng.integers(V))
            if (above, token) in taken:
                continue  # no node here
            taken.add((above, token))
            depth[n] = depth[above] + 1
            tokens[row, n], parents[row, n] = token, above
    p = dirichlet(rng, (count, W), V, alpha).astype(np.float32)
    u = (rng.integers(UNIT, size=(count, W)) / UNIT).astype(np.float32)
    return tokens, parents, p, u


def test_at_temperature_0_every_rule_follows_the_target():
    rng = np.random.default_rng(0)
    num_rows, K, V = 200, 4, 3
    p, q = (np.eye(V, dtype=np.float32)[rng.integers(V, size=(num_rows, K + 1))] for _ in range(2))
    tokens = np.concatenate([np.zeros((num_rows, 1), np.int32), q[:, :-1].argmax(axis=-1)], axis=1).astype(np.int32)
    parents = np.broadcast_to(np.arange(-1, K, dtype=np.int32), tokens.shape)
    u = rng.random((num_rows, K + 1), np.float32)
    path, count = jax.jit(jax.vmap(functools.partial(match_tree, num_steps=K)))(tokens, parents, p.argmax(axis=-1))
    assert set(np.asarray(count)) == set(range(K + 1))
    for rule in (token, block, recursive, traversal):
        walk = jax.jit(jax.vmap(functools.partial(rule, shape=tuple(range(-1, K)))))(tokens, parents, p, q, u)
        np.testing.assert_array_equal(walk.path, path)
        np.testing.assert_array_equal(walk.num_accepted, count)
        np.testing.assert_array_equal(walk.weights, np.take_along_axis(p, path[:, -1:, None], axis=1)[:, 0])


def test_at_temperature_0_a_tree_keeps_the_children_that_q_gives_nothing():
    tokens, parents, p, u = random_trees(200, 12, 4, 4)
    p = one_hot(p)
    q = one_hot(dirichlet(np.random.default_rng(1), p.shape[:2], 4))
    path, count = jax.jit(jax.vmap(functools.partial(match_tree, num_steps=4)))(tokens, parents, p.argmax(axis=-1))
    walk = jax.jit(jax.vmap(functools.partial(recursive_tree, num_steps=4, tree=TreeShape((-1, 0, 0, 0, 0)))))(
        tokens, parents, p, q, u
    )
    assert count.max() >= 3
    np.testing.assert_array_equal(walk.path, path)
    np.testing.assert_array_equal(walk.num_accepted, count)
    np.testing.assert_array_equal(walk.weights, np.take_along_axis(p, np.asarray(path)[:, -1:, None], axis=1)[:, 0])
    # Traversal verification, on one of these shapes at a time.
    shape = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 8, 10)
    tokens = np.tile(np.array([0, *[shape[:n].count(shape[n]) for n in range(1, 12)]], np.int32), (len(p), 1))
    tokens = (tokens + np.random.default_rng(2).integers(4, size=tokens.shape)[:, np.array(shape)]) % 4
    parents = np.broadcast_to(np.array(shape, np.int32), tokens.shape)
    path, count = jax.jit(jax.vmap(functools.partial(match_tree, num_steps=5)))(tokens, parents, p.argmax(axis=-1))
    walk = jax.jit(jax.vmap(functools.partial(traversal, shape=shape)))(tokens, parents, p, q, u)
    assert count.max() >= 3
    np.testing.assert_array_equal(walk.path, path)
    np.testing.assert_array_equal(walk.num_accepted, count)
    np.testing.assert_array_equal(walk.weights, np.take_along_axis(p, np.asarray(path)[:, -1:, None], axis=1)[:, 0])


# SGLang's thresholds


def sglang_walk(tokens, parents, p, u, single, acc, num_steps):
    """The kernel's loop as it stands there, over its linked children."""
    W = len(tokens)
    first, sibling = [-1] * W, [-1] * W
    for n in range(W - 1, 0, -1):
        if parents[n] >= 0:
            sibling[n], first[parents[n]] = first[parents[n]], n
    acc = np.float32(max(acc, 1e-9))
    excluded = np.zeros_like(p)
    mass, node, coin, accepted, current = np.float32(0), 0, u[0], [0], 0
    for _ in range(num_steps):
        current = first[current]
        while current != -1:
            own = p[node, tokens[current]]
            mass += own
            if coin <= mass / acc or own >= single:
                mass, node, coin = np.float32(0), current, u[current]
                accepted.append(current)
                break
            excluded[node, tokens[current]] = own
            current = sibling[current]
        if current == -1:
            break
    count = len(accepted) - 1
    weights = p[node] if count == num_steps else np.maximum(p[node] - excluded[node], 0)
    return accepted + accepted[-1:] * (num_steps - count), count, weights if weights.sum() > 0 else p[node]


@functools.partial(jax.jit, static_argnums=6)
def thresholds(tokens, parents, p, u, single, acc, num_steps):
    return jax.vmap(functools.partial(threshold_tree, threshold_single=single, threshold_acc=acc, num_steps=num_steps))(
        tokens, parents, p, u
    )


@pytest.mark.parametrize("num_steps", [4, 2])  # 2: the tree goes deeper than the walk may
@pytest.mark.parametrize(
    "single, acc", [(1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (0.3, 0.7), (1.0, 0.001), (0.001, 1.0), (1.0, 0.0), (0.0, 1.0)]
)
def test_thresholds_are_sglangs(single, acc, num_steps):
    trees = random_trees(100, 14, 8, 4)
    walk = thresholds(*trees, single, acc, num_steps)
    for row, (tokens, parents, p, u) in enumerate(zip(*trees, strict=True)):
        path, count, weights = sglang_walk(tokens, parents, p, u, single, acc, num_steps)
        assert (walk.path[row].tolist(), int(walk.num_accepted[row])) == (path, count)
        np.testing.assert_array_equal(walk.weights[row], weights)


@pytest.mark.parametrize("shape", [CHAINS[2], TREES["3"], TREES["uneven"], TREES["one branch goes on"]], ids=str)
def test_thresholds_of_1_have_the_targets_law_and_lower_ones_do_not(shape):
    """Probabilities in sixteenths: one coin in the middle of each sixteenth stands for all of them."""
    V, num_steps, C = 4, int(depths(shape).max()), 3
    rng = np.random.default_rng(0)
    p = [
        (rng.multinomial(16, np.full(V, 1 / V), (C, V**level)) / 16).astype(np.float32)
        for level in range(num_steps + 1)
    ]
    inner = sorted(set(shape) - {-1})
    coins = np.zeros((16 ** len(inner), len(shape)), np.float32)
    coins[:, inner] = (np.array(list(itertools.product(range(16), repeat=len(inner)))) + 0.5) / 16
    tokens, code, _ = draft_trees(shape, p, V)
    kept = rng.choice(len(tokens), 4, replace=False)  # exact for any drafts, so these in equal shares
    tokens, code = tokens[kept], code[kept]
    rows = rows_of(p, code, depths(shape))
    prob = np.full((C, 4, len(coins)), 0.25 / len(coins))
    for single, acc in ((1.0, 1.0), (1.0, 0.9), (0.3, 1.0)):
        run = functools.partial(
            threshold_tree,
            parents=np.array(shape, np.int32),
            threshold_single=single,
            threshold_acc=acc,
            num_steps=num_steps,
        )
        over_coins = jax.vmap(lambda tokens, p, u, run=run: run(tokens, p=p, u=u), in_axes=(None, None, 0))
        over_trees = jax.vmap(over_coins, in_axes=(0, 0, None))
        walk = jax.jit(jax.vmap(over_trees, in_axes=(None, 0, None)))(tokens, rows, coins)
        law = text_law(p, code, depths(shape), prob, jax.tree.map(np.asarray, walk))
        error = np.abs(law - target_law(p)).max()
        assert error < TOLERANCE if single == acc == 1 else error > CAUGHT, (single, acc, error)


# Medusa's and TensorRT-LLM's


def children_of(parents, node):
    return [n for n in range(1, len(parents)) if parents[n] == node]


def paths_from(parents, node=0):
    below = children_of(parents, node)
    return [[node, *path] for child in below for path in paths_from(parents, child)] or [[node]]


def medusa_walk(tokens, parents, p, epsilon, delta):
    best = (0, 0.0, [0])
    for path in paths_from(parents):
        likelihood, accepted = 0.0, [0]
        for above, node in itertools.pairwise(path):
            row = p[above].astype(np.float64)
            entropy = -sum(x * np.log(x) for x in row if x > 0)
            if not row[tokens[node]] > min(epsilon, delta * np.exp(-entropy)):
                break
            likelihood += np.log(row[tokens[node]])
            accepted.append(node)
        if (len(accepted) - 1, likelihood) > best[:2] or len(accepted) - 1 > best[0]:
            best = (len(accepted) - 1, likelihood, accepted)
    return best[2]


def tensorrt_walk(tokens, parents, p, topk, delta):
    accepted = [0]
    while True:
        row = p[accepted[-1]]
        likeliest = sorted(range(len(row)), key=lambda x: (-row[x], x))[:topk]
        allowed = {x for x in likeliest if row[x] >= row[likeliest[0]] - np.float32(delta) and row[x] > 0}
        passing = [n for n in children_of(parents, accepted[-1]) if tokens[n] in allowed]
        if not passing:
            return accepted
        accepted.append(passing[0])


def check_against(twin, walk, trees, num_steps):
    counts = set()
    for row, (tokens, parents, p, _) in enumerate(zip(*trees, strict=True)):
        path = twin(tokens, parents, p)
        count = len(path) - 1
        assert (int(walk.num_accepted[row]), walk.path[row].tolist()) == (count, path + path[-1:] * (num_steps - count))
        np.testing.assert_array_equal(walk.weights[row], p[path[-1]])
        counts.add(count)
    return counts


@pytest.mark.parametrize("epsilon, delta", [(0.09, 0.3), (0.3, 0.09), (0.3, 0.6), (0.0, 0.3)])
def test_typical_acceptance_is_medusas(epsilon, delta):
    trees = random_trees(150, 14, 6, 4)
    walk = jax.jit(
        jax.vmap(functools.partial(typical_tree, typical_epsilon=epsilon, typical_delta=delta, num_steps=4))
    )(*trees[:3])
    twin = functools.partial(medusa_walk, epsilon=epsilon, delta=delta)
    assert len(check_against(twin, walk, trees, 4)) >= 2


@pytest.mark.parametrize("topk, delta", [(1, 0.6), (2, 0.6), (3, 0.2), (10, 0.6), (10, 0.0), (3, 1.0)])
def test_relaxed_acceptance_is_tensorrts(topk, delta):
    tokens, parents, p, u = random_trees(150, 14, 6, 4)
    p = (np.round(p * 8) / 8).astype(np.float32)  # ties, zeros
    walk = jax.jit(jax.vmap(functools.partial(relaxed_tree, relaxed_topk=topk, relaxed_delta=delta, num_steps=4)))(
        tokens, parents, p
    )
    twin = functools.partial(tensorrt_walk, topk=topk, delta=delta)
    assert check_against(twin, walk, (tokens, parents, p, u), 4) >= {0, 1, 2}
