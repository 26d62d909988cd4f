"""Trees of drafts, against SGLang's construction in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.decoding.draft_tree import Candidates, choose_tree_shape, depths_and_ancestor_mask

V = 7


def plain_tree(tables, topk, num_steps, num_nodes):
    """Tokens and parents as SGLang builds them. `tables(path)`: the draft's probabilities after a path of tokens."""
    candidates = []  # score, token, flat index of the parent (-1: the root), path
    frontier = [(1.0, -1, ())]
    for _ in range(num_steps):
        first, grown = len(candidates), []
        for score, place, path in frontier:
            probabilities = tables(path)
            for token in np.argsort(-probabilities, kind="stable")[:topk]:
                grown.append((np.float32(score * probabilities[token]), int(token), place, (*path, int(token))))
        order = sorted(range(len(grown)), key=lambda index: -grown[index][0])[:topk]
        frontier = [(grown[index][0], first + index, grown[index][3]) for index in order]
        candidates += grown
    best = sorted(range(len(candidates)), key=lambda index: -candidates[index][0])[: num_nodes - 1]
    chosen = sorted(best)
    place = {flat: node for node, flat in enumerate(chosen, start=1)} | {-1: 0}
    return [candidates[flat][1] for flat in chosen], [-1] + [place[candidates[flat][2]] for flat in chosen]


@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), [(2, 1, 3), (2, 3, 8), (3, 3, 6), (4, 2, 21), (7, 2, 16)])
def test_candidates_become_sglangs_tree(topk, num_steps, num_nodes):
    rng = np.random.default_rng(num_nodes)
    made = {}

    def tables(path):
        if path not in made:
            made[path] = rng.dirichlet(np.full(V, 0.5)).astype(np.float32)
        return made[path]

    candidates, paths = Candidates(), [[()]]
    scores, places = jnp.ones((1, 1)), jnp.full((1, 1), -1)
    for _ in range(num_steps):
        probabilities = jnp.array([[tables(path) for path in paths[-1]]])
        scores, tokens, places, origin = candidates.add_children(*jax.lax.top_k(probabilities, topk), scores, places)
        paths.append([(*paths[-1][int(o)], int(t)) for o, t in zip(origin[0], tokens[0], strict=True)])
    tokens, parents = candidates.select_nodes(num_nodes)
    wanted_tokens, wanted_parents = plain_tree(tables, topk, num_steps, num_nodes)
    assert parents[0].tolist() == wanted_parents and tokens[0].tolist() == wanted_tokens


def test_equal_scores_leave_a_tree():
    for probabilities in (jnp.zeros((1, 1, V)), jnp.full((1, 1, V), 1 / V), jnp.eye(V)[None, :1]):
        candidates = Candidates()
        scores, places = jnp.ones((1, 1)), jnp.full((1, 1), -1)
        for _ in range(3):
            spread = jnp.broadcast_to(probabilities, (1, scores.shape[1], V))
            scores, _, places, _ = candidates.add_children(*jax.lax.top_k(spread, 3), scores, places)
        _, parents = candidates.select_nodes(9)
        assert all(-1 < parent < node for node, parent in enumerate(parents[0].tolist()) if node)


def test_who_is_on_whose_way():
    parents = jnp.array([[-1, 0, 0, 1, 3, 2], [-1, 0, 1, 2, 3, 4]])
    depths, is_on = jax.jit(depths_and_ancestor_mask, static_argnums=1)(parents, 5)
    assert depths.tolist() == [[0, 1, 1, 2, 3, 2], [0, 1, 2, 3, 4, 5]]
    for row, own in enumerate(parents.tolist()):
        for node in range(6):
            way = {node}
            while own[node] >= 0:
                node = own[node]
                way.add(node)
            assert set(np.flatnonzero(is_on[row, max(way)]).tolist()) == way


@pytest.mark.parametrize("topk", [1, 2, 4, 70])
@pytest.mark.parametrize("num_steps", [1, 3, 6])
@pytest.mark.parametrize("num_nodes", [2, 5, 7])
def test_fixed_shapes_are_trees_within_their_bounds(topk, num_steps, num_nodes):
    if num_nodes > sum(topk**depth for depth in range(num_steps + 1)):
        return
    shape = choose_tree_shape(topk, num_steps, num_nodes)
    assert len(shape.parents) == num_nodes and max(shape.depths) <= num_steps
    assert shape.depths == sorted(shape.depths) and all(parent < node for node, parent in enumerate(shape.parents))
    assert max(len(shape.children(node)) for node in range(num_nodes)) <= topk
    inner = [node for level in shape.inner_levels() for node in level]
    assert sorted(inner) == sorted(set(shape.parents[1:]))
