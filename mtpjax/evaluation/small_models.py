"""Small models for tests of decoding, with constructed weights whose drafts are right sometimes, always or never."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.models.config import ModelConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.params import param_shapes

# Scale of the blocks' outputs in "mixed" weights: small enough that drafts of every level are sometimes accepted, and
# large enough that they are sometimes rejected.
MIXED_BLOCK_SCALE = {"grouped": 1.5, "latent": 0.15, "sparse": 0.15, "hybrid": 0.3}
DRAFT_QUALITIES = ("random", "mixed", "right", "wrong")


def small_config(attention: str = "grouped", **changes) -> ModelConfig:
    """Makes the configuration of a small model.

    Args:
        attention: "grouped" (grouped-query attention, dense layers), "latent" (multi-head latent attention, experts
            from the second layer on), "sparse" (latent attention with a sparse indexer, which one layer shares) or
            "hybrid" (linear and gated full attention, experts with a gated shared expert).
        **changes: fields of `ModelConfig` to set otherwise.

    Returns:
        The configuration.
    """
    values = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    values |= {"intermediate_size": 48, "max_position_embeddings": 256, "num_mtp_modules": 1}
    kind = {"sparse": "latent", "hybrid": "grouped"}.get(attention, attention)
    if kind == "grouped":
        values |= {"num_key_value_heads": 2}
    # Linear attention around one layer of full attention, with the options of Qwen3.5.
    if attention == "hybrid":
        values |= {"num_hidden_layers": 3, "layer_types": ("linear_attention", "full_attention", "linear_attention")}
        values |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        values |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6}
        values |= {
            "zero_centred_norm": True,
            "use_qk_norm": True,
            "attn_output_gate": True,
            "partial_rotary_factor": 0.5,
        }
        values |= {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "mlp_only_layers": (1,),
        }
        values |= {"shared_expert_intermediate_size": 10, "shared_expert_gate": True, "scoring_func": "softmax"}
    # The indexer picks the keys of latent attention; the second layer reuses the picks of the first.
    if attention == "sparse":
        values |= {"num_hidden_layers": 3, "indexer_types": ("full", "shared", "full")}
        values |= {"index_topk": 7, "index_n_heads": 3, "index_head_dim": 6}
    # Latent attention and grouped experts, with the options of DeepSeek-V3.
    if kind == "latent":
        values |= {
            "q_lora_rank": 20,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
        }
        values |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1}
        values |= {"n_group": 4, "topk_group": 2, "router_correction_bias": True, "first_k_dense_replace": 1}
        values |= {"rope_interleave": True, "routed_scaling_factor": 2.5}
    return ModelConfig.from_dict({"attention": kind, **values, **changes})


def random_params(model: MTPModel, seed: int = 0) -> dict:
    """Draws every parameter at random, including norms and biases, so that tests notice any that is ignored.

    Args:
        model: the model.
        seed: seed of the weights.

    Returns:
        float32 parameters. Each leaf depends only on its path, its shape and the seed.
    """

    def draw(path, leaf):
        # Norms and biases stay close to neutral. Matrices are scaled by their number of inputs, so that activations
        # keep unit variance; the table maps names to the axis of the inputs.
        names = [key.key for key in path]
        noise = np.random.default_rng([seed, zlib.crc32("/".join(names).encode())]).standard_normal(leaf.shape)
        if names[-1] == "scale":
            noise = (0 if model.config.zero_centred_norm else 1) + 0.1 * noise
        elif names[-1] in ("norm", "norm_scale"):
            noise = 1 + 0.1 * noise
        elif names[-1] in ("qkv_bias", "correction_bias", "norm_bias"):
            noise = 0.1 * noise
        elif "embedding" not in names[-1]:
            fan_in = {"key_up": 2, "value_up": 1, "conv": 2}.get(names[-1], int("experts" in names and leaf.ndim > 2))
            noise = noise / leaf.shape[fan_in] ** 0.5
        return jnp.asarray(noise, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, param_shapes(model.config, model.scan_layers))


def constructed_params(model: MTPModel, attention: str, draft_quality: str, seed: int = 0) -> dict:
    """Constructs weights with a known acceptance rate.

    Except for "random", the head maps each token's embedding to the token's successor in one cycle through the
    vocabulary, and the modules pass on the embedding of the newest token. Trunk and modules then predict the successor.
    In "right" and "wrong" the blocks add nothing to the residual stream; in "mixed" they add enough to change some
    predictions, so that each draft depends on the contents of the caches.

    Args:
        model: the model.
        attention: its kind, as for `small_config`.
        draft_quality: "random" (drafts are right by chance), "mixed" (right at times), "right" (always) or "wrong"
            (never).
        seed: seed of the weights.

    Returns:
        float32 parameters.
    """
    params = random_params(model, seed)
    if draft_quality == "random":
        return params
    block_scale = MIXED_BLOCK_SCALE[attention] if draft_quality == "mixed" else 0.0
    sign = -1.0 if draft_quality == "wrong" else 1.0

    # Scale the output matrices of all blocks. A module's input projection passes its embedding half through, negated in
    # "wrong", so that its logits disfavour the successor.
    def scale_blocks(path, leaf):
        name = path[-1].key
        if name == "project":
            D = leaf.shape[1]
            return jnp.concatenate([sign * jnp.eye(D), block_scale * leaf[D:]])
        return block_scale * leaf if name in ("output", "down") else leaf

    # Column order[i + 1] of the head is the normalised embedding of token order[i].
    embedding = np.asarray(params["embedding"])
    order = np.random.default_rng(seed).permutation(len(embedding))
    head = np.zeros_like(embedding.T)
    head[:, np.roll(order, -1)] = (embedding / np.linalg.norm(embedding, axis=1, keepdims=True))[order].T
    return {**jax.tree_util.tree_map_with_path(scale_blocks, params), "head": jnp.asarray(head)}
