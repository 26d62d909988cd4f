"""The chunked delta rule against one token after the other, and the convolution at documents' borders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.layers.delta_rule import CHUNK, chunked_delta_rule, stepwise_delta_rule

B, J, P, Q = 2, 3, 8, 5

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(params=[1, 7, CHUNK + 1, 2 * CHUNK + 9], ids=lambda T: f"T{T}")
def rule(request, key):
    T = request.param
    keys = jax.random.split(key, 6)
    q, k = (jax.random.normal(key, (B, T, J, P)) for key in keys[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = jax.random.normal(keys[2], (B, T, J, Q))
    log_decay = -jnp.exp(2 * jax.random.normal(keys[3], (B, T, J)))  # some forget at once, some hardly ever
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (B, T, J)))
    return q, k, v, log_decay, beta, jax.random.normal(keys[5], (B, J, P, Q))


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_chunks_equal_steps(rule):
    output, state = jax.jit(chunked_delta_rule)(*rule)
    expected, states = jax.jit(stepwise_delta_rule)(*rule)
    assert_close(output, expected)
    assert_close(state, states[-1])
    np.testing.assert_array_equal(states[0], rule[-1])


def test_gradients_of_chunks_equal_those_of_steps(rule):
    def loss(rule, form):
        output, state = form(*rule)[:2]
        return jnp.sum(jnp.sin(output)) + jnp.sum(state if state.ndim == 4 else state[-1])

    found = jax.jit(jax.grad(loss), static_argnums=1)(rule, chunked_delta_rule)
    for mine, twin in zip(found, jax.jit(jax.grad(loss), static_argnums=1)(rule, stepwise_delta_rule), strict=True):
        np.testing.assert_allclose(mine, twin, rtol=1e-4, atol=1e-4 * np.abs(twin).max())  # longer sums


def test_each_document_starts_from_an_empty_state(key):
    T, cut = 100, 41
    rule = [jax.random.normal(key, (1, T, 1, size)) for size in (4, 4, 3)]
    rule += [-jnp.ones((1, T, 1)), jnp.full((1, T, 1), 0.5), jnp.zeros((1, 1, 4, 3))]
    rule[1] = rule[1] / jnp.linalg.norm(rule[1], axis=-1, keepdims=True)
    segments = jnp.where(jnp.arange(T) < cut, 1, 2)[None]
    packed, state = chunked_delta_rule(*rule, segment_ids=segments)
    apart = [stepwise_delta_rule(*(x[:, part] for x in rule[:5]), rule[5]) for part in (slice(0, cut), slice(cut, T))]
    assert_close(packed, jnp.concatenate([output for output, _ in apart], axis=1))
    assert_close(state, apart[1][1][-1])
