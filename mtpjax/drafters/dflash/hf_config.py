"""Parses and generates the `config.json` of block drafters in the authors' and speculators' formats.

DFlash's authors are z-lab (`DFlashDraftModel`). A method that extends DFlash defines another `BlockFormat`. vLLM reads
all of these methods in speculators' format. The authors' formats list the trunk layers whose outputs are read;
speculators' format lists the layers that these states enter.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from conversion.config_reader import ConfigReader
from conversion.tensor_slice import ParamSpec, copied
from mtpjax.drafters.architecture import TrunkSizes
from mtpjax.drafters.dflash.hf_windows import ATTENTION_KEYS, FULL, SLIDING, read_windows
from mtpjax.drafters.dflash.network import DFlashConfig
from mtpjax.drafters.files.layers_config import (
    class_names,
    describe_layers,
    describe_speculators,
    is_speculators,
    layers_specs,
    make_architecture,
    parse_layers,
    warn_of_unknown_keys,
)
from mtpjax.drafters.files.trunk_layers import (
    LAST_LAYER_STATE,
    LastLayerState,
    describe_last_layer,
    entered_layers,
    read_last_layer_state,
)
from mtpjax.drafters.method import DrafterFiles, Reading, Shapes
from mtpjax.errors import ConfigError

SPECULATORS = "speculators"
KNOWN_KEYS = {
    *("block_size", "dflash_config", "dspark_config", "num_target_layers", "is_causal", "num_anchors"),
    *("target_layer_ids", "mask_token_id", "sample_from_anchor", "markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov", "draft_vocab_size", "target_hidden_size"),
    *("is_neox_style", "target_num_hidden_layers", "projector_type", "attention_mode", LAST_LAYER_STATE),
}
# Known keys of `dflash_config`; other keys cause a warning.
SECTION_KEYS = {
    *("mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids", "causal", "use_swa", "swa_window_size"),
    *("sample_from_anchor", "block_size", "markov_rank", "markov_head_type", "enable_confidence_head"),
    *("confidence_head_with_markov", "num_anchors", LAST_LAYER_STATE),
}
# Keys in published files that this network does not implement, with the values for which they have no effect.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Describes how the files of one block-drafting method differ from the files of other methods.

    Attributes:
        name: the method's name in speculators' format.
        authors: the name of its authors' format.
        class_name: the class in `architectures`.
        config: the class of the architecture.
        describe: returns the keys that only the authors' format has.
        read_heads: reads additional architecture fields from the configuration, the tensor shapes, and D.
        describe_heads: returns the keys that `read_heads` reads.
        drafts_from_anchor: value of `sample_from_anchor` for the authors' files that do not specify it.
    """

    name: str
    authors: str
    class_name: str
    config: type[DFlashConfig]
    describe: Callable[[Any], dict[str, Any]]
    read_heads: Callable[[ConfigReader, Shapes, int], dict[str, Any]]
    describe_heads: Callable[[Any], dict[str, Any]]
    drafts_from_anchor: bool


def parse_blocks(
    kind: BlockFormat, values: dict[str, Any], shapes: Shapes, trunk: TrunkSizes, reading: Reading
) -> tuple[Any, str]:
    """Parses `config.json`. See `DrafterFiles.parse` for the arguments and the result.

    Raises:
        ConfigError: the configuration is damaged or not supported, or does not list the trunk layers to read.
    """
    reader = ConfigReader(values)
    form = SPECULATORS if is_speculators(values) else kind.authors
    section = reader.section("dflash_config" if reader.get("dflash_config") is not None else "dspark_config")
    layers = reader.section("transformer_layer_config") if form == SPECULATORS else reader
    for key, allowed in NOT_SUPPORTED.items():
        for each in (reader, section, layers):
            each.require(key, *allowed)
    warn_of_unknown_keys("dflash_config", section.values.keys() - SECTION_KEYS - NOT_SUPPORTED.keys())
    # Keys may be in `dflash_config` or at the top level.
    for key in SECTION_KEYS & section.values.keys() & values.keys():
        if None not in (section.values[key], values[key]) and section.values[key] != values[key]:
            raise ConfigError(f"config.json: {key} is {values[key]!r}, and {section.values[key]!r} in dflash_config")
    own = {key: value for key, value in {**section.values, **values}.items() if value is not None}
    own_layers = {key: value for key, value in layers.values.items() if key not in ATTENTION_KEYS}
    block = parse_layers(own_layers, KNOWN_KEYS, shapes, classes=class_names(values))
    # Some programs write the number of trunk states under the key for the number of trunk layers, and the number of
    # trunk layers under a different key.
    key = "target_num_hidden_layers" if "target_num_hidden_layers" in own else "num_target_layers"
    num_layers = reader.integer(key, trunk.num_hidden_layers)
    if num_layers != trunk.num_hidden_layers:
        raise ConfigError(f"config.json: {key} is {num_layers}, but the trunk has {trunk.num_hidden_layers} layers")
    windows, is_causal = read_windows(reader, section, layers, form, block.num_hidden_layers)
    is_first = reading.get("sample_from_anchor")
    is_first = form == kind.authors and kind.drafts_from_anchor if is_first is None else is_first
    both = ConfigReader(own)
    return make_architecture(
        kind.config,
        shapes,
        block=block,
        layer_ids=_layer_ids(both, form, num_layers, reading.get("last_layer_state")),
        num_target_layers=num_layers,
        block_size=both.integer("block_size"),
        mask_token_id=both.integer("mask_token_id", low=0),
        windows=windows,
        is_causal=is_causal,
        window_from_anchor=form == SPECULATORS and any(windows),
        sample_from_anchor=both.flag("sample_from_anchor", is_first),
        draft_vocab_size=reader.integer("draft_vocab_size", block.vocab_size),
        **kind.read_heads(both, shapes, block.hidden_size),
    ), form


def _layer_ids(
    reader: ConfigReader, form: str, num_layers: int, last_layer_state: LastLayerState | None
) -> tuple[int, ...]:
    """Reads the ids of the trunk layers whose input states the drafter reads."""
    key = "aux_hidden_state_layer_ids" if form == SPECULATORS else "target_layer_ids"
    listed = reader.items(key, int)
    if not listed:
        raise ConfigError(
            f"config.json lacks {key}: the default of other programs is wrong for most published files, and wrong "
            "layers would go unnoticed; add the trunk layers that the drafter was trained with"
        )
    # z-lab and DeepSpec list the layers whose outputs are read, with -1 for the embedding. They train on transformers'
    # hidden_states, whose last entry comes after the final norm; speculators uses vLLM's states.
    return entered_layers(
        listed,
        key,
        num_layers,
        are_outputs=form != SPECULATORS,
        stated=read_last_layer_state(reader),
        usual="before_norm" if form == SPECULATORS else "after_norm",
        choice=last_layer_state,
    )


def describe_blocks(kind: BlockFormat, config: DFlashConfig, form: str) -> dict[str, Any]:
    """Makes a `config.json` that `parse_blocks` parses back to `config`; raises `ConfigError` if none exists."""
    window = max(config.windows)
    layers = describe_layers(config.block) | {
        "layer_types": [SLIDING if each else FULL for each in config.windows],
        "sliding_window": window or None,
        "use_sliding_window": window > 0,
    }
    values = {
        "architectures": [kind.class_name],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
    }
    if form == SPECULATORS:
        values |= _describe_speculators(kind, config, layers)
    else:
        values = layers | values | {"num_target_layers": config.num_target_layers} | kind.describe(config)
    own = {"embed_tokens.weight": config.own_embedding, "lm_head.weight": config.own_head}
    found, _ = parse_blocks(kind, values, {name: () for name, is_own in own.items() if is_own}, config.trunk, {})
    if found != config:
        fields = [each.name for each in dataclasses.fields(config)]
        names = [name for name in fields if getattr(found, name, None) != getattr(config, name)]
        raise ConfigError(
            f"format {form!r} cannot express {', '.join(names) or type(config).__name__}: use a different format"
        )
    return values


def _describe_zlab(config: DFlashConfig) -> dict[str, Any]:
    section: dict[str, Any] = {"mask_token_id": config.mask_token_id, **describe_layer_ids(config)}
    if config.sample_from_anchor:
        section["sample_from_anchor"] = True
    if config.is_causal != tuple(window > 0 for window in config.windows):
        section["causal"] = config.is_causal[0]
    return {"dflash_config": section}


def describe_layer_ids(config: DFlashConfig) -> dict[str, Any]:
    """Returns the keys that list the trunk states in the authors' formats."""
    listed, last_layer = describe_last_layer(config.layer_ids, config.num_target_layers)
    return {"target_layer_ids": [layer - 1 for layer in listed], **last_layer}


def _describe_speculators(kind: BlockFormat, config: DFlashConfig, layers: dict[str, Any]) -> dict[str, Any]:
    listed, last_layer = describe_last_layer(config.layer_ids, config.num_target_layers)
    return {
        "aux_hidden_state_layer_ids": listed,
        **last_layer,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not any(config.is_causal),
        **kind.describe_heads(config),
        **describe_speculators(kind.name, layers, config.num_drafts),
    }


def _no_heads(reader: ConfigReader, shapes: Shapes, D: int) -> dict[str, Any]:
    reader.require("markov_rank", 0)
    return {}


DFLASH_FORMAT = BlockFormat(
    name="dflash",
    authors="z-lab",
    class_name="DFlashDraftModel",
    config=DFlashConfig,
    describe=_describe_zlab,
    read_heads=_no_heads,
    describe_heads=lambda config: {},
    drafts_from_anchor=False,
)


def block_files(
    kind: BlockFormat, specs: Callable[[Any], dict[str, ParamSpec]], tensor: str, keys: Mapping[str, Any] | None = None
) -> DrafterFiles:
    """Makes the `DrafterFiles` for a block-drafting method."""
    return DrafterFiles(
        formats=(kind.authors, SPECULATORS),
        format_with_ids=SPECULATORS,
        parse=functools.partial(parse_blocks, kind),
        specs=lambda config, form: specs(config),
        describe=functools.partial(describe_blocks, kind),
        is_of_speculators=True,
        tensors=(tensor,),
        keys=keys or {},
    )


def dflash_specs(config: DFlashConfig) -> dict[str, ParamSpec]:
    """Lists every parameter with its tensors, by plain name. The names are the same in all formats."""
    return layers_specs(config) | {"norm_context/scale": copied("hidden_norm.weight", config.block.hidden_size)}
