"""The Markov and confidence heads of DSpark in `config.json`."""

from collections.abc import Mapping
from typing import Any, get_args

from conversion.config_reader import ConfigReader
from mtpjax.drafters.dflash.network import DFlashConfig
from mtpjax.drafters.dflash.tensor_names import STEPS
from mtpjax.drafters.dspark.network import DSparkConfig, MarkovHead
from mtpjax.errors import ConfigError


def read_heads(reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]], D: int) -> dict[str, Any]:
    """Reads the heads. The tensors say what the configuration leaves out.

    Args:
        reader: the configuration.
        shapes: shapes of the tensors by plain name.
        D: width of the drafter.

    Returns:
        Fields of `DSparkConfig`.

    Raises:
        ConfigError: a value is damaged or not supported.
    """
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


def describe_heads(config: DFlashConfig) -> dict[str, Any]:
    """Returns the keys of a DSpark drafter's heads; none for a DFlash drafter."""
    if not isinstance(config, DSparkConfig):
        return {}
    return {
        "confidence_head_with_markov": config.confidence_with_markov,
        "enable_confidence_head": config.has_confidence,
        "markov_rank": config.markov_rank,
        **({"markov_head_type": config.markov_head} if config.markov_rank else {}),
    }
