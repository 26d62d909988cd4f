"""The adaptive depth policy on simulated rows: it finds the best depth, keeps it, and costs little to have."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.decoding import policy_regret
from experiments.decoding.policy_regret import LEVELS, adaptive, cost_curves
from mtpjax.decoding.depth_policy import PROBE_INTERVAL

CPU, GPU = cost_curves(1)["cpu"], cost_curves(1)["gpu"]


def depths(rate, costs, *, batch=16, length=256, seeds=4, mode="stream"):
    """Depths `[seeds, rounds]` over rows of one acceptance rate (or `[positions]` of them); -1 after the end."""
    drawn = np.random.default_rng(1).random((seeds, batch, length + LEVELS), np.float32)
    margin = np.broadcast_to(rate, drawn.shape) / np.maximum(drawn, 1e-9)
    fall, costs = np.ones(LEVELS, np.float32), jnp.asarray(costs, jnp.float32)
    return np.asarray(adaptive(margin.astype(np.float32), fall, costs, length=length, mode=mode)[1])


@pytest.mark.parametrize("curve", ["gpu", "cpu", "moe"])
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.95])
def test_constant_acceptance_settles_where_the_true_ratio_is_largest(curve, rate):
    costs = cost_curves(16)[curve]
    ratio = np.cumsum(rate ** np.arange(LEVELS + 1)) / costs
    chosen = depths(rate, costs)
    late = np.concatenate([row[row >= 0][len(row[row >= 0]) // 3 :] for row in chosen])
    assert (ratio[late] / ratio.max()).mean() > 0.97


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("costs", [CPU, GPU])
def test_rows_that_accept_nothing_cost_little_more_than_plain_decoding(batch, costs):
    chosen = depths(0.0, costs, batch=batch)
    assert np.mean(costs[chosen]) < 1.06
    # A try that costs little is repeated more often, because the estimate decays towards the prior.
    assert (chosen[:, -100:] > 0).mean() <= (1.5 / PROBE_INTERVAL if costs is CPU else 0.35)


def test_rows_that_accept_everything_get_the_deepest_round_if_it_pays():
    for costs in (CPU, GPU):
        chosen = depths(1.0, costs)
        assert (chosen[:, 4:20] == LEVELS).all()
    shallow = np.concatenate([[1.0, 1.5], np.full(LEVELS - 1, 50.0)])
    assert (depths(1.0, shallow)[:, :100] == 1).all()


@pytest.mark.parametrize("batch", [1, 16])
def test_drafting_starts_again_when_acceptance_comes_back(batch):
    rate = np.where(np.arange(512 + LEVELS) < 256, 0.02, 0.97)
    chosen = depths(rate, CPU, batch=batch, length=512, seeds=16)
    assert (chosen[:, 100:240] > 0).mean() <= 1.5 / PROBE_INTERVAL
    late = np.array([(row[256 + 3 * PROBE_INTERVAL :] > 2).sum() for row in chosen])
    ended = np.array([(row >= 0).sum() for row in chosen])
    assert ((late > 0) | (ended < 512 - 64)).mean() > 0.9


@pytest.mark.parametrize(
    ("mode", "batch", "is_measured"),
    [
        ("batch", 1, False),
        pytest.param("stream", 16, False, marks=pytest.mark.slow),
        pytest.param("batch", 16, False, marks=pytest.mark.slow),
        *(pytest.param(mode, 16, True, marks=pytest.mark.slow) for mode in ("stream", "batch")),
    ],
)
@pytest.mark.slow
def test_regret_is_small(mode, batch, is_measured):
    """The bar: on average over cells, at least 0.95 of the speed of the best fixed depth."""
    seeds = {1: 160, 16: 48}[batch]
    cells = [
        cell
        for process in policy_regret.PROCESSES
        if "period" not in process  # the policy assumes independent rejections
        for length in ((64, 256) if process in ("cliff", "regimes", "mixed rows", "constant 0.7") else (256,))
        for cell in policy_regret.measure(process, batch, length, mode, seeds, is_measured=is_measured)
    ]
    assert np.mean([cell.regret for cell in cells]) < 0.015
    above = [cell for cell in cells if cell.regret - 3 * cell.error > 0.05]
    assert len(above) <= 0.1 * len(cells), above


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
