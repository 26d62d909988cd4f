"""Maps a GGUF file's tensors to Hugging Face names, and their rows to Hugging Face's order.

Names and layouts are as in llama.cpp's converters. Layer N is `blk.N.`, a layer's experts are stacked into one tensor,
DeepSeek's `kv_b_proj` is split into keys (transposed) and values, and the tensors around an MTP module's decoder layer
are under `blk.N.nextn.`.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conversion.gguf_config import ROPE_FACTORS
from conversion.gguf_header import GGUFHeader, GGUFTensor
from mtpjax.errors import CheckpointFileError

_AROUND = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS = ("gate", "up", "down")
_LAYER = {
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "post_attention_norm": "post_attention_layernorm",  # GLM-4.5's name for the same norm
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{"attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in _PARTS},
    # Multi-head latent attention.
    **{"attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj", "attn_kv_b": "self_attn.kv_b_proj"},
    **{"attn_q_a_norm": "self_attn.q_a_layernorm", "attn_kv_a_norm": "self_attn.kv_a_layernorm"},
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    # The router and the shared experts.
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in _PARTS},
    # MTP modules, except their decoder layer.
    **{f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("head", "norm")},
}
_CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"  # the name for `exp_probs_b.bias`


@dataclasses.dataclass(frozen=True)
class NamedTensor:
    """A tensor under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]  # one name in the file, or two if `kv_b_proj` is split (keys, values)
    head_dim: int = 0  # the head size if the file interleaves the rows of rotary pairs; 0 if rows are in order
    expert: int = 0  # the index in a stack of experts


def named_tensors(header: GGUFHeader, config: dict[str, Any]) -> dict[str, NamedTensor]:
    """Lists a file's tensors under their Hugging Face names.

    Returns:
        The tensors by name. Unknown tensors keep their names, so that loading reports them.

    Raises:
        CheckpointFileError: two tensors have the same Hugging Face name, or a shape does not fit the name.
    """
    named: dict[str, NamedTensor] = {}
    for tensor in header.tensors.values():
        if tensor.name == ROPE_FACTORS:
            continue  # part of the configuration
        for made in _name(tensor, header, config):
            if made.name in named:
                raise CheckpointFileError(
                    f"tensors {named[made.name].sources[0]!r} and {tensor.name!r} of the GGUF file are both {made.name}"
                )
            named[made.name] = made
    return named


def _name(tensor: GGUFTensor, header: GGUFHeader, config: dict[str, Any]) -> Iterator[NamedTensor]:
    """Yields a tensor of the file under its Hugging Face name, and a stack of experts as one tensor per expert."""
    stem, _, kind = tensor.name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.([\w.]+)", stem, re.ASCII)
    prefix, part = (f"model.layers.{layer[1]}.", layer[2]) if layer else ("", stem)
    stack = re.fullmatch(r"ffn_(gate|up|down)_exps", part) if layer else None
    if not layer and stem in _AROUND:
        yield _whole(f"{_AROUND[stem]}.{kind}", tensor)
    elif layer and part in _LAYER:
        # llama.cpp reorders the rows of q and k only for the architecture llama.
        is_rotary = config["model_type"] == "llama" and part in ("attn_q", "attn_k")
        yield _whole(f"{prefix}{_LAYER[part]}.{kind}", tensor, config["head_dim"] if is_rotary else 0)
    elif layer and (part, kind) == ("exp_probs_b", "bias"):
        yield _whole(f"{prefix}{_CORRECTION_BIAS}", tensor)
    elif stack and kind == "weight" and len(tensor.shape) == 3:
        for expert in range(tensor.shape[0]):
            name = f"{prefix}mlp.experts.{expert}.{stack[1]}_proj.weight"
            yield NamedTensor(name, tensor.shape[1:], (tensor.name,), expert=expert)
    elif layer and (part, kind) == ("attn_k_b", "weight"):
        yield _joined(f"{prefix}self_attn.kv_b_proj.weight", tensor, header, f"blk.{layer[1]}.attn_v_b.weight")
    elif not (layer and (part, kind) == ("attn_v_b", "weight") and f"blk.{layer[1]}.attn_k_b.weight" in header.tensors):
        yield _whole(tensor.name, tensor)


def _whole(name: str, tensor: GGUFTensor, head_dim: int = 0) -> NamedTensor:
    if head_dim and tensor.shape[0] % head_dim:
        raise CheckpointFileError(
            f"tensor {tensor.name!r} of the GGUF file has {tensor.shape[0]} rows, not a multiple of {head_dim}"
        )
    return NamedTensor(name, tensor.shape, (tensor.name,), head_dim)


def _joined(name: str, keys: GGUFTensor, header: GGUFHeader, values_name: str) -> NamedTensor:
    """Joins the up-projections of keys `[N, R, C]` and values `[N, V, R]` into one tensor `[N * (C + V), R]`."""
    values = header.tensors.get(values_name)
    if values is None:
        raise CheckpointFileError(f"the GGUF file has {keys.name!r}, but not {values_name!r}")
    fits = len(keys.shape) == len(values.shape) == 3 and keys.shape[:2] == (values.shape[0], values.shape[2])
    if not fits:
        raise CheckpointFileError(
            f"tensors {keys.name!r} and {values_name!r} of the GGUF file have shapes {list(keys.shape)} and "
            f"{list(values.shape)}, not [heads, rank, keys] and [heads, values, rank]"
        )
    heads, rank, width = keys.shape
    return NamedTensor(name, (heads * (width + values.shape[1]), rank), (keys.name, values.name))


def read_rows(
    named: NamedTensor, header: GGUFHeader, rows: Callable[[str, int, int], np.ndarray], begin: int, end: int
) -> np.ndarray:
    """Returns rows of a tensor in Hugging Face's order, `[end - begin, ...]`.

    Args:
        rows: returns rows of a tensor in the file, where all axes except the last count as rows.
    """
    source = named.sources[0]
    if len(named.sources) == 2:
        return _read_joined(named, header, rows, begin, end)
    if named.head_dim:
        # llama.cpp interleaves the two halves of each head's rows, so row 2i + h of the file is row h * H/2 + i here.
        H = named.head_dim
        first = begin // H * H
        whole = rows(source, first, -(-end // H) * H)
        ordered = whole.reshape(-1, H // 2, 2, *whole.shape[1:]).swapaxes(1, 2).reshape(whole.shape)
        return ordered[begin - first : end - first]
    # A stack contains the experts in order. If a tensor has more axes, each of its rows is several rows in the file.
    inner = int(np.prod(named.shape[1:-1], dtype=np.int64)) if named.shape[1:] else 1
    skipped = named.expert * named.shape[0] * inner
    return rows(source, skipped + begin * inner, skipped + end * inner).reshape(end - begin, *named.shape[1:])


def _read_joined(
    named: NamedTensor, header: GGUFHeader, rows: Callable[[str, int, int], np.ndarray], begin: int, end: int
) -> np.ndarray:
    """Reads rows of `kv_b_proj`, where each head has C rows of keys and then V rows of values."""
    _, R, C = header.tensors[named.sources[0]].shape
    V = header.tensors[named.sources[1]].shape[1]
    first, last = begin // (C + V), -(-end // (C + V))
    keys = rows(named.sources[0], first * R, last * R).reshape(last - first, R, C).swapaxes(1, 2)
    values = rows(named.sources[1], first * V, last * V).reshape(last - first, V, R)
    joined = np.concatenate([keys, values], axis=1).reshape(-1, R)
    skipped = first * (C + V)
    return joined[begin - skipped : end - skipped]
