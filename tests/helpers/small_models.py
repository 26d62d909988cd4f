"""Small models for tests of decoding, with constructed weights whose drafts are right sometimes, always or never."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.decoder import Drafter
from mtpjax.drafters.eagle3.drafting import Eagle3Drafter
from mtpjax.drafters.eagle3.network import Eagle3Config
from mtpjax.drafters.medusa.drafting import MedusaDrafter
from mtpjax.drafters.medusa.network import MedusaConfig
from mtpjax.drafters.trained import DraftParams
from mtpjax.models.config import ModelConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.params import param_shapes
from tests.helpers.small_block_drafters import constructed_block_drafter

# Scale of the blocks' outputs in "mixed" weights: small enough that drafts of every level are sometimes accepted, and
# large enough that they are sometimes rejected.
MIXED_BLOCK_SCALE = {
    "grouped": 1.5, "latent": 0.15, "sparse": 0.15, "hybrid": 0.3, "sliding": 1.0, "clamped": 0.15
}  # fmt: skip
DRAFT_QUALITIES = ("random", "mixed", "right", "wrong")


def small_config(attention: str = "grouped", **changes) -> ModelConfig:
    """Makes the configuration of a small model.

    Args:
        attention: "grouped" (grouped-query attention, dense layers), "latent" (multi-head latent attention, experts
            from the second layer on), "sparse" (latent attention with a sparse indexer, which one layer shares),
            "hybrid" (linear and gated full attention, experts with a gated shared expert), "sliding" (a window of 5
            positions with sinks in two layers and the modules, values narrower than keys) or "clamped" (a window of 3
            in one layer, gates per head, sinks and biases, clamped experts with biases).
        **changes: fields of `ModelConfig` to change.

    Returns:
        The configuration.
    """
    values = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    values |= {"intermediate_size": 48, "max_position_embeddings": 256, "num_mtp_modules": 1}
    kind = attention if attention == "latent" else "latent" if attention == "sparse" else "grouped"
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
            "attention_bias": True,
            "attention_output_bias": True,
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
    # A window in some layers, with the options of MiMo-V2.
    if attention == "sliding":
        values |= {"num_hidden_layers": 3, "layer_types": ("sliding_attention", "full_attention", "sliding_attention")}
        values |= {"sliding_window": 5, "sliding_num_key_value_heads": 4, "sliding_rope_theta": 500.0}
        values |= {"partial_rotary_factor": 0.5, "attention_sinks": "sliding", "v_head_dim": 6}
        values |= {"attention_value_scale": 0.7, "mtp_layer_type": "sliding_attention"}
    # The same with the options of Step-3.5 and gpt-oss.
    if attention == "clamped":
        values |= {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 3}
        values |= {"sliding_num_attention_heads": 6, "attn_head_gate": True, "attention_sinks": "all"}
        values |= {"attention_bias": True, "attention_output_bias": True, "use_qk_norm": True}
        values |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "expert_bias": True}
        values |= {"scoring_func": "softmax", "shared_expert_intermediate_size": 10, "mlp_only_layers": (0,)}
        values |= {"swiglu_limits": (0.0, 0.6), "swiglu_limits_shared": (0.5, 0.4), "swiglu_alpha": 1.702}
    # The indexer picks the keys of latent attention; the second layer reuses the picks of the first.
    if attention == "sparse":
        values |= {"num_hidden_layers": 3, "indexer_types": ("full", "shared", "full")}
        values |= {"index_topk": 7, "index_n_heads": 3, "index_head_dim": 6}
        values |= {"attention_bias": True, "attention_output_bias": True}
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
        elif names[-1].endswith("_bias"):
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
        return block_scale * leaf if name in ("output", "output_bias", "down", "down_bias") else leaf

    # Column order[i + 1] of the head is the normalised embedding of token order[i].
    embedding = np.asarray(params["embedding"])
    order = np.random.default_rng(seed).permutation(len(embedding))
    head = np.zeros_like(embedding.T)
    head[:, np.roll(order, -1)] = (embedding / np.linalg.norm(embedding, axis=1, keepdims=True))[order].T
    return {**jax.tree_util.tree_map_with_path(scale_blocks, params), "head": jnp.asarray(head)}


def constructed_drafter(kind: str, model: MTPModel, params: dict, seed: int = 0) -> tuple[Drafter, Any]:
    """Constructs a drafter with parameters of its own whose drafts are right sometimes.

    It drafts for weights of `constructed_params` other than "random", whose trunk mostly continues a token with its
    successor. Random parts make every draft depend on the trunk's states, and on the drafter's cache if it has one. A
    quarter of the vocabulary cannot be drafted.

    Args:
        kind: "eagle3" (one layer that reads three trunk states), "medusa" (three heads), "dflash" or "dspark" (blocks
            of three drafts).
        model: the trunk.
        params: its parameters.
        seed: seed of the drafter.

    Returns:
        The drafter, and its parameters in float32.
    """
    if kind in ("dflash", "dspark"):
        return constructed_block_drafter(kind, model, params, seed)
    config, rng = model.config, np.random.default_rng([seed, zlib.crc32(kind.encode())])
    V, D = config.vocab_size, config.hidden_size
    # A quarter of the vocabulary cannot be drafted.
    draft_ids = np.sort(rng.choice(V, V - V // 4, replace=False)).astype(np.int32)
    embedding, head = np.asarray(params["embedding"]), np.asarray(params["head"])

    def noise(*shape: int, scale: float = 1.0) -> np.ndarray:
        return scale * rng.standard_normal(shape) / shape[0] ** 0.5

    def to_arrays(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)

    if kind == "medusa":
        # The state of a token is close to its embedding. Head k scores the (k+2)th successor of that token.
        medusa = MedusaConfig(hidden_size=D, vocab_size=V, num_heads=3, draft_vocab_size=len(draft_ids))
        successor = (embedding @ head).argmax(axis=1)  # of each token
        target, heads = successor, {}
        for index in range(medusa.num_heads):
            target = successor[target]
            output = np.zeros((D, V))
            output[:, target] = (embedding / np.linalg.norm(embedding, axis=1, keepdims=True)).T
            heads[f"output_{index}"] = output[:, draft_ids]
            heads[f"block_{index}"] = {"kernel_0": noise(D, D, scale=0.5), "bias_0": noise(D, scale=0.5)}
        return MedusaDrafter(architecture=medusa), DraftParams(to_arrays(heads), jnp.asarray(draft_ids))
    # EAGLE-3: attention finds the newest token by its embedding and passes the embedding on, which the trunk's head
    # maps to the successor.
    N, H = config.num_attention_heads, D // config.num_attention_heads
    block = ModelConfig(
        vocab_size=V,
        hidden_size=D,
        num_hidden_layers=1,
        num_attention_heads=N,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
    )
    eagle = Eagle3Config(
        block=block,
        layer_ids=(0, 1, config.num_hidden_layers),
        num_target_layers=config.num_hidden_layers,
        target_hidden_size=D,
        draft_vocab_size=len(draft_ids),
    )
    # Queries, keys and values pass the embedding half of the input on, plus noise from both halves.
    qkv = noise(2 * D, N, 3, H, scale=0.3)
    slices = np.eye(D).reshape(D, N, H)
    for part, scale in enumerate((2.0, 2.0, 1.0)):  # query, key, value
        qkv[:D, :, part] += scale * slices
    # The output passes the attended embedding on to the trunk's head; the other matrices are noise.
    network = {
        "fc": noise(eagle.features_size, D),
        "head": head[:, draft_ids],
        "norm_final": {"scale": 1 + 0.1 * rng.standard_normal(D)},
        "layer_0": {
            "norm_embedding": {"scale": np.ones(D)},
            "norm_hidden": {"scale": np.ones(D)},
            "norm_feed_forward": {"scale": np.ones(D)},
            "attention": {"qkv": qkv, "output": 3.0 * np.eye(D)},
            "dense": {
                "gate_up": noise(D, 2, config.intermediate_size),
                "down": noise(config.intermediate_size, D, scale=0.3),
            },
        },
    }
    return Eagle3Drafter(architecture=eagle), DraftParams(to_arrays(network), jnp.asarray(draft_ids))
