import dataclasses
import json

import pytest

from mtpjax import DecodeConfig, ModelConfig, Objective, TrainConfig, presets
from mtpjax.data.config import Source
from mtpjax.models.rope_scaling import Yarn

BASE = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LATENT = {"attention": "latent", "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


@pytest.mark.parametrize("name", presets)
def test_presets_survive_json(name):
    config = presets[name]
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(dataclasses.replace(config))


def test_absent_head_counts_are_filled_in():
    config = ModelConfig(**BASE)
    assert (config.head_dim, config.num_key_value_heads, config.rotary_dim) == (8, 4, 8)


def test_the_first_layers_may_be_dense():
    config = ModelConfig(**BASE, **EXPERTS, first_k_dense_replace=1)
    assert [config.layer_kind(layer).is_moe for layer in range(2)] == [False, True] and config.is_moe
    assert not ModelConfig(**BASE).layer_kind(0).is_moe


def test_layers_with_a_window_have_what_is_not_given_from_the_others():
    config = ModelConfig(**BASE, **SLIDING, sliding_rope_theta=100.0, attention_sinks="sliding")
    sliding, full = config.trunk_kinds
    assert (sliding.is_sliding, full.is_sliding, config.mtp_kind.is_sliding) == (True, False, False)
    own = config.of_layer(sliding)
    assert (own.rope_theta, own.num_attention_heads, own.num_key_value_heads) == (100.0, 4, 4)
    assert config.of_layer(full) is config and config.has_sinks(sliding) and not config.has_sinks(full)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match=r"unknown preset 'huge'; supported: tiny, small, tiny-moe") as raised:
        presets["huge"]
    assert "\n" not in str(raised.value)


def test_an_unknown_setting_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"'hiden_size': did you mean hidden_size"):
        ModelConfig.from_dict({**BASE, "hiden_size": 3})


def test_yarn_comes_back_from_plain_values():
    config = ModelConfig(**BASE, rope_scaling=Yarn(factor=2.0, original_max_position_embeddings=64))
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": 0}, "vocab_size must be positive, not 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be positive, not -1"),
        ({"num_mtp_modules": -1}, "num_mtp_modules must be at least 0, got -1"),
        ({"num_attention_heads": 5}, "hidden_size (32) must be divisible by num_attention_heads (5)"),
        ({"num_key_value_heads": 3}, "num_attention_heads (4) must be divisible by num_key_value_heads (3)"),
        ({"attention": "linear"}, "attention 'linear' is not one of grouped, latent"),
        ({"mtp_chaining": "tree"}, "mtp_chaining 'tree'"),
        ({"mtp_input": "hidden"}, "mtp_input 'hidden'"),
        ({"scoring_func": "relu"}, "scoring_func 'relu'"),
        ({"head_dim": 7}, "rotated channels per head must be even, got 7"),
        ({**SLIDING, "sliding_window": 0}, "positive sliding_window, not 0"),
        ({**SLIDING, "sliding_num_key_value_heads": 3}, "sliding_num_attention_heads (4) must be divisible by"),
        (
            {**SLIDING, "sliding_partial_rotary_factor": 0.4},
            "rotated channels per head of sliding attention must be even, got 3",
        ),
        ({**SLIDING, **LATENT}, "sliding attention must be grouped-query attention"),
        ({"v_head_dim": 6, "use_qk_norm": True}, "v_head_dim 6 must equal head_dim 8 with biases"),
        ({"attention_sinks": "first"}, "attention_sinks 'first' is not one of none, sliding, all"),
        ({"partial_rotary_factor": 0.4}, "rotated channels per head must be even, got 3"),
        ({**LATENT, "kv_lora_rank": 0}, "positive kv_lora_rank, not 0"),
        ({**LATENT, "qk_rope_head_dim": 5}, "rotated channels per head must be even, got 5"),
        ({**EXPERTS, "moe_intermediate_size": 0}, "moe_intermediate_size, got 0"),
        ({**EXPERTS, "n_group": 3}, "n_routed_experts (8) must be divisible by n_group (3)"),
        ({**EXPERTS, "n_group": 4, "topk_group": 5}, "topk_group must be within 1..4, got 5"),
        (
            {**EXPERTS, "num_experts_per_tok": 0},
            "num_experts_per_tok must be within 1..8, the experts of 1 groups, got 0",
        ),
        (
            {**EXPERTS, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
            "num_experts_per_tok must be within 1..2, the experts of 1 groups, got 3",
        ),
    ],
)
def test_model_settings_that_do_not_fit_are_refused(changes, named):
    with pytest.raises(ValueError) as raised:
        ModelConfig(**(BASE | changes))
    assert named in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        (DecodeConfig, {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        (DecodeConfig, {"num_steps": -1}, "num_steps must be at least 0, got -1"),
        (DecodeConfig, {"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
        (DecodeConfig, {"min_rows": 0}, "min_rows must be at least 1, got 0"),
        (DecodeConfig, {"max_length": 1}, "max_length must be at least 2, got 1"),
        (TrainConfig, {"steps": 0}, "steps must be at least 1, not 0"),
        (TrainConfig, {"row_length": 1}, "row_length must be at least 2, not 1"),
        (TrainConfig, {"extra_tokens": -1}, "extra_tokens must be at least 0, not -1"),
        (TrainConfig, {"data": "a", "sources": (Source(path="b"),)}, "data and sources are both given"),
        (Source, {"path": "a", "kind": "csv"}, "kind 'csv' is not one of auto, text, jsonl, chat, formatted"),
        (Source, {"kind": "jsonl"}, "a source of kind 'jsonl' needs a path"),
        (Source, {"weight": 0.0}, "weight must be positive, not 0.0"),
        (Source, {"max_skipped": -1}, "max_skipped must be at least 0, not -1"),
        (TrainConfig, {"held_out_fraction": 1.0}, "held_out_fraction 1.0"),
        (TrainConfig, {"optimizer": "sgd"}, "optimizer 'sgd' is not one of adamw, muon"),
        (TrainConfig, {"attention_layout": "flat"}, "attention_layout 'flat'"),
    ],
)
def test_other_settings_that_do_not_fit_are_refused(kind, changes, named):
    with pytest.raises(ValueError) as raised:
        kind(**changes)
    assert named in str(raised.value) and "\n" not in str(raised.value)


def test_stop_tokens_given_as_a_list_can_be_hashed():
    assert hash(DecodeConfig(stop_token_ids=[1, 2])) == hash(DecodeConfig(stop_token_ids=(1, 2)))


def test_what_trains_decides_the_objective_unless_one_is_named():
    assert TrainConfig().objective.mix == (("cross_entropy", 1.0),)
    assert TrainConfig(trains="modules").objective == Objective(mix={"kl": 1.0})
    named = Objective(mix={"lk_hybrid": 1.0}, vocab_chunk=8)
    assert TrainConfig(trains="detached", objective=named).objective == named
