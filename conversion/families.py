"""Defines the supported model families by their tensor names and the settings that their `config.json` omits."""

import dataclasses
from typing import Any

Pairs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A family's tensor names."""

    trunk: str = "model."  # prefix of embedding, layers and final norm
    head: str = "lm_head.weight"
    shared_embedding: str = ""  # name of a tied embedding that is stored as the head
    module_root: str | None = None  # prefix of the modules' names; None means the trunk's, or none before `mtp.`
    # MTP modules are stored as additional "layers" (DeepSeek, GLM), under "mtp" (Qwen), or in other ways that
    # `conversion.names.mtp_names` implements ("mtp_each", "mimo", "mimo_v2", "ernie").
    mtp: str = "layers"
    mtp_norm: str = "shared_head.norm"  # final norm of modules that are additional layers; `mtp_head`: their head
    mtp_head: str = "shared_head.head"
    feed_forward_norm: str = "post_attention_layernorm"
    mtp_feed_forward_norm: str = "post_attention_layernorm"  # the same norm in MTP modules
    sinks: str = "sinks"  # learned attention sinks
    router: str = "gate"
    correction_bias: str = "gate.e_score_correction_bias"
    has_bias_row: bool = False  # the correction bias is stored as [1, E]
    experts: str = "mlp"  # the layer's submodule that contains the experts and their router
    stacks_matrices: bool = False  # each matrix has one tensor for all experts; gate and up are separate
    shared_experts: str = "mlp.shared_experts"
    packed_delta: bool = False  # Qwen3-Next packs the projections of linear attention per key head
    fused_experts: bool = False  # exported files stack the trunk's experts, as Qwen3.5's do

    @property
    def embedding(self) -> str:
        """The name of the embedding tensor."""
        return self.shared_embedding or f"{self.trunk}embed_tokens.weight"

    @property
    def modules(self) -> str:
        """The prefix of the modules' tensor names, including `mtp.` if they have it."""
        root = self.module_root
        if self.is_under_mtp:
            return f"{root or ''}mtp."
        return self.trunk if root is None else root

    @property
    def is_under_mtp(self) -> bool:
        """True if the tensors of MTP modules are under `mtp.`."""
        return self.mtp in ("mtp", "mtp_each")


@dataclasses.dataclass(frozen=True)
class Family:
    """A supported `model_type`."""

    layout: Layout = dataclasses.field(default_factory=Layout)
    attention: str = "grouped"  # "grouped" (GQA) or "latent" (MLA)
    fixed: Pairs = dataclasses.field(default_factory=dict)  # fields of ModelConfig that `config.json` never states
    architecture: str = ""  # the transformers class that loads the text model
    # For each key of `config.json`, the key that this family uses instead, the default if the key is missing, and the
    # only supported value.
    keys: dict[str, str] = dataclasses.field(default_factory=dict)
    defaults: Pairs = dataclasses.field(default_factory=dict)
    required: Pairs = dataclasses.field(default_factory=dict)
    has_windows: bool = False  # some layers have sliding-window attention (`conversion.windows`)
    rotates_part: bool = True  # the transformers class reads `partial_rotary_factor`
    # Fields that the transformers class sets, regardless of `config.json`.
    computes: Pairs = dataclasses.field(default_factory=dict)
    nulls: tuple[str, ...] = ()  # keys in `NOT_NULL` that are null in published files, where null means the default


# Qwen3-Next and Qwen3.5 have norms that scale by 1 + weight, gated attention outputs, and a gated shared expert.
_QWEN_HYBRID = {
    **{"zero_centred_norm": True, "use_qk_norm": True, "attn_output_gate": True, "scoring_func": "softmax"},
    "shared_expert_gate": True,
}
_QUARTER_ROTARY = {"partial_rotary_factor": 0.25}
# DeepSeek-V3 and its relatives have interleaved rotary pairs, and a router with a correction bias per expert.
_CORRECTION_BIAS = {"router_correction_bias": True}
_DEEPSEEK = {"rope_interleave": True} | _CORRECTION_BIAS
_DEEPSEEK_ROUTING = {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
_EPSILON = {"rms_norm_eps": 1e-5}
# Values that some of transformers' mixture-of-experts classes use, regardless of `config.json`.
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_PLAIN_ROUTING = _ONE_GROUP | {"routed_scaling_factor": 1.0, "n_shared_experts": 0}
_NORMALIZED = {"norm_topk_prob": True}
_NO_SHARED_WIDTH = {"shared_expert_intermediate_size": 0}
# `attention_bias` adds a bias to q, k, v and the output, except in some families' classes, whose output has no bias.
_NO_OUTPUT_BIAS = {"attention_output_bias": False}
# Dense MTP modules that read and pass on hidden states from before the final norms.
_PRE_NORM_MODULES = {"mtp_hidden_post_norm": False, "mtp_chain_post_norm": False, "mtp_dense": True}

_DEEPSEEK_V3 = Family(
    attention="latent", fixed=_DEEPSEEK, architecture="DeepseekV3ForCausalLM", defaults=_DEEPSEEK_ROUTING
)
_QWEN35 = Family(Layout(mtp="mtp"), fixed=_QWEN_HYBRID, architecture="Qwen3_5ForCausalLM", defaults=_QUARTER_ROTARY)
_QWEN35_MOE = dataclasses.replace(
    _QWEN35,
    layout=Layout(mtp="mtp", fused_experts=True),
    architecture="Qwen3_5MoeForCausalLM",
    computes=_PLAIN_ROUTING | _NORMALIZED,
)
# Step-3.5-Flash and the text model of Step-3.7 have three dense MTP modules, each with a separate head.
_STEP = Family(
    Layout(
        mtp_norm="transformer.shared_head.norm",
        mtp_head="transformer.shared_head.output",
        experts="moe",
        correction_bias="router_bias",
        stacks_matrices=True,
        shared_experts="share_expert",
    ),
    fixed={"zero_centred_norm": True, "use_qk_norm": True, "attn_head_gate": True}
    | _CORRECTION_BIAS
    | _PRE_NORM_MODULES,
    keys={
        **{"num_key_value_heads": "num_attention_groups", "n_routed_experts": "moe_num_experts"},
        **{"num_experts_per_tok": "moe_top_k", "shared_expert_intermediate_size": "share_expert_dim"},
        **{"routed_scaling_factor": "moe_router_scaling_factor", "norm_topk_prob": "norm_expert_weight"},
    },
    defaults=_EPSILON,
    computes=_ONE_GROUP | _NORMALIZED,
    required={
        **{"use_head_wise_attn_gate": True, "use_moe": True, "use_moe_router_bias": True},
        **{"moe_router_activation": "sigmoid", "att_impl_type": "GQA", "zero_centered": True, "sink": False},
        "query_pre_attn_scalar": None,
    },
    architecture="Step3p7ForConditionalGeneration",
    has_windows=True,
)

# Families by `model_type`. Settings that `config.json` contains are read from that file, and are not listed here.
FAMILIES = {
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "deepseek_v32": dataclasses.replace(
        _DEEPSEEK_V3,
        architecture="DeepseekV32ForCausalLM",
        computes={"rope_interleave": True, "indexer_rope_interleave": False},
    ),
    "glm_moe_dsa": Family(
        attention="latent",
        fixed=_DEEPSEEK,
        architecture="GlmMoeDsaForCausalLM",
        defaults=_EPSILON | {"routed_scaling_factor": 2.5, "indexer_rope_interleave": True},
        computes={"rope_interleave": True, "indexer_rope_interleave": True},
    ),
    # GLM-4.7-Flash.
    "glm4_moe_lite": Family(
        attention="latent",
        fixed=_DEEPSEEK,
        architecture="Glm4MoeLiteForCausalLM",
        defaults={"first_k_dense_replace": 1} | _EPSILON | {"routed_scaling_factor": 1.8},
    ),
    # Kimi-K2.5 and K2.6 have DeepSeek-V3's trunk and a vision tower.
    "kimi_k25": dataclasses.replace(
        _DEEPSEEK_V3, layout=Layout("language_model.model.", head="language_model.lm_head.weight")
    ),
    "glm4_moe": Family(
        fixed=_CORRECTION_BIAS | _NO_OUTPUT_BIAS,
        architecture="Glm4MoeForCausalLM",
        defaults=_EPSILON | {"partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
    ),
    "qwen3_next": Family(
        Layout(mtp="mtp", packed_delta=True),
        fixed=_QWEN_HYBRID,
        architecture="Qwen3NextForCausalLM",
        defaults=_QUARTER_ROTARY,
        computes=_PLAIN_ROUTING,
    ),
    "qwen3_5": dataclasses.replace(
        _QWEN35,
        layout=Layout("model.language_model.", mtp="mtp"),
        architecture="Qwen3_5ForConditionalGeneration",
    ),
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe": dataclasses.replace(
        _QWEN35_MOE,
        layout=Layout("model.language_model.", mtp="mtp", fused_experts=True),
        architecture="Qwen3_5MoeForConditionalGeneration",
    ),
    "qwen3_5_moe_text": _QWEN35_MOE,
    # Qwen3 and Llama have no published MTP modules. mtpjax names their modules as Qwen3.5 does. In older exports, the
    # modules are additional layers.
    "qwen3": Family(
        Layout(mtp="mtp_each"), fixed={"use_qk_norm": True}, architecture="Qwen3ForCausalLM", rotates_part=False
    ),
    "qwen3_moe": Family(
        Layout(mtp="mtp_each"),
        fixed={"use_qk_norm": True, "scoring_func": "softmax"},
        architecture="Qwen3MoeForCausalLM",
        defaults={"norm_topk_prob": False},
        rotates_part=False,
        computes=_PLAIN_ROUTING | _NO_SHARED_WIDTH,
    ),
    "llama": Family(Layout(mtp="mtp_each"), architecture="LlamaForCausalLM", rotates_part=False),
    "mimo": Family(
        Layout(mtp="mimo"),
        fixed={"mtp_input": "hidden_embedding", "mtp_chaining": "trunk", "attention_bias": True} | _NO_OUTPUT_BIAS,
        architecture="MiMoForCausalLM",
        rotates_part=False,
    ),
    # MiMo-V2-Flash has three dense MTP modules with a sliding window, all of which read the trunk's hidden states.
    # SGLang passes the hidden states before the final norm, and vLLM passes those after it.
    "mimo_v2_flash": Family(
        Layout(mtp="mimo_v2", mtp_feed_forward_norm="pre_mlp_layernorm", sinks="attention_sink_bias"),
        fixed=_CORRECTION_BIAS
        | _PRE_NORM_MODULES
        | _NO_OUTPUT_BIAS
        | {"mtp_chaining": "trunk", "mtp_layer_type": "sliding_attention"},
        architecture="MiMoV2FlashForCausalLM",
        defaults={
            **{"attention_value_scale": 0.707, "rms_norm_eps": 1e-5},
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.334},
            },
        },
        nulls=("routed_scaling_factor",),
        required={"hybrid_block_size": None},
        has_windows=True,
    ),
    "step3p5": _STEP,
    "step3p7": _STEP,
    # gpt-oss in bfloat16. mtpjax names its MTP modules as Qwen3.5 does.
    "gpt_oss": Family(
        Layout(mtp="mtp_each", router="router"),
        fixed={"attention_bias": True, "attention_sinks": "all", "scoring_func": "softmax", "expert_bias": True},
        architecture="GptOssForCausalLM",
        keys={"moe_intermediate_size": "intermediate_size", "n_routed_experts": "num_local_experts"},
        defaults={
            **{"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 32.0, "truncate": False},
                **{"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0},
            },
        },
        required={"attention_bias": True},
        rotates_part=False,
        computes=_PLAIN_ROUTING | _NORMALIZED | _NO_SHARED_WIDTH,
        has_windows=True,
    ),
    # Hunyuan-3.
    "hy_v3": Family(
        Layout(
            mtp_norm="final_layernorm",
            router="router.gate",
            correction_bias="expert_bias",
            shared_experts="mlp.shared_mlp",
        ),
        fixed={"use_qk_norm": True} | _CORRECTION_BIAS,
        architecture="HYV3ForCausalLM",
        keys={
            **{"use_qk_norm": "qk_norm", "n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
            **{"norm_topk_prob": "route_norm", "routed_scaling_factor": "router_scaling_factor"},
        },
        defaults={
            **{"first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0},
            **{"router_scaling_factor": 2.826, "num_shared_experts": 1},
        },
        rotates_part=False,
        computes=_ONE_GROUP | _NORMALIZED | _NO_SHARED_WIDTH,
        required={"use_cla": False},
    ),
    # Ernie-4.5 has a dense MTP module that reads the hidden states before the trunk's final norm and shares that norm,
    # as in its authors' training code (PaddlePaddle/ERNIE). SGLang and vLLM pass normed states, apply no final norm,
    # and mask position 0.
    "ernie4_5_moe": Family(
        Layout(mtp="ernie", correction_bias="moe_statics.e_score_correction_bias", has_bias_row=True),
        fixed=_DEEPSEEK | _PRE_NORM_MODULES | {"scoring_func": "softmax", "mtp_output_norm": "trunk"},
        architecture="Ernie4_5_MoeForCausalLM",
        keys={
            **{"n_routed_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
            **{"n_shared_experts": "moe_num_shared_experts", "first_k_dense_replace": "moe_layer_start_index"},
            "decoder_sparse_step": "moe_layer_interval",
        },
        defaults={
            **{"moe_layer_start_index": 1, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
            "tie_word_embeddings": True,
        },
        required={
            **{"use_bias": False, "attention_bias": False, "moe_use_aux_free": True, "moe_gate_act": "softmax"},
            **{"compression_ratio": 1, "moe_norm_min": 1e-12},
        },
        rotates_part=False,
        computes={
            **_ONE_GROUP,
            **{"use_qk_norm": False, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
            **_NO_SHARED_WIDTH,
        },
    ),
}

# In transformers, these keys have no defined meaning for null, so a default would be a guess.
NOT_NULL = (
    *("rms_norm_eps", "layernorm_epsilon", "hidden_act", "max_position_embeddings", "norm_topk_prob", "route_norm"),
    *("routed_scaling_factor", "router_scaling_factor", "moe_router_scaling_factor", "rope_interleave"),
    *("attention_value_scale", "swiglu_alpha", "swiglu_limit", "attention_bias"),
)
# Keys of `config.json` that do not change the logits. A warning reports every other unknown key.
IGNORED_KEYS = {
    # Names, special tokens, caches, and training settings (mtpjax trains without dropout or auxiliary losses).
    *("architectures", "model_type", "auto_map", "torch_dtype", "dtype", "transformers_version", "name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "initializer_range", "use_cache"),
    *("aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "output_router_logits", "moe_capacity", "moe_gate"),
    # Parallelism in other programs, since `pretraining_tp` and `ep_size` do not change the sums.
    *("pretraining_tp", "ep_size", "attention_chunk_size", "max_seq_len"),
    # Unused keys, since `use_sliding_window` must be false and the others only matter with `index_topk`.
    *("max_window_layers", "sliding_window", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"),
    # Precision of operations that mtpjax computes in float32.
    *("mamba_ssm_dtype", "moe_router_dtype", "enable_moe_fp32_combine", "enable_attention_fp32_softmax"),
    *("enable_lm_head_fp32", "need_fp32_gate", "norm_dtype", "fp32_residual_connection", "scale_fmt"),
    # The vision tower and its tokens.
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("projection_hidden_size", "projection_layer_norm_eps", "media_placeholder_token_id", "language_model_only"),
    *("use_unified_vision_chunk", "video_placeholder", "ignore_index", "projector_bias"),
    "understand_projector_stride",
    # Keys that repeat others in the file (Step-3.5's lists of layers, and gpt-oss's section for rotary embeddings).
    *("moe_every_n_layer", "moe_layer_offset", "initial_context_length"),
    # Keys that are read as separate sections.
    *("text_config", "quantization_config", "quantization", "rope_parameters", "rope_scaling"),
}
