"""Reads training settings from a YAML file and `key=value` pairs."""

import argparse
import dataclasses
import difflib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jsonargparse
import yaml

from mtpjax.training.config import TrainConfig


def read_train_config(path=None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads settings from a YAML file, then applies `key=value` pairs over them.

    Args:
        path: the file; None: the defaults.
        overrides: pairs such as "steps=100" or "objective.warmup=0.1".

    Returns:
        The settings.

    Raises:
        ValueError: the file or a pair cannot be read, a key is unknown (the message names the nearest one), or a value
            has the wrong type or is out of range. One line.
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TrainConfig)
    known = list(parser.get_defaults().keys())
    # Check the keys of both first, so that the message for an unknown key can name the nearest one.
    values = {} if path is None else _read_yaml(path)
    for key in _dotted_keys(values):
        _check_key(key, known)
    for pair in overrides:
        key, found, _ = pair.partition("=")
        if not found:
            raise ValueError(f"{pair!r} is not a key=value pair")
        _check_key(key, known)
    # jsonargparse converts and checks types, `TrainConfig` checks ranges. The former's errors may span several lines.
    try:
        parsed = parser.parse_args([f"--{pair}" for pair in overrides], parser.parse_object(values))
        return TrainConfig(**parser.instantiate(parsed).as_dict())
    except argparse.ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error


def to_yaml(config: TrainConfig) -> str:
    """Formats all settings as YAML that `read_train_config` reads."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def _read_yaml(path) -> dict[str, Any]:
    """Reads a YAML mapping; an empty file gives no settings."""
    try:
        values = yaml.safe_load(pathlib.Path(path).read_text())
        json.dumps(values, default=str, skipkeys=True)  # finds aliases that form a cycle
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{path} must be a mapping of settings")
    return values or {}


def _dotted_keys(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of nested dicts."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _dotted_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _check_key(key: str, known: list[str]) -> None:
    """Raises `ValueError` for an unknown key."""
    # A setting such as `mesh` has keys of its own, so a key may also begin with a known one.
    if not any(f"{key}.".startswith(f"{name}.") for name in known):
        near = difflib.get_close_matches(key, known, n=1)
        raise ValueError(
            f"unknown setting {key}: "
            + (f"did you mean {near[0]}?" if near else f"the settings are {', '.join(known)}")
        )
