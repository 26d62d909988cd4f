"""Adaptive depth: what the counts and the costs lead to, and that the text does not depend on it."""

import dataclasses

import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams
from mtpjax.decoding.depth_policy import PROBE_INTERVAL
from mtpjax.serving.depth import AdaptiveDepth, best_depth, estimate_rates, probe_depth
from mtpjax.serving.engine import Engine
from mtpjax.serving.engine_session import EngineSession
from mtpjax.serving.executor import Executor, measure_costs
from mtpjax.serving.request import Request
from mtpjax.serving.sizes import EngineSettings
from tests.helpers.engine_client import Client
from tests.serving.test_engine import alone

COSTS = (1.0, 1.3, 1.6)
SETTINGS = EngineSettings(
    num_slots=2, max_length=96, page_size=8, batch_sizes=(2,), prefill_tokens=8, adapts_depth=True, depth_costs=(COSTS,)
)
CONFIG = DecodeConfig(num_steps=2, prefill_chunk=8, acceptance="sample")


@pytest.mark.parametrize(
    ("costs", "rates", "depth"),
    [
        (COSTS, [1.0, 1.0], 2),
        (COSTS, [0.9, 0.1], 1),
        (COSTS, [0.2, 1.0], 0),
        ((1.0, 1.0, 1.0), [0.0, 0.0], 0),
        ((1.0, 2.5, 2.6), [1.0, 1.0], 2),
        ((1.0, 2.5, 4.0), [1.0, 1.0], 0),
    ],
)
def test_the_best_depth_has_the_most_tokens_per_second(costs, rates, depth):
    assert best_depth(costs, np.array(rates)) == depth


def test_a_probe_is_one_deeper_where_that_could_win():
    assert [probe_depth(COSTS, best) for best in (0, 1, 2)] == [1, 2, 2]
    assert probe_depth((1.0, 2.0, 3.0), 0) == 0


def test_rates_start_at_the_prior_and_follow_the_counts():
    assert estimate_rates(np.zeros(2), np.zeros(2)).tolist() == [0.75, 0.75]
    first, second = estimate_rates(np.array([100.0, 40.0]), np.array([40.0, 0.0]))
    assert 0.4 < first < 0.42 and second < 0.05


def test_wrong_drafts_end_and_are_probed_again():
    policy = AdaptiveDepth((COSTS, (1.0, 2.0, 3.0)), (2, 4))
    assert policy.choose(2) == 2
    for _ in range(8):
        policy.record(1, np.array([2, 2]), np.array([0, 0]))
    depths = [policy.choose(2) for _ in range(2 * PROBE_INTERVAL)]
    assert depths.count(0) == 2 * PROBE_INTERVAL - 2 and depths.count(1) == 2
    # Where more rows decode drafts could not win even if they were right.
    assert {policy.choose(3) for _ in range(2 * PROBE_INTERVAL)} == {0}
    # Rounds without drafts change nothing; right ones in the probes do.
    before = policy.verified
    policy.record(2, np.zeros(2, int), np.zeros(2, int))
    assert policy.verified is before
    for _ in range(16):
        policy.record(1, np.array([2, 0]), np.array([2, 0]))
    assert policy.choose(1) > 0


def test_the_second_level_counts_where_the_first_was_accepted():
    policy = AdaptiveDepth((COSTS,), (2,))
    policy.record(1, np.array([8, 8]), np.array([3, 1]))
    assert policy.verified.tolist() == [8, 3] and policy.accepted.tolist() == [3, 1]


def requests():
    for seed in range(4):
        sampling = SamplingParams(seed=seed, temperature=0.5 * (seed % 2))
        yield Request(prompt=(seed + 1, 2, 3), max_new_tokens=60, sampling=sampling)


@pytest.mark.slow
@pytest.mark.parametrize("quality", ["wrong", "right"])
def test_the_depth_follows_acceptance_and_the_text_stays(quality, small):
    model, params = small("grouped", quality)
    engine = Engine(params, model=model, config=CONFIG, settings=SETTINGS)
    engine.start()
    asked = [request for request in requests() if quality == "right" or not request.sampling.temperature]
    results = Client(engine).run(asked)
    status = engine.status()
    assert engine.close(timeout=30)
    for request, (tokens, _, _) in zip(asked, results, strict=True):
        assert tokens == alone(params, model, request, CONFIG)[0]
    # Rounds that drafted the first level. Greedy texts of this model accept all right drafts.
    share = status.proposed[0] / status.num_steps
    assert share < 0.5 if quality == "wrong" else share > 0.9


def test_sizes_of_the_costs_are_checked(small):
    model, params = small("grouped")
    settings = dataclasses.replace(SETTINGS, depth_costs=((1.0, 1.5),))
    with pytest.raises(ValueError, match="depth_costs must have 3 durations"):
        Executor(EngineSession(params, model=model, config=CONFIG, settings=settings))
    with pytest.raises(ValueError, match="acceptance 'block' the text for a seed depends"):
        Executor(
            EngineSession(params, model=model, config=dataclasses.replace(CONFIG, acceptance="auto"), settings=SETTINGS)
        )


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["grouped", "hybrid"])
def test_costs_are_measured_for_each_batch_size_and_depth(attention, small):
    model, params = small(attention, "mixed")
    settings = dataclasses.replace(SETTINGS, num_slots=4, batch_sizes=(1, 4), depth_costs=None)
    costs = measure_costs(Executor(EngineSession(params, model=model, config=CONFIG, settings=settings)))
    assert [len(durations) for durations in costs] == [3, 3]
    assert all(0 < durations[0] <= durations[1] <= durations[2] for durations in costs)
    engine = Engine(params, model=model, config=CONFIG, settings=settings)
    engine.warm_up()
    engine.start()
    for request, (tokens, _, _) in zip(requests(), Client(engine).run(list(requests())), strict=True):
        assert tokens == alone(params, model, request, CONFIG)[0]
    assert engine.status().num_compilations == 0
    assert engine.close(timeout=30)
