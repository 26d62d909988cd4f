"""Each field of `ModelConfig`, changed by itself, changes what a model computes, or is refused, or is listed here."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.models.config import ModelConfig
from mtpjax.models.forward import forward
from mtpjax.models.model import MTPModel
from mtpjax.models.params import param_shapes
from mtpjax.models.rope_scaling import LinearScaling
from tests.helpers.small_models import small_config

FIELDS = {field.name: field for field in dataclasses.fields(ModelConfig)}
NO_EFFECT_ON_LOGITS = {
    "max_position_embeddings",  # limits the length of texts
    "num_tokens",  # limits the ids that are decoded
}
LATENT_SIZES = {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "latent_norm_eps"}
INDEXER = {"index_n_heads", "index_head_dim", "indexer_rope_interleave", "indexer_types"}
WINDOWS = {name for name in FIELDS if name.startswith("sliding_")}
LINEAR = {name for name in FIELDS if name.startswith("linear_")}
EXPERTS = {
    *("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "shared_expert_intermediate_size"),
    *("shared_expert_gate", "first_k_dense_replace", "mlp_only_layers", "scoring_func", "router_correction_bias"),
    *("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "expert_bias", "swiglu_limits"),
    *("swiglu_alpha", "mtp_dense"),
}
# By kind of small model: fields about parts that it does not have. `sliding_rope_scaling` asks whether windows scale as
# well, so it needs a scaling; `shared_expert_intermediate_size` replaces `n_shared_experts`.
ABSENT = {
    "grouped": LATENT_SIZES | INDEXER | WINDOWS | LINEAR | EXPERTS,
    "latent": {"head_dim", "num_key_value_heads"} | INDEXER | WINDOWS | LINEAR,
    "sparse": {"head_dim", "num_key_value_heads"} | WINDOWS | LINEAR,
    "hybrid": LATENT_SIZES | INDEXER | WINDOWS | {"n_shared_experts"},
    "sliding": LATENT_SIZES | INDEXER | LINEAR | EXPERTS | {"sliding_rope_scaling"},
    "clamped": LATENT_SIZES | INDEXER | LINEAR | {"sliding_rope_scaling", "n_shared_experts"},
}


def other_values(config, name):
    """Lists values that differ from the config's; one of them must change the logits, or all be refused."""
    layers = config.num_hidden_layers
    value: Any = getattr(config, name)
    chosen = {
        "indexer_types": ("full",) * layers,
        "layer_types": ("full_attention",) * layers if value else ("sliding_attention",) * layers,
        "swiglu_limits": (0.3,) * layers,
        "swiglu_limits_shared": (0.3,) * layers,
        "mlp_only_layers": () if value else (layers - 1,),
        "rope_scaling": LinearScaling(factor=2.0),
        "attention_sinks": "sliding" if value == "all" else "all",
        "scoring_func": "sigmoid" if value == "softmax" else "softmax",
        "linear_output_gate": "sigmoid",
        "mtp_chaining": "trunk",
        "mtp_input": "hidden_embedding",
        "mtp_layer_type": "full_attention" if value == "sliding_attention" else "sliding_attention",
        "mtp_output_norm": "trunk",
    }
    if name in chosen:
        return [chosen[name]]
    if isinstance(value, bool):
        return [not value]
    return [value / 2 or 0.5] if isinstance(value, float) else [int(value) + 1, 2 * int(value) or 4, int(value) + 2]


def constants(jaxpr):
    """Collects the arrays that a traced function holds, such as rotary frequencies; its text does not show them."""
    found = [np.asarray(array).tobytes() for array in getattr(jaxpr, "consts", ())]
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                found += constants(part) if hasattr(part, "eqns") or hasattr(part, "jaxpr") else []
    return found


@functools.cache
def computation(config):
    """Traces the trunk's and the modules' logits; nothing is compiled."""
    model = MTPModel(config)
    traced = jax.make_jaxpr(lambda params, tokens: forward(params, tokens, model=model))(
        param_shapes(config), jax.ShapeDtypeStruct((1, 12), jnp.int32)
    )
    return str(traced), constants(traced)


def counts(kind, name):
    """Returns whether another value of a field changes the parameters or the computation, or all are refused."""
    config, is_refused = small_config(kind, num_mtp_modules=2), True
    for value in other_values(config, name):
        try:
            changed = small_config(kind, **{"num_mtp_modules": 2, name: value})
        except ValueError:
            continue
        is_refused = False
        if param_shapes(changed) != param_shapes(config) or computation(changed) != computation(config):
            return True
    return is_refused


@pytest.mark.parametrize(
    "kind",
    [
        "grouped",  # the others trace for 10 to 20 seconds each
        *(pytest.param(name, marks=pytest.mark.slow) for name in ABSENT if name != "grouped"),
    ],
)
def test_no_field_is_ignored(kind):
    checked = FIELDS.keys() - {"attention"} - NO_EFFECT_ON_LOGITS - ABSENT[kind]
    assert [name for name in sorted(checked) if not counts(kind, name)] == []


@pytest.mark.slow  # traces about 40 models
@pytest.mark.parametrize("kind", ABSENT)
def test_the_listed_fields_change_nothing(kind):
    assert [name for name in sorted(NO_EFFECT_ON_LOGITS | ABSENT[kind]) if counts(kind, name)] == []


def test_experts_without_limits_have_the_activation_with_alpha():
    config = small_config("hybrid")
    assert computation(dataclasses.replace(config, swiglu_alpha=1.7)) != computation(config)


def test_layers_with_linear_attention_have_their_limits():
    config = small_config("hybrid", swiglu_limits=(0.3, 0.4, 0.5), swiglu_limits_shared=(0.6, 0.7, 0.8))
    assert [kind.expert_limit for kind in config.trunk_kinds] == [0.3, 0.4, 0.5]
    assert [kind.dense_limit for kind in config.trunk_kinds] == [0.6, 0.7, 0.8]


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("latent", {"use_qk_norm": True}, "latent attention does not support use_qk_norm True: it must be False"),
        ("latent", {"attn_output_gate": True}, "not support attn_output_gate"),
        ("latent", {"attn_head_gate": True}, "not support attn_head_gate"),
        ("sparse", {"attention_sinks": "all"}, "not support attention_sinks 'all': it must be 'none'"),
        ("latent", {"attention_value_scale": 0.5}, "not support attention_value_scale 0.5: it must be 1.0"),
        ("latent", {"partial_rotary_factor": 0.5}, "not support partial_rotary_factor"),
        ("hybrid", {"shared_expert_intermediate_size": 0}, "shared_expert_gate needs n_shared_experts"),
    ],
)
def test_an_option_that_a_kind_does_not_compute_is_refused(kind, changes, words):
    with pytest.raises(ValueError, match=words):
        small_config(kind, **changes)
