"""Arguments of a wrong type in the resumable calls are refused in one line and leave the state usable."""

import jax
import numpy as np
import pytest

from mtpjax import (
    DecodeConfig,
    ModelConfig,
    MTPModel,
    SamplingParams,
    collect,
    generate,
    init_params,
    init_state,
    insert,
    run,
    speculative_generate,
)
from tests.helpers.tiny_model import MODEL

CONFIG = DecodeConfig(max_new_tokens=4, num_steps=2)


@pytest.fixture(scope="module")
def params():
    return init_params(MODEL, jax.random.key(0))


@pytest.fixture(scope="module")
def state(params):
    return init_state(params, model=MODEL, config=CONFIG, num_slots=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"params": {}}, "params must be the parameters"),
        ({"state": None}, "state must be a DecodeState, got NoneType"),
        ({"model": None}, "model must be an MTPModel, got NoneType"),
        ({"config": {"num_steps": 2}}, "config must be a DecodeConfig, got dict"),
        ({"sampling": {"temperature": 1.0}}, "sampling must be SamplingParams, got dict"),
        ({"key": 3}, "key must be a jax.random key, got 3"),
        ({"key": np.ones(3, np.uint32)}, r"key must be a jax.random key, got an array uint32\[3\]"),
        ({"slots": None}, "slots must be a sequence of integers, got None"),
        ({"slots": [0.5]}, "slots must be an integer, got 0.5"),
        ({"prompts": 3}, r"prompts must be \[B, T\] or a list of token lists, got int"),
        ({"prompts": [[1, [2]]]}, "prompts must be lists of token ids"),
        ({"num_cached": [1.5]}, "num_cached must be an integer, got 1.5"),
        ({"sampling": SamplingParams(top_p=[0.5, 0.5])}, r"top_p has shape \(2,\), but there are 1 rows"),
    ],
)
def test_insert_refuses_a_wrong_type_in_one_line(changes, said, params, state):
    values = {"params": params, "state": state, "slots": [0], "prompts": [[1, 2]], "model": MODEL, "config": CONFIG}
    values |= changes
    with pytest.raises(ValueError, match=said) as caught:
        insert(values.pop("params"), values.pop("state"), values.pop("slots"), values.pop("prompts"), **values)
    assert "\n" not in str(caught.value)
    # The state was not donated.
    assert np.asarray(state.done).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"params": {}}, "params must be the parameters"),
        ({"state": {}}, "state must be a DecodeState, got dict"),
        ({"model": 3}, "model must be an MTPModel, got int"),
        ({"config": None}, "config must be a DecodeConfig, got NoneType"),
        ({"max_rounds": 1.5}, "max_rounds must be an integer, got 1.5"),
        ({"max_rounds": "2"}, "max_rounds must be an integer, got '2'"),
    ],
)
def test_run_refuses_a_wrong_type_in_one_line(changes, said, params, state):
    values = {"params": params, "state": state, "max_rounds": 1, "model": MODEL, "config": CONFIG} | changes
    with pytest.raises(ValueError, match=said):
        run(values.pop("params"), values.pop("state"), values.pop("max_rounds"), **values)
    assert np.asarray(state.done).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_slots": 1.5}, "num_slots must be an integer, got 1.5"),
        ({"num_slots": "a"}, "num_slots must be an integer, got 'a'"),
        ({"max_length": 2.5}, "max_length must be an integer, got 2.5"),
        ({"config": {}}, "config must be a DecodeConfig, got dict"),
    ],
)
def test_a_state_of_wrong_settings_is_refused(changes, said, params):
    with pytest.raises(ValueError, match=said):
        init_state(params, **({"model": MODEL, "config": CONFIG, "num_slots": 2} | changes))


def test_numpy_params_and_numbers_work(params):
    params = jax.device_get(params)
    state = init_state(params, model=MODEL, config=CONFIG, num_slots=np.int64(2), max_length=np.int32(32))
    state = insert(params, state, np.array([1]), [[1, 2, 3]], model=MODEL, config=CONFIG, num_cached=np.array([0]))
    state = run(params, state, np.int64(10**12), model=MODEL, config=CONFIG)
    assert collect(state, [1]).rows() == generate(params, [[1, 2, 3]], model=MODEL, config=CONFIG).rows()


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
def test_params_of_another_model_are_named(change, said, params, state):
    wrong = change(params)
    with pytest.raises(ValueError, match=said) as caught:
        speculative_generate(wrong, [[1, 2]], model=MODEL, config=CONFIG)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=said):
        insert(wrong, state, [0], [[1, 2]], model=MODEL, config=CONFIG)


def test_a_prefill_chunk_beyond_the_positions_allocates_no_more(params):
    huge = DecodeConfig(max_new_tokens=4, prefill_chunk=2**30)
    results = [generate(params, [[1, 2, 3]], model=MODEL, config=config).rows() for config in (huge, CONFIG)]
    assert results[0] == results[1]
