"""Reads the values of a `config.json`, and checks their types and ranges, because the file is untrusted."""

import math
from typing import Any

from mtpjax.errors import ConfigError

LIMIT = 2**31  # every integer of a configuration must be smaller


class ConfigReader:
    """Reads the values in a JSON object, and records the keys that were read.

    If a value has the wrong type or is out of range, every method raises a `ConfigError`, whose one-line message
    contains the key and the value. Null counts as missing.

    Attributes:
        values: the object.
        seen: the keys that were read.
        names: for each usual key that the object replaces, the key that it uses instead.
        unknown_within: keys in nested objects that were not read, as `section.key`.
    """

    def __init__(self, values: dict[str, Any], names: dict[str, str] | None = None):
        self.values, self.seen, self.names = values, set(), names or {}
        self.unknown_within: set[str] = set()

    def get(self, key: str) -> Any:
        """Returns the unchecked value of `key`, or `None`."""
        # `parse_config` warns about keys that were not read, because they may change what the model computes.
        key = self.names.get(key, key)
        self.seen.add(key)
        return self.values.get(key)

    def _value(self, key: str, default: Any) -> tuple[Any, str]:
        """Returns the value or the default, and the key in the file."""
        value = self.get(key)
        return default if value is None else value, self.names.get(key, key)

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """Returns an integer of at least `low`. Without a default, the key is required."""
        value, key = self._value(key, default)
        if value is None:
            raise ConfigError(f"config.json lacks {key}")
        # bool is a subclass of int in Python, but true is not a size.
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < LIMIT:
            raise ConfigError(f"config.json: {key} is {value!r}, not an integer of at least {low}")
        return value

    def number(self, key: str, default: float) -> float:
        """Returns a positive, finite number."""
        value, key = self._value(key, default)
        # Python's JSON parser accepts NaN and Infinity.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"config.json: {key} is {value!r}, not a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Returns a boolean."""
        value, key = self._value(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key} is {value!r}, not true or false")
        return value

    def items(self, key: str, kind: type | tuple[type, ...]) -> tuple:
        """Returns a list whose items have one of the given types, as a tuple, or () if the key is missing."""
        value, key = self._value(key, [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise ConfigError(f"config.json: {key} must be a list of {names}")
        return tuple(value)

    def per_layer(self, key: str, kind: type, layers: int, modules: int) -> tuple[tuple, Any]:
        """Returns the layers' entries, and the entry that all MTP modules share.

        The modules' entries follow the layers' entries, or are in `mtp_{key}`. If the key is missing, the result is
        `((), None)`.
        """
        listed = self.items(key, kind)
        own = listed[layers:] or self.items(f"mtp_{key}", kind)
        key = self.names.get(key, key)
        if listed and len(listed) not in (layers, layers + modules):
            raise ConfigError(
                f"config.json: {key} has {len(listed)} entries; supported: one for each of {layers} layers, "
                f"optionally followed by one for each of {modules} MTP modules"
            )
        if len(set(own)) > 1:
            raise ConfigError(
                f"config.json: {key} has different values for MTP modules, {list(own)}, which is not supported"
            )
        return listed[:layers], own[0] if own else None

    def section(self, key: str) -> "ConfigReader":
        """Returns a reader for a nested object. The reader is empty if there is no such object."""
        value, key = self._value(key, {})
        if not isinstance(value, dict):
            raise ConfigError(f"config.json: {key} is {value!r}, not an object")
        return ConfigReader(value)

    def require(self, key: str, *allowed: Any) -> None:
        """Rejects an unsupported value, but accepts a missing value."""
        value, key = self.get(key), self.names.get(key, key)
        if value is not None and value not in allowed:
            supported = f"; supported: {', '.join(map(repr, allowed))}" if allowed else ""
            raise ConfigError(f"config.json: {key} {value!r} is not supported{supported}")
