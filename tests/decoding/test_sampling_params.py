"""What a request may ask for, and one line for what it may not."""

import dataclasses

import jax
import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams, generate, speculative_generate
from mtpjax.decoding.decoder import make_spec
from mtpjax.decoding.loop import decode
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.decoding.sampling_params import make_sampling_arrays


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1 must be within 0"),
        ({"temperature": float("nan")}, "temperature nan must be within"),
        ({"temperature": [0.5, 0.5]}, r"temperature has shape \(2,\), but there are 3 rows"),
        ({"temperature": "warm"}, "temperature must be a number or one per row, got 'warm'"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p 1.1 must be within 0..1"),
        ({"top_k": -1}, "top_k -1 must be within"),
        ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ({"min_p": [0, 2, 0]}, "min_p .* must be within 0..1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"min_new_tokens": -2}, "min_new_tokens -2 must be within"),
        ({"logit_bias": {61: 1.0}}, "logit_bias holds token id 61, outside 0..60"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias holds a value that is not finite"),
        ({"logit_bias": [{3: 1.0}]}, "logit_bias must be one value for all rows, or a sequence"),
        ({"allowed_tokens": []}, "row 0 cannot emit any token"),
        ({"allowed_tokens": [[1], None, [2]], "banned_tokens": [2]}, "row 2 cannot emit any token"),
        ({"banned_tokens": [-1]}, "banned_tokens holds token id -1"),
        ({"temperature": 1.0}, "a temperature above 0 needs SamplingParams.seed"),
        ({"seed": -1}, "seed must be an integer within .*, got -1"),
        ({"seed": [1, 2]}, "seed has 2 values, but there are 3 rows"),
    ],
)
def test_requests_that_cannot_be_are_refused(values, message, small):
    model, _ = small("grouped", "mixed")
    with pytest.raises(ValueError, match=message) as caught:
        make_sampling_arrays(SamplingParams(**values), 3, model.config, None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature -1 must be within 0..inf"),
        ({"temperature": 10**400}, "temperature 1.* must be within"),
        ({"temperature": float("inf")}, "temperature inf must be within"),
        ({"temperature": "0.7"}, "temperature must be a number or one per row, got '0.7'"),
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": [0.5, None]}, "temperature must be a number"),
        ({"temperature": {0: 0.5}}, "temperature must be a number"),
        ({"temperature": np.array([[0.5]])}, "temperature must be a number"),
        ({"top_k": [3, 1.5]}, "top_k must be an integer"),
        ({"top_p": np.array([0.5, 2.0])}, "top_p .* must be within 0..1"),
        ({"top_p": jax.numpy.array([0.5, 0.0])}, "top_p must be above 0"),
        ({"min_p": float("nan")}, "min_p nan must be within 0..1"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty -inf must be within"),
        ({"min_new_tokens": -2}, "min_new_tokens -2 must be within"),
        ({"seed": [1, None]}, "seed must be an integer within .*, got None"),
        ({"seed": 2**64}, "seed must be an integer within"),
        ({"seed": True}, "seed must be an integer within"),
        ({"logit_bias": [{3: 1.0}, 5]}, "logit_bias must be a mapping or one per row"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias must hold token ids, got 'a'"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias holds a value that is not finite"),
        ({"allowed_tokens": "abc"}, "allowed_tokens must be a sequence"),
        ({"allowed_tokens": [[1], [0.5]]}, "allowed_tokens must hold token ids, got 0.5"),
        ({"banned_tokens": np.array([3, -1])}, "banned_tokens holds token id -1, which is negative"),
    ],
)
def test_sampling_parameters_are_checked_when_they_are_made(values, message):
    with pytest.raises(ValueError, match=message) as caught:
        SamplingParams(**values)
    assert "\n" not in str(caught.value)


def test_arrays_and_traced_values_stay_sampling_parameters(small):
    """Of NumPy and JAX, alone and within lists; values of a trace are not known yet."""
    for values in (
        {"temperature": np.float32(0.5), "top_k": np.int64(4), "seed": np.uint32(3)},
        {"temperature": jax.numpy.array([0.1, 0.2], jax.numpy.bfloat16), "seed": jax.numpy.arange(2)},
        {"top_k": 3.0, "allowed_tokens": [None, [1], np.array([2]), {3}], "banned_tokens": ()},
        {"logit_bias": [None, {np.int64(3): jax.numpy.float32(1.0)}]},
    ):
        SamplingParams(**values)

    def temperature(values):
        sampling = SamplingParams(temperature=values, top_p=[values[0], 0.5], seed=values, banned_tokens=[values])
        return sampling.temperature

    np.testing.assert_array_equal(jax.jit(temperature)(jax.numpy.ones(2)), 1)
    model, params = small("grouped", "mixed")
    arguments = {"model": model, "config": DecodeConfig(max_new_tokens=3)}
    rows = [
        speculative_generate(params, [[1, 2]], **arguments, sampling=SamplingParams(temperature=t, seed=s)).rows()
        for t, s in ((0.5, 3), (jax.numpy.array([0.5]), jax.numpy.array([3])))
    ]
    assert rows[0] == rows[1]


def test_a_list_that_changed_is_checked_again(small):
    model, _ = small("grouped", "mixed")
    temperature = np.zeros(2)
    sampling = SamplingParams(temperature=temperature)
    temperature[1] = -1
    with pytest.raises(ValueError, match=r"temperature .* must be within 0\.\.inf"):
        make_sampling_arrays(sampling, 2, model.config, None)


def test_a_call_without_settings_takes_the_default_ones(small):
    model, params = small("grouped", "mixed")
    expected = speculative_generate(params, [[1, 2]], model=model, config=DecodeConfig()).rows()
    assert speculative_generate(params, [[1, 2]], model=model).rows() == expected
    assert generate(params, [[1, 2]], model=model).rows() == expected
    with pytest.raises(ValueError, match="config must be a DecodeConfig, got dict"):
        speculative_generate(params, [[1, 2]], model=model, config={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drafter": 5}, "drafter must be a name such as 'mtp' or 'lookup', or a Drafter, got 5"),
        ({"typical_epsilon": -1}, "typical_epsilon must be finite and at least 0, got -1"),
        ({"relaxed_delta": float("nan")}, "relaxed_delta must be finite and at least 0, got nan"),
        ({"topk": 4, "num_steps": 1, "num_draft_tokens": 8}, "num_draft_tokens must be at most 5 for topk 4"),
        ({"topk": 1, "num_steps": 3, "num_draft_tokens": 3}, r"num_draft_tokens must be 4 for a chain .*, got 3"),
        ({"topk": 2, "acceptance": "block"}, "'block' supports only chains: set topk to 1"),
        ({"acceptance": "best"}, "unknown acceptance rule 'best'; supported: auto, greedy"),
        ({"num_steps": 2, "depth_policy": "adaptive"}, r"needs 3 depth_costs, for depths 0..2; got none"),
        ({"num_steps": 1, "depth_policy": "adaptive", "depth_costs": (1, 0)}, "must be positive and finite"),
        (
            {"num_steps": 1, "depth_policy": "adaptive", "depth_costs": (1, 2), "depth_rates": (0.5, 0.5)},
            r"depth_rates must hold 1 rates \(one per level\), .*; got \(0.5, 0.5\)",
        ),
        (
            {"num_steps": 2, "topk": 2, "depth_policy": "adaptive", "depth_costs": (1, 2, 3)},
            "'adaptive' supports only chains",
        ),
        ({"threshold_acc": 1.5}, "threshold_acc must be within 0..1, got 1.5"),
        ({"stop_sequences": ((1,), ())}, "stop_sequences contains an empty sequence"),
        ({"draft_window": 0}, "draft_window must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        DecodeConfig(**values)


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"num_mtp_modules": 2}, {"topk": 2}, "trees, which need exactly one MTP module; the model has 2"),
        ({"attention": "hybrid"}, {"topk": 2}, "linear attention supports only chains"),
        ({}, {"topk": 62}, "topk 62 exceeds the 61 tokens"),
        ({}, {"topk": 2, "draft_vocabulary": (3,)}, "topk 2 exceeds the 1 tokens"),
        ({}, {"draft_vocabulary": (3, 61)}, "draft_vocabulary is empty or has ids outside 0..60"),
        ({}, {"stop_sequences": ((3, 61),)}, "stop token id 61 is outside 0..60"),
    ],
)
def test_what_a_model_cannot_do_is_refused(changes, config, message, small):
    model, params = small(
        changes.get("attention", "grouped"),
        "mixed",
        **{name: value for name, value in changes.items() if name != "attention"},
    )
    with pytest.raises(ValueError, match=message):
        speculative_generate(params, [[1]], model=model, config=DecodeConfig(**config))


def test_greedy_does_not_take_warm_rows():
    with pytest.raises(ValueError, match="acceptance 'greedy' supports only temperature 0"):
        make_spec(DecodeConfig(acceptance="greedy"), is_greedy=False)


def test_what_may_come_early_must_not_be_stop_tokens_alone(small):
    model, params = small("grouped", "mixed")
    config = DecodeConfig(stop_token_ids=(7,))
    sampling = SamplingParams(allowed_tokens=np.array([7]), min_new_tokens=2)
    with pytest.raises(ValueError, match="row 0 can emit only stop tokens, which min_new_tokens=2 bans"):
        speculative_generate(params, [[1]], model=model, config=config, sampling=sampling)


def test_no_limit_is_the_models(small):
    model, params = small("grouped", "mixed")
    for most in (2**31 - 1, 2**40):
        config = DecodeConfig(max_new_tokens=most, max_length=9, num_steps=1, prefill_chunk=4)
        assert speculative_generate(params, [[1, 2]], model=model, config=config).lengths.tolist() == [7]


def test_penalties_count_along_trees_whose_passes_are_padded(small):
    model, params = small("grouped", "mixed")
    shape = {"max_new_tokens": 12, "num_steps": 2, "min_rows": 4, "prefill_chunk": 4}
    sampling = SamplingParams(repetition_penalty=1.3, banned_tokens=np.array([5]))
    plain, tree = (
        speculative_generate(
            params, [[1, 2, 3]], model=model, config=DecodeConfig(**shape, topk=topk), sampling=sampling
        ).rows()
        for topk in (1, 2)
    )
    assert plain == tree


def test_the_rule_follows_from_temperature_and_shape():
    def rule(is_greedy, **config):
        return make_spec(DecodeConfig(**config), is_greedy=is_greedy).rule.name

    assert rule(True) == rule(True, topk=2) == rule(True, num_steps=0) == "greedy"
    assert rule(False) == "block" and rule(False, topk=2) == "recursive" and rule(False, num_steps=0) == "sample"


def test_options_that_no_row_uses_are_not_compiled_in(small):
    model, _ = small("grouped", "mixed")
    none = make_sampling_arrays(SamplingParams(), 2, model.config, None)
    assert none.features == SamplingFeatures() and none.bias.shape == (2, 0)
    some = make_sampling_arrays(SamplingParams(top_k=[0, 3], min_p=0.0), 2, model.config, None)
    assert some.top_k.tolist() == [61, 3] and some.features == SamplingFeatures(top_k=True)
    everything = make_sampling_arrays(SamplingParams(), 2, model.config, None, features=SamplingFeatures.all_enabled())
    assert jax.tree.structure(everything.replace(features=None)) == jax.tree.structure(some.replace(features=None))
    with pytest.raises(ValueError, match="made without these sampling options: top_k"):
        make_sampling_arrays(SamplingParams(top_k=3), 2, model.config, None, features=SamplingFeatures(top_p=True))


def test_other_requests_compile_nothing_new(small):
    """Only which fields are in use, the shape of drafts and the rule are compiled in."""
    model, params = small("grouped", "mixed")
    config = DecodeConfig(max_new_tokens=5, num_steps=1, prefill_chunk=4)

    def call(config=config, **asked):
        asked = {"temperature": [0.0, 0.7], "seed": [1, 2], "top_p": 0.9, **asked}
        prompts = [[1, 2, 3], [4]]
        return speculative_generate(params, prompts, model=model, config=config, sampling=SamplingParams(**asked))

    call()
    compiled = decode.plain._cache_size()
    call(temperature=1.3, seed=7, top_p=[0.5, 1.0])
    call(dataclasses.replace(config, stop_token_ids=(3, 4), max_new_tokens=7))
    assert decode.plain._cache_size() == compiled


def test_adaptive_costs_compile_nothing_new(small):
    model, params = small("grouped", "mixed")
    config = DecodeConfig(
        max_new_tokens=9, num_steps=2, depth_policy="adaptive", depth_costs=(1, 1.2, 1.3), prefill_chunk=4
    )
    first = speculative_generate(params, [[1, 2]], model=model, config=config)
    compiled = decode.plain._cache_size()
    second = speculative_generate(
        params, [[1, 2]], model=model, config=dataclasses.replace(config, depth_costs=(1, 5, 9))
    )
    assert decode.plain._cache_size() == compiled
    assert first.rows() == second.rows()
    assert first.stats.proposed.sum() > 0 and second.stats.proposed.sum() == 0  # where no depth can pay


def test_a_key_gives_each_row_its_own_noise(small):
    model, params = small("grouped", "mixed")
    config = DecodeConfig(max_new_tokens=12, num_steps=2, prefill_chunk=4)

    def rows(key):
        sampling = SamplingParams(temperature=1.0)
        return speculative_generate(
            params, [[1, 2]] * 3, model=model, config=config, sampling=sampling, key=jax.random.key(key)
        ).rows()

    assert rows(0) == rows(0) != rows(1)
    assert len({tuple(row) for row in rows(0)}) == 3


def test_a_reduced_draft_vocabulary_drafts_nothing_else(small):
    model, params = small("grouped", "right")
    some = tuple(range(0, 61, 2))
    config = DecodeConfig(max_new_tokens=40, num_steps=2, draft_vocabulary=some, prefill_chunk=4)
    result = speculative_generate(params, [[1, 2], [5]], model=model, config=config)
    plain = speculative_generate(params, [[1, 2], [5]], model=model, config=dataclasses.replace(config, num_steps=0))
    assert result.rows() == plain.rows()
    drafted = result.tokens[result.origins > 0]
    assert drafted.size and set(drafted.tolist()) <= set(some)
    everything = dataclasses.replace(config, draft_vocabulary=None)
    full = speculative_generate(params, [[1, 2], [5]], model=model, config=everything)
    assert set(full.tokens[full.origins > 0].tolist()) - set(some)
    assert np.array_equal(full.tokens, plain.tokens)


@pytest.mark.slow
def test_a_window_only_changes_what_is_drafted(small):
    model, params = small("grouped", "mixed")
    prompts = [np.random.default_rng(0).integers(0, 61, 40).tolist(), [3, 4]]
    shape = {"max_new_tokens": 30, "num_steps": 2, "prefill_chunk": 8}
    plain = speculative_generate(params, prompts, model=model, config=DecodeConfig(**{**shape, "num_steps": 0}))
    accepted = {}
    for window in (None, 2, 500):
        config = DecodeConfig(**shape, draft_window=window, draft_sinks=2)
        result = speculative_generate(params, prompts, model=model, config=config)
        assert result.rows() == plain.rows()
        accepted[window] = result.stats.accepted.tolist()
    assert accepted[500] == accepted[None] != accepted[2]
