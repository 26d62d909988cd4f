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
from conversion.hf_config_write import edit_config
from conversion.load_plan import make_plan
from mtpjax.errors import CheckpointFileError, ConfigError
from tests.golden import RENAMED, WINDOWS, path
from tests.helpers.checkpoints import rewrite
from tests.helpers.numpy_module import run_module


def config_of(name):
    return json.loads((path(name) / "config.json").read_text())


DENSE = {"qwen3_moe": [False, True, False], "gpt_oss": [False] * 4}
DENSE |= {name: [True, False, False, False] for name in ("mimo_v2_flash", "step3p5")}


@pytest.mark.parametrize("name", (*RENAMED, *WINDOWS))
def test_every_key_is_known_and_written_again(name):
    parsed = parse_config(config_of(name))
    assert parsed.unknown == ()
    model_type, values = describe_config(parsed.model, name)
    assert model_type == name and parse_config(values).model == parsed.model
    dense = [not kind.is_moe for kind in parsed.model.trunk_kinds]
    assert dense == DENSE.get(name, [True, False, False])


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
        ("glm4_moe_lite", {"attention_bias": "true"}, "attention_bias is 'true', not true or false"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window True is not supported"),
        ("mimo_v2_flash", {"swa_head_dim": 16}, "swa_head_dim 16 is not supported; supported: 12"),
        ("mimo_v2_flash", {"hybrid_block_size": 4}, "hybrid_block_size 4 is not supported"),
        ("mimo_v2_flash", {"layer_types": None}, "lacks layer_types"),
        ("mimo_v2_flash", {"attention_bias": True}, "v_head_dim 8 must equal head_dim 12 with biases"),
        (
            "mimo_v2_flash",
            {"add_full_attention_sink_bias": True, "add_swa_attention_sink_bias": False},
            "sinks only in layers with full attention",
        ),
        ("step3p5", {"layer_types": ["full_attention"] * 4}, "must list the types of 4 layers and 2 MTP modules"),
        (
            "step3p5",
            {"rope_theta": [1e4, 2e4, 3e4, 1e4, 2e4, 2e4]},
            "sliding_attention must share one rope_theta",
        ),
        ("step3p5", {"use_rope_layers": [True, False] * 3}, "false entries"),
        ("step3p5", {"swiglu_limits": [0.0] * 5 + [7.0]}, "with bounds for MTP modules"),
        ("step3p5", {"moe_layers_enum": "1,5"}, "moe_layers_enum with MTP modules"),
        ("step3p5", {"moe_router_activation": "softmax"}, "moe_router_activation 'softmax' is not supported"),
        ("step3p5", {"attention_other_setting": {"head_dim": 16}}, "head_dim 16 is not supported; supported: 8"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quant_method mxfp4 is not supported"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias False is not supported"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window is 0"),
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


def test_mimo_v2_as_published_is_mimo_v2_as_transformers_saves_it():
    """The published file marks layers by 0 and 1, and counts the positions of a window before the query."""
    values = config_of("mimo_v2_flash")
    rope = values["rope_parameters"]
    dropped = ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps", "sliding_window")
    published = {key: value for key, value in values.items() if key not in dropped} | {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "layernorm_epsilon": values["rms_norm_eps"],
        "sliding_window": values["sliding_window"] - 1,
        "sliding_window_size": values["sliding_window"] - 1,
        "attention_chunk_size": values["sliding_window"] - 1,
        "rope_theta": rope["full_attention"]["rope_theta"],
        "swa_rope_theta": rope["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": rope["full_attention"]["partial_rotary_factor"],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 12,
        "swa_v_head_dim": 8,
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "routed_scaling_factor": None,
        "n_shared_experts": None,
        "hybrid_block_size": None,
    }
    parsed = parse_config(published)
    assert parsed.model == parse_config(values).model and parsed.unknown == ()


def test_step_3_7_nests_the_text_model_of_step_3_5():
    values = config_of("step3p5")
    nested = {"model_type": "step3p7", "text_config": values, "vision_config": {}, "image_token_id": 5}
    assert parse_config(nested).model == parse_config(values).model and parse_config(nested).unknown == ()


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

    with (
        CheckpointFiles(folder) as files,
        pytest.raises(CheckpointFileError, match=r"quantized: compressed-tensors .*weight_packed"),
    ):
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


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3", {"rms_norm_eps": None}, "rms_norm_eps is null: set a value, or remove the key"),
        ("qwen3", {"hidden_act": None}, "hidden_act is null"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("qwen3", {"use_sliding_window": "false"}, "use_sliding_window 'false' is not supported"),
        ("qwen3", {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6', not a positive number"),
        ("qwen3", {"attention_bias": 1}, "attention_bias is 1, not true or false"),
        ("deepseek_v3", {"norm_topk_prob": None}, "norm_topk_prob is null"),
        ("deepseek_v3", {"routed_scaling_factor": None}, "routed_scaling_factor is null"),
        ("deepseek_v3", {"num_local_experts": 6}, "num_local_experts 6 is not supported; supported: 12"),
        # transformers' classes do not read these keys.
        ("deepseek_v32", {"rope_interleave": False}, "rope_interleave False is not supported"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "type glm_moe_dsa have True"),
        ("qwen3_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5 is not supported"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ("qwen3_next", {"n_group": 2}, "n_group 2 is not supported"),
        ("hy_v3", {"route_norm": False}, "route_norm False is not supported"),
        ("gpt_oss", {"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ("gpt_oss", {"experts_per_token": 1}, "experts_per_token 1 is not supported; supported: 2"),
        ("ernie4_5_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1, but moe_k is 2: keep only moe_k"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min 0.1 is not supported"),
        ("ernie4_5_moe", {"attention_bias": True}, "attention_bias True is not supported"),
    ],
)
def test_a_key_that_would_be_guessed_or_not_read_is_refused(name, changes, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({**config_of(name), **changes})


@pytest.mark.parametrize(
    ("name", "key", "field", "value"),
    [
        ("glm4_moe", "partial_rotary_factor", "partial_rotary_factor", 0.5),
        ("glm4_moe", "rms_norm_eps", "rms_norm_eps", 1e-5),
        ("qwen3_next", "partial_rotary_factor", "partial_rotary_factor", 0.25),
        ("glm_moe_dsa", "rms_norm_eps", "rms_norm_eps", 1e-5),
        ("glm_moe_dsa", "indexer_rope_interleave", "indexer_rope_interleave", True),
        ("glm_moe_dsa", "routed_scaling_factor", "routed_scaling_factor", 2.5),
        ("deepseek_v3", "routed_scaling_factor", "routed_scaling_factor", 2.5),
        ("deepseek_v3", "topk_group", "topk_group", 4),
        ("hy_v3", "router_scaling_factor", "routed_scaling_factor", 2.826),
    ],
)
def test_a_missing_key_has_the_default_of_transformers_class(name, key, field, value):
    values = {name: value for name, value in config_of(name).items() if name != key}
    for section in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(section), dict):
            values[section] = {name: value for name, value in values[section].items() if name != key}
    assert getattr(parse_config(values).model, field) == value


def test_sharing_the_indexer_between_draft_steps_is_said_to_be_missing(caplog):
    values = config_of("glm_moe_dsa")
    [note] = parse_config(values).notes
    assert note.startswith("index_share_for_mtp_iteration is not supported: every draft step")
    assert parse_config({**values, "index_share_for_mtp_iteration": False}).notes == ()
    assert parse_config({**values, "num_nextn_predict_layers": 0}).notes == ()
    with CheckpointFiles(path("glm_moe_dsa")) as files:
        make_plan(files)
    assert "config.json: index_share_for_mtp_iteration is not supported" in caplog.text


@pytest.mark.parametrize(
    ("name", "key", "of_modules", "field", "value"),
    [
        ("glm4_moe_lite", "mlp_layer_types", ["sparse"], "mtp_dense", False),
        ("glm4_moe_lite", "mlp_layer_types", ["dense"], "mtp_dense", True),
        ("hy_v3", "mlp_layer_types", ["dense"], "mtp_dense", True),
        ("mimo_v2_flash", "layer_types", ["full_attention"] * 3, "mtp_layer_type", "full_attention"),
        ("mimo_v2_flash", "mlp_layer_types", ["dense"] * 3, "mtp_dense", True),
        ("qwen3_5", "layer_types", ["full_attention"], "mtp_layer_type", "full_attention"),
        ("glm_moe_dsa", "indexer_types", ["full"], "mtp_layer_type", "full_attention"),
    ],
)
def test_a_list_of_layers_may_go_on_with_the_modules(name, key, of_modules, field, value):
    values = config_of(name)
    level = values.get("text_config", values)
    wanted = dataclasses.replace(parse_config(values).model, **{field: value})
    # Behind the layers, or, as transformers saves them, under a key of their own.
    for longer in ({key: [*level[key], *of_modules]}, {f"mtp_{key}": of_modules}):
        parsed = parse_config({**values, "text_config": {**level, **longer}} if level is not values else level | longer)
        assert parsed.model == wanted and parsed.unknown == ()


def test_step_saved_by_transformers_has_its_modules_under_keys_of_their_own():
    values = config_of("step3p5")
    types = values["layer_types"]
    split = values | {"layer_types": types[:4], "mtp_layer_types": types[4:]}
    assert parse_config(split).model == parse_config(values).model and parse_config(split).unknown == ()


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "hy_v3",
            {"mlp_layer_types": ["dense"] * 6},
            "has 6 entries; supported: one for each of 3 layers, optionally followed by one for each of 1",
        ),
        ("hy_v3", {"mlp_layer_types": ["dense", "moe", "dense"]}, "mlp_layer_types with 'moe' is not supported"),
        (
            "mimo_v2_flash",
            {"mlp_layer_types": ["dense", *["sparse"] * 4, "dense", "dense"]},
            r"different values for MTP modules, \['sparse', 'dense', 'dense'\]",
        ),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 6 + ["shared"]}, "MTP modules of type 'shared'"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ],
)
def test_a_list_of_layers_that_does_not_fit_is_refused(name, changes, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({**config_of(name), **changes})


@pytest.mark.parametrize("count", [0, 1, 4])
def test_lists_that_go_on_with_the_modules_follow_their_number(count):
    values = config_of("step3p5") | {"mtp_mlp_layer_types": ["dense"] * 2}
    parsed = parse_config(values)
    edited = edit_config(values, parsed.layout, num_mtp_modules=count)
    found = parse_config(edited).model
    assert found == dataclasses.replace(parsed.model, num_mtp_modules=count, mtp_layer_type=found.mtp_layer_type)
    assert count == 0 or found.mtp_layer_type == parsed.model.mtp_layer_type
    assert len(values["layer_types"]) == 6 and len(edited["layer_types"]) == 4 + count


def test_keys_of_other_families_change_nothing_and_are_reported():
    """As in transformers, whose classes do not read them."""
    for name, key in (
        ("gpt_oss", "attention_value_scale"),
        ("step3p5", "swiglu_alpha"),
        ("mimo_v2_flash", "swiglu_limit"),
        ("qwen3", "layernorm_epsilon"),
    ):
        values = config_of(name)
        parsed = parse_config({**values, key: 0.5})
        assert parsed.model == parse_config(values).model and parsed.unknown == (key,)


def test_gpt_oss_without_a_rotary_section_has_yarn():
    values = {key: value for key, value in config_of("gpt_oss").items() if key != "rope_parameters"}
    for given in ({}, {"rope_parameters": None}, {"rope_scaling": None}):
        scaling = parse_config({**values, **given}).model.rope_scaling
        assert (scaling.factor, scaling.truncate, scaling.original_max_position_embeddings) == (32.0, False, 4096)


def test_null_keys_that_a_family_does_not_read_are_accepted():
    for name, key in (
        ("qwen3", "routed_scaling_factor"),
        ("qwen3", "rope_interleave"),
        ("step3p5", "num_key_value_heads"),
        ("hy_v3", "n_shared_experts"),
    ):
        values = config_of(name)
        assert parse_config({**values, key: None}).model == parse_config(values).model
    with pytest.raises(ConfigError, match="norm_topk_prob is null"):
        parse_config({**config_of("qwen3_moe"), "norm_topk_prob": None})


def test_mimo_v2_with_two_epsilons_is_refused():
    values = {key: value for key, value in config_of("mimo_v2_flash").items() if key != "rms_norm_eps"}
    assert parse_config({**values, "layernorm_epsilon": 1e-3}).model.rms_norm_eps == 1e-3
    with pytest.raises(ConfigError, match=r"layernorm_epsilon is .* and rms_norm_eps is"):
        parse_config({**values, "layernorm_epsilon": 1e-3, "rms_norm_eps": 1e-5})


def test_the_outer_configuration_says_how_weights_are_quantized():
    """transformers reads it there; a nested section often has a null."""
    values = config_of("qwen3_5")
    text = values["text_config"] | {"quantization_config": None}
    fp8 = {"quant_method": "fp8", "weight_block_size": [4, 8]}
    assert parse_config(values | {"quantization_config": fp8, "text_config": text}).block == (4, 8)
    assert parse_config(values | {"text_config": text | {"quantization_config": fp8}}).block == (4, 8)
