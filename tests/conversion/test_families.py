"""Families whose configurations and tensors have names of their own: keys, errors, and MTP modules against NumPy."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import mtpjax
from conversion.describe_config import describe_config
from conversion.files import CheckpointFiles
from conversion.hf_config import parse_config
from conversion.load_plan import make_plan
from mtpjax.errors import CheckpointFileError, ConfigError
from tests.golden import RENAMED, path
from tests.helpers.checkpoints import rewrite
from tests.helpers.numpy_module import run_module


def config_of(name):
    return json.loads((path(name) / "config.json").read_text())


@pytest.mark.parametrize("name", RENAMED)
def test_every_key_is_known_and_written_again(name):
    parsed = parse_config(config_of(name))
    assert parsed.unknown == ()
    model_type, values = describe_config(parsed.model, name)
    assert model_type == name and parse_config(values).model == parsed.model
    dense = [not kind.is_moe for kind in parsed.model.trunk_kinds]
    assert dense == ([False, True, False] if name == "qwen3_moe" else [True, False, False])


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("ernie4_5_moe", {"use_bias": True}, "use_bias True is not supported"),
        ("ernie4_5_moe", {"moe_use_aux_free": False}, "moe_use_aux_free False is not supported"),
        ("ernie4_5_moe", {"compression_ratio": 2.0}, "compression_ratio 2.0 is not supported"),
        ("ernie4_5_moe", {"moe_num_experts": [64, 64]}, "moe_num_experts is"),
        ("ernie4_5_moe", {"moe_k": None}, "lacks moe_k"),
        ("hy_v3", {"use_cla": True}, "use_cla True is not supported"),
        ("hy_v3", {"qk_norm": False}, "qk_norm False is not supported"),
        ("hy_v3", {"expert_hidden_dim": 12}, "expert_hidden_dim 12 is not supported; supported: 8"),
        ("glm4_moe_lite", {"attention_bias": True}, "attention_bias True is not supported"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window True is not supported"),
    ],
)
def test_what_is_not_supported_is_named_as_the_file_names_it(name, changes, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({**config_of(name), **changes})


def test_keys_that_are_missing_have_the_values_of_transformers():
    values = config_of("ernie4_5_moe")
    short = {key: value for key, value in values.items() if key not in ("tie_word_embeddings", "moe_layer_start_index")}
    assert parse_config(short).model == parse_config(values).model
    assert parse_config({**values, "moe_layer_end_index": 1}).model.mlp_only_layers == (2,)
    values = config_of("qwen3_moe")
    unsaid = {key: value for key, value in values.items() if key != "norm_topk_prob"}
    assert parse_config(unsaid).model == dataclasses.replace(parse_config(values).model, norm_topk_prob=False)
    for name in ("hy_v3", "glm4_moe_lite"):
        values = config_of(name)
        short = {key: value for key, value in values.items() if key not in ("mlp_layer_types", "first_k_dense_replace")}
        assert parse_config(short).model == parse_config(values).model


def test_both_names_of_the_number_of_experts_are_read():
    values = config_of("qwen3_moe")
    old = {**values, "num_experts": values["num_local_experts"]}
    del old["num_local_experts"]
    assert parse_config(old).model == parse_config(values).model and parse_config(old).unknown == ()


def test_packed_weights_are_named(tmp_path):
    """Kimi-K2.5 is published with int4 experts."""

    def pack(key, array):
        return (f"{key}_packed", array) if key.endswith("experts.0.up_proj.weight") else (key, array)

    folder = rewrite(path("kimi_k25"), tmp_path / "packed", pack)

    with CheckpointFiles(folder) as files, pytest.raises(CheckpointFileError, match="weight_packed is quantized"):
        make_plan(files)


@pytest.mark.parametrize("name", ["glm4_moe_lite", "hy_v3", "ernie4_5_moe"])
def test_the_modules_outputs_are_those_of_the_formula_in_numpy(name):
    """A second implementation checks the golden outputs of modules, which come from transformers' layers."""
    with np.load(path(name) / "expected.npz") as expected:
        expected = dict(expected)
    with CheckpointFiles(path(name)) as files:
        tensors = {key: files.read(key).astype(np.float64) for key in files.tensors}
    for prompt in ("p0", "p1"):
        read = "prenorm" if name == "ernie4_5_moe" else "postnorm"
        hidden = expected[f"{prompt}_hidden_{read}"][:-1].astype(np.float64)
        output, logits = run_module(tensors, config_of(name), hidden, expected[f"{prompt}_input_ids"][1:])
        np.testing.assert_allclose(output, expected[f"{prompt}_mtp1_hidden_postnorm"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(logits, expected[f"{prompt}_mtp1_logits"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # compiles a forward pass
def test_ernies_module_can_run_as_in_the_engines(tmp_path):
    folder = shutil.copytree(path("ernie4_5_moe"), tmp_path / "engines")
    chosen = {"mtp_hidden_post_norm": True, "mtp_output_norm": "none", "mtp_mask_first": True}
    (folder / "config.json").write_text(json.dumps({**config_of("ernie4_5_moe"), **chosen}))
    model, params = mtpjax.load(folder)
    _, values = describe_config(model.config, "ernie4_5_moe")
    assert parse_config(values).model == model.config
    with CheckpointFiles(folder) as files:
        tensors = {key: files.read(key).astype(np.float64) for key in files.tensors}
    with np.load(folder / "expected.npz") as expected:
        tokens, hidden = expected["p0_input_ids"], expected["p0_hidden_postnorm"].astype(np.float64)
    found = mtpjax.forward(params, tokens[None], model=model).mtp_logits[0][0, :-1]
    _, wanted = run_module(tensors, config_of("ernie4_5_moe"), hidden[:-1], tokens[1:], as_engines=True)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
