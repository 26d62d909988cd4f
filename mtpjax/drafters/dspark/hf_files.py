"""Parses and generates the configuration of the Markov and confidence heads that DSpark adds to DFlash.

DSpark's authors are DeepSpec (`Qwen3DSparkModel`). SpecForge writes their format as `DSparkDraftModel`, with keys in
`dflash_config`. In shapes, r is the rank of the Markov head.
"""

from collections.abc import Mapping
from typing import Any, get_args

from conversion.config_reader import ConfigReader
from conversion.tensor_slice import ParamSpec, copied, linear
from mtpjax.drafters.dflash.hf_config import BlockFormat, describe_layer_ids, dflash_specs
from mtpjax.drafters.dspark.network import DSparkConfig, MarkovHead
from mtpjax.errors import ConfigError

STEPS = {"gated": "gate_proj", "rnn": "joint_proj"}  # name of the layer in the Markov head, by head type
DEEPSPEC_CLASS = "Qwen3DSparkModel"


def read_heads(reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]], D: int) -> dict[str, Any]:
    """Reads the settings of the heads, and infers settings that the configuration lacks from the tensors."""
    markov, confidence = shapes.get("markov_head.markov_w1.weight", ()), shapes.get("confidence_head.proj.weight", ())
    rank = reader.integer("markov_rank", markov[-1] if markov else 0, low=0)
    steps = [kind for kind, name in STEPS.items() if f"markov_head.{name}.weight" in shapes]
    kind = reader.get("markov_head_type") or (steps[0] if steps else "vanilla")
    kinds = get_args(MarkovHead)[1:]
    if rank and kind not in kinds:
        raise ConfigError(f"config.json: markov_head_type {kind!r} is not supported; supported: {', '.join(kinds)}")
    has_confidence = reader.flag("enable_confidence_head", bool(confidence))
    reads_markov = bool(rank and confidence) and confidence[-1] == D + rank
    return {
        "markov_head": kind if rank else "none",
        "markov_rank": rank,
        "has_confidence": has_confidence,
        "confidence_with_markov": has_confidence and reader.flag("confidence_head_with_markov", reads_markov),
    }


def describe_heads(config: DSparkConfig) -> dict[str, Any]:
    """Returns the `config.json` keys of the heads."""
    return {
        "confidence_head_with_markov": config.confidence_with_markov,
        "enable_confidence_head": config.has_confidence,
        "markov_rank": config.markov_rank,
        **({"markov_head_type": config.markov_head} if config.markov_rank else {}),
    }


def _describe_deepspec(config: DSparkConfig) -> dict[str, Any]:
    return {
        "mask_token_id": config.mask_token_id,
        **describe_layer_ids(config),
        **({} if config.sample_from_anchor else {"sample_from_anchor": False}),
        **describe_heads(config),
    }


DSPARK_FORMAT = BlockFormat(
    name="dspark",
    authors="deepspec",
    class_name=DEEPSPEC_CLASS,
    config=DSparkConfig,
    describe=_describe_deepspec,
    read_heads=read_heads,
    describe_heads=describe_heads,
    drafts_from_anchor=True,
)


def dspark_specs(config: DSparkConfig) -> dict[str, ParamSpec]:
    """Lists the parameters in `dflash_specs` and the parameters of the heads, with their tensors."""
    D, r, specs = config.block.hidden_size, config.markov_rank, dflash_specs(config)
    if r:
        specs["markov_in"] = copied("markov_head.markov_w1.weight", config.block.vocab_size, r)
        specs["markov_out"] = linear("markov_head.markov_w2.weight", r, config.draft_vocab_size)
    if config.markov_head in STEPS:
        name = f"markov_head.{STEPS[config.markov_head]}"
        sizes = (D + r, r) if config.markov_head == "gated" else (2 * r + D, 3 * r)
        specs["markov_step"] = linear(f"{name}.weight", *sizes)
        specs["markov_step_bias"] = copied(f"{name}.bias", sizes[1])
    if config.has_confidence:
        specs["confidence_out"] = linear("confidence_head.proj.weight", D + r * config.confidence_with_markov, 1)
        specs["confidence_bias"] = copied("confidence_head.proj.bias", 1)
    return specs
