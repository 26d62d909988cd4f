"""Drafters as training programs leave them: names, classes, types and layer ids that vary for one meaning."""

import functools
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtpjax.drafters.architecture import TrunkSizes
from mtpjax.drafters.dflash.hf_config import DFLASH_FORMAT, describe_blocks, parse_blocks
from mtpjax.drafters.dspark.hf_files import DSPARK_FORMAT
from mtpjax.drafters.eagle3.hf_config import describe_eagle3, parse_eagle3
from mtpjax.drafters.files.detect import detect_method
from mtpjax.drafters.files.read import read_drafter as read_drafter_of
from mtpjax.drafters.files.write import write_drafter
from mtpjax.drafters.methods import METHODS
from mtpjax.errors import CheckpointError, CheckpointFileError, ConfigError
from tests.golden import drafter_path

TRUNK = TrunkSizes(320, 64, 8)
HEAD = {"lm_head.weight": (320, 64)}  # of the tensors' shapes
read_drafter = functools.partial(read_drafter_of, methods=METHODS)
D2T, T2D = "d2t", "t2d"


def draft(name):
    return drafter_path(name) / "draft"


def variant(target, name, rename=lambda key: key, tensors=None, without=(), **changes):
    """A golden drafter with other names, some other tensors, and another `config.json`; None removes a key."""
    target.mkdir()
    values = json.loads((draft(name) / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    found = load_file(draft(name) / "model.safetensors") | (tensors or {})
    save_file({rename(key): leaf for key, leaf in found.items() if key not in without}, target / "model.safetensors")
    return target


def same_drafter(found, expected):
    assert found.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    np.testing.assert_array_equal(found.draft_ids, expected.draft_ids)


def under_model(key):
    """The names that trainers leave whose drafter is inside of a language model."""
    return key if key in ("lm_head.weight", D2T, T2D) else f"model.{key}"


RENAMES = {
    "model.midlayer": under_model,
    "model.layers.0": lambda key: under_model(key.replace("midlayer.", "layers.0.")),
    "layers.0": lambda key: key.replace("midlayer.", "layers.0."),
    "midlayer": lambda key: key.replace("layers.0.", "midlayer."),
    "DDP": lambda key: f"module.{key}",
    "torch.compile": lambda key: f"_orig_mod.{key}",
    "a compiled layer": lambda key: key.replace("mlp.", "_orig_mod.mlp."),
    "DDP of a module": lambda key: f"module.draft_model.model.{key}",
    "eagle_module": lambda key: f"eagle_module.{key}",
}


@pytest.mark.parametrize("how", RENAMES)
@pytest.mark.parametrize("name", ["eagle3", "eagle31"])
def test_eagle3_names_may_have_prefixes(name, how, tmp_path):
    path = variant(tmp_path / "draft", name, RENAMES[how])
    found = read_drafter(path, TRUNK)
    same_drafter(found, read_drafter(draft(name), TRUNK))
    write_drafter(tmp_path / "like", found, like=path)
    assert (tmp_path / "like" / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("prefix", ["model.", "module.", "_orig_mod.", "draft_model."])
@pytest.mark.parametrize("name", ["medusa", "dflash", "dspark"])
def test_names_of_other_drafters_may_have_prefixes(name, prefix, tmp_path):
    found = read_drafter(variant(tmp_path / "draft", name, lambda key: prefix + key), TRUNK)
    same_drafter(found, read_drafter(draft(name), TRUNK))


def test_missing_tensors_are_named_beside_those_that_are_there(tmp_path):
    path = variant(tmp_path / "draft", "eagle3", lambda key: key.replace("midlayer.self_attn", "block.attn"))
    with pytest.raises(
        CheckpointFileError, match=r"lacks 4 tensors: layers.0.self_attn.k_proj.*it holds 15 tensors: block.attn.k_proj"
    ):
        read_drafter(path, TRUNK)


def test_two_tensors_for_one_parameter_are_refused(tmp_path):
    path = variant(tmp_path / "draft", "eagle3", tensors={"model.fc.weight": np.zeros((64, 192), np.float32)})
    with pytest.raises(CheckpointFileError, match=r"holds fc.weight and model.fc.weight, which both mean fc.weight"):
        read_drafter(path, TRUNK)


@pytest.mark.parametrize("model_type", ["kimi_k2", "deepseek_v3", "gpt_oss", "qwen3", "llama4_text"])
def test_a_drafter_named_after_its_trunk_has_the_layers_of_its_tensors(model_type, tmp_path):
    copied = {"kv_lora_rank": 16, "n_routed_experts": 8} if model_type == "deepseek_v3" else {}
    path = variant(tmp_path / "draft", "eagle3", model_type=model_type, **copied)
    same_drafter(read_drafter(path, TRUNK), read_drafter(draft("eagle3"), TRUNK))


def test_nested_layers_may_be_named_after_the_trunk(tmp_path):
    layers = json.loads((draft("eagle31") / "config.json").read_text())["transformer_layer_config"]
    path = variant(tmp_path / "draft", "eagle31", transformer_layer_config=layers | {"model_type": "gpt_oss"})
    same_drafter(read_drafter(path, TRUNK), read_drafter(draft("eagle31"), TRUNK))


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_blocks_may_be_named_after_the_trunk(name, tmp_path):
    path = variant(tmp_path / "draft", name, model_type="glm4_moe")
    same_drafter(read_drafter(path, TRUNK), read_drafter(draft(name), TRUNK))


def test_query_norms_are_found_by_their_tensors(tmp_path):
    norms = {f"midlayer.self_attn.{each}_norm.weight": np.full(16, 2, np.float32) for each in "qk"}
    config = read_drafter(variant(tmp_path / "draft", "eagle3", tensors=norms, model_type="kimi_k2"), TRUNK).config
    assert config.block.use_qk_norm


def test_latent_attention_is_refused_by_its_tensors(tmp_path):
    latent = {"midlayer.self_attn.kv_a_proj_with_mqa.weight": np.zeros((24, 128), np.float32)}
    path = variant(tmp_path / "draft", "eagle3", tensors=latent, architectures=["Eagle3DeepseekV2ForCausalLM"])
    with pytest.raises(ConfigError, match=r"latent attention \(layers.0.self_attn.kv_a_proj_with_mqa.weight"):
        read_drafter(path, TRUNK)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *[("eagle3", [each]) for each in ("Eagle3LlamaForCausalLM", "Eagle3DeepseekV2ForCausalLM", "LlamaForCausalLM")],
        ("eagle3", None),
        ("eagle31", ["Eagle3DraftModel"]),
        ("medusa", ["MedusaModel"]),
        ("dflash", ["DFlashForCausalLM"]),
        ("dflash", ["DFlashModel"]),
        ("dflash", None),
        ("dspark", ["DSparkDraftModel"]),
        ("dspark", None),
    ],
)
def test_the_class_may_have_another_name(name, changes, tmp_path):
    path = variant(tmp_path / "draft", name, architectures=changes)
    same_drafter(read_drafter(path, TRUNK), read_drafter(draft(name), TRUNK))


def test_medusa_heads_are_found_by_their_tensors(tmp_path):
    path = variant(tmp_path / "draft", "medusa", medusa_num_heads=None, medusa_num_layers=None)
    same_drafter(read_drafter(path, TRUNK), read_drafter(draft("medusa"), TRUNK))


def test_a_nested_configuration_is_speculators_without_its_type(tmp_path):
    path = variant(tmp_path / "draft", "eagle31", speculators_model_type=None)
    same_drafter(read_drafter(path, TRUNK), read_drafter(draft("eagle31"), TRUNK))


@pytest.mark.parametrize("key", ["dflash_config", "dspark_config"])
@pytest.mark.parametrize("has_copies", [False, True])
def test_dspark_of_specforge_names_its_keys_in_a_section(has_copies, key, tmp_path):
    """The heads are then those of the tensors."""
    keys = ("mask_token_id", "target_layer_ids", "markov_rank", "enable_confidence_head", "confidence_head_with_markov")
    values = json.loads((draft("dspark") / "config.json").read_text())
    section = {each: values[each] for each in keys[:2]} | {"projector_type": "dspark", "attention_mode": "gqa"}
    removed: dict = {} if has_copies else dict.fromkeys((*keys, "markov_head_type", "num_target_layers"))
    changes = {"architectures": ["DSparkDraftModel"], key: section, **removed}
    path = variant(tmp_path / "draft", "dspark", **changes)
    same_drafter(read_drafter(path, TRUNK), read_drafter(draft("dspark"), TRUNK))
    with pytest.raises(ConfigError, match=r"mask_token_id is 1, and 319 in dflash_config"):
        read_drafter(variant(tmp_path / "other", "dspark", **changes | {"mask_token_id": 1}), TRUNK)


def test_the_number_of_trunk_layers_may_have_a_key_of_its_own(tmp_path):
    path = variant(tmp_path / "draft", "dspark", num_target_layers=3, target_num_hidden_layers=8)
    same_drafter(read_drafter(path, TRUNK), read_drafter(draft("dspark"), TRUNK))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
            "architectures .*Qwen3.*no medusa_num_heads.*2 t",
        ),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "EAGLE-1 and EAGLE-2 are not supported"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2 are not supported"),
        ({"speculators_config": {"algorithm": "mlp"}}, "'mlp' is not supported; supported: 'eagle3', 'dflash'"),
        ({}, "no architectures, no model_type.*2 tensors .lm_head.weight, model.embed"),
    ],
)
def test_files_of_no_method_say_what_was_looked_at(values, message):
    with pytest.raises(ConfigError, match=message):
        detect_method(values, ["model.embed_tokens.weight", "lm_head.weight"], METHODS)


# The draft vocabulary.


def ids_of(tensors, tmp_path, without=(), name="eagle3"):
    return read_drafter(variant(tmp_path / "draft", name, tensors=tensors, without=without), TRUNK).draft_ids


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16"])
@pytest.mark.parametrize("marks", ["bool", "uint8", "int64"])
def test_the_draft_vocabulary_may_have_any_integers(dtype, marks, tmp_path):
    found = load_file(draft("eagle3") / "model.safetensors")
    tensors = {D2T: found[D2T].astype(dtype), T2D: found[T2D].astype(marks)}
    np.testing.assert_array_equal(ids_of(tensors, tmp_path), np.flatnonzero(found[T2D]))


@pytest.mark.parametrize(
    ("offsets", "ids", "message"),
    [
        (np.arange(96), None, r"two readings without t2d"),  # the first 96 tokens, or every second one
        (np.arange(96), np.arange(96), r"holds token ids \(0, 1, \.\.\.\) instead of offsets"),
        (np.arange(96) * 3, None, r"holds token ids \(0, 3, \.\.\.\)"),
        (
            np.zeros(96, int),
            np.arange(1, 97),
            r"t2d and d2t define different draft vocabularies.*96 tokens, .*lists 95",
        ),
        (np.full(96, 300), None, r"lists tokens outside 0\.\.319.*is from 300 to 395"),
        (-np.arange(96), None, r"or one twice"),
        (np.zeros(96, np.float32), None, r"d2t is float32\[96\], not integers"),
        (np.zeros(95, int), None, r"not integers \[96\]"),
    ],
)
def test_a_draft_vocabulary_of_another_meaning_is_refused(offsets, ids, message, tmp_path):
    tensors = {D2T: offsets}
    if ids is not None:
        tensors[T2D] = np.isin(np.arange(320), ids)
    with pytest.raises(CheckpointFileError, match=message):
        ids_of(tensors, tmp_path, without=() if ids is not None else (T2D,))


def test_offsets_without_marks_are_read(tmp_path):
    found = load_file(draft("eagle3") / "model.safetensors")
    np.testing.assert_array_equal(ids_of({}, tmp_path, without=(T2D,)), np.flatnonzero(found[T2D]))


@pytest.mark.parametrize("marks", [np.full(320, 0.5, np.float32), np.full(320, 2), np.ones(319, bool)])
def test_marks_of_another_type_are_refused(marks, tmp_path):
    with pytest.raises(CheckpointFileError, match=r"t2d is .*, not bool \[320\] or zeros and ones"):
        ids_of({T2D: marks}, tmp_path)


def test_marks_alone_must_mark_all_tokens(tmp_path):
    with pytest.raises(CheckpointFileError, match="t2d marks 1 of 320 tokens, but the head drafts all"):
        ids_of({T2D: np.arange(320) == 5}, tmp_path, name="dflash")


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, bool, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("name", ["eagle3", "medusa", "dspark"])
def test_weights_of_integers_are_refused(name, dtype, tmp_path):
    tensor = {"eagle3": "fc.weight", "medusa": "0.0.linear.weight", "dspark": "markov_head.markov_w1.weight"}[name]
    zeros = np.zeros_like(load_file(draft(name) / "model.safetensors")[tensor])
    path = variant(tmp_path / "draft", name, tensors={tensor: zeros.astype(dtype)})
    for cast in (None, np.float32):
        with pytest.raises(CheckpointFileError, match=f"{tensor} has unsupported dtype"):
            read_drafter(path, TRUNK, dtype=cast)


def test_a_quantised_drafter_is_named_so(tmp_path):
    packed = {"fc.weight": np.zeros((64, 24), np.int32)}
    path = variant(tmp_path / "draft", "eagle3", tensors=packed, quantization_config={"quant_method": "awq"})
    with pytest.raises(CheckpointFileError, match=r"quant_method.*awq.* are not supported"):
        read_drafter(path, TRUNK)


# The last layer of the trunk.


def layer_ids(name, ids, key="target_layer_ids", last=None, **changes):
    values = json.loads((draft(name) / "config.json").read_text())
    section = {"dflash_config": values["dflash_config"] | {key: ids}} if "dflash_config" in values else {key: ids}
    kind = DSPARK_FORMAT if name == "dspark" else DFLASH_FORMAT
    return parse_blocks(kind, values | section | changes, {}, TRUNK, {"last_layer_state": last})[0].layer_ids


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_the_last_layer_is_read_after_the_norm_and_a_warning_says_so(name, caplog):
    assert layer_ids(name, [1, 3, 7]) == (2, 4, 9)
    assert "target_layer_ids [1, 3, 7] includes the last of 8 trunk layers" in caplog.text
    assert "Using after_norm" in caplog.text and "--last-layer-state before_norm" in caplog.text
    caplog.clear()
    assert layer_ids(name, [1, 3, 7], last="before_norm") == (2, 4, 8)
    assert layer_ids(name, [1, 3, 7], last_layer_state="before_norm") == (2, 4, 8)
    assert layer_ids(name, [1, 3, 5], last="before_norm") == (2, 4, 6)
    assert not caplog.text
    with pytest.raises(ConfigError, match="last_layer_state is 'before_norm', not 'after_norm'"):
        layer_ids(name, [1, 3, 7], last="after_norm", last_layer_state="before_norm")
    with pytest.raises(ConfigError, match="last_layer_state 'both' is not supported"):
        layer_ids(name, [1, 3, 7], last_layer_state="both")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 3, 8], r"\[2, 4, 9\], which must be distinct and within 0\.\.8.*count from 1, subtract 1"),
        ([1, 3, -1], r"two readings: -1 is the embedding .* write the last layer as 7"),
        ([-2, 1], r"within 0\.\.8"),
        ([1, 1], "must be distinct"),
    ],
)
def test_layer_ids_of_other_conventions_are_refused(ids, message):
    with pytest.raises(ConfigError, match=message):
        layer_ids("dflash", ids)


@pytest.mark.parametrize(
    ("aux_layers", "ids", "last", "expected"),
    [
        ("entered", [2, 4, 8], None, (2, 4, 8)),
        ("entered", [2, 4, 8], "after_norm", (2, 4, 9)),
        ("output", [1, 3, 7], "after_norm", (2, 4, 9)),
        ("output", [1, 3, 6], "after_norm", (2, 4, 7)),
    ],
)
def test_eagle3_may_read_either_state_of_the_last_layer(aux_layers, ids, last, expected, caplog):
    values = json.loads((draft("eagle3") / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": ids}
    choices = {"aux_layers": aux_layers, "last_layer_state": last}
    config, _ = parse_eagle3(values, HEAD, TRUNK, choices)
    assert config.layer_ids == expected
    assert ("Using before_norm" in caplog.text) == (last is None)
    # Files that mtpjax writes say it.
    for form in ("specforge", "speculators"):
        caplog.clear()
        choices = {"aux_layers": None if form == "speculators" else "output"}
        again, _ = parse_eagle3(describe_eagle3(config, form), HEAD, TRUNK, choices)
        assert again == config and not caplog.text


@pytest.mark.parametrize("form", ["z-lab", "speculators"])
@pytest.mark.parametrize("last", ["before_norm", "after_norm"])
def test_written_blocks_say_which_state_of_the_last_layer_they_read(form, last, caplog):
    values = json.loads((draft("dflash_full") / "config.json").read_text())
    values["dflash_config"]["target_layer_ids"] = [1, 7]
    config, _ = parse_blocks(DFLASH_FORMAT, values, {}, TRUNK, {"last_layer_state": last})
    written = describe_blocks(DFLASH_FORMAT, config, form)
    assert parse_blocks(DFLASH_FORMAT, written, {}, TRUNK, {})[0] == config and not caplog.text


def test_unknown_keys_of_sections_are_warned_of(tmp_path, caplog):
    read_drafter(variant(tmp_path / "eagle", "eagle3", eagle_config={"next_layer": True}), TRUNK)
    section = json.loads((draft("dflash") / "config.json").read_text())["dflash_config"]
    read_drafter(variant(tmp_path / "dflash", "dflash", dflash_config=section | {"other": 1}), TRUNK)
    assert "eagle_config has unknown keys, which are ignored: next_layer" in caplog.text
    assert "dflash_config has unknown keys, which are ignored: other" in caplog.text


def test_unknown_keys_of_eagle_config_that_change_the_network_are_refused(tmp_path):
    for key, value in {"use_last_layernorm": False, "use_mtp_layernorm": True, "parallel_draft_step": 4}.items():
        path = variant(tmp_path / key, "eagle3", eagle_config={key: value})
        with pytest.raises(CheckpointError, match=f"{key} {value} is not supported"):
            read_drafter(path, TRUNK)


def test_tensors_of_several_dtypes_become_float32_with_a_warning(tmp_path, caplog):
    part = "midlayer.mlp.gate_proj.weight"
    path = variant(tmp_path / "draft", "eagle3", tensors={part: _tensor("eagle3", part).astype(ml_dtypes.bfloat16)})
    found = read_drafter(path, TRUNK)
    named = [line for line in caplog.messages if "1 parameter with tensors of different dtypes" in line]
    assert len(named) == 1 and f"{part} bfloat16" in named[0] and "read as float32" in named[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(found.params)} == {np.dtype(np.float32)}


def test_files_that_are_not_read_are_named(tmp_path, caplog):
    """A head in a file of its own would be replaced by the trunk's without a word."""
    path = variant(tmp_path / "draft", "dflash")
    save_file({"lm_head.weight": np.zeros((320, 64), np.float32)}, path / "head.safetensors")
    assert not read_drafter(path, TRUNK).config.own_head
    assert "has safetensors files that are not read: head.safetensors" in caplog.text


def _tensor(name, key):
    return load_file(draft(name) / "model.safetensors")[key]
