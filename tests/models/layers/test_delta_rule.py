"""The gated delta rule computes what plain NumPy computes token by token, whole, in chunks and after a commit."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mtpjax.models.view import View

from mtpjax.models.layers.delta_rule import DELTA, MAX_STEPWISE_TOKENS, DeltaRule
from tests.helpers.small_models import small_config

CONFIG = small_config("hybrid")
K, J = CONFIG.linear_num_key_heads, CONFIG.linear_num_value_heads
P, Q, C = CONFIG.linear_key_head_dim, CONFIG.linear_value_head_dim, CONFIG.linear_conv_kernel_dim
B, T = 2, 21  # more than `MAX_STEPWISE_TOKENS`
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}  # float32 sums in another order


def view(**fields):
    """The layer reads no angles and no mask."""
    return View(angles=(jnp.zeros(0), jnp.zeros(0)), mask=jnp.zeros(0), **fields)


@pytest.fixture(scope="module")
def inputs():
    return jax.random.normal(jax.random.key(1), (B, T, CONFIG.hidden_size))


@pytest.fixture(scope="module")
def params(inputs):
    shapes = DeltaRule(CONFIG).init(jax.random.key(2), inputs, view())["params"]
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    # Norms and rates are not their initial ones and zeros, so that a swapped one is noticed.
    noise = [leaf + 0.2 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noise)


@functools.partial(jax.jit, static_argnames="config")
def run(params, x, view, entries, config):
    output, entries, _ = DeltaRule(config).apply({"params": params}, x, view, entries)
    return output.total(), entries


def apply(params, x, entries=None, config=CONFIG, **fields):
    return run(params, x, view(**fields), entries, config)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def plain(params, x, gate_function=lambda gate: gate * sigmoid(gate)):
    """The rule for one text `[T, D]` in float64, by loops over tokens and heads."""
    params = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    x, G = np.asarray(x, np.float64), J // K
    mixed = np.einsum("td,dkw->tkw", x, params["qkvz"])
    strengths = np.einsum("td,dkw->tkw", x, params["ba"])
    channels = 2 * P + G * Q
    padded = np.concatenate([np.zeros((C - 1, K, channels)), mixed[..., :channels]])
    state, outputs = np.zeros((J, P, Q)), np.zeros(x.shape)
    for t in range(len(x)):
        # 1. The convolution over the last C inputs, and silu.
        convolved = sum(padded[t + c] * params["conv"][:, :, c] for c in range(C))
        convolved = convolved * sigmoid(convolved)
        heads = np.zeros((J, Q))
        for j in range(J):
            k_head, g = divmod(j, G)
            query, key = convolved[k_head, :P], convolved[k_head, P : 2 * P]
            query, key = (vector / np.sqrt((vector**2).sum() + 1e-6) for vector in (query, key))
            value = convolved[k_head, 2 * P + g * Q : 2 * P + (g + 1) * Q]
            beta = sigmoid(strengths[t, k_head, g])
            decay = np.exp(
                -np.exp(params["log_rate"][j]) * np.log1p(np.exp(strengths[t, k_head, G + g] + params["rate_bias"][j]))
            )
            # 2. The state decays, then what it says about the key moves towards the value.
            state[j] *= decay
            state[j] += beta * np.outer(key, value - key @ state[j])
            read = query @ state[j] / np.sqrt(P)
            # 3. Norm and gate of the head.
            read = read / np.sqrt((read**2).mean() + CONFIG.rms_norm_eps) * params["norm"]
            heads[j] = read * gate_function(mixed[t, k_head, channels + g * Q : channels + (g + 1) * Q])
        outputs[t] = heads.reshape(-1) @ params["output"]
    return outputs, state, padded[len(x) :]


def empty():
    return DELTA.empty_entries(CONFIG, CONFIG.trunk_kinds[0], B, 0, jnp.float32)


def prefill(params, x, entries, num_valid):
    return apply(params, x, entries, num_valid=jnp.asarray(num_valid))


def check(entries, params, inputs, lengths):
    """The entries are those of the first `lengths` tokens of each row."""
    for row, length in enumerate(lengths):
        _, state, before = plain(params, inputs[row, :length])
        np.testing.assert_allclose(entries["state"][row], state, **TOLERANCE)
        np.testing.assert_allclose(entries["conv"][row], before, **TOLERANCE)


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_a_whole_row(params, inputs, gate):
    config = dataclasses.replace(CONFIG, linear_output_gate=gate)
    gate_function = sigmoid if gate == "sigmoid" else lambda x: x * sigmoid(x)
    output, _ = apply(params, inputs, config=config)
    expected = np.stack([plain(params, row, gate_function)[0] for row in inputs])
    np.testing.assert_allclose(output, expected, **TOLERANCE)


def test_documents_of_a_packed_row_do_not_see_each_other(params, inputs):
    ends = [0, 2, 9, T]  # the first document is shorter than the convolution
    segment_ids = jnp.repeat(jnp.arange(3), np.diff(ends), total_repeat_length=T)
    output, _ = apply(params, inputs[:1], segment_ids=segment_ids[None])
    expected = [plain(params, inputs[0, begin:end])[0] for begin, end in itertools.pairwise(ends)]
    np.testing.assert_allclose(output[0], np.concatenate(expected), **TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 2, MAX_STEPWISE_TOKENS + 1, T])
def test_a_prompt_in_chunks(params, inputs, chunk):
    entries, outputs = empty(), []
    for begin in range(0, T, chunk):
        part = inputs[:, begin : begin + chunk]
        output, entries = prefill(params, part, entries, [part.shape[1]] * B)
        outputs.append(output)
    expected = np.stack([plain(params, row)[0] for row in inputs])
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), expected, **TOLERANCE)
    check(entries, params, inputs, [T, T])


@pytest.mark.parametrize("width", [4, MAX_STEPWISE_TOKENS + 1])
def test_padding_after_the_valid_tokens_changes_nothing(params, inputs, width):
    lengths = [1, 3]  # one is shorter than what the convolution keeps
    _, entries = prefill(params, inputs[:, :width], empty(), lengths)
    check(entries, params, inputs, lengths)
    # A pass without a valid token leaves a row as it is.
    _, entries = prefill(params, inputs[:, :width], entries, [0, 0])
    check(entries, params, inputs, lengths)


@pytest.mark.parametrize("num_committed", [(0, 1), (2, 4), (4, 0)])
def test_a_commit_advances_the_state_over_the_accepted_drafts_only(params, inputs, num_committed):
    _, entries = prefill(params, inputs[:, :5], empty(), [5, 5])
    output, entries = apply(params, inputs[:, 5:9], entries)
    expected = np.stack([plain(params, row[:9])[0][5:] for row in inputs])
    np.testing.assert_allclose(output, expected, **TOLERANCE)
    # The state is still that before the drafts.
    for row in range(B):
        np.testing.assert_allclose(entries["state"][row], plain(params, inputs[row, :5])[1], **TOLERANCE)
    entries = DELTA.commit(entries, jnp.asarray(num_committed))
    check(entries, params, inputs, [5 + number for number in num_committed])


def test_a_commit_after_a_pass_of_valid_tokens_changes_nothing(params, inputs):
    _, entries = prefill(params, inputs[:, :5], empty(), [5, 3])
    assert DELTA.commit(entries, jnp.asarray([5, 3])) is entries


def test_a_new_text_starts_from_zeros_beside_one_that_continues(params, inputs):
    _, entries = prefill(params, inputs[:, :5], empty(), [5, 5])
    check(DELTA.reset(entries, jnp.asarray([True, False])), params, inputs, [0, 5])
