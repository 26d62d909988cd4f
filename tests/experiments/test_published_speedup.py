"""The fit of a published row of speed-ups."""

import json

import numpy as np
import pytest

from experiments.decoding.published_speedup import PUBLISHED, RESULT, Fit, Steps, draw, fit_row, speedups, tables

RESULTS = json.loads(RESULT.read_text())
STEPS = Steps(
    *(
        np.array([point[name] for point in RESULTS["points"]])
        for name in ("requests", "plain_seconds", "drafted_seconds")
    )
)


def test_the_fit_finds_the_parameters_of_a_row_that_it_made():
    made = Fit(accept_length=1.8, prefill_share=0.05, fixed_cost=8e-3)
    found, error = fit_row(STEPS, speedups(STEPS, made), 2)
    assert (found.accept_length, found.prefill_share) == pytest.approx((1.8, 0.05), rel=1e-3)
    assert found.fixed_cost == pytest.approx(8e-3, rel=1e-2) and error < 1e-6


def test_without_prefill_and_fixed_cost_the_gain_is_that_of_the_steps():
    fit = Fit(accept_length=2.0, prefill_share=0.0, fixed_cost=0.0)
    np.testing.assert_allclose(speedups(STEPS, fit), 2 * STEPS.plain / STEPS.drafted)


def test_the_result_repeats(tmp_path):
    fit, error = fit_row(STEPS, list(PUBLISHED.values()), RESULTS["num_steps"])
    assert error == pytest.approx(RESULTS["fit"]["rms"], rel=1e-2)
    np.testing.assert_allclose(speedups(STEPS, fit), [point["fitted"] for point in RESULTS["points"]], rtol=1e-2)
    assert len(tables(RESULTS)) == 2
    draw(RESULTS, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size
