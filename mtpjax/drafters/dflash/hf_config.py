"""The `config.json` of DFlash and DSpark drafters, in the formats of z-lab, DeepSpec and speculators.

z-lab's (`DFlashDraftModel`) is DFlash's own, and DeepSpec's (`Qwen3DSparkModel`) is DSpark's. SpecForge writes the
latter as `DSparkDraftModel`, with keys in `dflash_config`. vLLM reads both from speculators' format. z-lab and DeepSpec
list the trunk layers whose outputs are read, speculators the layers that these states enter.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Literal

from conversion.config_reader import ConfigReader
from conversion.describe_config import describe_config
from mtpjax.drafters.dflash.hf_windows import ATTENTION_KEYS, FULL, SLIDING, read_windows
from mtpjax.drafters.dflash.network import DFlashConfig
from mtpjax.drafters.dspark.hf_heads import describe_heads, read_heads
from mtpjax.drafters.dspark.network import DSparkConfig
from mtpjax.drafters.eagle3.hf_config import TrunkSizes
from mtpjax.drafters.files.layers_config import parse_layers
from mtpjax.drafters.files.method import class_names, find_method, is_speculators
from mtpjax.drafters.files.trunk_layers import (
    LAST_LAYER_STATE,
    LastLayerState,
    describe_last_layer,
    entered_layers,
    read_last_layer_state,
)
from mtpjax.errors import ConfigError

log = logging.getLogger("mtpjax.conversion")

Format = Literal["z-lab", "deepspec", "speculators"]
ZLAB_CLASS, DEEPSPEC_CLASS = "DFlashDraftModel", "Qwen3DSparkModel"
KNOWN_KEYS = {
    *("block_size", "dflash_config", "dspark_config", "num_target_layers", "is_causal", "num_anchors"),
    *("target_layer_ids", "mask_token_id", "sample_from_anchor", "markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov", "draft_vocab_size", "target_hidden_size"),
    *("is_neox_style", "target_num_hidden_layers", "projector_type", "attention_mode", LAST_LAYER_STATE),
}
# Keys of `dflash_config`; others are warned of.
SECTION_KEYS = {
    *("mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids", "causal", "use_swa", "swa_window_size"),
    *("sample_from_anchor", "block_size", "markov_rank", "markov_head_type", "enable_confidence_head"),
    *("confidence_head_with_markov", "num_anchors", LAST_LAYER_STATE),
}
# Keys of published files that this network does not implement, with the values that change nothing.
NOT_SUPPORTED = {
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1, 1.0),
    "final_logit_softcapping": (),
    "input_embedding_scale": (1, 1.0),
    "output_multiplier": (1, 1.0),
    "is_neox_style": (True,),
    "attention_bias": (False,),
    "use_aux_hidden_state": (True,),
    "projector_type": ("dflash", "dspark"),
    "attention_mode": ("gqa", "mha"),
    "shift_label": (),
}


def parse_dflash(
    values: dict[str, Any],
    trunk: TrunkSizes,
    *,
    has_embedding: bool,
    has_head: bool,
    sample_from_anchor: bool | None = None,
    last_layer_state: LastLayerState | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[DFlashConfig, Format]:
    """Parses the content of a `config.json`.

    Args:
        values: the JSON value.
        trunk: sizes of the trunk.
        has_embedding: the files hold the drafter's own embedding.
        has_head: the files hold the drafter's own head.
        sample_from_anchor: the value of this switch if the file lacks it. None: True for DeepSpec's files, else False.
        last_layer_state: which output of the last trunk layer is read, if any and if the file does not say it. None:
            the one after the final norm, or before it for speculators' files, with a warning.
        shapes: shapes of the tensors by plain name, which say what the configuration leaves out; None: unknown.

    Returns:
        The architecture, a `DSparkConfig` for DSpark, and the format of the file.

    Raises:
        ConfigError: the configuration is damaged or not supported, or does not say which trunk states are read.
    """
    reader, shapes = ConfigReader(values), shapes or {}
    is_dspark = find_method(values, shapes) == "dspark"
    form: Format = "speculators" if is_speculators(values) else "deepspec" if is_dspark else "z-lab"
    section = reader.section("dflash_config" if reader.get("dflash_config") is not None else "dspark_config")
    layers = reader.section("transformer_layer_config") if form == "speculators" else reader
    for key, allowed in NOT_SUPPORTED.items():
        for each in (reader, section, layers):
            each.require(key, *allowed)
    if unknown := sorted(section.values.keys() - SECTION_KEYS - NOT_SUPPORTED.keys()):
        log.warning("dflash_config has unknown keys, which are ignored: %s", ", ".join(unknown))
    # Keys may be in `dflash_config` or beside it.
    for key in SECTION_KEYS & section.values.keys() & values.keys():
        if None not in (section.values[key], values[key]) and section.values[key] != values[key]:
            raise ConfigError(f"config.json: {key} is {values[key]!r}, and {section.values[key]!r} in dflash_config")
    own = {key: value for key, value in {**section.values, **values}.items() if value is not None}
    own_layers = {key: value for key, value in layers.values.items() if key not in ATTENTION_KEYS}
    block = parse_layers(own_layers, KNOWN_KEYS, shapes, classes=class_names(values))
    # Some programs write the number of trunk states in the place of that of layers, and the latter beside it.
    key = "target_num_hidden_layers" if "target_num_hidden_layers" in own else "num_target_layers"
    num_layers = reader.integer(key, trunk.num_hidden_layers)
    if num_layers != trunk.num_hidden_layers:
        raise ConfigError(f"config.json: {key} is {num_layers}, but the trunk has {trunk.num_hidden_layers} layers")
    windows, is_causal = read_windows(reader, section, layers, form, block.num_hidden_layers)
    # DeepSpec's class always drafts from the anchor, without a switch.
    is_first = form == "deepspec" if sample_from_anchor is None else sample_from_anchor
    both = ConfigReader(own)
    fields: dict[str, Any] = {
        "block": block,
        "layer_ids": _layer_ids(both, form, num_layers, last_layer_state),
        "num_target_layers": num_layers,
        "block_size": both.integer("block_size"),
        "mask_token_id": both.integer("mask_token_id", low=0),
        "windows": windows,
        "is_causal": is_causal,
        "window_from_anchor": form == "speculators" and any(windows),
        "sample_from_anchor": both.flag("sample_from_anchor", is_first),
        "draft_vocab_size": reader.integer("draft_vocab_size", block.vocab_size),
        "own_embedding": has_embedding,
        "own_head": has_head,
    }
    try:
        if is_dspark:
            return DSparkConfig(**fields, **read_heads(both, shapes, block.hidden_size)), form
        both.require("markov_rank", 0)
        return DFlashConfig(**fields), form
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"config.json: {error}") from error


def _layer_ids(
    reader: ConfigReader, form: Format, num_layers: int, last_layer_state: LastLayerState | None
) -> tuple[int, ...]:
    """Reads which trunk states the drafter reads, as the ids of the layers that they enter."""
    key = "aux_hidden_state_layer_ids" if form == "speculators" else "target_layer_ids"
    listed = reader.items(key, int)
    if not listed:
        raise ConfigError(
            f"config.json lacks {key}: the formula that programs fall back to is wrong for most published files, and a "
            "wrong reading raises no error; add the trunk layers that the drafter was trained with"
        )
    # z-lab and DeepSpec list the layers whose outputs are read, and -1 for the embedding. They train on transformers'
    # hidden_states, of which the last one is after the final norm; speculators' states are vLLM's.
    return entered_layers(
        listed,
        key,
        num_layers,
        are_outputs=form != "speculators",
        stated=read_last_layer_state(reader),
        usual="before_norm" if form == "speculators" else "after_norm",
        choice=last_layer_state,
    )


def describe_dflash(config: DFlashConfig, form: Format) -> dict[str, Any]:
    """Makes a `config.json` that `parse_dflash` reads as `config`.

    Args:
        config: the architecture.
        form: the format to write.

    Returns:
        The content.

    Raises:
        ConfigError: the format cannot express the architecture.
    """
    _, layers = describe_config(config.block, "qwen3")
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        layers.pop(key, None)
    window = max(config.windows)
    layers |= {
        "layer_types": [SLIDING if each else FULL for each in config.windows],
        "sliding_window": window or None,
        "use_sliding_window": window > 0,
    }
    values = {"z-lab": _describe_zlab, "deepspec": _describe_deepspec, "speculators": _describe_speculators}[form](
        config, layers
    )
    trunk = TrunkSizes(config.block.vocab_size, config.block.hidden_size, config.num_target_layers)
    found, _ = parse_dflash(values, trunk, has_embedding=config.own_embedding, has_head=config.own_head)
    if found != config:
        fields = [each.name for each in dataclasses.fields(config)]
        names = [name for name in fields if getattr(found, name, None) != getattr(config, name)]
        raise ConfigError(f"this format cannot express {', '.join(names) or type(config).__name__}: write another")
    return values


def _describe_zlab(config: DFlashConfig, layers: dict[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        **_describe_layer_ids(config),
    }
    if config.sample_from_anchor:
        section["sample_from_anchor"] = True
    if config.is_causal != tuple(window > 0 for window in config.windows):
        section["causal"] = config.is_causal[0]
    return {
        **layers,
        "architectures": [ZLAB_CLASS],
        "block_size": config.block_size,
        "dflash_config": section,
        "draft_vocab_size": config.draft_vocab_size,
        "num_target_layers": config.num_target_layers,
    }


def _describe_layer_ids(config: DFlashConfig) -> dict[str, Any]:
    """Makes the keys about trunk states in z-lab's and DeepSpec's formats."""
    listed, last_layer = describe_last_layer(config.layer_ids, config.num_target_layers)
    return {"target_layer_ids": [layer - 1 for layer in listed], **last_layer}


def _describe_deepspec(config: DFlashConfig, layers: dict[str, Any]) -> dict[str, Any]:
    return {
        **layers,
        "architectures": [DEEPSPEC_CLASS],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        **_describe_layer_ids(config),
        **({} if config.sample_from_anchor else {"sample_from_anchor": False}),
        **describe_heads(config),
    }


def _describe_speculators(config: DFlashConfig, layers: dict[str, Any]) -> dict[str, Any]:
    kind = "dspark" if isinstance(config, DSparkConfig) else "dflash"
    layers = {key: value for key, value in layers.items() if key != "architectures"}
    listed, last_layer = describe_last_layer(config.layer_ids, config.num_target_layers)
    return {
        "architectures": [DEEPSPEC_CLASS if kind == "dspark" else ZLAB_CLASS],
        "aux_hidden_state_layer_ids": listed,
        **last_layer,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not any(config.is_causal),
        **describe_heads(config),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_drafts}],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        "speculators_model_type": kind,
        "transformer_layer_config": layers,
    }
