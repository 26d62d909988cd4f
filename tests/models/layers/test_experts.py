import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import ModelConfig
from mtpjax.models.layers.experts import routing
from pallas_kernels.dequantise import dequantise
from pallas_kernels.grouped_matmul.reference import (
    blocks_of_rows,
    grouped_matmul_by_expert,
    grouped_matmul_by_pair,
    grouped_matmul_many_tokens,
    grouped_matmul_reference,
)
from pallas_kernels.router import select_experts_reference

FORMS = [
    *(jax.jit(form, static_argnames="block") for form in (grouped_matmul_by_expert, grouped_matmul_by_pair)),
    jax.jit(grouped_matmul_many_tokens),
]
reference = jax.jit(grouped_matmul_reference)
names = pytest.mark.parametrize("form", FORMS, ids=["by expert", "by pair", "many tokens"])


def problem(n, E, k):
    """Tokens, ids, weights and two stacks. Ids are drawn with repetition, and some are E: no expert."""
    D, F = 16, 12
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.standard_normal((n, D), np.float32)),
        jnp.asarray(rng.integers(0, E + 1, (n, k), np.int32)),
        jnp.asarray(rng.random((n, k), np.float32)),
        jnp.asarray(rng.standard_normal((E, D, 2, F), np.float32) * D**-0.5),
        jnp.asarray(rng.standard_normal((E, F, D), np.float32) * F**-0.5),
    )


def by_hand(x, ids, weights, gate_up, down):
    """The sum written out, in float64."""
    x, weights, gate_up, down = (np.asarray(array, np.float64) for array in (x, weights, gate_up, down))
    y = np.zeros_like(x)
    for token, choices in enumerate(np.asarray(ids)):
        for place, expert in enumerate(choices):
            if expert < len(down):
                gate, up = np.einsum("D,DgF->gF", x[token], gate_up[expert])
                y[token] += weights[token, place] * (gate / (1 + np.exp(-gate)) * up) @ down[expert]
    return y


def assert_close(actual, expected):
    """Float32 sums in another order: 1e-5 of the largest value."""
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * max(np.abs(expected).max(), 1e-3))


def test_many_tokens_copy_an_expert_at_most_five_times():
    assert blocks_of_rows(24, 64) == (8, 67) and blocks_of_rows(6 * 4096, 64) == (96, 320)
    for tokens in (4096, 32768, 131072):
        block, num_blocks = blocks_of_rows(6 * tokens, 64)
        assert num_blocks <= 5 * 64 + 64 and block * 64 <= 6 * tokens / 4


@pytest.mark.parametrize(
    ("n", "E", "k"), [(1, 8, 1), (1, 8, 2), (2, 8, 2), (7, 4, 4), (33, 16, 3), (100, 5, 5), (800, 4, 2)]
)
def test_every_form_computes_the_sum(n, E, k):
    arrays = problem(n, E, k)
    expected = by_hand(*arrays)
    for form in (reference, *FORMS):
        assert_close(form(*arrays), expected)


@names
def test_an_expert_chosen_twice_counts_twice(form):
    x, _, weights, gate_up, down = problem(3, 4, 2)
    ids = jnp.array([[1, 1], [3, 3], [1, 3]])
    assert_close(form(x, ids, weights, gate_up, down), reference(x, ids, weights, gate_up, down))


@names
def test_ids_beyond_the_experts_add_nothing(form):
    x, _, weights, gate_up, down = problem(5, 4, 2)
    assert not form(x, jnp.full((5, 2), 4), weights, gate_up, down).any()
    ids = jnp.array([[4, 0], [7, 2], [1, 9], [4, 4], [3, 3]])
    assert_close(form(x, ids, weights, gate_up, down), reference(x, ids, weights, gate_up, down))


@names
def test_all_tokens_may_choose_one_expert(form):
    x, _, weights, gate_up, down = problem(100, 64, 2)
    ids = jnp.full((100, 2), 63)
    assert_close(form(x, ids, weights, gate_up, down), reference(x, ids, weights, gate_up, down))


@pytest.mark.parametrize("form", FORMS[:2], ids=["by expert", "by pair"])
def test_the_weights_of_an_expert_that_no_token_chose_do_not_matter(form):
    x, _, weights, gate_up, down = problem(4, 8, 2)
    ids = jnp.array([[1, 5], [5, 1], [1, 8], [8, 8]])
    idle = jnp.array([0, 2, 3, 4, 6, 7])
    poisoned = gate_up.at[idle].set(jnp.nan), down.at[idle].set(jnp.nan)
    expected = reference(x, ids, weights, gate_up, down)
    assert_close(form(x, ids, weights, *poisoned), expected)


@pytest.mark.parametrize("form", FORMS[:2], ids=["by expert", "by pair"])
def test_fp8_experts_are_dequantised_one_at_a_time(form):
    x, ids, weights, *stacks = problem(5, 4, 2)
    block = 5  # divides neither width
    values = [stack.astype(jnp.float8_e4m3fn) for stack in stacks]
    rng = np.random.default_rng(2)
    scales = [
        jnp.asarray(rng.uniform(0.5, 2, (len(stack), -(-stack.shape[1] // block), *stack.shape[2:])), jnp.float32)
        for stack in stacks
    ]
    meant = [dequantise(value, scale, block, axis=1) for value, scale in zip(values, scales, strict=True)]
    assert_close(form(x, ids, weights, *values, *scales, block=block), reference(x, ids, weights, *meant))


@pytest.mark.parametrize(("n", "E", "k"), [(1, 8, 2), (40, 6, 3)])
def test_gradients_of_the_sorted_form_match_the_reference(n, E, k):
    x, ids, weights, gate_up, down = problem(n, E, k)
    direction = np.random.default_rng(1).standard_normal(x.shape, np.float32)

    def loss(form, x, weights, gate_up, down):
        return (form(x, ids, weights, gate_up, down) * direction).sum()

    def gradients(form):
        return jax.jit(jax.grad(functools.partial(loss, form), argnums=(0, 1, 2, 3)))(x, weights, gate_up, down)

    for actual, expected in zip(
        gradients(grouped_matmul_many_tokens), gradients(grouped_matmul_reference), strict=True
    ):
        assert_close(actual, expected)


def config(**fields):
    base = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return ModelConfig(**base, n_routed_experts=12, moe_intermediate_size=8, **fields)


def route_by_hand(logits, bias, config):
    """One token at a time, as DeepSeek-V3 and Qwen describe it, in float64."""
    logits = np.asarray(logits, np.float64)
    if config.scoring_func == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    table = np.zeros_like(scores)
    size = scores.shape[1] // config.n_group
    for token, score in enumerate(scores):
        choice = score + (0 if bias is None else np.asarray(bias, np.float64))
        groups = [sorted(choice[begin : begin + size])[-2:] for begin in range(0, len(choice), size)]
        kept = np.argsort([-sum(best) for best in groups])[: config.topk_group]
        allowed = [expert for expert in range(len(choice)) if expert // size in kept]
        picked = sorted(allowed, key=lambda expert: -choice[expert])[: config.num_experts_per_tok]
        total = score[picked].sum() + 1e-20 if config.norm_topk_prob else 1.0
        table[token, picked] = score[picked] / total * config.routed_scaling_factor
    return table


ROUTERS = {
    "plain": {"num_experts_per_tok": 3},
    "all": {"num_experts_per_tok": 12},
    "groups": {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "groups-of-one": {"num_experts_per_tok": 2, "n_group": 12, "topk_group": 3},
    "softmax": {"num_experts_per_tok": 3, "scoring_func": "softmax"},
    "unnormalised": {"num_experts_per_tok": 3, "scoring_func": "softmax", "norm_topk_prob": False},
}


@pytest.mark.parametrize("is_biased", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("name", ROUTERS)
def test_routing_matches_one_token_at_a_time(name, is_biased):
    settings = config(**ROUTERS[name], router_correction_bias=is_biased)
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((50, 12), np.float32) * 2)
    # Mostly below minus the largest score, so that a group masked with 0 instead of -inf would win.
    bias = jnp.asarray(rng.uniform(-1.6, 0.1, 12), jnp.float32) if is_biased else None
    ids, weights = jax.jit(select_experts_reference, static_argnums=2)(logits, bias, routing(settings))
    assert all(len(set(row)) == settings.num_experts_per_tok for row in ids.tolist())
    table = np.zeros((50, 12))
    np.put_along_axis(table, np.asarray(ids), np.asarray(weights), axis=1)
    np.testing.assert_allclose(table, route_by_hand(logits, bias, settings), rtol=2e-5, atol=1e-7)


def test_the_bias_chooses_but_does_not_weigh():
    settings = config(num_experts_per_tok=2, router_correction_bias=True, norm_topk_prob=False)
    logits = jnp.linspace(-1, 1, 12)[None, :]
    bias = jnp.zeros(12).at[jnp.array([0, 1])].set(5.0)
    ids, weights = select_experts_reference(logits, bias, routing(settings))
    assert sorted(ids[0].tolist()) == [0, 1]
    np.testing.assert_allclose(weights[0], jax.nn.sigmoid(logits[0, ids[0]]), rtol=1e-6)
