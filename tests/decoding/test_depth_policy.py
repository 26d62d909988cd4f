"""The adaptive depth policy: how counts become rates, and how rates and costs become a depth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.decoding import depth_policy
from mtpjax.decoding.depth_policy import (
    PRIOR_RATE,
    PROBE_INTERVAL,
    acceptance_rates,
    can_speed_up,
    init_policy,
    update_policy,
)

LEVELS = 7
CHEAP = 1 + 0.12 * np.arange(LEVELS + 1)  # costs of a round where it reads weights: more tokens are nearly free
DEAR = 1 + 0.56 * np.arange(LEVELS + 1)  # and where each token costs half a pass
rates = jax.jit(acceptance_rates)


@jax.jit
def rounds(policy, counts, depth, active=None):
    """The policy after rounds at this depth, with the accepted drafts `counts [rounds, B]`."""
    is_on = jnp.ones(policy.verified.shape[0], bool) if active is None else jnp.asarray(active)

    def body(policy, count):
        return update_policy(policy, depth, count, was_active=is_on, is_active=is_on), None

    return jax.lax.scan(body, policy, jnp.asarray(counts, jnp.int32))[0]


def drawn_counts(key, rate, num_rounds, batch, depth):
    """Accepted drafts `[rounds, B]` of rows that accept each draft at this rate."""
    return (np.asarray(jax.random.uniform(key, (num_rounds, batch, depth))) < rate).cumprod(axis=2).sum(axis=2)


def test_rates_begin_at_the_prior_and_converge_to_what_is_accepted(key):
    policy, on = init_policy(DEAR, 4), jnp.ones(4, bool)
    np.testing.assert_allclose(rates(policy, on), PRIOR_RATE, rtol=1e-6)
    estimate = rates(rounds(policy, drawn_counts(key, 0.6, 400, 4, 3), 3), on)
    assert estimate[:, :3].mean() == pytest.approx(0.6, abs=0.06)
    # Depths that were never tried are expected to do as well as the last one that was.
    np.testing.assert_allclose(estimate[:, 3:].mean(axis=0), estimate[:, 2:3].mean(), atol=0.1)


def test_measured_rates_are_the_first_estimates_and_outlast_an_assumed_prior(key):
    measured, on = 0.9 - 0.1 * np.arange(LEVELS), jnp.ones(4, bool)
    known, unknown = init_policy(DEAR, 4, prior=measured), init_policy(DEAR, 4)
    np.testing.assert_allclose(rates(known, on), np.broadcast_to(measured, (4, LEVELS)), rtol=1e-5)
    failed = [rates(rounds(policy, [[0] * 4] * 2, 1), on)[:, 0] for policy in (known, unknown)]
    assert (failed[0] - failed[1]).min() > 0.1
    # What is observed outweighs both in the end.
    estimate = rates(rounds(known, drawn_counts(key, 0.5, 400, 4, 3), 3), on)
    np.testing.assert_allclose(estimate[:, 0].mean(), 0.5, atol=0.1)


def test_a_row_is_shrunk_to_the_batch_only_while_it_has_few_rounds_of_its_own(key):
    own = drawn_counts(key, 0.7, 60, 1, 4)[:, 0]
    estimates = []
    for other in (0, 4):
        counts = np.stack([own, np.full(60, other)], axis=1)
        estimates.append(np.asarray(rates(rounds(init_policy(CHEAP, 2), counts, 4), jnp.ones(2, bool)))[0])
    assert np.abs(estimates[0] - estimates[1])[0] < 0.15
    fresh = rates(rounds(init_policy(CHEAP, 2), [[1, 0]] * 30, 1, np.array([False, True])), jnp.ones(2, bool))[0]
    assert fresh[0] < 0.2


def test_depths_that_only_easy_rows_reach_promise_nothing_to_a_hard_row():
    """Measured over rows of which half accept most and half little, deeper depths look likelier than the first."""
    on, measured = jnp.ones(1, bool), np.concatenate([[0.45], np.full(LEVELS - 1, 0.9)])
    fresh = rates(init_policy(DEAR, 1, prior=measured), on)[0]
    np.testing.assert_allclose(fresh, measured, rtol=1e-5)
    hard = rates(rounds(init_policy(DEAR, 1, prior=measured), [[0], [0], [1], [0], [0]] * 4, 1), on)[0]
    assert hard[0] < 0.45 and (hard[1:] <= hard[0] * 2 + 1e-6).all() and (hard[1:] < 0.9).all()


def test_depths_out_of_use_return_to_what_the_depth_before_suggests():
    policy, on = rounds(init_policy(DEAR, 1), [[1]] * 20, 2), jnp.ones(1, bool)  # depth 2 always fails
    before = rates(policy, on)[0, 1]
    after = rates(rounds(policy, [[1]] * 400, 1), on)[0]
    assert before < 0.2 < 0.8 < after[1] <= after[0]


def test_a_row_that_is_done_does_not_influence_the_others():
    counts = np.array([[0, 3, 1], [1, 3, 0], [0, 2, 2], [1, 3, 1], [0, 3, 0]])
    active = np.array([True, False, True])
    with_done = rounds(rounds(init_policy(CHEAP, 3), counts, 3), counts[:1], 3, active)
    without = rounds(rounds(init_policy(CHEAP, 3), counts, 3, active), counts[:1], 3, active)
    np.testing.assert_allclose(rates(with_done, active)[active], rates(without, active)[active], rtol=1e-6)
    assert int(with_done.depth) == int(without.depth)


def test_the_depth_maximises_expected_tokens_over_cost():
    """Against the formula, for rates that are known: (1 + r + r^2 + ...) / cost."""
    for rate in (0.2, 0.5, 0.7, 0.9, 0.99):
        for costs in (CHEAP, DEAR):
            ratio = np.cumsum(rate ** np.arange(LEVELS + 1)) / costs
            best = int(ratio.argmax())
            policy = init_policy(costs, 3, prior=np.full(LEVELS, rate))
            # The first round never has depth 0 where depth 1 could pay, since it would reveal nothing.
            assert int(policy.depth) == max(best, 1)


def test_probes_come_at_regular_intervals():
    policy, on, depths_ = init_policy(DEAR, 4), jnp.ones(4, bool), []
    step = jax.jit(
        lambda policy: update_policy(policy, policy.depth, jnp.zeros(4, jnp.int32), was_active=on, is_active=on)
    )
    for _ in range(8 * PROBE_INTERVAL):
        depths_.append(int(policy.depth))
        policy = step(policy)
    probes = np.flatnonzero(depths_[PROBE_INTERVAL:])
    assert len(probes) >= 5 and set(np.diff(probes)) == {PROBE_INTERVAL + 1}  # the probe, and the rounds between
    assert max(depths_[PROBE_INTERVAL:]) == 1  # one deeper than plain decoding


def test_drafting_that_cannot_pay_is_never_tried():
    costs = 1 + 1.02 * np.arange(LEVELS + 1)
    assert not can_speed_up(costs) and can_speed_up(CHEAP)
    assert int(rounds(init_policy(costs, 2), [[0, 0]] * 40, 0).depth) == 0


@pytest.mark.slow
def test_one_slow_row_ends_drafting_for_a_batch_that_waits_for_it():
    """Its 63 neighbours gain by drafts, but it is the one that ends the batch."""
    costs, batch = jnp.array([1.0, 1.35, 2.05, 2.45]), 64

    def decode(has_slow_row):
        policy, remaining, spent = init_policy(costs, batch, prior=[0.87, 0.8, 0.9]), jnp.full(batch, 128), 0.0
        while remaining.any():
            is_good = (jnp.arange(batch) > 0) | (not has_slow_row)
            count = jnp.where(is_good & (remaining % 9 > 0), policy.depth, 0)
            spent += float(costs[policy.depth])
            was_active, remaining = remaining > 0, jnp.maximum(remaining - count - 1, 0)
            policy = update_policy(
                policy, policy.depth, count, was_active=was_active, is_active=remaining > 0, remaining=remaining
            )
        return spent

    assert decode(has_slow_row=True) < 1.15 * 128
    assert decode(has_slow_row=False) < 0.8 * 128


def test_no_draft_is_made_beyond_a_limit():
    policy, on = init_policy(CHEAP, 2), jnp.ones(2, bool)
    for remaining, most in (([1, 1], 0), ([3, 2], 2), ([1, 50], LEVELS)):
        after = update_policy(
            policy, 4, jnp.array([4, 4], jnp.int32), was_active=on, is_active=on, remaining=jnp.array(remaining)
        )
        assert int(after.depth) <= most
        assert most < LEVELS or int(after.depth) > 3


def test_a_probe_does_not_go_beyond_a_limit():
    policy, on = init_policy(CHEAP, 2).replace(since_probe=jnp.int32(PROBE_INTERVAL)), jnp.ones(2, bool)
    after = update_policy(policy, 0, jnp.zeros(2, jnp.int32), was_active=on, is_active=on, remaining=jnp.array([1, 1]))
    assert int(after.depth) == 0


def test_without_rows_nothing_is_drafted_and_nothing_is_nan():
    policy, off = init_policy(CHEAP, 2), jnp.zeros(2, bool)
    for remaining in (None, jnp.zeros(2, jnp.int32)):
        after = update_policy(policy, 3, jnp.zeros(2, jnp.int32), was_active=~off, is_active=off, remaining=remaining)
        assert int(after.depth) == 0
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


def test_it_is_a_carry_of_a_compiled_loop_and_depth_may_be_static_or_traced():
    def body(policy):
        on = jnp.ones(3, bool)
        return update_policy(policy, policy.depth, policy.depth * jnp.array([1, 0, 1]), was_active=on, is_active=on)

    static = jax.jit(depth_policy.update_policy, static_argnames="depth")
    policy = init_policy(DEAR, 3)
    looped = jax.jit(lambda policy: jax.lax.fori_loop(0, 5, lambda _, policy: body(policy), policy))(policy)
    for _ in range(5):
        depth, on = int(policy.depth), jnp.ones(3, bool)
        policy = static(policy, depth, depth * jnp.array([1, 0, 1]), was_active=on, is_active=on)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), looped, policy)
