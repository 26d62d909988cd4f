"""Decoding settings of a wrong type are refused in one line; those of NumPy work."""

import dataclasses

import jax
import numpy as np
import pytest

from mtpjax import (
    DecodeConfig,
    ModelConfig,
    MTPModel,
    SamplingParams,
    forward,
    generate,
    init_params,
    speculative_generate,
)
from mtpjax.data.tokenizer import ByteTokenizer
from mtpjax.io.checkpoint import load
from mtpjax.serving.offline import complete
from mtpjax.serving.text_stream import TextStream
from tests.helpers.tiny_model import MODEL

CONFIG = DecodeConfig(max_new_tokens=4)


@pytest.fixture(scope="module")
def params():
    return init_params(MODEL, jax.random.key(0))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_steps": 1.5},
        {"num_steps": None},
        {"max_new_tokens": "8"},
        {"topk": True},
        {"min_rows": 2.0},
        {"draft_vocabulary": [2**40]},
        {"draft_vocabulary": 3},
        {"stop_token_ids": "ab"},
        {"stop_token_ids": None},
        {"stop_token_ids": [1.5]},
        {"stop_sequences": [3]},
        {"prefill_chunk": 2**40},
        {"threshold_acc": "1"},
        {"logprobs": "yes"},
        {"depth_costs": ["a"]},
    ],
)
def test_a_wrong_type_is_refused_in_one_line(settings):
    with pytest.raises(ValueError, match=next(iter(settings))) as caught:
        DecodeConfig(**settings)
    assert "\n" not in str(caught.value)


def test_numpy_settings_equal_python_ones():
    config = DecodeConfig(num_steps=np.int64(2), stop_token_ids=np.array([3, 4]), threshold_acc=np.float32(1))
    assert config == DecodeConfig(num_steps=2, stop_token_ids=(3, 4)) and type(config.num_steps) is int
    assert DecodeConfig(stop_token_ids=iter([1])).stop_token_ids == (1,)


@pytest.mark.parametrize("make", [iter, lambda ids: map(int, ids), lambda ids: (each for each in ids)])
def test_banned_tokens_of_an_iterator_are_banned(make, params):
    first = int(generate(params, [[1, 2]], model=MODEL, config=CONFIG).tokens[0, 0])
    for banned in (make([first]), [make([first])]):
        result = generate(params, [[1, 2]], model=MODEL, config=CONFIG, sampling=SamplingParams(banned_tokens=banned))
        assert first not in result.rows()[0]
    allowed = SamplingParams(allowed_tokens=make([5]))
    assert set(generate(params, [[1, 2]], model=MODEL, config=CONFIG, sampling=allowed).rows()[0]) == {5}


@pytest.mark.parametrize("value", [3, "ab"])
def test_banned_tokens_must_be_a_sequence(value):
    with pytest.raises(ValueError, match="banned_tokens must be a sequence"):
        SamplingParams(banned_tokens=value)


def test_wrong_arguments_of_a_call_are_refused(params):
    prompts = np.array([[1, 2]])
    for changes, said in (
        ({"config": {"num_steps": 1}}, "config must be a DecodeConfig"),
        ({"sampling": {"temperature": 1}}, "sampling must be SamplingParams"),
        ({"key": 3}, "key must be a jax.random key"),
        ({"lengths": [1.5]}, "lengths must be integers"),
    ):
        with pytest.raises(ValueError, match=said):
            generate(params, prompts, **{"model": MODEL, "config": CONFIG} | changes)
    with pytest.raises(ValueError, match="params must be the parameters"):
        generate({}, prompts, model=MODEL, config=CONFIG)


def test_numpy_params_decode_to_the_same_tokens(params):
    results = [generate(each, [[1, 2]], model=MODEL, config=CONFIG).rows() for each in (params, jax.device_get(params))]
    assert results[0] == results[1]


@pytest.mark.parametrize("token", [-1, 32])
def test_forward_refuses_ids_outside_the_vocabulary(token, params):
    with pytest.raises(ValueError, match=rf"contain id {token}, which is outside 0\.\.31"):
        forward(params, np.array([[1, token]], np.int32), model=MODEL)


def test_weights_are_not_cast_to_integers(tmp_path):
    with pytest.raises(ValueError, match="dtype must be a floating-point type, got int32"):
        load(tmp_path, dtype="int32")


@pytest.mark.parametrize(
    "transformed",
    [
        lambda params: jax.jit(lambda p: generate(p, [[1, 2]], model=MODEL, config=CONFIG).tokens)(params),
        lambda params: jax.jit(lambda x: generate(params, x, model=MODEL, config=CONFIG).tokens)(np.ones((1, 2), int)),
        lambda params: jax.jit(lambda x: generate(params, [x], model=MODEL, config=CONFIG).tokens)(np.ones(2, int)),
        lambda params: jax.vmap(lambda x: generate(params, x[None], model=MODEL, config=CONFIG).tokens)(
            np.ones((2, 2), int)
        ),
        lambda params: jax.grad(lambda p: generate(p, [[1, 2]], model=MODEL, config=CONFIG).tokens.sum())(params),
    ],
)
def test_decoding_inside_a_transformation_is_refused(transformed, params):
    with pytest.raises(ValueError, match="cannot be called inside"):
        transformed(params)


SETTINGS = [
    {"num_steps": 2},
    {"num_steps": 2, "topk": 2, "num_draft_tokens": 4},
    {"num_steps": 2, "depth_policy": "adaptive", "depth_costs": (1.0, 1.1, 1.2)},
    {"num_steps": 2, "drafter": "lookup"},
]
CHECKS = {
    "strict": lambda: jax.numpy_dtype_promotion("strict"),
    "nans": lambda: jax.debug_nans(True),
    "infs": lambda: jax.debug_infs(True),
    "transfers": lambda: jax.transfer_guard("disallow"),
}


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [*((settings, 0.0) for settings in SETTINGS[1:]), (SETTINGS[0], 0.7)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in [(SETTINGS[0], 0.0), *((s, 0.7) for s in SETTINGS[1:])]],
)
def test_decoding_works_under_strict_promotion_and_debug_checks(settings, temperature, params):
    config = dataclasses.replace(CONFIG, **settings)
    sampling = SamplingParams(temperature=temperature, seed=1, top_k=5, top_p=0.9, repetition_penalty=1.1)
    expected = speculative_generate(params, [[1, 2, 3]], model=MODEL, config=config, sampling=sampling).rows()
    # Only what changes the programs: the next test has the other checks.
    for name in ("strict", "nans"):
        with CHECKS[name]():
            result = speculative_generate(params, [[1, 2, 3]], model=MODEL, config=config, sampling=sampling)
        assert result.rows() == expected, name


@pytest.mark.parametrize("name", CHECKS)
def test_decoding_with_drafts_and_forward_work_under_the_same_checks(name, params):
    def decode():
        config = dataclasses.replace(CONFIG, num_steps=2)
        rows = speculative_generate(params, [[1, 2, 3]], model=MODEL, config=config).rows()
        return rows, forward(params, [[1, 2, 3]], model=MODEL).logits.shape

    expected = decode()
    with CHECKS[name]():
        assert decode() == expected


@pytest.mark.parametrize("name", ["strict", "transfers"])
def test_batches_of_prompts_work_under_the_same_checks(name, params):
    def make_stream(prompt):
        return TextStream(ByteTokenizer().incremental_decoder(prompt))

    def decode():
        config, sampling = dataclasses.replace(CONFIG, num_steps=2), SamplingParams(seed=[1, 2])
        settings = {"config": config, "sampling": sampling, "make_stream": make_stream, "batch_size": 1}
        batches = complete(params, [[1, 2, 3], [4]], model=MODEL, **settings)
        return [completion.tokens for batch in batches for completion in batch.completions]

    expected = decode()
    with CHECKS[name]():
        assert decode() == expected


def other_width():
    return init_params(MTPModel(ModelConfig(**(MODEL.config.to_dict() | {"hidden_size": 24}))), jax.random.key(0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda params: other_width(), r"embedding has shape \(32, 24\) instead of shape \(32, 16\)"),
        (lambda params: {k: v for k, v in params.items() if k != "trunk"}, "trunk/layer_0/.* has nothing"),
        (lambda params: {k: v for k, v in params.items() if k != "mtp_0"}, "mtp_0/.* has nothing"),
    ],
)
def test_params_of_another_model_are_named(change, said, params):
    wrong = change(params)
    with pytest.raises(ValueError, match=said) as caught:
        speculative_generate(wrong, [[1, 2]], model=MODEL, config=dataclasses.replace(CONFIG, num_steps=2))
    assert "\n" not in str(caught.value)


def test_a_prefill_chunk_beyond_the_positions_allocates_no_more(params):
    huge = DecodeConfig(max_new_tokens=4, prefill_chunk=2**30)
    results = [generate(params, [[1, 2, 3]], model=MODEL, config=config).rows() for config in (huge, CONFIG)]
    assert results[0] == results[1]
