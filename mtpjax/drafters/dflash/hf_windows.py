"""Reads the windows and the attention direction of DFlash and DSpark layers from `config.json`."""

from conversion.config_reader import ConfigReader
from mtpjax.errors import ConfigError

SLIDING, FULL = "sliding_attention", "full_attention"
# Keys that are hidden from the model family's parser, because this module reads the attention settings itself.
ATTENTION_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "tie_word_embeddings")


def read_windows(
    reader: ConfigReader, section: ConfigReader, layers: ConfigReader, form: str, count: int
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Reads each layer's window (0 if it has none), and whether its slots attend only to earlier slots."""
    types = layers.items("layer_types", str)
    if not types and layers.flag("use_sliding_window", False):
        raise ConfigError(
            "config.json: use_sliding_window is set, but layer_types, which lists the layers with a window, is missing"
        )
    types = types or (FULL,) * count
    if len(types) != count or any(kind not in (SLIDING, FULL) for kind in types):
        raise ConfigError(f"config.json: layer_types {list(types)} must have {count} entries: '{FULL}' or '{SLIDING}'")
    if section.flag("use_swa", False) and SLIDING not in types:
        # In MiMo's files, every layer has a window that extends in both directions.
        size = section.integer("swa_window_size", layers.get("sliding_window"))
        return (size,) * count, (reader.flag("is_causal", section.flag("causal", False)),) * count
    is_sliding = tuple(kind == SLIDING for kind in types)
    if form == "deepspec" and any(is_sliding):
        raise ConfigError(
            "config.json: DeepSpec's format does not support sliding layers, because DeepSpec trains without them"
        )
    window = section.integer("swa_window_size", layers.get("sliding_window")) if any(is_sliding) else 0
    windows = tuple(window * each for each in is_sliding)
    if form == "speculators":
        if any(is_sliding) and reader.get("sliding_window_non_causal") is None:
            raise ConfigError(
                "config.json lacks sliding_window_non_causal, whose default differs between programs: add the value "
                "that the drafter was trained with"
            )
        is_causal = not reader.flag("sliding_window_non_causal", True)
        return windows, tuple(each and is_causal for each in is_sliding)
    # Use is_causal if it is set, then dflash_config.causal, and otherwise the layer's type.
    for each, key in ((reader, "is_causal"), (section, "causal")):
        if each.get(key) is not None:
            return windows, (each.flag(key, False),) * count
    return windows, is_sliding
