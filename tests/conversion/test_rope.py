"""Rotary embeddings of `config.json` against the numbers that transformers computes from the same keys."""

import json

import numpy as np
import pytest

from conversion.describe_config import describe_config
from conversion.hf_config import parse_config
from mtpjax.errors import ConfigError
from mtpjax.models.config import Yarn
from mtpjax.models.layers.rotary import inverse_frequencies, softmax_scale
from tests.golden import HERE

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
    return inverse_frequencies(model), factor, softmax_scale(model, width)


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
        ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_type is 'yarn', and type is 'linear'"),
        ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 4.0}}, "differ in factor: keep one"),
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
