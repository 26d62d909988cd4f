"""Recognizes unsupported quantized formats by tensor names and dtypes, for error messages.

Only the tensors decide, because configurations may be wrong or out of date. Messages quote the configuration.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from conversion.safetensors_header import DTYPES, TensorInfo

Tensors = Mapping[str, TensorInfo]
FP8 = (DTYPES["F8_E4M3"], DTYPES["F8_E5M2"])
DESCRIPTIONS = ("hf_quant_config.json", "quantize_config.json", "quant_model_description.json")
SCALE_ENDS = ("_scale_inv", "_scale")  # suffixes of scale tensors: DeepSeek's, and some other programs'
ORIGINAL = "load the original release in bfloat16"


class PackedFormat(NamedTuple):
    """An unsupported quantized format."""

    name: str
    ends: str  # regular expression for the end of a tensor's name
    fits: Callable[[Tensors, str, str], bool]  # arguments: all tensors, the tensor's name, the name without the end
    way: str = ORIGINAL  # what the user can do


def _any(tensors: Tensors, name: str, stem: str) -> bool:
    return True


def _is(*kinds: str) -> Callable[[Tensors, str, str], bool]:
    dtypes = {DTYPES[kind] for kind in kinds}
    return lambda tensors, name, stem: tensors[name].dtype in dtypes


def _is_beside(*ends: str, kinds: tuple[str, ...] = tuple(DTYPES)) -> Callable[[Tensors, str, str], bool]:
    """Accepts a tensor with one of these dtypes if all of these companion tensors exist."""
    has_dtype = _is(*kinds)
    return lambda tensors, name, stem: has_dtype(tensors, name, stem) and all(f"{stem}{end}" in tensors for end in ends)


def _is_awq(tensors: Tensors, name: str, stem: str) -> bool:
    """Recognizes AWQ, which packs the columns of `qweight [I, O / 8]`. GPTQ packs its rows `[I / 8, O]` instead."""
    scales = tensors.get(f"{stem}.scales")
    if f"{stem}.g_idx" in tensors or scales is None or len(tensors[name].shape) != 2:
        return False
    return tensors[name].shape[-1] < scales.shape[-1] if scales.shape else False


TORCH = "load it with transformers and call model.dequantize() and save_pretrained, or "
OWN_NAMES = (".weight_packed", ".qweight", ".codes", ".W_q", ".trellis", "._data")
INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
# The first match wins, so more specific formats are listed first.
FORMATS = (
    PackedFormat("compressed-tensors NVFP4", r"\.weight_packed", _is_beside(".weight_global_scale", kinds=("U8",))),
    PackedFormat("compressed-tensors MXFP4", r"\.weight_packed", _is("U8")),
    PackedFormat("compressed-tensors packed integers", r"\.weight_packed", _any),
    PackedFormat("ModelOpt NVFP4", r"\.weight", _is_beside(".weight_scale", ".weight_scale_2", kinds=("U8",))),
    PackedFormat(
        "bitsandbytes 4-bit (nf4, fp4)",
        r"",
        lambda tensors, name, stem: f"{name}.absmax" in tensors or ".quant_state.bitsandbytes__" in name,
        TORCH + ORIGINAL,
    ),
    PackedFormat("bitsandbytes 8-bit (LLM.int8)", r"\.weight", _is_beside(".SCB", kinds=("I8",)), TORCH + ORIGINAL),
    PackedFormat(
        "MLX",
        r"\.weight",
        _is_beside(".scales", kinds=("U32",)),
        "dequantize it with mlx_lm.convert --dequantize, or load the original release in bfloat16",
    ),
    PackedFormat(
        "MXFP4 (gpt-oss)",
        r"_blocks",
        _is_beside("_scales", kinds=("U8",)),
        "load it with transformers (quantization_config=Mxfp4Config(dequantize=True)) and save it in bfloat16",
    ),
    PackedFormat("AWQ", r"\.qweight", _is_awq),
    PackedFormat("GPTQ", r"\.qweight", _any),
    PackedFormat("AQLM", r"\.codes", _any),
    PackedFormat("HQQ", r"\.W_q", _any),
    PackedFormat("EXL2", r"\.q_(weight|invperm|perm|groups|scale)", _any),
    PackedFormat("EXL3", r"\.trellis", _any),
    PackedFormat("VPTQ", r"\.(res_)?indices", _any),
    PackedFormat("quanto", r"\.weight\._data(\._data)?", _any),
    PackedFormat("torchao", r"[.:]_?weight[._:](qdata|tensor_impl.*)", _any),
    PackedFormat("Marlin", r"\.B", _is_beside(".s", kinds=("I32",))),
    PackedFormat("EETQ", r"\.weight", _is_beside(".weight_scales", kinds=("I8",))),
    PackedFormat("W8A8 integers (Ascend)", r"\.weight", _is_beside(".weight_offset", kinds=("I8",))),
    PackedFormat("integers with a scale per output", r"\.weight", _is_beside(".weight_scale", kinds=INTEGERS)),
    PackedFormat("packed integers", r"(_proj|lm_head|embed_tokens|experts\.\w+)(\.weight)?", _is(*INTEGERS)),
)


def find_packed_format(tensors: Tensors, values: Any, descriptions: Mapping[str, Any], supported: str) -> str | None:
    """Returns a message about a packed checkpoint's format and what to do, or None if the weights are not packed."""
    # Every packed format has integer tensors, fp8 tensors that are not plain weights, or specific names.
    odd = [name for name in tensors if tensors[name].dtype.kind in "iu" or name.endswith(OWN_NAMES)]
    odd += [name for name in tensors if tensors[name].dtype in FP8 and not name.endswith((".weight", "_proj"))]
    for name in sorted(odd):
        for form in FORMATS:
            # The stem is the module's name, as in `model.layers.0.mlp.down_proj`.
            found = re.fullmatch(f"(.*)(?:{form.ends})", name)
            if found is None or not form.fits(tensors, name, found[1]):
                continue
            said = described_quantization(values, descriptions)
            return (
                f"the checkpoint is quantized: {form.name}{f' ({said})' if said else ''}, which is not supported; "
                f"tensor {name} is {tensors[name].dtype} of shape {tensors[name].shape}. Supported: {supported}. What "
                f"to do: {form.way}"
            )
    return None


def described_quantization(values: Any, descriptions: Mapping[str, Any]) -> str:
    """Quotes a checkpoint's quantization settings, such as "config.json: quant_method awq, bits 4". May return ""."""
    levels = [values, values.get("text_config")] if isinstance(values, dict) else []
    sections = [
        ("config.json", level.get(key))
        for level in levels
        if isinstance(level, dict)
        for key in ("quantization_config", "quantization")
    ]
    for name, content in descriptions.items():
        nested = content.get("quantization") if isinstance(content, dict) else None
        sections.append((name, nested or content))
    for name, section in sections:
        if not isinstance(section, dict) or not section:
            continue
        # Quote only short values, which identify the format, because lists of modules are long.
        words = [f"{key} {json.dumps(value)}" for key, value in section.items() if _is_short(value)]
        return f"{name}: {', '.join(words[:6])}" if words else name
    return ""


def _is_short(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and len(str(value)) < 60
