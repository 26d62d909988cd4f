"""Reads rotary settings from `rope_parameters` (transformers 5), or from `rope_scaling` and `rope_theta` (before).

Values have the same meaning as in transformers. Values that transformers rejects, or that make the frequencies depend
on the text length, raise an error.
"""

import dataclasses
from typing import Any

from conversion.config_reader import ConfigReader
from mtpjax.errors import ConfigError
from mtpjax.models.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, Yarn

FULL, SLIDING = "full_attention", "sliding_attention"
# In text, mrope's three sections have the same positions, so mrope is equivalent to "default". "dynamic" rescales only
# texts that are longer than `max_position_embeddings`, and decoding rejects these.
SUPPORTED = ("default", "linear", "dynamic", "yarn", "llama3", "mrope")

# MiMo-V2's older keys for both layer types. A file with only some of them has no defined meaning.
OLDER_KEYS = ("rope_theta", "swa_rope_theta", "partial_rotary_factor")


def with_defaults(stated: dict[str, Any], defaults: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Adds a family's default values, but adds rotary defaults only where transformers uses them.

    Raises:
        ConfigError: the family needs rotary settings for each layer type, but the file has only some older keys.
    """
    is_stated = stated.get("rope_parameters") is not None
    stated = {key: value for key, value in stated.items() if key != "rope_parameters" or is_stated}
    section = defaults.get("rope_parameters")
    if section is None:
        return defaults | stated
    # transformers reads `rope_scaling` instead of the default section.
    given = [stated.get(key) for key in ("rope_parameters", "rope_scaling")]
    given = [value for value in given if isinstance(value, dict) and value]
    without = {key: value for key, value in defaults.items() if key != "rope_parameters"} | stated
    if FULL not in section:
        return without if given else defaults | stated
    if any(FULL in value for value in given):
        return without
    found = {key for values in (stated, *given) for key in OLDER_KEYS if values.get(key) is not None}
    if not (found or given or is_stated):
        return defaults | stated
    if missing := [key for key in OLDER_KEYS if key not in found]:
        raise ConfigError(
            f"config.json lacks {', '.join(missing)}: {model_type} needs {', '.join(OLDER_KEYS)}, or rope_parameters "
            f"with {FULL} and {SLIDING}"
        )
    return without


def read_rope(reader: ConfigReader, *, rotates_part: bool) -> dict[str, Any]:
    """Reads the fields of `ModelConfig` for rotary embeddings.

    Args:
        rotates_part: whether the transformers class can rotate only a part of each head.

    Raises:
        ConfigError: the values are damaged or not supported.
    """
    section = _section(reader)
    if FULL not in section.values:
        return _read_section(section, reader, rotates_part)
    # There is a section for each layer type.
    for name in (FULL, SLIDING):
        if name in section.values and section.get(name) is None:
            raise ConfigError(f"config.json: rope_parameters with {name} null (no rotary embedding) is not supported")
    if SLIDING not in section.values:
        raise ConfigError(f"config.json: rope_parameters has {FULL} and lacks {SLIDING}")
    full, sliding = (
        _read_section(section.section(name), reader, rotates_part, is_nested=True) for name in (FULL, SLIDING)
    )
    own = sliding.pop("rope_scaling")
    if own not in (None, full["rope_scaling"]):
        raise ConfigError(
            f"config.json: rope_parameters with different scalings in {SLIDING} and {FULL} is not supported"
        )
    full["sliding_rope_scaling"] = own == full["rope_scaling"]
    return full | {f"sliding_{name}": value for name, value in sliding.items()}


def describe_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns the `config.json` section for a rotary scaling, without optional keys that are not set."""
    kinds = {Yarn: "yarn", Llama3Scaling: "llama3", LinearScaling: "linear", type(None): "default"}
    values = {} if scaling is None else dataclasses.asdict(scaling)
    is_set = {name: value for name, value in values.items() if value not in (None, 0.0) or value is False}
    return {"rope_type": kinds[type(scaling)], **is_set}


def _section(reader: ConfigReader) -> ConfigReader:
    """Returns the section for rotary embeddings. If a file has both kinds of sections, they must agree."""
    new, old = reader.section("rope_parameters"), reader.section("rope_scaling")
    if not new.values or not old.values:
        return new if new.values else old
    differing = ["rope_type"] if _kind(new) != _kind(old) else []
    for key in sorted((new.values.keys() | old.values.keys()) - {"rope_type", "type"}):
        mine, other = new.values.get(key), old.values.get(key)
        # With the older keys, base and rotated share are outside the section.
        is_beside = other is None and key in ("rope_theta", "partial_rotary_factor")
        differing += [key] if mine != other and not is_beside else []
    if differing:
        raise ConfigError(
            f"config.json: rope_parameters and rope_scaling differ in {', '.join(differing)}: keep only one of them"
        )
    return new


def _kind(section: ConfigReader) -> str:
    """Returns the scaling type, which is "default" for an empty section."""
    names = [section.get(key) for key in ("rope_type", "type")]
    given = [name for name in names if name is not None]
    if not given and (section.get("factor") is not None or section.values.keys() & {"rope_type", "type"}):
        raise ConfigError('config.json: rope_parameters or rope_scaling lacks rope_type (such as "yarn")')
    kind = given[0] if given else "default"
    if len(set(given) - {"mrope", "default"}) + (len(set(given) & {"mrope", "default"}) > 0) > 1:
        raise ConfigError(f"config.json: rope_type is {names[0]!r}, but type is {names[1]!r}: keep only one of them")
    if kind == "longrope":
        raise ConfigError(
            "config.json: rope_type 'longrope' is not supported: its frequencies change with the length of the text"
        )
    if kind not in SUPPORTED:
        raise ConfigError(f"config.json: unsupported rope_type {kind!r}; supported: {', '.join(SUPPORTED)}")
    return kind


def _read_section(
    section: ConfigReader, reader: ConfigReader, rotates_part: bool, *, is_nested: bool = False
) -> dict[str, Any]:
    """Reads one section. `rope_theta` and `partial_rotary_factor` may be inside or outside the section."""
    for of in (section, reader):
        if "rope_theta" in of.values and of.get("rope_theta") is None:
            raise ConfigError("config.json: rope_theta is null, not a positive number")
    theta = section.number("rope_theta", reader.number("rope_theta", 10000.0))
    partial = section.number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
    if partial > 1 or (partial < 1 and not rotates_part):
        allowed = "at most 1" if rotates_part else "1.0 in this family"
        raise ConfigError(f"config.json: partial_rotary_factor is {partial}; supported: {allowed}")
    scaling = _read_scaling(section, reader, is_nested)
    # mrope's settings for images do not affect text.
    ignored = {"mrope_section", "mrope_interleaved"}
    reader.unknown_within |= {f"rope_parameters.{key}" for key in section.values.keys() - section.seen - ignored}
    return {"rope_theta": theta, "partial_rotary_factor": partial, "rope_scaling": scaling}


def _read_scaling(section: ConfigReader, reader: ConfigReader, is_nested: bool) -> RopeScaling | None:
    """Reads the scaling of one section."""
    kind = _kind(section)
    if kind in ("default", "mrope"):
        section.seen.discard("factor")  # unused, so report it as an unknown key
        return None

    def needed(key: str) -> float:
        if section.get(key) is None:
            state = "null" if key in section.values else "missing"
            raise ConfigError(f"config.json: {key} is {state}, but rope_type {kind!r} needs it")
        return section.number(key, 1.0)

    if kind == "dynamic":
        # Hunyuan's `alpha` would change the frequencies for all positions.
        section.require("alpha")
        needed("factor")
        section.seen.add("original_max_position_embeddings")
        return None
    if kind == "linear":
        return LinearScaling(factor=needed("factor"))
    original = _original_length(section, reader, is_nested)
    if kind == "llama3":
        # Llama 3 scales only low frequencies, with a smooth transition.
        factors = {key: needed(key) for key in ("low_freq_factor", "high_freq_factor", "factor")}
        return Llama3Scaling(original_max_position_embeddings=original, **factors)
    # The type is YaRN. A null factor means the ratio of the lengths. For some optional keys, null or 0 means unset.
    is_null = "factor" in section.values and section.get("factor") is None
    factor = reader.integer("max_position_embeddings") / original if is_null else needed("factor")
    if "truncate" in section.values and section.get("truncate") is None:
        raise ConfigError("config.json: truncate is null, not true or false")
    optional = {
        key: section.number(key, 1.0)
        for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        if section.get(key) not in (None, 0) or isinstance(section.get(key), bool)
    }
    if section.get("attention_factor") is not None:
        optional["attention_factor"] = section.number("attention_factor", 1.0)
    truncate = section.flag("truncate", True)
    return Yarn(factor=factor, original_max_position_embeddings=original, truncate=truncate, **optional)


def _original_length(section: ConfigReader, reader: ConfigReader, is_nested: bool) -> int:
    """Reads the length before scaling from outside or inside the section, or else from `max_position_embeddings`."""
    key = "original_max_position_embeddings"
    inside = section.get(key)
    if not is_nested and reader.get(key) is not None:
        return reader.integer(key)
    if key in section.values and inside is None:
        raise ConfigError(f"config.json: {key} is null, not an integer")
    return section.integer(key, reader.integer("max_position_embeddings"))
