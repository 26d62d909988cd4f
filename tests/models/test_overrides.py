"""Fields of an architecture that differ from a preset's."""

import pytest

from mtpjax import ModelConfig, TrainConfig, presets
from mtpjax.models.overrides import model_changes, override_config
from mtpjax.models.rope_scaling import Yarn


def test_head_sizes_follow_the_width_unless_they_are_given():
    base = presets["tiny"]
    wide = override_config(base, {"hidden_size": 96})
    assert (base.head_dim, wide.head_dim, wide.num_key_value_heads) == (16, 24, 2)
    assert override_config(base, {"hidden_size": 96, "head_dim": 16}).head_dim == 16
    equal = ModelConfig(vocab_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=8)
    assert override_config(equal, {"num_attention_heads": 8}).num_key_value_heads == 8


def test_head_sizes_of_a_preset_that_sets_them_stay():
    base = presets["glm-4.5-air"]
    assert override_config(base, {"hidden_size": 1024}).head_dim == base.head_dim == 128


@pytest.mark.parametrize("name", presets)
def test_a_whole_architecture_replaces_any_preset(name):
    assert TrainConfig(model=presets[name]).model_config == presets[name]
    assert hash(TrainConfig(model=presets[name])) == hash(TrainConfig(model=presets[name]))


def test_plain_values_become_hashable():
    scaling = {"factor": 2.0, "original_max_position_embeddings": 64}
    config = TrainConfig(model={"rope_scaling": scaling, "mlp_only_layers": [1], "num_mtp_modules": 3})
    assert config.model_config.rope_scaling == Yarn(**scaling) and config.model_config.num_mtp_modules == 3
    assert hash(config)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"hiden_size": 3}, r"unknown setting model\.hiden_size: did you mean model\.hidden_size\?"),
        ({"mtp_own": True}, r"did you mean .*model\.mtp_own_head.* or .*\?"),
        ({"xyzzy": 3}, "the fields are vocab_size, hidden_size"),
        ({"hidden_size": "96"}, r"model\.hidden_size must be of type int, not '96'"),
        ({"hidden_size": True}, r"model\.hidden_size must be of type int, not True"),
        ({"use_qk_norm": 1}, r"model\.use_qk_norm must be of type bool, not 1"),
        ({"mlp_only_layers": 3}, r"model\.mlp_only_layers must be a list, not 3"),
        ({"rope_scaling": {"factor": 2}}, "original_max_position_embeddings"),
        ({"num_attention_heads": 5}, r"num_attention_heads \(5\)"),
        ("model.yaml", "read_model_config"),
    ],
)
def test_wrong_fields_are_refused(model, said):
    with pytest.raises(ValueError, match=said) as raised:
        TrainConfig(model=model)
    assert "\n" not in str(raised.value)


def test_a_checkpoint_keeps_its_architecture_except_for_more_modules():
    assert model_changes(TrainConfig(init_from="DIR", model={"num_mtp_modules": 3}).model) == {"num_mtp_modules": 3}
    with pytest.raises(ValueError, match=r"only model\.num_mtp_modules can be set, not model\.hidden_size"):
        TrainConfig(init_from="DIR", model={"hidden_size": 96})
