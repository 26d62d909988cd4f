"""The `config.json` of DFlash and DSpark drafters, in the formats of z-lab, DeepSpec and speculators.

z-lab's (`DFlashDraftModel`) is DFlash's own, and DeepSpec's (`Qwen3DSparkModel`) is DSpark's. vLLM reads both from
speculators' format. z-lab and DeepSpec list the trunk layers whose outputs are read, speculators the layers that these
states enter.
"""

import dataclasses
from typing import Any, Literal, get_args

from conversion.config_reader import ConfigReader
from conversion.describe_config import describe_config
from conversion.drafters.eagle3_config import TrunkSizes, parse_layers
from mtpjax.errors import ConfigError
from mtpjax.models.dflash import DFlashConfig
from mtpjax.models.dspark import DSparkConfig, MarkovHead

Format = Literal["z-lab", "deepspec", "speculators"]
ZLAB_CLASS, DEEPSPEC_CLASS = "DFlashDraftModel", "Qwen3DSparkModel"
SPECULATORS_TYPES = ("dflash", "dspark")
SLIDING, FULL = "sliding_attention", "full_attention"
# Keys about the layers' attention that are read here, and not by the parser of model families.
ATTENTION_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "tie_word_embeddings")
KNOWN_KEYS = {
    *("block_size", "dflash_config", "num_target_layers", "is_causal", "num_anchors", "target_layer_ids"),
    *("mask_token_id", "sample_from_anchor", "markov_rank", "markov_head_type", "enable_confidence_head"),
    *("confidence_head_with_markov", "draft_vocab_size", "target_hidden_size", "is_neox_style"),
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
}


def is_dflash(values: dict[str, Any]) -> bool:
    """Returns whether a `config.json` describes a DFlash or DSpark drafter."""
    kind = values.get("speculators_model_type")
    classes = values.get("architectures") or ()
    return kind in SPECULATORS_TYPES or (kind is None and any(name in classes for name in (ZLAB_CLASS, DEEPSPEC_CLASS)))


def parse_dflash(
    values: dict[str, Any],
    trunk: TrunkSizes,
    *,
    has_embedding: bool,
    has_head: bool,
    sample_from_anchor: bool | None = None,
) -> tuple[DFlashConfig, Format]:
    """Parses the content of a `config.json`.

    Args:
        values: the JSON value.
        trunk: sizes of the trunk.
        has_embedding: the files hold the drafter's own embedding.
        has_head: the files hold the drafter's own head.
        sample_from_anchor: the value of this switch if the file lacks it. None: True for DeepSpec's files, else False.

    Returns:
        The architecture, a `DSparkConfig` for DSpark, and the format of the file.

    Raises:
        ConfigError: the configuration is damaged or not supported, or does not say which trunk states are read.
    """
    reader, kind = ConfigReader(values), values.get("speculators_model_type")
    is_deepspec = kind is None and DEEPSPEC_CLASS in (values.get("architectures") or ())
    form: Format = "speculators" if kind else "deepspec" if is_deepspec else "z-lab"
    section = reader.section("dflash_config")
    layers = reader.section("transformer_layer_config") if kind else reader
    for key, allowed in NOT_SUPPORTED.items():
        for each in (reader, section, layers):
            each.require(key, *allowed)
    block = parse_layers({key: value for key, value in layers.values.items() if key not in ATTENTION_KEYS}, KNOWN_KEYS)
    num_layers = reader.integer("num_target_layers", trunk.num_hidden_layers)
    if num_layers != trunk.num_hidden_layers:
        raise ConfigError(
            f"config.json: num_target_layers is {num_layers}, but the trunk has {trunk.num_hidden_layers} layers"
        )
    windows, is_causal = _attention(reader, section, layers, form, block.num_hidden_layers)
    # The switch is in dflash_config or beside it. DeepSpec's class always drafts from the anchor, without a switch.
    is_first = is_deepspec if sample_from_anchor is None else sample_from_anchor
    is_first = section.flag("sample_from_anchor", reader.flag("sample_from_anchor", is_first))
    mask = section.integer("mask_token_id", reader.get("mask_token_id"), low=0)
    fields: dict[str, Any] = {
        "block": block,
        "layer_ids": _layer_ids(reader, section, form),
        "num_target_layers": num_layers,
        "block_size": reader.integer("block_size"),
        "mask_token_id": mask,
        "windows": windows,
        "is_causal": is_causal,
        "window_from_anchor": form == "speculators" and any(windows),
        "sample_from_anchor": is_first,
        "draft_vocab_size": reader.integer("draft_vocab_size", block.vocab_size),
        "own_embedding": has_embedding,
        "own_head": has_head,
    }
    try:
        if is_deepspec or kind == "dspark":
            return DSparkConfig(**fields, **_heads(reader)), form
        for each in (reader, section):
            each.require("markov_rank", 0)
        return DFlashConfig(**fields), form
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"config.json: {error}") from error


def _heads(reader: ConfigReader) -> dict[str, Any]:
    """Reads the Markov and confidence heads of DSpark."""
    rank = reader.integer("markov_rank", 0, low=0)
    kind = reader.get("markov_head_type") or "vanilla"
    kinds = get_args(MarkovHead)[1:]
    if rank and kind not in kinds:
        raise ConfigError(f"config.json: markov_head_type {kind!r} is not supported; supported: {', '.join(kinds)}")
    has_confidence = reader.flag("enable_confidence_head", False)
    return {
        "markov_head": kind if rank else "none",
        "markov_rank": rank,
        "has_confidence": has_confidence,
        "confidence_with_markov": has_confidence and reader.flag("confidence_head_with_markov", False),
    }


def _layer_ids(reader: ConfigReader, section: ConfigReader, form: Format) -> tuple[int, ...]:
    """Reads which trunk states the drafter reads, as the ids of the layers that they enter."""
    key = "aux_hidden_state_layer_ids" if form == "speculators" else "target_layer_ids"
    listed = section.items(key, int) or reader.items(key, int)
    if not listed:
        raise ConfigError(
            f"config.json lacks {key}: the formula that programs fall back to is wrong for most published files, and a "
            "wrong reading raises no error; add the trunk layers that the drafter was trained with"
        )
    # z-lab and DeepSpec list the layers whose outputs are read, and -1 for the embedding.
    return listed if form == "speculators" else tuple(layer + 1 for layer in listed)


def _attention(
    reader: ConfigReader, section: ConfigReader, layers: ConfigReader, form: Format, count: int
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Reads each layer's window, and whether a slot attends only to the slots before it."""
    types = layers.items("layer_types", str)
    if not types and layers.flag("use_sliding_window", False):
        raise ConfigError("config.json: use_sliding_window without layer_types does not say which layers slide")
    types = types or (FULL,) * count
    if len(types) != count or any(kind not in (SLIDING, FULL) for kind in types):
        raise ConfigError(f"config.json: layer_types {list(types)} are not {count} of '{FULL}' and '{SLIDING}'")
    if section.flag("use_swa", False) and SLIDING not in types:
        # MiMo's files: every layer slides, in both directions.
        size = section.integer("swa_window_size", layers.get("sliding_window"))
        return (size,) * count, (reader.flag("is_causal", section.flag("causal", False)),) * count
    slides = tuple(kind == SLIDING for kind in types)
    if form == "deepspec" and any(slides):
        raise ConfigError("config.json: sliding layers are not supported in DeepSpec's format: it trains without them")
    window = section.integer("swa_window_size", layers.get("sliding_window")) if any(slides) else 0
    windows = tuple(window * each for each in slides)
    if form == "speculators":
        if any(slides) and reader.get("sliding_window_non_causal") is None:
            raise ConfigError(
                "config.json lacks sliding_window_non_causal, whose default differs between programs: add the value "
                "that the drafter was trained with"
            )
        is_causal = not reader.flag("sliding_window_non_causal", True)
        return windows, tuple(each and is_causal for each in slides)
    # is_causal, then dflash_config.causal, then the layer's type.
    for each, key in ((reader, "is_causal"), (section, "causal")):
        if each.get(key) is not None:
            return windows, (each.flag(key, False),) * count
    return windows, slides


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
        "target_layer_ids": [layer - 1 for layer in config.layer_ids],
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


def _describe_deepspec(config: DFlashConfig, layers: dict[str, Any]) -> dict[str, Any]:
    return {
        **layers,
        "architectures": [DEEPSPEC_CLASS],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": [layer - 1 for layer in config.layer_ids],
        **({} if config.sample_from_anchor else {"sample_from_anchor": False}),
        **_describe_heads(config),
    }


def _describe_speculators(config: DFlashConfig, layers: dict[str, Any]) -> dict[str, Any]:
    kind = "dspark" if isinstance(config, DSparkConfig) else "dflash"
    layers = {key: value for key, value in layers.items() if key != "architectures"}
    return {
        "architectures": [DEEPSPEC_CLASS if kind == "dspark" else ZLAB_CLASS],
        "aux_hidden_state_layer_ids": list(config.layer_ids),
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not any(config.is_causal),
        **_describe_heads(config),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_drafts}],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        "speculators_model_type": kind,
        "transformer_layer_config": layers,
    }


def _describe_heads(config: DFlashConfig) -> dict[str, Any]:
    """Makes the keys of DSpark's heads."""
    if not isinstance(config, DSparkConfig):
        return {}
    return {
        "confidence_head_with_markov": config.confidence_with_markov,
        "enable_confidence_head": config.has_confidence,
        "markov_rank": config.markov_rank,
        **({"markov_head_type": config.markov_head} if config.markov_rank else {}),
    }
