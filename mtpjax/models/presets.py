"""Named architectures, both small models to train and published models."""

import dataclasses

from mtpjax.messages import did_you_mean
from mtpjax.models.config import ModelConfig
from mtpjax.models.rope_scaling import Yarn


class _Presets(dict[str, ModelConfig]):
    def __missing__(self, name: str):
        raise ValueError(f"unknown preset '{name}'{did_you_mean(name, self)}; supported: {', '.join(self)}")


# Narrow and deep, so that on a CPU a pass over three tokens costs little more than a one-token pass, and drafts are
# cheap.
_TINY = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=16,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=192,
    max_position_embeddings=2048,
    num_mtp_modules=1,
)

_SMALL = {
    "tiny": _TINY,
    # 29 MB of weights, so that a round takes milliseconds and the model dominates it.
    "small": dataclasses.replace(_TINY, hidden_size=256, num_hidden_layers=8, head_dim=64, intermediate_size=768),
    "tiny-moe": ModelConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=2048,
        attention="latent",
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        rope_interleave=True,
        n_routed_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        n_shared_experts=1,
        first_k_dense_replace=1,
        router_correction_bias=True,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        num_mtp_modules=1,
    ),
}

_DEEPSEEK_V3 = ModelConfig(
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    intermediate_size=18432,
    max_position_embeddings=163840,
    attention="latent",
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_interleave=True,
    rope_scaling=Yarn(factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0),
    n_routed_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    first_k_dense_replace=3,
    router_correction_bias=True,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    num_mtp_modules=1,
)

_GLM_45_AIR = ModelConfig(
    vocab_size=151552,
    hidden_size=4096,
    num_hidden_layers=46,
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=10944,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    attention_bias=True,
    rope_theta=1e6,
    partial_rotary_factor=0.5,
    n_routed_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1408,
    n_shared_experts=1,
    first_k_dense_replace=1,
    router_correction_bias=True,
    num_mtp_modules=1,
)


def _every_fourth(layers: int) -> tuple:
    """Repeats three linear-attention layers and one full-attention layer."""
    return ("linear_attention", "linear_attention", "linear_attention", "full_attention") * (layers // 4)


_QWEN35_27B = ModelConfig(
    vocab_size=248320,
    hidden_size=5120,
    num_hidden_layers=64,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    intermediate_size=17408,
    max_position_embeddings=262144,
    zero_centred_norm=True,
    use_qk_norm=True,
    attn_output_gate=True,
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    layer_types=_every_fourth(64),
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    num_mtp_modules=1,
)

_QWEN35_35B_A3B = dataclasses.replace(
    _QWEN35_27B,
    hidden_size=2048,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    intermediate_size=512,
    layer_types=_every_fourth(40),
    linear_num_value_heads=32,
    n_routed_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    shared_expert_gate=True,
    scoring_func="softmax",
)

presets = _Presets(
    {
        **_SMALL,
        "deepseek-v3": _DEEPSEEK_V3,
        "deepseek-v3.2": dataclasses.replace(_DEEPSEEK_V3, index_topk=2048, index_n_heads=64, index_head_dim=128),
        "glm-4.5": dataclasses.replace(
            _GLM_45_AIR,
            hidden_size=5120,
            num_hidden_layers=92,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            n_routed_experts=160,
            first_k_dense_replace=3,
            routed_scaling_factor=2.5,
            use_qk_norm=True,
        ),
        "glm-4.5-air": _GLM_45_AIR,
        "glm-5": dataclasses.replace(
            _DEEPSEEK_V3,
            vocab_size=154880,
            hidden_size=6144,
            num_hidden_layers=78,
            num_attention_heads=64,
            intermediate_size=12288,
            max_position_embeddings=202752,
            rms_norm_eps=1e-5,
            q_lora_rank=2048,
            qk_nope_head_dim=192,
            v_head_dim=256,
            rope_theta=1e6,
            rope_scaling=None,
            n_group=1,
            topk_group=1,
            index_topk=2048,
            index_n_heads=32,
            index_head_dim=128,
            indexer_rope_interleave=True,
        ),
        "qwen3-next": dataclasses.replace(
            _QWEN35_35B_A3B,
            vocab_size=151936,
            num_hidden_layers=48,
            intermediate_size=5120,
            layer_types=_every_fourth(48),
            n_routed_experts=512,
            num_experts_per_tok=10,
        ),
        "qwen3.5-9b": dataclasses.replace(
            _QWEN35_27B,
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=16,
            intermediate_size=12288,
            layer_types=_every_fourth(32),
            linear_num_value_heads=32,
        ),
        "qwen3.5-27b": _QWEN35_27B,
        "qwen3.5-35b-a3b": _QWEN35_35B_A3B,
    }
)
