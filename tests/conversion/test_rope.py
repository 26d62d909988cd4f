"""Rotary embeddings of `config.json` against the numbers that transformers computes from the same keys."""

import json

import numpy as np
import pytest

from conversion.describe_config import describe_config
from conversion.hf_config import parse_config
from mtpjax.errors import ConfigError
from mtpjax.models.layers.rotary import inverse_frequencies
from mtpjax.models.rope_scaling import Yarn
from tests.golden import HERE
from tests.golden import path as golden_path

RECORDED = json.loads((HERE / "rope.json").read_text())
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
# transformers computes these two: the first for other shapes of arrays, the second by the length of each text.
REFUSED = ("proportional", "longrope")


def values_of(model_type, config):
    return {"model_type": model_type, **RECORDED["base"][model_type], **config}


def rotary_of(model):
    """Returns the frequencies, the factor of cosines and sines, and that of the scores."""
    is_yarn, is_latent = isinstance(model.rope_scaling, Yarn), model.attention == "latent"
    width = model.qk_nope_head_dim + model.qk_rope_head_dim if is_latent else model.head_dim
    factor = model.rope_scaling.rotation_factor if is_yarn else 1.0
    return inverse_frequencies(model), factor, model.softmax_scale(width)


def test_each_section_gives_transformers_numbers_or_an_error():
    for case in RECORDED["cases"]:
        values = values_of(case["model_type"], case["config"])
        section = values.get("rope_scaling") or {}
        if "error" in case or section.get("rope_type") in REFUSED:
            with pytest.raises(ConfigError):
                parse_config(values)
            continue
        frequencies, factor, softmax = rotary_of(parse_config(values).model)
        # transformers computes frequencies in float32, and the file has seven digits.
        np.testing.assert_allclose(frequencies, case["frequencies"], rtol=2e-6, err_msg=str(case))
        assert (factor, softmax) == pytest.approx((case["factor"], case["softmax"]), rel=1e-9), case


def test_a_written_section_gives_the_same_numbers():
    for case in RECORDED["cases"]:
        section = case["config"].get("rope_scaling") or {}
        if "error" in case or section.get("rope_type") in REFUSED:
            continue
        model = parse_config(values_of(case["model_type"], case["config"])).model
        _, written = describe_config(model, case["model_type"])
        assert parse_config(written).model == model, case


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_scaling": {"factor": 4.0}}, "lacks rope_type"),
        ({"rope_scaling": {"type": None, "factor": 4.0}}, "lacks rope_type"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_type is 'yarn', but type is 'linear'"),
        ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 4.0}}, "differ in factor: keep only one"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4}}, "differ in rope_type, factor, original"),
        ({"rope_scaling": {**YARN, "truncate": None}}, "truncate is null"),
        ({"rope_scaling": {**YARN, "factor": "8"}}, "factor is '8', not a positive number"),
        ({"rope_scaling": {**YARN, "mscale": True}}, "mscale is True, not a positive number"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "alpha 1000.0 is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "change with the length of the text"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported: 1.0 in this family"),
        ({"rope_parameters": {"full_attention": None}}, "full_attention null"),
    ],
)
def test_a_section_that_has_no_clear_meaning_is_refused(config, words):
    with pytest.raises(ConfigError, match=words):
        parse_config(values_of("llama", config))


def test_two_sections_that_agree_are_read():
    both = {"rope_theta": 100.0, "rope_scaling": {**YARN, "type": "yarn"}}
    both["rope_parameters"] = {**YARN, "rope_theta": 100.0}
    del both["rope_theta"]
    one = parse_config(values_of("llama", {"rope_theta": 100.0, "rope_scaling": YARN})).model
    assert parse_config(values_of("llama", both)).model == one


def test_keys_of_a_section_that_change_nothing_are_reported():
    section = {"rope_type": "default", "factor": 4.0, "mrope_section": [1, 1, 2]}
    assert parse_config(values_of("llama", {"rope_scaling": section})).unknown == ("rope_parameters.factor",)
    section = {**YARN, "low_freq_factor": 1.0}
    assert parse_config(values_of("llama", {"rope_scaling": section})).unknown == ("rope_parameters.low_freq_factor",)


MIMO_KEYS = ("rope_theta", "swa_rope_theta", "partial_rotary_factor")


def mimo(**changes):
    values = json.loads((golden_path("mimo_v2_flash") / "config.json").read_text())
    return {key: value for key, value in values.items() if key != "rope_parameters"} | changes


@pytest.mark.parametrize("empty", [{}, {"rope_parameters": None, "rope_scaling": None}])
def test_mimo_v2_without_rotary_keys_has_transformers_defaults(empty):
    model = parse_config(mimo(head_dim=192, swa_head_dim=192, **empty)).model
    assert (model.rope_theta, model.sliding_rope_theta) == (5e6, 1e4)
    assert (model.partial_rotary_factor, model.sliding_partial_rotary_factor) == (0.334, 0.334)


def test_mimo_v2_needs_all_of_its_older_rotary_keys():
    older = dict(zip(MIMO_KEYS, (7e6, 3e4, 0.5), strict=True))
    model = parse_config(mimo(**older)).model
    assert (model.rope_theta, model.sliding_rope_theta, model.sliding_partial_rotary_factor) == (7e6, 3e4, 0.5)
    # transformers moves two of the keys into a section where a class of the repository's own saves the file.
    section = {"rope_type": "default", "rope_theta": 7e6, "partial_rotary_factor": 0.5}
    assert parse_config(mimo(rope_parameters=section, swa_rope_theta=3e4)).model == model
    for key in MIMO_KEYS:
        with pytest.raises(ConfigError, match=f"config.json lacks {key}: mimo_v2_flash needs"):
            parse_config(mimo(**{name: value for name, value in older.items() if name != key}))
    with pytest.raises(ConfigError, match="rope_parameters has full_attention and lacks sliding_attention"):
        parse_config(mimo(rope_parameters={"full_attention": {"rope_theta": 7e6}}))


def test_step_with_rotary_sections_of_transformers_is_refused():
    """Their values would not be read: the release has lists with an entry per layer."""
    values = json.loads((golden_path("step3p5") / "config.json").read_text())
    sections = {"full_attention": {"rope_theta": 5e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ConfigError, match="rope_parameters, which transformers writes"):
        parse_config(values | {"rope_parameters": sections})
