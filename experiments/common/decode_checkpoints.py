"""Writes the models that `bench_decode` measures, as small Hugging Face checkpoints that every engine reads.

There are two checkpoints per shape. In `random` the weights are seeded noise, and all engines must give the same
tokens. In `rigged`, the shapes and the work per token are the same, but every block adds zero and every MTP module
returns its input embedding. So every draft is right: the next token is a fixed permutation of the last token (with a
tied head, the last token again), and the accept length is `num_steps + 1`.
"""

import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from conversion.describe_config import describe_config
from conversion.families import FAMILIES
from conversion.names import param_specs
from mtpjax import ModelConfig

_LLAMA: dict[str, Any] = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "num_mtp_modules": 1}
_DEEPSEEK: dict[str, Any] = {
    "attention": "latent",
    "max_position_embeddings": 2048,
    "num_mtp_modules": 1,
    "rope_interleave": True,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "router_correction_bias": True,
    "routed_scaling_factor": 2.5,
}
SHAPES = {
    "S": ModelConfig(
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1536,
        **_LLAMA,
    ),
    "M": ModelConfig(
        vocab_size=16384,
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=4096,
        **_LLAMA,
    ),
    "D": ModelConfig(
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=1536,
        q_lora_rank=256,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
        **_DEEPSEEK,
    ),
    "tiny": ModelConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        **_DEEPSEEK,
    ),
}


FAMILY = {"grouped": ("llama", "LlamaForCausalLM"), "latent": ("deepseek_v3", "DeepseekV3ForCausalLM")}


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Returns the values of `config.json`, without end-of-text tokens."""
    model_type, architecture = FAMILY[config.attention]
    _, values = describe_config(config, model_type)
    ends = {"bos_token_id": None, "eos_token_id": None, "torch_dtype": "float32", "hidden_act": "silu"}
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    return {**values, "architectures": [architecture], "num_key_value_heads": kv_heads, **ends}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a checkpoint's tensors: matrices are `[out, in]`; vectors are norms or router biases."""
    specs = param_specs(config, FAMILIES[FAMILY[config.attention][0]].layout, lambda name: False)
    return {piece.name: piece.shape for spec in specs.values() for piece in spec.slices}


def bytes_per_round(config: ModelConfig, batch: int, num_steps: int, length: float) -> float:
    """Returns the bytes of float32 weights and caches that one verify pass and its draft passes must read.

    Args:
        config: the model.
        batch: number of rows.
        num_steps: draft levels; 0 is plain decoding.
        length: mean length of the rows in tokens.
    """
    sizes = {name: 4 * float(np.prod(shape)) for name, shape in tensor_shapes(config).items()}
    table = sizes["model.embed_tokens.weight"]

    def layer(index: int, rows: int) -> float:
        # The module is stored as the layer after the trunk's last one, or under its own names.
        prefixes = (f"model.layers.{index}.", *(["mtp."] if index == config.num_hidden_layers else []))
        own = {name: size for name, size in sizes.items() if name.startswith(prefixes)}
        experts = sum(size for name, size in own.items() if "mlp.experts." in name)
        missed = (1 - config.num_experts_per_tok / config.n_routed_experts) ** rows if config.is_moe else 0
        if config.attention == "latent":
            entry = config.kv_lora_rank + config.qk_rope_head_dim
        else:
            entry = 2 * config.num_key_value_heads * config.head_dim
        return sum(own.values()) - missed * experts + 4 * batch * length * entry

    # The trunk processes all nodes of a round; the head has the size of the embedding table.
    rows = batch * (num_steps + 1)
    trunk = table + sum(layer(index, rows) for index in range(config.num_hidden_layers))
    # The first draft level also processes the committed tokens; later levels process one token per row.
    levels = (rows, *[batch] * (num_steps - 1))[:num_steps]
    drafts = sum(table + layer(config.num_hidden_layers, rows) for rows in levels)
    return trunk + drafts


def write_checkpoint(folder: pathlib.Path, config: ModelConfig, *, rigged: bool, seed: int = 0) -> None:
    """Writes `config.json` and `model.safetensors` in float32 into a new folder."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if name.endswith("bias"):
            tensors[name] = rng.uniform(-0.3, 0.1, shape).astype(np.float32)
        elif len(shape) == 1:
            tensors[name] = rng.uniform(0.8, 1.2, shape).astype(np.float32)
        elif rigged and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros(shape, np.float32)
        else:
            tensors[name] = rng.standard_normal(shape, np.float32) / np.sqrt(shape[1], dtype=np.float32)
    # With large embeddings the logits are far apart, so rounding never changes a token.
    tensors["model.embed_tokens.weight"] *= 16
    if rigged:
        _rig(tensors, config, rng)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_json(config), indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _rig(tensors: dict[str, np.ndarray], config: ModelConfig, rng: np.random.Generator) -> None:
    """Makes MTP modules return the embedding, and the head predict a permutation of the last token."""
    D = config.hidden_size
    for layer in range(config.num_mtp_modules):
        name = f"model.layers.{config.num_hidden_layers + layer}.eh_proj.weight"
        name = name if name in tensors else "mtp.fc.weight"  # both take the embedding first
        assert name in tensors
        tensors[name] = np.concatenate([np.eye(D), np.zeros((D, D))], axis=1).astype(np.float32)
    if not config.tie_word_embeddings:
        cycle = rng.permutation(config.vocab_size)  # one cycle through the whole vocabulary, so no text repeats
        head = np.empty_like(tensors["lm_head.weight"])
        head[np.roll(cycle, -1)] = tensors["model.embed_tokens.weight"][cycle]
        tensors["lm_head.weight"] = head
