"""Logits become the distribution that was asked for: against a plain NumPy twin, row by row and token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.decoding.sampling import (
    PathTokens,
    SamplingArrays,
    SamplingFeatures,
    TokenHistory,
    apply_penalties_and_bias,
    distribution,
    draw,
)

V = 12
OFF = {"temperature": 1.0, "top_k": V, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "frequency": 0.0, "presence": 0.0}
ROWS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.2},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 0.999999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    {"repetition": 1.7},
    {"repetition": 0.5},
    {"frequency": 0.8},
    {"presence": -1.5},
    {"repetition": 1.3, "frequency": 0.4, "presence": 0.6, "top_p": 0.7, "temperature": 0.7},
    {"temperature": 0.0, "presence": 3.0},
    {"bias": {3: 4.0, 5: -np.inf}},
    {"bias": {token: -np.inf for token in range(1, V)}},
    {"min_new": 3},
]
PROMPT, NEW, DRAFTED = [1, 2, 2, 7], [3, 3, 9], [3, 4]
STOPS = [0, 9, -1, -1]


def twin(logits, row, *, prompt, before, num_new, num_tokens=V):
    """One row's probabilities, in float64. `before`: new tokens and drafts on the way."""
    row = {**OFF, **row}
    logits = [float(value) for value in logits]
    for token in range(V):
        count = before.count(token)
        if count or token in prompt:
            logits[token] *= 1 / row["repetition"] if logits[token] > 0 else row["repetition"]
        logits[token] -= row["frequency"] * count + (row["presence"] if count else 0)
        logits[token] += row.get("bias", {}).get(token, 0)
        if token >= num_tokens or (token in STOPS and num_new < row.get("min_new", 0)):
            logits[token] = -np.inf
    best = int(np.argmax(logits))
    if row["temperature"] == 0:
        return np.eye(V)[best]
    weights = np.exp((np.array(logits) - logits[best]) / row["temperature"])
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")
    weights[order[row["top_k"] :]] = 0
    weights /= weights.sum()
    if row["top_p"] < 1:
        enough = int(np.argmax(np.cumsum(weights[order]) >= row["top_p"])) + 1
        weights[order[enough:]] = 0
        weights /= weights.sum()
    weights[weights < row["min_p"] * weights.max()] = 0
    return weights / weights.sum()


def arrays(rows):
    """Every field for every row."""
    full = [{**OFF, **row} for row in rows]
    bias = np.zeros((len(rows), V), np.float32)
    for place, row in zip(bias, rows, strict=True):
        for token, value in row.get("bias", {}).items():
            place[token] = value
    fields = {
        name: jnp.array([row[name] for row in full], jnp.int32 if name == "top_k" else jnp.float32) for name in OFF
    }
    least = jnp.array([row.get("min_new", 0) for row in rows], jnp.int32)
    seed, features = jnp.zeros((len(rows), 2), jnp.uint32), SamplingFeatures.all_enabled()
    return SamplingArrays(seed=seed, bias=jnp.array(bias), min_new=least, features=features, **fields)


@jax.jit
def both(logits, sampling, history, path, num_new):
    adjusted = apply_penalties_and_bias(
        logits,
        sampling,
        history,
        path=path,
        num_new=num_new,
        stop_ids=jnp.broadcast_to(jnp.array(STOPS), (len(logits), len(STOPS))),
        num_tokens=V - 1,
    )
    return adjusted, distribution(adjusted, sampling)


@pytest.mark.parametrize("seed", range(3))
def test_every_setting_gives_what_the_twin_gives(seed):
    B, T = len(ROWS), 3
    logits = 3 * np.random.default_rng(seed).standard_normal((B, T, V)).astype(np.float32)
    history = TokenHistory(
        jnp.zeros((B, V), bool).at[:, np.array(PROMPT)].set(True),
        jnp.broadcast_to(jnp.bincount(jnp.array(NEW), length=V), (B, V)).astype(jnp.int32),
    )
    is_on = jnp.broadcast_to(jnp.tri(T, len(DRAFTED), -1, dtype=bool), (B, T, len(DRAFTED)))  # node t after t drafts
    path = PathTokens(jnp.broadcast_to(jnp.array(DRAFTED), (B, len(DRAFTED))), is_on)
    num_new = jnp.broadcast_to(jnp.arange(1, T + 1), (B, T))
    adjusted, found = both(jnp.array(logits), arrays(ROWS), history, path, num_new)
    for b, row in enumerate(ROWS):
        for t in range(T):
            wanted = twin(logits[b, t], row, prompt=PROMPT, before=NEW + DRAFTED[:t], num_new=t + 1, num_tokens=V - 1)
            np.testing.assert_allclose(found[b, t], wanted, atol=2e-6, err_msg=f"{row} after {t} drafts")
            assert int(adjusted[b, t].argmax()) == int(wanted.argmax()) or row.get("temperature", 1) > 0
    assert not np.array(found)[:, :, V - 1].any()  # a padded row of the table


def test_equally_likely_tokens_stay_or_go_together():
    logits = jnp.log(jnp.array([[[4.0, 2.0, 2.0, 1.0] + [0.0] * (V - 4)]]))
    for changes, kept in (({"top_k": 2}, 3), ({"top_p": 0.6}, 3), ({"top_k": 1}, 1)):
        probabilities = distribution(logits, arrays([changes]))
        assert int((probabilities > 0).sum()) == kept
        assert float(probabilities.sum()) == pytest.approx(1)


def test_a_row_without_any_token_left_is_one_at_token_0():
    for temperature in (0.0, 1.0):
        probabilities = distribution(jnp.full((1, 1, V), -jnp.inf), arrays([{"temperature": temperature}]))
        assert probabilities[0, 0].tolist() == [1.0] + [0.0] * (V - 1)


def test_the_smallest_temperature_is_the_arg_max():
    logits = jnp.array([[[1.0, 35.0, -jnp.inf, -20.0] + [0.0] * (V - 4)]])
    assert distribution(logits, arrays([{"temperature": 1e-37}]))[0, 0].tolist() == [0.0, 1.0] + [0.0] * (V - 2)


def test_neutral_values_change_nothing():
    logits = jnp.array(np.random.default_rng(0).standard_normal((2, 3, V)), jnp.float32)
    few = SamplingArrays.greedy(2).replace(temperature=jnp.array([0.0, 0.8]))
    many = arrays([{"temperature": 0.0}, {"temperature": 0.8}])
    np.testing.assert_allclose(distribution(logits, few), distribution(logits, many), rtol=1e-6)


@pytest.mark.parametrize("place", [slice(None), 3])
def test_a_row_with_nan_is_one_hot_and_leaves_the_others_as_they_are(place):
    # A draft head that computes NaN must still say what its token was drawn from: ratio rules compare p with it.
    logits = np.random.default_rng(0).normal(size=(3, 1, V)).astype(np.float32)
    broken = logits.copy()
    broken[1, 0, place] = np.nan
    sampling = SamplingArrays.greedy(3, V, SamplingFeatures.all_enabled())
    sampling = sampling.replace(temperature=jnp.full(3, 0.7), top_k=jnp.full(3, 5), top_p=jnp.full(3, 0.9))
    whole, given = (np.asarray(distribution(jnp.asarray(each), sampling)) for each in (logits, broken))
    assert sorted(given[1, 0]) == [0] * (V - 1) + [1]
    gumbel = jnp.asarray(np.random.default_rng(1).gumbel(size=(3, 1, V)), jnp.float32)
    assert given[1, 0, draw(jnp.asarray(given), gumbel)[1, 0]] == 1
    np.testing.assert_array_equal(given[[0, 2]], whole[[0, 2]])
