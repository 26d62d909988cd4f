"""How deep to draft: the depth that pays is found and kept, rows count as they should, and regret is small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import policy_regret
from experiments.policy_regret import LEVELS, adaptive, cost_curves
from mtpjax.decoding import depth_policy as policy_
from mtpjax.decoding.depth_policy import LONGEST_WAIT, PRIOR, init_policy

CPU, GPU = cost_curves(1)["cpu"], cost_curves(1)["gpu"]
observe, rates = jax.jit(policy_.observe), jax.jit(policy_.rates)


def depths(rate, costs, *, batch=16, length=256, seeds=4, mode="stream"):
    """Depths `[seeds, rounds]` over rows of one acceptance rate (or `[positions]` of them); -1 behind the end."""
    drawn = np.random.default_rng(1).random((seeds, batch, length + LEVELS), np.float32)
    margin = np.broadcast_to(rate, drawn.shape) / np.maximum(drawn, 1e-9)
    fall, costs = np.ones(LEVELS, np.float32), jnp.asarray(costs, jnp.float32)
    return np.asarray(adaptive(margin.astype(np.float32), fall, costs, length=length, mode=mode)[1])


@jax.jit
def rounds(policy, counts, depth, active=None):
    """The policy after rounds at this depth, with the accepted drafts `counts [rounds, B]`."""
    is_on = jnp.ones(policy.reached.shape[0], bool) if active is None else jnp.asarray(active)

    def body(policy, count):
        return observe(policy, depth, count, took_part=is_on, active=is_on), None

    return jax.lax.scan(body, policy, jnp.asarray(counts, jnp.int32))[0]


@pytest.mark.parametrize("curve", ["gpu", "cpu", "moe"])
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.95])
def test_constant_acceptance_settles_where_the_true_ratio_is_largest(curve, rate):
    costs = cost_curves(16)[curve]
    ratio = np.cumsum(rate ** np.arange(LEVELS + 1)) / costs
    chosen = depths(rate, costs)
    late = np.concatenate([row[row >= 0][len(row[row >= 0]) // 3 :] for row in chosen])
    assert (ratio[late] / ratio.max()).mean() > 0.97
    changes = np.mean([np.mean(row[row >= 0][10:-1] != row[row >= 0][11:]) for row in chosen])
    assert changes < 0.35


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("costs", [CPU, GPU])
def test_rows_that_accept_nothing_are_left_alone(batch, costs):
    chosen = depths(0.0, costs, batch=batch)
    assert np.mean(costs[chosen]) < 1.05
    assert (chosen[:, -100:] > 0).mean() < (0.05 if costs is CPU else 0.35)  # where a try costs little it is tried more


def test_rows_that_accept_everything_get_the_deepest_round_if_it_pays():
    for costs in (CPU, GPU):
        chosen = depths(1.0, costs)
        assert (chosen[:, 4:20] == LEVELS).all()
    shallow = np.concatenate([[1.0, 1.5], np.full(LEVELS - 1, 50.0)])
    assert (depths(1.0, shallow)[:, :100] == 1).all()


def test_where_drafting_never_pays_it_is_not_even_tried():
    costs = 1 + 1.02 * np.arange(LEVELS + 1)
    assert (depths(0.98, costs) <= 0).all()


@pytest.mark.parametrize("batch", [1, 16])
def test_drafting_is_taken_up_again_when_acceptance_comes_back(batch):
    rate = np.where(np.arange(512 + LEVELS) < 256, 0.02, 0.97)
    chosen = depths(rate, CPU, batch=batch, length=512, seeds=16)
    assert (chosen[:, 100:240] > 0).mean() < 0.05
    late = np.array([(row[256 + LONGEST_WAIT + 20 :] > 2).sum() for row in chosen])
    ended = np.array([(row >= 0).sum() for row in chosen])
    assert ((late > 0) | (ended < 512 - 64)).mean() > 0.9


def test_probes_wait_ever_longer():
    probes = np.flatnonzero(depths(0.0, CPU, batch=4, seeds=1)[0])
    waits = np.diff(probes[probes > 12])
    assert len(waits) >= 2 and (waits[1:] >= waits[:-1]).all() and waits[-1] <= LONGEST_WAIT + 1


def test_rates_begin_at_the_prior_and_converge_to_what_is_accepted(key):
    policy = init_policy(CPU, 4)
    on = jnp.ones(4, bool)
    np.testing.assert_allclose(rates(policy, on), PRIOR, rtol=1e-6)
    counts = (np.asarray(jax.random.uniform(key, (400, 4, 3))) < 0.6).cumprod(axis=2).sum(axis=2)
    estimate = rates(rounds(policy, counts, 3), on)
    assert estimate[:, :3].mean() == pytest.approx(0.6, abs=0.06)
    np.testing.assert_allclose(estimate[:, 3:], np.broadcast_to(estimate[:, 2:3], (4, LEVELS - 3)), rtol=1e-5)


def test_measured_rates_are_where_estimates_begin_and_they_last_longer(key):
    measured = 0.9 - 0.1 * np.arange(LEVELS)
    on = jnp.ones(4, bool)
    known, unknown = init_policy(CPU, 4, prior=measured), init_policy(CPU, 4)
    np.testing.assert_allclose(rates(known, on), np.broadcast_to(measured, (4, LEVELS)), rtol=1e-6)
    failed = [rates(rounds(policy, [[0] * 4] * 2, 1), on)[:, 0] for policy in (known, unknown)]
    assert (failed[0] - failed[1]).min() > 0.2
    counts = (np.asarray(jax.random.uniform(key, (400, 4, 3))) < 0.5).cumprod(axis=2).sum(axis=2)
    np.testing.assert_allclose(rates(rounds(known, counts, 3), on)[:, 0].mean(), 0.5, atol=0.15)
    # Where the first level does better than it was measured to, the next is thought better too.
    assert (rates(rounds(known, [[1] * 4] * 20, 1), on)[:, 1] > measured[1]).all()


def test_measured_rates_are_given_up_for_a_row_that_they_do_not_hold_for():
    on, measured = jnp.ones(2, bool), np.full(LEVELS, 0.85)
    # One row accepts nothing; the other, after a bad beginning, as much as was measured.
    counts = [[0, 0]] * 3 + [[0, 3], [0, 3], [0, 0], [0, 3], [0, 3]] * 3
    estimate = np.asarray(rates(rounds(init_policy(CPU, 2, prior=measured), counts, 3), on))[:, 0]
    unknown = np.asarray(rates(rounds(init_policy(CPU, 2), counts, 3), on))[:, 0]
    assert abs(estimate[0] - unknown[0]) < 0.1  # no more held against what it does than a guess
    assert estimate[1] > unknown[1] + 0.03
    everything = [[3, 3]] * 14
    easy, unknown = (
        rates(rounds(init_policy(CPU, 2, prior=prior), everything, 3), on)[0, 0]
        for prior in (np.full(LEVELS, 0.4), None)
    )
    assert easy > unknown - 0.15


def test_measured_lengths_tell_at_once_which_depth_suits_regular_failures():
    """Every fourth token fails: one draft or two make two tokens a round, and three make four."""
    costs, rates_, lengths = jnp.array([1.0, 1.5, 1.8, 2.6]), np.ones(3), np.array([2.0, 2.0, 4.0])
    assert init_policy(costs, 2, prior=rates_).depth == 2  # for 3 tokens by rates
    policy = init_policy(costs, 2, prior=rates_, lengths=lengths)
    assert policy.depth == 3
    assert init_policy(costs, 2, prior=rates_, lengths=1 + np.arange(1, 4)).depth == 2
    # A row without failures leaves it at that; one where every other token fails has gaps that three tokens hold too.
    whole, halves = np.asarray(policy_.regularity(rounds(policy, [[3, 1]] * 24, 3)))
    np.testing.assert_allclose(whole, [1, 1, 2 / 3, 1], rtol=1e-5)
    assert halves[2] / halves[1] > 2 / 3 + 0.05


def test_deep_levels_are_tried_where_by_measured_rates_they_are_nearly_as_good():
    """One draft makes 1.9 tokens for 1.5, three make 3.3 for 2.7, 4 % less: until this batch has shown it, too."""
    costs, measured = jnp.array([1.0, 1.5, 2.3, 2.7]), np.array([0.9, 0.8, 0.9])
    policy = init_policy(costs, 2, prior=measured)
    assert policy.depth == 3
    as_measured = [[3, 1], [0, 3], [3, 3], [1, 3], [3, 0], [1, 3], [3, 3], [3, 1], [2, 3], [3, 3]] * 4
    assert rounds(policy, as_measured, 3).settled == 1
    assert init_policy(jnp.array([1.0, 1.5, 2.4, 3.0]), 2, prior=measured).depth == 1  # 14 % less
    assert init_policy(jnp.array([1.0, 1.95, 3.0, 3.8]), 2, prior=measured).settled == 0  # one draft is no deep level


def test_one_row_that_accepts_nothing_ends_drafting_for_a_batch_that_waits_for_it():
    """Its 63 neighbours gain by drafts, but it is the one that ends the batch."""
    costs, batch = jnp.array([1.0, 1.35, 2.05, 2.45]), 64

    def decode(has_bad):
        policy, remaining, spent = init_policy(costs, batch, prior=[0.87, 0.8, 0.9]), jnp.full(batch, 128), 0.0
        while remaining.any():
            is_good = (jnp.arange(batch) > 0) | (not has_bad)
            count = jnp.where(is_good & (remaining % 9 > 0), policy.depth, 0)
            spent += float(costs[policy.depth])
            took_part, remaining = remaining > 0, jnp.maximum(remaining - count - 1, 0)
            policy = observe(
                policy, policy.depth, count, took_part=took_part, active=remaining > 0, remaining=remaining
            )
        return spent

    assert decode(has_bad=True) < 1.1 * 128
    assert decode(has_bad=False) < 0.8 * 128


def test_levels_that_only_easy_rows_reach_promise_nothing_to_a_hard_one():
    """Measured over rows of which half accept most and half little, deeper levels look likelier than the first."""
    on, measured = jnp.ones(1, bool), np.concatenate([[0.45], np.full(LEVELS - 1, 0.9)])
    fresh = rates(init_policy(CPU, 1, prior=measured), on)[0]
    np.testing.assert_allclose(fresh, measured, rtol=1e-6)
    hard = rates(rounds(init_policy(CPU, 1, prior=measured), [[0], [0], [1], [0], [0]] * 4, 1), on)[0]
    assert hard[0] < 0.45 and (hard[1:] < hard[0] * (0.9 / 0.45) ** 0.3).all()


@pytest.mark.parametrize("remaining", [None, 60])
def test_a_change_of_depth_has_to_pay_for_itself(remaining):
    on, costs = jnp.ones(1, bool), np.array([1.0, 1.2, 1.4])
    left = None if remaining is None else jnp.array([remaining])
    chosen = []
    for change in (0.0, 0.1, 1000.0):
        policy = init_policy(costs, 1, change=change, prior=[0.9, 0.9])
        assert int(policy.depth) == 2  # the first round is no change
        for _ in range(40):
            policy = observe(policy, 2, jnp.array([0]), took_part=on, active=on, remaining=left)
        chosen.append(int(policy.settled))
    assert chosen == [0, 0, 2]


def test_levels_out_of_use_return_to_the_level_before():
    policy = rounds(init_policy(CPU, 1), [[1]] * 20, 2)  # level 2 always fails
    on = jnp.ones(1, bool)
    before = rates(policy, on)[0, 1]
    after = rates(rounds(policy, [[1]] * 400, 1), on)[0]
    assert before < 0.15 < 0.8 < after[1] <= after[0]


def test_a_row_that_is_done_counts_for_nothing():
    """The same as a batch without it, whatever it did before."""
    counts = np.array([[0, 3, 1], [1, 3, 0], [0, 2, 2], [1, 3, 1], [0, 3, 0]])
    active = np.array([True, False, True])
    # Rows of a smaller batch are remembered differently: so the other one has a row that never ran.
    all_rows = rounds(init_policy(GPU, 3), counts, 3)
    all_rows = rounds(all_rows, counts[:1], 3, active)
    others = rounds(init_policy(GPU, 3), counts, 3, active)
    others = rounds(others, counts[:1], 3, active)
    np.testing.assert_allclose(rates(all_rows, active)[active], rates(others, active)[active], rtol=1e-6)
    assert int(all_rows.settled) == int(others.settled)


def test_a_row_hears_of_others_only_until_it_speaks_for_itself(key):
    own = (np.asarray(jax.random.uniform(key, (60, 4))) < 0.7).cumprod(axis=1).sum(axis=1)
    estimates = []
    for other in (0, 4):
        counts = np.stack([own, np.full(60, other)], axis=1)
        estimates.append(np.asarray(rates(rounds(init_policy(GPU, 2), counts, 4), jnp.ones(2, bool)))[0])
    assert np.abs(estimates[0] - estimates[1])[:3].max() < 0.2
    assert np.abs(estimates[0] - estimates[1])[4:].max() < 0.35  # levels that neither tried


def test_no_draft_is_made_behind_a_limit():
    policy, on = init_policy(GPU, 2), jnp.ones(2, bool)
    for remaining, most in (([1, 1], 0), ([3, 2], 2), ([1, 50], LEVELS)):
        after = observe(
            policy, 4, jnp.array([4, 4], jnp.int32), took_part=on, active=on, remaining=jnp.array(remaining)
        )
        assert int(after.depth) <= most
        assert most < LEVELS or int(after.depth) > 4


def test_without_rows_nothing_is_drafted_and_nothing_is_nan():
    policy, off = init_policy(GPU, 2), jnp.zeros(2, bool)
    for remaining in (None, jnp.zeros(2, jnp.int32)):
        after = observe(policy, 3, jnp.zeros(2, jnp.int32), took_part=~off, active=off, remaining=remaining)
        assert int(after.depth) == 0
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


def test_it_is_a_carry_of_a_compiled_loop_and_depth_may_be_static_or_traced():
    def body(policy):
        on = jnp.ones(3, bool)
        return observe(policy, policy.depth, policy.depth * jnp.array([1, 0, 1]), took_part=on, active=on)

    static = jax.jit(policy_.observe, static_argnames="depth")
    policy = init_policy(CPU, 3)
    looped = jax.jit(lambda policy: jax.lax.fori_loop(0, 5, lambda _, policy: body(policy), policy))(policy)
    for _ in range(5):
        depth, on = int(policy.depth), jnp.ones(3, bool)
        policy = static(policy, depth, depth * jnp.array([1, 0, 1]), took_part=on, active=on)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), looped, policy)


# What costs more than 3 % here, all of it in texts of 64 tokens: what is learnt in the first rounds, which are few and
# dear, or a change halfway that comes after ten rounds of evidence to the contrary.
@pytest.mark.parametrize(
    ("mode", "batch", "is_measured"),
    [
        ("batch", 1, False),
        pytest.param("stream", 16, False, marks=pytest.mark.slow),
        pytest.param("batch", 16, False, marks=pytest.mark.slow),
        *(pytest.param(mode, 16, True, marks=pytest.mark.slow) for mode in ("stream", "batch")),
    ],
)
def test_regret_is_small(mode, batch, is_measured):
    seeds = {1: 160, 16: 48}[batch]
    cells = [
        cell
        for process in policy_regret.PROCESSES
        if "period" not in process
        for length in ((64, 256) if process in ("cliff", "regimes", "mixed rows", "constant 0.7") else (256,))
        for cell in policy_regret.measure(process, batch, length, mode, seeds, is_measured=is_measured)
    ]
    assert np.mean([cell.regret for cell in cells]) < 0.01
    above = [cell for cell in cells if cell.regret - 3 * cell.error > 0.03]
    assert len(above) <= 0.1 * len(cells), above
    assert all(cell.regret - 3 * cell.error < 0.08 for cell in cells), above


def test_acceptance_of_a_process_is_counted_as_its_rounds_meet_it():
    margin, fall = policy_regret.draw("falling 0.8", 8, 256, 32)
    counted, lengths = policy_regret.acceptance(margin, fall, length=256)
    expected = 0.8 * 0.65 ** np.arange(3)
    np.testing.assert_allclose(counted[:3], expected, atol=0.02)
    np.testing.assert_allclose(lengths[:3], 1 + np.cumsum(np.cumprod(expected)), atol=0.02)
    margin, fall = policy_regret.draw("period 3", 1, 255, 4)  # two drafts, and the bonus token is the third
    counted, lengths = policy_regret.acceptance(margin, fall, length=255)
    np.testing.assert_array_equal(counted[:2] > 0.98, True)
    np.testing.assert_allclose(lengths[:2], [1.5, 3], atol=0.05)


def test_regular_failures_are_seen_where_levels_do_not_tell(monkeypatch):
    """Every fourth token fails: 2 drafts need two rounds for four tokens, and 3 one."""
    costs = jnp.array([1.0, 1.5, 2.0, 2.5])
    policy = rounds(init_policy(costs, 1), [[2], [0]] * 8, 2).replace(depth=jnp.int32(2))
    tokens = np.cumsum(np.concatenate([[1], np.cumprod(rates(policy, jnp.ones(1, bool))[0])]))
    corrected = tokens * np.asarray(policy_.regularity(policy))[0]
    assert abs(corrected[2] - 2) < 0.1 and np.argmax(tokens / costs) < 3
    assert corrected[3] > 2.9 and np.argmax(corrected / costs) == 3

    def regret():
        adaptive.clear_cache()
        cells = [policy_regret.measure(name, 4, 256, "batch", 8) for name in ("period 3", "period 4")]
        return np.array([[cell.regret for cell in row if cell.curve == "cpu"] for row in cells])

    with_gaps = regret()
    monkeypatch.setattr(policy_, "USUAL_GAPS", 1e6)
    without = regret()
    adaptive.clear_cache()
    assert (with_gaps < without).all() and with_gaps.mean() < 0.85 * without.mean()


def test_random_failures_leave_the_levels_as_they_are(key):
    accepted = jnp.cumprod(jax.random.bernoulli(key, 0.7, (400, 8, LEVELS)), axis=-1).sum(axis=-1)
    policy = rounds(init_policy(CPU, 8), accepted, LEVELS)
    np.testing.assert_allclose(policy_.regularity(policy).mean(axis=0), 1, atol=0.15)
    fresh = init_policy(CPU, 2)
    np.testing.assert_array_equal(policy_.regularity(fresh), np.ones((2, LEVELS + 1)))
