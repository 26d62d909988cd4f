"""The Hugging Face configuration and tensor names of a GGUF file, by its architecture."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from conversion.gguf_header import GGUFHeader
from mtpjax.errors import ConfigError

# GGUF's name of an architecture -> `model_type`. llama.cpp reorders the rows of q and k of llama alone.
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3"}
_AROUND = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{"attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
ROPE_FACTORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class NamedTensor:
    """A tensor under its Hugging Face name."""

    name: str
    source: str  # its name in the file
    head_dim: int = 0  # rows of a head whose rotary pairs are interleaved in the file; 0: rows are in order


def named_tensors(header: GGUFHeader) -> Iterator[NamedTensor]:
    """Lists the tensors of a file under their Hugging Face names.

    Args:
        header: the parsed header.

    Yields:
        The tensors. Unknown ones keep their name, so that loading reports them.
    """
    head_dim = describe_config(header, {})["head_dim"] if header.metadata["general.architecture"] == "llama" else 0
    for source in header.tensors:
        if source == ROPE_FACTORS:
            continue  # part of the configuration
        stem, _, kind = source.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if stem in _AROUND:
            yield NamedTensor(f"{_AROUND[stem]}.{kind}", source)
        elif layer and layer[2] in _LAYER:
            rotary = head_dim if layer[2] in ("attn_q", "attn_k") else 0
            yield NamedTensor(f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.{kind}", source, rotary)
        else:
            yield NamedTensor(source, source)


def describe_config(header: GGUFHeader, tokens: dict[str, Any], rope_factors: np.ndarray | None = None) -> dict:
    """Writes the metadata of a file as the content of a `config.json`.

    Args:
        header: the parsed header.
        tokens: further values, such as `eos_token_id`.
        rope_factors: the tensor `rope_freqs.weight`, if the file has one.

    Returns:
        The content. `conversion.hf_config` checks the values.

    Raises:
        ConfigError: the architecture is not supported, or a value is missing.
    """
    values = header.metadata
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ConfigError(f"unsupported GGUF architecture {architecture!r}; supported: {', '.join(ARCHITECTURES)}")

    def get(key: str, default: Any = None) -> Any:
        value = values.get(f"{architecture}.{key}", default)
        if value is None:
            raise ConfigError(f"the GGUF file lacks {architecture}.{key}")
        if isinstance(value, (list, np.ndarray)):
            raise ConfigError(f"{architecture}.{key} is an array of {len(value)} values; supported: one value")
        return value

    if get("expert_count", 0):
        raise ConfigError(f"{architecture}.expert_count is {get('expert_count')!r}: experts are not supported in GGUF")
    heads, width = get("attention.head_count"), get("embedding_length")
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        raise ConfigError(f"{architecture}.attention.head_count is {heads!r}; supported: one positive integer")
    head_dim = get("attention.key_length", get("rope.dimension_count", width // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise ConfigError(f"{architecture}.{key} is {get(key)!r}, and the head size {head_dim!r}: not supported")
    if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2:
        raise ConfigError(f"the head size is {head_dim!r}, not an even number")
    # The names of all layers are listed before any is looked up, so a wrong count must not get that far.
    if not isinstance(get("block_count"), int) or get("block_count") > len(header.tensors):
        raise ConfigError(
            f"{architecture}.block_count is {get('block_count')!r}, and the file has {len(header.tensors)} tensors"
        )
    vocabulary = header.tensors.get("token_embd.weight")
    return {
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": vocabulary.shape[0] if vocabulary else get("vocab_size"),
        "hidden_size": width,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(get, head_dim, rope_factors),
        **tokens,
    }


def _rope_scaling(get, head_dim: int, factors: np.ndarray | None) -> dict[str, Any] | None:
    """Reads rotary scaling: named in the metadata, or as Llama 3.1's factors per frequency."""
    if factors is not None:
        return _llama3_scaling(np.asarray(factors, np.float64), get("rope.freq_base", 10000.0), head_dim)
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return None
    original = get("rope.scaling.original_context_length", get("context_length"))
    return {"rope_type": kind, "factor": get("rope.scaling.factor", 1.0), "original_max_position_embeddings": original}


def _llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Recognizes Llama 3.1's settings, of which the file keeps only the factor of each frequency."""
    if factors.shape != (head_dim // 2,) or not isinstance(theta, (int, float)) or not theta > 0:
        raise ConfigError(f"{ROPE_FACTORS} has shape {list(factors.shape)}, and rope.freq_base is {theta!r}")
    # The lowest frequencies are divided by the factor itself; the other settings are the same in all releases.
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    wavelengths = 2 * math.pi * float(theta) ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-4):
        raise ConfigError(f"{ROPE_FACTORS} holds other factors than Llama 3.1's: not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
