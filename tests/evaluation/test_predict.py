"""What is predicted along the trunk's own text is what decoding does: round by round if greedy, else in expectation."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig, load, speculative_generate
from mtpjax.evaluation.acceptance import measure_acceptance
from mtpjax.evaluation.metrics import decoded_rates, report
from mtpjax.evaluation.predict import acceptance_probabilities, expected_rounds
from mtpjax.evaluation.teacher_forced import is_predictable
from tests import golden

CONFIG = DecodeConfig(max_new_tokens=24, num_steps=3, prefill_chunk=8)


def make_prompts(count, vocab_size=61, most=9):
    rng = np.random.default_rng(0)
    return [rng.integers(1, vocab_size, size).tolist() for size in rng.integers(1, most, count)]


def assert_exact(acceptance):
    """Rounds and accepted drafts of every prompt."""
    assert acceptance.is_identical.all()
    assert acceptance.predicted.rounds.tolist() == acceptance.rounds.tolist()
    assert acceptance.predicted.accepted.tolist() == acceptance.accepted.tolist()


@pytest.mark.parametrize(
    ("attention", "modules", "chaining", "num_steps"),
    [
        ("grouped", 2, "trunk", 4),
        pytest.param("latent", 3, "chain", 3, marks=pytest.mark.slow),
        pytest.param("hybrid", 1, "chain", 2, marks=pytest.mark.slow),
    ],
)
def test_greedy_rounds_are_predicted_one_by_one(attention, modules, chaining, num_steps, small):
    model, params = small(attention, "mixed", num_mtp_modules=modules, mtp_chaining=chaining)
    config = dataclasses.replace(CONFIG, num_steps=num_steps)
    prompts = make_prompts(16)
    acceptance = measure_acceptance(params, prompts, model=model, config=config, batch_size=16)
    assert_exact(acceptance)
    assert 0 < acceptance.accepted.sum() < acceptance.rounds.sum() * num_steps


@pytest.mark.slow
def test_rounds_of_fewer_levels_are_predicted_on_the_way(small):
    model, params = small("grouped", "mixed")
    prompts = make_prompts(16)
    acceptance = measure_acceptance(params, prompts, model=model, config=CONFIG, batch_size=16)
    at_two = dataclasses.replace(CONFIG, num_steps=2)
    stats = speculative_generate(params, prompts, model=model, config=at_two).stats
    assert acceptance.predicted.rounds_at_depth[:, 1].tolist() == stats.rounds.tolist() != acceptance.rounds.tolist()
    assert acceptance.predicted.accepted_at_depth[:, 1].tolist() == stats.accepted.sum(axis=1).tolist()
    figures = report(acceptance, ["all"] * 16)["overall"]
    lengths = [length.value for length in figures["predicted"]["accept_length_at_depth"]]
    assert lengths[1] == pytest.approx(stats.accept_length)
    assert lengths[-1] == pytest.approx(figures["decoded"]["accept_length"].value)


@pytest.mark.slow
def test_limits_and_stops_within_a_round_are_predicted(small):
    """A row ends at each place of a round; drafts behind its end count, as they do in decoding."""
    model, params = small("grouped", "mixed", max_position_embeddings=40)
    prompts = make_prompts(16)
    whole = measure_acceptance(params, prompts, model=model, config=CONFIG, batch_size=16)
    stops = tuple({text[place] for text, place in zip(whole.texts, range(5, 21), strict=True)})
    for changes in (
        {"stop_token_ids": stops[:2]},
        {"stop_token_ids": stops, "max_new_tokens": 9},
        {"stop_sequences": (tuple(whole.texts[0][4:7]), tuple(whole.texts[1][7:9]))},
        {"max_length": 14},
        {"max_new_tokens": 1},
    ):
        config = dataclasses.replace(CONFIG, **changes)
        found = measure_acceptance(params, prompts, model=model, config=config, batch_size=16)
        assert_exact(found)
        assert sum(map(len, found.texts)) < sum(map(len, whole.texts))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3_fp8"])
def test_greedy_rounds_of_golden_checkpoints_are_predicted_one_by_one(name):
    model, params = load(golden.path(name), dtype=jnp.float32)
    prompts = make_prompts(8, model.config.vocab_size)
    assert_exact(measure_acceptance(params, prompts, model=model, config=CONFIG, batch_size=8))


@pytest.mark.slow
def test_matched_samples_are_predicted_one_by_one(small):
    """The rule "sample" gives the tokens of plain decoding, so nothing is left to chance."""
    model, params = small("grouped", "mixed")
    config = dataclasses.replace(CONFIG, acceptance="sample")
    assert_exact(measure_acceptance(params, make_prompts(16), model=model, config=config, temperature=0.7))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
def test_sampled_accept_lengths_are_predicted_in_expectation(rule, small):
    """Of 240 texts, to three standard errors, less than 3 %; greedy rows in the same batch are certain."""
    model, params = small("grouped", "mixed")
    config = dataclasses.replace(CONFIG, acceptance=rule, num_steps=2, max_new_tokens=56)
    prompts, temperatures = make_prompts(256), np.repeat([0.0, 1.0], [16, 240])
    acceptance = measure_acceptance(
        params, prompts, model=model, config=config, temperature=temperatures.tolist(), batch_size=256
    )
    greedy, warm = acceptance.select(temperatures == 0), acceptance.select(temperatures == 1)
    assert_exact(greedy)
    assert not warm.is_identical.all()
    lengths = []
    for steps, accepted in ((warm.rounds, warm.accepted), (warm.predicted.rounds, warm.predicted.accepted)):
        rates = decoded_rates(steps, accepted)
        lengths.append(rates["accept_length"])
        assert all(0.1 < rate.value < 0.7 for rate in rates["survival"])
    real, predicted = lengths
    errors = [(length.high - length.low) / (2 * 1.96) for length in lengths]
    assert 3 * np.hypot(*errors) < 0.03 * real.value
    assert abs(predicted.value - real.value) < 3 * np.hypot(*errors)


def test_a_text_given_the_rounds_are_those_of_a_plain_walk():
    """Drawn one round after the other, 20,000 times, for ratios p/q that a text may have."""
    rng = np.random.default_rng(0)
    log_ratio = rng.normal(0, 0.8, (1, 12, 3))
    log_ratio[0, 9:] = -np.inf
    for rule in ("token", "block"):
        acceptance = acceptance_probabilities(np.zeros((1, 12, 3), bool), log_ratio, np.zeros(1, bool), rule=rule)
        assert (np.diff(acceptance, axis=-1) <= 0).all() and (acceptance >= 0).all() and (acceptance <= 1).all()
        rounds, accepted = expected_rounds(acceptance, np.array([2]), np.array([11]))
        counts = np.zeros(4)
        for _ in range(20_000):
            place = 1
            while place < 9:
                drafts = int((rng.random() < acceptance[0, place]).sum())
                counts += [1, *(np.arange(3) < drafts)]
                place += drafts + 1
        np.testing.assert_allclose(counts[0] / 20_000, rounds[0], rtol=0.02)
        np.testing.assert_allclose(counts[1:] / 20_000, accepted[0], rtol=0.04)


def test_trees_and_windows_are_not_predicted():
    for changes in ({"topk": 2}, {"draft_window": 4}, {"draft_vocabulary": (1, 2, 3)}):
        assert not is_predictable(dataclasses.replace(CONFIG, **changes), "block")
    assert is_predictable(CONFIG, "block") and not is_predictable(CONFIG, "typical")
    with pytest.raises(ValueError, match="acceptance 'typical' is not one of greedy"):
        acceptance_probabilities(np.zeros((1, 1, 1)), np.zeros((1, 1, 1)), np.zeros(1, bool), rule="typical")
