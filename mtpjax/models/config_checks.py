"""Checks that the fields of a `ModelConfig` are consistent. A violation raises `ValueError` with the values."""

import math
from typing import Any

from mtpjax.messages import require, require_choice, require_divisible

MAX_PARTS = 10_000  # layers, modules, or experts per layer; published models have hundreds


def check_sizes(config: Any) -> None:
    """Checks the sizes and the per-layer lists, before missing sizes get their defaults."""
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    for name in (*sizes, "max_position_embeddings"):
        require(getattr(config, name) > 0, f"{name} must be positive, not {getattr(config, name)}")
    tokens, vocab_size = config.num_tokens, config.vocab_size
    require(0 <= tokens <= vocab_size, f"num_tokens {tokens} is not within 0..{vocab_size}")
    require(config.num_mtp_modules >= 0, f"num_mtp_modules must be at least 0, got {config.num_mtp_modules}")
    require(0 <= config.rms_norm_eps < math.inf, f"rms_norm_eps must be at least 0, got {config.rms_norm_eps}")
    # Loading lists the tensor names of every layer and expert, so an absurd number in a damaged file would stall it.
    for name in ("num_hidden_layers", "num_mtp_modules", "n_routed_experts"):
        require(getattr(config, name) <= MAX_PARTS, f"{name} must be at most {MAX_PARTS}, got {getattr(config, name)}")
    for name in ("indexer_types", "layer_types", "swiglu_limits", "swiglu_limits_shared"):
        given = len(getattr(config, name))
        require(
            given in (0, config.num_hidden_layers),
            f"{name} must have {config.num_hidden_layers} entries, one per layer; got {given}",
        )
    for kind in config.layer_types:
        require_choice("layer type", kind, ("full_attention", "sliding_attention", "linear_attention"))
    for kind in config.indexer_types:
        require_choice("indexer type", kind, ("full", "shared"))


def check_layers(config: Any) -> None:
    """Checks the settings of each kind of layer that the model has."""
    if "linear_attention" in config.layer_types:
        _check_linear(config)
    if config.index_topk:
        _check_indexer(config)
    if config.attention == "grouped":
        _check_grouped(config)
    else:
        _check_latent(config)
    if config.has_sliding_layers:
        _check_sliding(config)
    require(
        config.rotary_dim % 2 == 0, f"the number of rotated channels per head must be even, got {config.rotary_dim}"
    )
    if config.n_routed_experts:
        _check_experts(config)


def _require_positive(config: Any, layer: str, names: tuple[str, ...]) -> None:
    for name in names:
        require(getattr(config, name) > 0, f"{layer} needs a positive {name}, not {getattr(config, name)}")


def _check_grouped(config: Any) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    require_divisible("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    is_plain = not (config.attention_bias or config.use_qk_norm or config.attn_output_gate)
    require(
        config.value_dim == config.head_dim or is_plain,
        f"v_head_dim {config.v_head_dim} must equal head_dim {config.head_dim} with biases, norms or output gates",
    )


def _check_latent(config: Any) -> None:
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    _require_positive(config, "latent attention", sizes)
    # Options that only grouped attention has.
    absent = {"use_qk_norm": False, "attn_output_gate": False, "attn_head_gate": False, "attention_sinks": "none"}
    for name, neutral in (absent | {"attention_value_scale": 1.0, "partial_rotary_factor": 1.0}).items():
        value = getattr(config, name)
        require(value == neutral, f"latent attention does not support {name} {value!r}: it must be {neutral!r}")


def _check_indexer(config: Any) -> None:
    is_possible = config.attention == "latent" and config.q_lora_rank > 0
    require(is_possible, "an indexer needs latent attention with q_lora_rank")
    width, rotated = config.index_head_dim, config.qk_rope_head_dim
    require(min(config.index_n_heads, width) > 0, "an indexer needs index_n_heads and index_head_dim")
    require(width >= rotated, f"index_head_dim ({width}) must be at least qk_rope_head_dim ({rotated})")
    require(
        config.indexer_types[:1] != ("shared",),
        "the first layer cannot share the indexer of an earlier layer: set its indexer type to full",
    )


def _check_sliding(config: Any) -> None:
    require(config.attention == "grouped", "sliding attention must be grouped-query attention")
    _require_positive(config, "sliding attention", ("sliding_window",))
    heads, kv_heads = config.sliding_num_attention_heads, config.sliding_num_key_value_heads
    require_divisible("sliding_num_attention_heads", heads, "sliding_num_key_value_heads", kv_heads)
    width = int(config.head_dim * config.sliding_partial_rotary_factor)
    require(width % 2 == 0, f"the number of rotated channels per head of sliding attention must be even, got {width}")


def _check_linear(config: Any) -> None:
    sizes = ("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
    _require_positive(config, "linear attention", (*sizes, "linear_num_value_heads"))
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    require_divisible("linear_num_value_heads", values, "linear_num_key_heads", keys)


def _check_experts(config: Any) -> None:
    experts, groups, width = config.n_routed_experts, config.n_group, config.moe_intermediate_size
    require(width > 0, f"experts need a positive moe_intermediate_size, got {width}")
    has_gate = config.shared_expert_gate and not config.shared_width
    require(not has_gate, "shared_expert_gate needs n_shared_experts or shared_expert_intermediate_size")
    require_divisible("n_routed_experts", experts, "n_group", groups)
    require(1 <= config.topk_group <= groups, f"topk_group must be within 1..{groups}, got {config.topk_group}")
    reach, picked = config.topk_group * (experts // groups), config.num_experts_per_tok
    within = f"within 1..{reach}, the experts of {config.topk_group} groups"
    require(1 <= picked <= reach, f"num_experts_per_tok must be {within}, got {picked}")
