"""Architectures from the command line and from YAML files."""

import pytest

from mtpjax import presets
from mtpjax.training.yaml_config import model_to_yaml, read_model_config, read_train_config, to_yaml

REQUIRED = "vocab_size: 256\nhidden_size: 32\nnum_hidden_layers: 2\nnum_attention_heads: 2\nintermediate_size: 48\n"


@pytest.mark.parametrize("name", presets)
def test_every_preset_comes_back_from_yaml(name, tmp_path):
    file = tmp_path / "model.yaml"
    file.write_text(model_to_yaml(presets[name]))
    assert read_model_config(file) == presets[name]


def test_fields_on_the_command_line_have_the_types_of_the_model():
    pairs = ["model.num_mtp_modules=3", "model.use_qk_norm=true", "model.rope_theta=1e6", "model.mlp_only_layers=[1]"]
    model = read_train_config(None, ["preset=tiny", *pairs]).model_config
    assert (model.num_mtp_modules, model.use_qk_norm, model.rope_theta) == (3, True, 1e6)
    assert model.mlp_only_layers == (1,) and model.num_hidden_layers == presets["tiny"].num_hidden_layers
    scaling = ["model.rope_scaling.factor=4", "model.rope_scaling.original_max_position_embeddings=64"]
    assert read_train_config(None, scaling).model_config.rope_scaling.factor == 4.0


def test_a_file_is_a_whole_architecture_which_the_command_line_changes(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(REQUIRED)
    config = read_train_config(None, [f"model={file}", "model.num_mtp_modules=2", "model.hidden_size=64"])
    model = config.model_config
    assert (model.hidden_size, model.head_dim, model.num_mtp_modules) == (64, 32, 2)
    assert model.max_position_embeddings == 4096  # the default of ModelConfig, not the preset's
    file.unlink()  # the settings hold the content
    run = tmp_path / "run.yaml"
    run.write_text(to_yaml(config))
    assert read_train_config(run) == config


def test_settings_in_a_file_name_fields_or_a_file(tmp_path):
    (tmp_path / "mine.yaml").write_text(REQUIRED)
    run = tmp_path / "run.yaml"
    run.write_text("model:\n  num_mtp_modules: 2\n")
    assert read_train_config(run, ["model.hidden_size=128"]).model_config.num_mtp_modules == 2
    run.write_text(f"model: {tmp_path}/mine.yaml\n")
    assert read_train_config(run).model_config.hidden_size == 32


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("hidden_size: 32\n", "vocab_size, num_hidden_layers, num_attention_heads, intermediate_size missing"),
        (f"{REQUIRED}hiden_size: 3\n", r"did you mean model\.hidden_size\?"),
        (f"{REQUIRED}use_qk_norm: 3\n", "use_qk_norm"),
        (f"{REQUIRED}num_key_value_heads: 3\n", r"num_key_value_heads \(3\)"),
        ("- 1\n", "must be a mapping"),
        ("a: b: c\n", "cannot be read"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(content, said, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=said) as raised:
        read_train_config(None, [f"model={file}"])
    assert str(file) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (["model.hiden_size=3"], r"unknown setting model\.hiden_size: did you mean model\.hidden_size\?"),
        (["model.hidden_size=wide"], "model.hidden_size.*int"),
        (["model.hidden_size.x=3"], "model.hidden_size"),
        (["model.attention=flash"], "model.attention"),
        (["model=nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["model.hidden_size"], "is not a key=value pair"),
    ],
)
def test_wrong_settings_of_the_model_are_refused_in_one_line(pairs, said):
    with pytest.raises(ValueError, match=said) as raised:
        read_train_config(None, pairs)
    assert "\n" not in str(raised.value)
