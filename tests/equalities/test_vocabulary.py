"""Sampling and acceptance over a split vocabulary give the results of a whole one. Four virtual devices; float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mtpjax import compat
from mtpjax.decoding import rng
from mtpjax.decoding.acceptance.chain import block_chain, token_chain
from mtpjax.decoding.acceptance.lossy import relaxed_tree, threshold_tree, typical_tree
from mtpjax.decoding.acceptance.tree import recursive_tree, traversal_tree
from mtpjax.decoding.draft_tree import choose_tree_shape
from mtpjax.decoding.logits import draw_target
from mtpjax.decoding.sampling import (
    PathTokens,
    SamplingArrays,
    SamplingFeatures,
    TokenHistory,
    apply_penalties_and_bias,
    distribution,
)
from mtpjax.models.vocabulary import WHOLE, Vocabulary

V, B, T = 48, 64, 4
TREE = choose_tree_shape(2, 2, 6)
COLUMNS = PartitionSpec(None, None, "tensor")  # of the last of three axes


def whole_and_parts(function, split, whole, out_specs):
    """`function(vocabulary, split, whole)` on one device, and over four that have a quarter of the columns each."""
    mesh = compat.make_mesh({"tensor": 4})

    def on_parts(split, whole):
        return function(Vocabulary.of(V), split, whole)

    in_specs = (jax.tree.map(lambda _: COLUMNS, split), jax.tree.map(lambda _: PartitionSpec(), whole))
    in_parts = jax.shard_map(on_parts, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(functools.partial(function, WHOLE))(split, whole), jax.jit(in_parts)(split, whole)


def requests():
    """Rows with every option, and their logits: rounded, so that tokens tie, and with tokens that are banned."""
    keys = iter(jax.random.split(jax.random.key(0), 20))
    logits = jnp.round(3 * jax.random.normal(next(keys), (B, T, V)), 1)
    logits = jnp.where(jax.random.bernoulli(next(keys), 0.1, logits.shape), -jnp.inf, logits)
    uniform = lambda low, high: jax.random.uniform(next(keys), (B,), minval=low, maxval=high)
    is_on = lambda: jax.random.bernoulli(next(keys), 0.6, (B,))
    sampling = SamplingArrays(
        temperature=jnp.where(is_on(), uniform(0.3, 2), 0),
        seed=jax.random.bits(next(keys), (B, 2), jnp.uint32),
        top_k=jnp.where(is_on(), jax.random.randint(next(keys), (B,), 1, V), V),
        top_p=jnp.where(is_on(), uniform(0.1, 1), 1),
        min_p=jnp.where(is_on(), uniform(0, 0.2), 0),
        repetition=uniform(0.8, 1.3),
        frequency=uniform(-0.2, 0.5),
        presence=uniform(-0.2, 0.5),
        min_new=jax.random.randint(next(keys), (B,), 0, 4),
        bias=jnp.round(jax.random.normal(next(keys), (B, V))),
        features=SamplingFeatures.all_enabled(),
    )
    history = TokenHistory(
        jax.random.bernoulli(next(keys), 0.2, (B, V)), jax.random.randint(next(keys), (B, V), -3, 3).clip(0)
    )
    path = PathTokens(jax.random.randint(next(keys), (B, T), 0, V), jnp.broadcast_to(jnp.tri(T, dtype=bool), (B, T, T)))
    return logits, (sampling, history, path)


def sample(vocabulary, logits, given):
    sampling, history, path = given
    num_new = jnp.broadcast_to(jnp.arange(T), (B, T))
    adjusted = apply_penalties_and_bias(
        logits,
        sampling,
        history,
        path=path,
        num_new=num_new,
        stop_ids=jnp.broadcast_to(jnp.array([[5, V - 5, -1]]), (B, 3)),
        num_tokens=V - 3,
        vocabulary=vocabulary,
    )
    probabilities = distribution(adjusted, sampling, vocabulary)
    read = lambda columns: jnp.take_along_axis(adjusted, columns[:, :, None], axis=2)[:, :, 0]
    # 13 tokens are more than a device has.
    numbers = (
        draw_target(probabilities, sampling, num_new + 100, vocabulary),
        vocabulary.argmax(adjusted),
        vocabulary.top_k(adjusted, 13),
        vocabulary.look_up(read, path.tokens, logits.shape[2]),
        vocabulary.logsumexp(adjusted),
    )
    return (adjusted, probabilities), numbers


def test_sampling_from_parts_gives_the_tokens_of_the_whole():
    (whole, numbers), (parts, from_parts) = whole_and_parts(sample, *requests(), ((COLUMNS, COLUMNS), PartitionSpec()))
    np.testing.assert_array_equal(parts[0], whole[0])
    # The same tokens are kept, and their probabilities differ by the rounding of a sum.
    np.testing.assert_array_equal(parts[1] > 0, whole[1] > 0)
    np.testing.assert_allclose(parts[1], whole[1], rtol=1e-5)
    *exact, logsumexp = numbers
    *exact_from_parts, logsumexp_from_parts = from_parts
    jax.tree.map(np.testing.assert_array_equal, exact_from_parts, exact)
    np.testing.assert_allclose(logsumexp_from_parts, logsumexp, rtol=1e-6)
    # Filters and bans took part.
    num_kept = np.asarray((whole[1] > 0).sum(axis=-1))
    assert (num_kept == 1).any() and (num_kept > 10).any() and num_kept.max() < V - 3


def rule_named(name, vocabulary):
    tree = {"num_steps": 2, "vocabulary": vocabulary}
    return {
        "token": lambda tokens, parents, p, q, u: token_chain(tokens[1:3], p[:3], q[:2], u[1:3], vocabulary=vocabulary),
        "block": lambda tokens, parents, p, q, u: block_chain(tokens[1:3], p[:3], q[:2], u[1:3], vocabulary=vocabulary),
        "recursive": lambda tokens, parents, p, q, u: recursive_tree(tokens, parents, p, q, u, topk=2, **tree),
        "traversal": lambda tokens, parents, p, q, u: traversal_tree(tokens, p, q, u, parents=TREE.parents, **tree),
        "threshold": lambda tokens, parents, p, q, u: threshold_tree(
            tokens, parents, p, u, single=0.3, acc=0.6, **tree
        ),
        "typical": lambda tokens, parents, p, q, u: typical_tree(tokens, parents, p, epsilon=0.3, delta=3.0, **tree),
        "relaxed": lambda tokens, parents, p, q, u: relaxed_tree(tokens, parents, p, topk=2, delta=0.1, **tree),
    }[name]


def drafts():
    """Trees, and p and q of their nodes; half of the rows have probabilities of 0."""
    W, keys = len(TREE.parents), iter(jax.random.split(jax.random.key(1), 5))
    p, q = (jax.nn.softmax(2 * jax.random.normal(next(keys), (B, W, V)), axis=-1) for _ in "pq")
    is_cut = (jnp.arange(B) % 2 == 0)[:, None, None] & (q < 0.01)
    q = jnp.where(is_cut, 0, q)
    q = q / q.sum(axis=-1, keepdims=True)
    p = (p + q) / 2  # close enough that some drafts are accepted
    # The children of a node are different tokens, the most likely ones of its q.
    parents = jnp.broadcast_to(jnp.array(TREE.parents), (B, W))
    best = jax.lax.top_k(q, 2)[1]
    rank = jnp.array([0] + [TREE.children(parent).index(n) for n, parent in enumerate(TREE.parents) if n])
    tokens = best[:, jnp.array(TREE.parents), rank]
    return (p, q), (tokens, parents, jax.random.uniform(next(keys), (B, W)))


@pytest.mark.parametrize("name", ["token", "block", "recursive", "traversal", "threshold", "typical", "relaxed"])
def test_rules_accept_the_same_from_parts(name):
    def accept(vocabulary, split, whole):
        (p, q), (tokens, parents, u) = split, whole
        *decision, weights = jax.vmap(rule_named(name, vocabulary))(tokens, parents, p, q, u)
        bonus = vocabulary.argmax(weights)
        return weights[:, None], (decision, bonus)

    (weights, decision), (parts, from_parts) = whole_and_parts(accept, *drafts(), (COLUMNS, PartitionSpec()))
    jax.tree.map(np.testing.assert_array_equal, from_parts, decision)
    # Differences of nearly equal probabilities keep few digits.
    np.testing.assert_allclose(parts, weights, atol=1e-6)
    assert len(np.unique(decision[0][-1])) > 1  # some drafts are accepted, some rejected


def test_noise_of_a_part_is_cut_from_the_noise_of_the_whole():
    seed, position = jnp.array([[1, 2]], jnp.uint32), jnp.array([[7, 8]])
    noise = functools.partial(rng.gumbel, seed, position, rng.DRAFT, jnp.arange(2))
    np.testing.assert_array_equal(noise(5, 20), noise(40)[:, :, 20:25])
