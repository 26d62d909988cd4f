"""Depth-k losses against a loop over positions; packed rows against the same documents apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import ModelConfig, MTPModel, Objective, TrainConfig, forward, init_params
from mtpjax.training.losses import (
    all_targets,
    batch_totals,
    depth_targets,
    depth_weights,
    end_to_end_tv,
    lk_hybrid,
    mix_at,
    mtp_scale_at,
    multi_depth_loss,
    objective_loss,
    valid_mean,
)
from mtpjax.training.objective import OBJECTIVES
from mtpjax.training.position_losses import PositionTerms, plain_terms

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    num_mtp_modules=2,
)
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 0], [1, 1, 1, 1, 1, 1, 1, 2, 2, 0, 0, 0]])


def cross_entropy(logits, targets, is_valid):
    return valid_mean(plain_terms([logits], targets[None]).cross_entropy[0], is_valid)


def brute_force_loss(logits, tokens, segments, mask, depth):
    """One position at a time, in float64."""
    losses = []
    for row in range(tokens.shape[0]):
        for i in range(tokens.shape[1] - depth - 1):
            target = i + depth + 1
            same = segments[row, i] != 0 and all(segments[row, j] == segments[row, i] for j in range(i, target + 1))
            if same and mask[row, target]:
                line = logits[row, i].astype(np.float64)
                shifted = line - line.max()
                losses.append(np.log(np.exp(shifted).sum()) - shifted[tokens[row, target]])
    return np.mean(losses) if losses else 0.0


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5])
def test_depth_loss_equals_a_loop_over_positions(depth, key):
    logits = np.asarray(jax.random.normal(key, (2, 12, 61))) * 3
    tokens = np.asarray(jax.random.randint(key, (2, 12), 0, 61))
    mask = np.asarray(jax.random.bernoulli(key, 0.8, (2, 12)))
    targets, is_valid = depth_targets(jnp.asarray(tokens), jnp.asarray(SEGMENTS), jnp.asarray(mask), depth)
    loss = cross_entropy(jnp.asarray(logits), targets, is_valid)
    np.testing.assert_allclose(loss, brute_force_loss(logits, tokens, SEGMENTS, mask, depth), rtol=1e-5)


def test_no_valid_target_gives_zero_loss_and_zero_gradient(key):
    logits = jax.random.normal(key, (1, 4, 7))
    nothing = jnp.zeros((1, 4), bool)
    value, gradient = jax.value_and_grad(cross_entropy)(logits, jnp.zeros((1, 4), jnp.int32), nothing)
    assert value == 0
    assert not gradient.any()


def test_padding_and_last_positions_have_no_target():
    ones = jnp.ones((2, 12), bool)
    for depth in range(4):
        _, is_valid = depth_targets(jnp.zeros((2, 12), jnp.int32), jnp.asarray(SEGMENTS), ones, depth)
        lengths = [4, 6, 1, 7, 2]  # of the documents above
        assert is_valid.sum() == sum(max(length - depth - 1, 0) for length in lengths)


def brute_force_objective(name, logits, trunk, tokens, segments, mask, weights, xp):
    """One objective over the depths of `weights`, one position at a time.

    `xp` is numpy in float64, or jax.numpy to differentiate. `trunk` holds the numbers of `logits` and is what nothing
    is differentiated through: p, and alpha in LK's weight.
    """

    def log_softmax(line):
        line = line - line.max()
        return line - xp.log(xp.exp(line).sum())

    def is_valid(row, i, depth):
        target = i + depth + 1
        if target >= tokens.shape[1] or not mask[row, target]:
            return False
        return segments[row, i] != 0 and all(segments[row, j] == segments[row, i] for j in range(i, target + 1))

    def log_p(row, i, depth):
        return log_softmax(trunk[0][row, i + depth])  # the trunk's own for the same token

    def kl(row, i, depth):
        p = log_p(row, i, depth)
        return sum(xp.exp(p) * (p - log_softmax(logits[depth][row, i])))

    def alpha(row, i, depth, source):
        p, q = xp.exp(log_p(row, i, depth)), xp.exp(log_softmax(source[depth][row, i]))
        return sum(xp.minimum(p, q))

    rows, places = range(tokens.shape[0]), range(tokens.shape[1])
    if name == "end_to_end_tv":
        terms = []
        for row in rows:
            for i in places:
                survival = 1.0
                for depth in weights:
                    if not is_valid(row, i, depth):
                        break
                    survival = survival * alpha(row, i, depth, logits)
                    terms.append(1 - survival)
        return sum(terms) / max(len(terms), 1)
    total = 0.0
    for depth, weight in weights.items():
        spots = [(row, i, depth) for row in rows for i in places if is_valid(row, i, depth)]
        mean = lambda values, spots=spots: sum(values) / max(len(spots), 1)
        if name == "cross_entropy":
            value = mean(-log_softmax(logits[depth][row, i])[tokens[row, i + depth + 1]] for row, i, _ in spots)
        elif name == "kl":
            value = mean(kl(*spot) for spot in spots)
        elif name == "total_variation":
            value = mean(1 - alpha(*spot, logits) for spot in spots)
        else:
            w = np.exp(-3.0 * float(mean(alpha(*spot, trunk) for spot in spots)))
            value = w * mean(kl(*spot) for spot in spots) + (1 - w) * mean(1 - alpha(*spot, logits) for spot in spots)
        total = total + weight * value
    return total


def random_rows(key, num_depths, V=7):
    """Logits of the trunk and every depth `[2, 12, V]`, which drafts share some of; tokens and a mask."""
    keys = jax.random.split(key, num_depths + 3)
    trunk = 2 * jax.random.normal(keys[0], (2, 12, V))
    drafts = [jnp.roll(trunk, -d, 1) + jax.random.normal(keys[d], (2, 12, V)) for d in range(1, num_depths + 1)]
    tokens = jax.random.randint(keys[-1], (2, 12), 0, V)
    return [trunk, *drafts], tokens, jax.random.bernoulli(keys[-2], 0.8, (2, 12))


def total_of(logits, tokens, mask, objective, segments=SEGMENTS, progress=1.0):
    targets, is_valid = all_targets(tokens, jnp.asarray(segments), mask, len(logits) - 1)
    terms = plain_terms(logits, targets)
    return objective_loss(terms, is_valid, mtp_scale=0.3, objective=objective, progress=progress)[0]


@pytest.mark.parametrize("num_depths", [1, 2, 3])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_equals_a_loop_over_positions(name, num_depths, key):
    """Values against float64; gradients, of the trunk's logits too, against those of the loop itself."""
    logits, tokens, mask = random_rows(key, num_depths)
    tokens_, mask_ = np.asarray(tokens), np.asarray(mask)
    weights = {depth: 1 / num_depths for depth in range(1, num_depths + 1)}

    def expected(logits, trunk, xp):
        rest = (logits, trunk, tokens_, SEGMENTS, mask_)
        main = brute_force_objective("cross_entropy", *rest, {0: 1}, xp)
        return main + 0.3 * brute_force_objective(name, *rest, weights, xp)

    value, gradients = jax.value_and_grad(total_of)(logits, tokens, mask, Objective(mix={name: 1.0}))
    exact = [np.asarray(array, np.float64) for array in logits]
    np.testing.assert_allclose(value, expected(exact, exact, np), rtol=1e-5)
    frozen = [np.asarray(array) for array in logits]
    for got, wanted in zip(gradients, jax.grad(expected)(logits, frozen, jnp), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-8)
    _, is_valid = all_targets(tokens, jnp.asarray(SEGMENTS), mask, num_depths)
    for gradient, counts in zip(gradients, is_valid, strict=True):
        assert counts.any()
        assert not gradient[~counts].any()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("rows", ["all masked", "too short", "only padding"])
def test_objectives_without_a_target_are_zero_and_have_no_gradient(name, rows, key):
    logits, tokens, mask = random_rows(key, 3)
    if rows == "too short":  # the trunk has targets, no depth has
        segments, mask = np.repeat(np.arange(1, 7), 2)[None].repeat(2, axis=0), mask | True
    else:
        segments, mask = SEGMENTS * (rows != "only padding"), mask & (rows == "only padding")
    objective = Objective(mix={name: 1.0})
    value, gradients = jax.value_and_grad(total_of)(logits, tokens, mask, objective, segments)
    if rows != "too short":
        assert value == 0
        assert not gradients[0].any()
    else:
        trunk = cross_entropy(logits[0], *depth_targets(tokens, jnp.asarray(segments), mask, 0))
        np.testing.assert_array_equal(value, trunk)
        assert gradients[0].any()
    assert not any(gradient.any() for gradient in gradients[1:])


def test_a_depth_without_targets_does_not_dilute_or_spoil_the_others(key):
    """Documents of three tokens: depth 1 has a target each, depths 2 and 3 have none."""
    logits, tokens, mask = random_rows(key, 3)
    segments = np.repeat(np.arange(1, 5), 3)[None].repeat(2, axis=0)
    for name in OBJECTIVES:
        three, one = (
            total_of(logits[:n], tokens, mask | True, Objective(mix={name: 1.0}), segments)
            - total_of(logits[:1], tokens, mask | True, Objective(), segments)
            for n in (4, 2)
        )
        share = 1 if name == "end_to_end_tv" else 1 / 3  # the mean over depths counts empty ones as 0
        np.testing.assert_allclose(three, share * one, rtol=1e-4)


def test_end_to_end_tv_stops_at_the_first_invalid_depth():
    overlap = jnp.array([0.5, 0.25, 0.5])[:, None, None] * jnp.ones((3, 1, 3))
    is_valid = jnp.array([[1, 1, 0], [1, 0, 1], [1, 1, 1]], bool)[:, None, :]  # anchors: three depths, one, none
    value, gradient = jax.value_and_grad(end_to_end_tv)(overlap, is_valid)
    assert value == ((1 - 0.5) + (1 - 0.125) + (1 - 0.0625) + (1 - 0.5)) / 4
    by_hand = [[1 + 0.25 + 0.125, 1, 0], [0.5 + 0.25, 0, 0], [0.125, 0, 0]]  # of the sum of products, per factor
    np.testing.assert_array_equal(gradient[:, 0], -np.array(by_hand) / 4)


def test_drafts_like_the_trunk_have_nothing_left_to_learn(key):
    trunk = 3 * jax.random.normal(key, (2, 12, 7))
    tokens, mask = jnp.zeros((2, 12), jnp.int32), jnp.ones((2, 12), bool)
    drafts = [jnp.roll(trunk, -depth, 1) for depth in (1, 2)]
    alone = total_of([trunk], tokens, mask, Objective())
    for name in ("kl", "lk_hybrid", "end_to_end_tv"):
        value, gradients = jax.value_and_grad(total_of)([trunk, *drafts], tokens, mask, Objective(mix={name: 1.0}))
        np.testing.assert_allclose(value, alone, rtol=1e-6)
        for gradient in gradients[1:]:
            np.testing.assert_allclose(gradient, 0, atol=1e-8)


@pytest.mark.parametrize("spread", [1.0, 10.0, 1000.0])
def test_gradient_of_total_variation_is_the_bounded_formula(spread, key):
    """`d(1-alpha)/dz = -q (1[q < p] - s)`, s the mass of q where q < p: magnitudes sum to `2 s (1 - s) <= 1/2`."""
    trunk, draft = spread * jax.random.normal(key, (2, 50, 1, 31))
    ahead = jnp.concatenate([jnp.zeros_like(trunk), trunk], axis=1)  # depth 1 at 0 is compared with the trunk at 1

    def tv(draft):
        terms = plain_terms([ahead, jnp.pad(draft, ((0, 0), (0, 1), (0, 0)))], jnp.zeros((2, 50, 2), jnp.int32))
        return (1 - terms.overlap[0, :, 0]).sum()

    gradient = jax.grad(tv)(draft)[:, 0]
    p, q = (np.asarray(jax.nn.softmax(logits[:, 0]), np.float64) for logits in (trunk, draft))
    s = np.where(q < p, q, 0).sum(-1, keepdims=True)
    np.testing.assert_allclose(gradient, -q * ((q < p) - s), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.abs(gradient).sum(-1), (2 * s * (1 - s))[:, 0], rtol=1e-5, atol=1e-6)
    assert np.abs(gradient).sum(-1).max() <= 0.5


def test_lk_hybrid_lies_between_kl_and_total_variation(key):
    """eta 0 is KL, a large one total variation; in between, one weight for a depth from its mean overlap."""
    kl, overlap = jax.random.uniform(key, (2, 2, 1, 12))
    is_valid = jnp.arange(12)[None, None] < jnp.array([12, 5])[:, None, None]
    means = [np.array([values[0].mean(), values[1, :, :5].mean()]) for values in (kl, overlap)]
    for decay in (0.0, 3.0, 1e4):
        w = np.exp(-decay * means[1])
        got = lk_hybrid(kl, overlap, is_valid, decay=decay)
        np.testing.assert_allclose(got, w * means[0] + (1 - w) * (1 - means[1]), rtol=1e-6)


def test_mixes_add_up_and_warm_up_linearly(key):
    logits, tokens, mask = random_rows(key, 2)
    objective = Objective(mix={"kl": 0.5, "end_to_end_tv": 2.0}, start={"cross_entropy": 1.0, "kl": 1.5}, warmup=0.2)
    single = {name: total_of(logits, tokens, mask, Objective(mix={name: 1.0})) for name in OBJECTIVES}
    trunk = total_of(logits[:1], tokens, mask, Objective())
    for progress, weights in [(0.0, (1, 1.5, 0)), (0.05, (0.75, 1.25, 0.5)), (0.2, (0, 0.5, 2)), (1.0, (0, 0.5, 2))]:
        names = ("cross_entropy", "kl", "end_to_end_tv")
        got = mix_at(progress, objective)
        np.testing.assert_allclose([got[name] for name in names], weights, rtol=1e-6)
        total = total_of(logits, tokens, mask, objective, progress=progress)
        expected = trunk + sum(w * (single[name] - trunk) for name, w in zip(names, weights, strict=True))
        np.testing.assert_allclose(total, expected, rtol=1e-5)


def test_depths_weigh_equally_or_fall_as_in_fastmtp(key):
    np.testing.assert_allclose(depth_weights(3, Objective()), [1 / 3] * 3, rtol=1e-6)
    fast = Objective(depth_weights="decayed")
    np.testing.assert_allclose(depth_weights(3, fast), [0.51, 0.31, 0.18], atol=0.005)
    np.testing.assert_allclose(depth_weights(3, fast), np.array([1, 0.6, 0.36]) / 1.96, rtol=1e-6)
    logits, tokens, mask = random_rows(key, 3)
    targets, is_valid = all_targets(tokens, jnp.asarray(SEGMENTS), mask, 3)
    terms = plain_terms(logits, targets)
    total, losses = objective_loss(terms, is_valid, mtp_scale=0.3, objective=fast)
    np.testing.assert_allclose(total, losses[0] + 0.3 * (losses[1:] @ np.array([1, 0.6, 0.36]) / 1.96), rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mix": {"tv": 1.0}}, "objective 'tv' is not one of cross_entropy, kl, total_variation, lk_hybrid, "),
        ({"start": {"xent": 1.0}, "warmup": 0.1}, "objective 'xent' is not one of cross_entropy, kl, "),
        ({"depth_weights": "geometric"}, "depth_weights 'geometric' is not one of mean, decayed"),
        ({"mix": {"kl": -1.0}}, "the weight of kl must be at least 0, not -1.0"),
        ({"warmup": 0.1}, r"start \(\) and warmup 0.1 must be set together"),
        ({"start": {"kl": 1.0}}, "must be set together"),
        ({"start": {"kl": 1.0}, "warmup": 1.5}, "warmup must be at most 1, not 1.5"),
        ({"vocab_chunk": -1}, "vocab_chunk must be at least 0, not -1"),
    ],
)
def test_unknown_names_and_impossible_numbers_are_refused(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        Objective(**settings)
    assert "\n" not in str(error.value)


def test_an_objective_is_hashable_and_the_default_is_cross_entropy():
    assert hash(Objective(mix={"kl": 1})) == hash(Objective(mix=(("kl", 1),)))
    assert TrainConfig().objective == Objective(mix={"cross_entropy": 1.0})
    assert TrainConfig().objective.comparison == "none"
    assert Objective(start={"kl": 1.0}, warmup=0.5).comparison == "kl"
    assert Objective(mix={"kl": 1.0, "total_variation": 1.0}).comparison == "all"


def losses_and_gradients(params, model, tokens, segments, layout):
    def loss_of(params):
        tokens_, segments_ = jnp.asarray(tokens), jnp.asarray(segments)
        output = forward(params, tokens_, model=model, segment_ids=segments_, num_depths=4, attention_layout=layout)
        return multi_depth_loss(output, tokens_, segments_, segments_ > 0, mtp_scale=0.3)

    (_, losses), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)
    return losses, gradients


@pytest.mark.parametrize(
    ("layout", "chaining"),
    [
        ("ttt", "chain"),
        pytest.param("stream", "trunk", marks=pytest.mark.slow),
        pytest.param("ttt", "trunk", marks=pytest.mark.slow),
        pytest.param("stream", "chain", marks=pytest.mark.slow),
    ],
)
def test_packed_documents_train_like_separate_ones(layout, chaining, key):
    """Two modules and two recycled levels; every loss and every gradient, within float32's rounding."""
    model = MTPModel(dataclasses.replace(CONFIG, mtp_chaining=chaining))
    params = init_params(model, key)
    lengths = [5, 9, 6]
    documents = [np.asarray(jax.random.randint(jax.random.key(n), (n,), 0, 61)) for n in lengths]
    packed = np.concatenate([*documents, [0] * 2])[None]
    packed_segments = np.repeat([1, 2, 3, 0], [*lengths, 2])[None]
    apart = np.stack([np.pad(document, (0, 22 - len(document))) for document in documents])
    apart_segments = (np.arange(22)[None, :] < np.array(lengths)[:, None]).astype(np.int32)

    losses, gradients = losses_and_gradients(params, model, packed, packed_segments, layout)
    expected_losses, expected_gradients = losses_and_gradients(params, model, apart, apart_segments, layout)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for got, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert jnp.linalg.norm(got - expected) <= 1e-5 * jnp.linalg.norm(expected)


def test_total_is_the_main_loss_plus_the_scaled_mean_over_depths(key):
    model = MTPModel(CONFIG)
    tokens = jax.random.randint(key, (2, 12), 0, 61)
    output = forward(init_params(model, key), tokens, model=model, num_depths=3)
    ones = jnp.ones_like(tokens)
    total, losses = multi_depth_loss(output, tokens, ones, ones > 0, mtp_scale=0.3)
    assert losses.shape == (4,)
    np.testing.assert_allclose(total, losses[0] + 0.3 * losses[1:].mean(), rtol=1e-6)


def test_lambda_falls_once():
    values = [mtp_scale_at(progress, scale=0.3, final=0.1, switch=0.7) for progress in (0, 0.69, 0.7, 1)]
    assert values == [0.3, 0.3, 0.1, 0.1]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_of_parts_add_up_with_the_totals_of_the_whole(name, key):
    """And not without: a part's own means weigh its targets by how few it has."""
    keys = jax.random.split(key, 3)
    values = [jax.random.uniform(part, (depths, 4, 12)) for part, depths in zip(keys, (3, 2, 2), strict=True)]
    segments, mask = np.repeat(SEGMENTS, 2, axis=0), np.ones((4, 12), bool)
    mask[0, 3:], mask[3] = False, False
    _, is_valid = all_targets(jnp.zeros((4, 12), jnp.int32), jnp.asarray(segments), jnp.asarray(mask), 2)
    settings = {"mtp_scale": 0.3, "objective": Objective(mix={name: 1.0})}
    whole = objective_loss(PositionTerms(*values), is_valid, **settings)
    totals = batch_totals(is_valid, valid_mean(values[2], is_valid[1:]))

    def parts(**more):
        rows = [slice(row, row + 1) for row in range(4)]
        made = [(PositionTerms(*(value[:, row] for value in values)), is_valid[:, row]) for row in rows]
        return [objective_loss(*part, **settings, **more) for part in made]

    for found, means, expected in zip(
        zip(*parts(totals=totals), strict=True), zip(*parts(), strict=True), whole, strict=True
    ):
        np.testing.assert_allclose(sum(found), expected, rtol=1e-5)
        assert abs(sum(means) / 4 - expected).max() > 1e-2
