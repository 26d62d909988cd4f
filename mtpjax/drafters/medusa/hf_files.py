"""Parses and generates the configuration of Medusa heads in the authors' and vLLM's formats.

Head k with n layers has the tensors `k.j.linear.weight` and `k.n.weight` in the authors' format (`medusa_lm_head.pt`),
and `blocks.k.layers.j.weight` and `lm_heads.k.weight` in vLLM's. Published configurations sometimes have the wrong
number of heads, so the tensors decide.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from conversion.config_reader import ConfigReader
from conversion.tensor_slice import ParamSpec, copied, linear
from mtpjax.drafters.architecture import TrunkSizes
from mtpjax.drafters.files.draft_ids import IdsTensors
from mtpjax.drafters.medusa.network import MedusaConfig
from mtpjax.errors import CheckpointFileError, ConfigError

log = logging.getLogger("mtpjax.conversion")

TOKEN_MAP = "token_map"  # vLLM's draft vocabulary, in which column j of a head is token `token_map[j]`


def parse_medusa(
    values: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], trunk: TrunkSizes
) -> tuple[MedusaConfig, str]:
    """Parses `config.json`. See `DrafterFiles.parse` for the arguments and the result."""
    reader = ConfigReader(values)
    form = "vllm" if any(name.startswith(("blocks.", "lm_heads.")) for name in shapes) else "medusa"
    if form == "medusa":
        keys = ("medusa_num_heads", "medusa_num_layers")
        head, layer, output = r"(\d+)\.", r"0\.(\d+)\.linear\.weight", "0.{}.weight"
    else:
        keys = ("num_heads", "num_hidden_layers")
        head, layer, output = r"blocks\.(\d+)\.", r"blocks\.0\.layers\.(\d+)\.weight", "lm_heads.0.weight"
    heads = {int(found[1]) for name in shapes if (found := re.match(head, name))}
    layers = {int(found[1]) for name in shapes if (found := re.fullmatch(layer, name))}
    output = output.format(len(layers))
    if len(shapes.get(output, ())) != 2 or heads != set(range(len(heads))) or layers != set(range(len(layers))):
        raise CheckpointFileError(f"these are not the tensors of Medusa heads: {', '.join(sorted(shapes)[:5])}")
    for key, found in zip(keys, (len(heads), len(layers)), strict=True):
        stated = reader.integer(key, found, low=0)
        if stated != found:
            log.warning("config.json: %s is %d, but the files contain %d; using %d", key, stated, found, found)
    vocab_size = reader.integer("vocab_size", trunk.vocab_size)
    draft_size = shapes[output][0]
    if form == "vllm" and draft_size != reader.integer("truncated_vocab_size", vocab_size):
        raise ConfigError(f"config.json: truncated_vocab_size differs from the {draft_size} rows of {output}")
    reader.require("logit_scale", 1.0, 1)
    return MedusaConfig(
        hidden_size=reader.integer("hidden_size", trunk.hidden_size),
        vocab_size=vocab_size,
        num_heads=len(heads),
        num_layers=len(layers),
        has_bias=any(name.endswith(".bias") for name in shapes),
        draft_vocab_size=draft_size,
        shares_output=form == "vllm" and reader.flag("original_lm_head", False),
    ), form


def medusa_specs(config: MedusaConfig, form: str) -> dict[str, ParamSpec]:
    """Lists every parameter with its tensor in this format."""
    D, R = config.hidden_size, config.draft_vocab_size
    specs = {}
    for k in range(config.num_heads):
        for j in range(config.num_layers):
            name = f"{k}.{j}.linear" if form == "medusa" else f"blocks.{k}.layers.{j}"
            specs[f"block_{k}/kernel_{j}"] = linear(f"{name}.weight", D, D)
            if config.has_bias:
                specs[f"block_{k}/bias_{j}"] = copied(f"{name}.bias", D)
        if k == 0 or not config.shares_output:
            name = f"{k}.{config.num_layers}" if form == "medusa" else f"lm_heads.{k}"
            specs[f"output_{k}"] = linear(f"{name}.weight", D, R)
    return specs


def describe_medusa(config: MedusaConfig, form: str) -> dict[str, Any]:
    """Makes a `config.json` that `parse_medusa` parses back to `config`."""
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    if form == "vllm":
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            **sizes,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": config.has_bias,
            "truncated_vocab_size": config.draft_vocab_size,
            "original_lm_head": config.shares_output,
        }
    if config.draft_vocab_size < config.vocab_size or config.shares_output:
        raise ConfigError(
            "Medusa's own format supports neither a draft vocabulary nor a shared head: use vLLM's format"
        )
    return {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers, **sizes, "version": "2"}


def _read_token_map(files: Any, names: Mapping[str, str], R: int, V: int) -> np.ndarray | None:
    if R == V and TOKEN_MAP not in names:
        return None
    if TOKEN_MAP not in names:
        raise CheckpointFileError(f"{files.path} lacks {TOKEN_MAP}")
    ids = files.read(names[TOKEN_MAP])
    is_valid = ids.shape == (R,) and ids.dtype.kind == "i" and len(np.unique(ids)) == len(ids)
    if not is_valid or ids.min() < 0 or ids.max() >= V:
        raise CheckpointFileError(f"{files.path}: {TOKEN_MAP} does not hold {R} distinct token ids")
    return ids.astype(np.int32)


MEDUSA_IDS = IdsTensors((TOKEN_MAP,), _read_token_map, lambda ids, vocab_size: {TOKEN_MAP: ids})
