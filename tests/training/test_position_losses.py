"""Terms by chunks of the vocabulary against the plain ones, which have all logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import Objective
from mtpjax.training.losses import all_targets, objective_loss
from mtpjax.training.objective import OBJECTIVES
from mtpjax.training.position_losses import choose_vocab_chunk, chunked_terms, plain_terms

B, T, D, V = 2, 9, 8, 37
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 0, 0]])


def rows(key, num_depths, num_heads, dtype=jnp.float32, scale=1.0):
    keys = jax.random.split(key, 3)
    hidden = scale * jax.random.normal(keys[0], (1 + num_depths, B, T, D))
    heads = jax.random.normal(keys[1], (num_heads, D, V))
    return list(hidden.astype(dtype)), list(heads), jax.random.randint(keys[2], (B, T), 0, V)


def loss_of(hidden, heads, tokens, *, head_of, objective, implementation="xla"):
    """The whole loss, by chunks if the objective says so; every depth counts, and the mask hides some targets."""
    targets, is_valid = all_targets(tokens, jnp.asarray(SEGMENTS), tokens % 5 > 0, len(hidden) - 1)
    if objective.vocab_chunk:
        chunk = objective.vocab_chunk
        how = {"vocab_chunk": chunk, "compares": objective.comparison, "implementation": implementation}
        terms = chunked_terms(hidden, heads, targets, head_of=head_of, **how)
    else:
        logits = [
            jnp.matmul(state, heads[which].astype(state.dtype), preferred_element_type=jnp.float32)
            for state, which in zip(hidden, head_of, strict=True)
        ]
        terms = plain_terms(logits, targets)
    return objective_loss(terms, is_valid, mtp_scale=0.3, objective=objective)


def compare(hidden, heads, tokens, head_of, mix, chunk, tolerance, implementation="xla"):
    def run(vocab_chunk):
        def total(hidden, heads):
            objective = Objective(mix=mix, vocab_chunk=vocab_chunk)
            how = {"head_of": head_of, "objective": objective, "implementation": implementation}
            return loss_of(hidden, heads, tokens, **how)

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(hidden, heads)

    (total, losses), gradients = run(chunk)
    (expected_total, expected_losses), expected = run(0)
    np.testing.assert_allclose(total, expected_total, rtol=1e-5)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for got, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert got.dtype == wanted.dtype
        got, wanted = (np.asarray(array, np.float64) for array in (got, wanted))
        assert np.linalg.norm(wanted) > 0
        assert np.linalg.norm(got - wanted) <= tolerance * np.linalg.norm(wanted)


@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 100])  # only 1 and 37 divide the vocabulary
def test_chunks_of_any_size_equal_all_logits(chunk, key):
    mix = {"cross_entropy": 0.1, "kl": 0.4, "lk_hybrid": 1.0, "end_to_end_tv": 0.9}
    compare(*rows(key, 3, 1), (0, 0, 0, 0), mix, chunk, 1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_objective_by_chunks_equals_all_logits(name, key):
    """Two modules with heads of their own, the last of them recycled."""
    compare(*rows(key, 3, 3), (0, 1, 2, 2), {name: 1.0}, 8, 1e-5)


@pytest.mark.parametrize(
    ("mix", "num_depths", "head_of"),
    [
        ({"cross_entropy": 1.0}, 0, (0,)),
        ({"cross_entropy": 1.0}, 3, (0, 1, 0, 1)),
        ({"lk_hybrid": 1.0, "end_to_end_tv": 0.9, "cross_entropy": 0.1}, 3, (0, 1, 0, 2)),
    ],
)
def test_kernels_equal_all_logits(mix, num_depths, head_of, key):
    compare(*rows(key, num_depths, max(head_of) + 1), head_of, mix, 16, 1e-5, "interpreted")


def test_a_trunk_alone_has_chunks_too(key):
    compare(*rows(key, 0, 1), (0,), {"cross_entropy": 1.0}, 8, 1e-5)


@pytest.mark.parametrize("name", ["lk_hybrid", "kl"])
def test_logits_near_a_thousand_stay_finite(name, key):
    """There float32 numbers lie 6e-5 apart, and a probability is as uncertain as that, relatively."""
    hidden, heads, tokens = rows(key, 2, 1, scale=100.0)
    assert jnp.abs(hidden[0] @ heads[0]).max() > 500
    compare(hidden, heads, tokens, (0, 0, 0), {name: 1.0, "cross_entropy": 1.0}, 8, 6e-5)


def test_bfloat16_hidden_states_have_bfloat16_gradients(key):
    """Both take products of bfloat16 and sum in float32, but round the logits' gradient at other places: 8 bits."""
    hidden, heads, tokens = rows(key, 2, 1, jnp.bfloat16)
    compare(hidden, heads, tokens, (0, 0, 0), {"lk_hybrid": 1.0, "cross_entropy": 1.0}, 8, 2**-7)


def test_without_targets_chunks_give_zero(key):
    hidden, heads, tokens = rows(key, 2, 1)
    objective = Objective(mix={"lk_hybrid": 1.0, "end_to_end_tv": 1.0}, vocab_chunk=8)
    total = lambda hidden, heads: loss_of(hidden, heads, tokens * 0, head_of=(0, 0, 0), objective=objective)[0]
    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(hidden, heads)
    assert value == 0
    assert not any(gradient.any() for gradient in jax.tree.leaves(gradients))


def test_logits_are_never_stored(key):
    """The compiled program's temporary memory, loss and gradients: below one float32 `[B, T, V]`, of three plainly."""
    shapes = [jax.ShapeDtypeStruct((2, 64, 16), jnp.float32)] * 3, [jax.ShapeDtypeStruct((16, 4096), jnp.float32)]
    targets = jnp.zeros((3, 2, 64), jnp.int32)

    def total(hidden, heads):
        terms = chunked_terms(hidden, heads, targets, head_of=(0, 0, 0), vocab_chunk=64, compares="all")
        objective = Objective(mix={"lk_hybrid": 1.0})
        return objective_loss(terms, targets == 0, mtp_scale=0.3, objective=objective)[0]

    memory = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 64 * 4096 * 4


def test_a_chunk_has_columns(key):
    hidden, heads, tokens = rows(key, 0, 1)
    with pytest.raises(ValueError, match="vocab_chunk must be at least 1, not 0"):
        chunked_terms(hidden, heads, tokens[None], head_of=(0,), vocab_chunk=0, compares="none")


def test_a_gpu_and_large_rows_compute_the_losses_by_chunks():
    choose = functools.partial(choose_vocab_chunk, num_levels=2, vocab_size=128256)
    assert choose(1024, platform="cpu") == 0  # 1.05 GB of logits
    assert choose(2048, platform="cpu") == 8192
    assert [choose(positions, platform="gpu") for positions in (64, 4096, 32768, 131072)] == [8192, 8192, 8192, 2048]
    assert choose_vocab_chunk(10**6, 2, 512, platform="gpu") == 512
