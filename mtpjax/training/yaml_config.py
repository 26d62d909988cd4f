"""A run's settings from a YAML file and `key=value` pairs."""

import argparse
import dataclasses
import difflib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jsonargparse
import yaml

from mtpjax.training.config import TrainConfig


def read_config(path=None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The settings of the YAML file at `path` (None: the defaults) with `section.key=value` pairs over them.

    Raises `ValueError`, in one line, for a file or pair that cannot be read, for a key that there is not (with the
    nearest), and for a value of another type or outside its limits.
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TrainConfig)
    known = list(parser.get_defaults().keys())
    values = {} if path is None else _read(path)
    for key in _keys(values):
        _check_key(key, known)
    for pair in overrides:
        key, found, _ = pair.partition("=")
        if not found:
            raise ValueError(f"{pair!r} is no key=value pair")
        _check_key(key, known)
    try:
        parsed = parser.parse_args([f"--{pair}" for pair in overrides], parser.parse_object(values))
        return TrainConfig(**parser.instantiate(parsed).as_dict())
    except argparse.ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error


def to_yaml(config: TrainConfig) -> str:
    """Every setting, as `read_config` takes it."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def _read(path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(pathlib.Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{path} must hold keys and values")
    return values or {}


def _keys(values: dict[str, Any], place: str = "") -> Iterator[str]:
    """The dotted keys of nested dicts."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _keys(value, f"{place}{key}.")
        else:
            yield f"{place}{key}"


def _check_key(key: str, known: list[str]) -> None:
    if not any(f"{key}.".startswith(f"{name}.") for name in known):  # a setting may hold keys of its own
        near = difflib.get_close_matches(key, known, n=1)
        raise ValueError(
            f"there is no setting {key}: " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")
        )
