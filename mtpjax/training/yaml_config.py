"""Reads training settings from a YAML file and `key=value` pairs."""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonargparse
import yaml

from mtpjax.messages import did_you_mean
from mtpjax.training.config import TrainConfig
from mtpjax.training.model_yaml import read_model_setting, read_yaml, split_model_pairs


def read_train_config(path=None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads settings from a YAML file, then applies `key=value` pairs over them.

    Args:
        path: the file; None: the defaults.
        overrides: pairs such as "steps=100", "objective.warmup=0.1", "model.num_mtp_modules=3", or "model=FILE.yaml",
            which names a whole architecture (`mtpjax.training.model_yaml`).

    Returns:
        The settings.

    Raises:
        ValueError: the file or a pair cannot be read, a key is unknown (the message names the nearest one), or a value
            has the wrong type or is out of range. One line.
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TrainConfig, skip={"model"})
    known = {**dict(parser.get_defaults().items()), "model": None}
    # Check the keys of both first, so that the message for an unknown key can name the nearest one.
    values = {} if path is None else read_yaml(path)
    for key in _dotted_keys(values):
        _check_key(key, known)
    for pair in overrides:
        key, found, _ = pair.partition("=")
        if not found:
            raise ValueError(f"{pair!r} is not a key=value pair")
        _check_key(key, known)
    # The architecture has its own types. A file that it is read from is not named in the settings: they hold its
    # content, so that a run resumes with the architecture that it began with, and never silently with another.
    others, fields, file = split_model_pairs(overrides)
    in_file = values.pop("model", None)
    model = read_model_setting(in_file if file is None else file, fields)
    # jsonargparse converts and checks types, `TrainConfig` checks ranges. The former's errors may span several lines.
    try:
        parsed = parser.parse_args([f"--{pair}" for pair in others], parser.parse_object(values))
        return TrainConfig(**parser.instantiate(parsed).as_dict(), model=model)
    except argparse.ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error


def to_yaml(config: TrainConfig) -> str:
    """Formats all settings as YAML that `read_train_config` reads."""
    settings = dataclasses.asdict(config)
    return yaml.safe_dump(settings | {"model": dict(settings["model"])}, sort_keys=False)


def _dotted_keys(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of nested dicts."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _dotted_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _check_key(key: str, known: Mapping[str, Any]) -> None:
    """Raises `ValueError` for an unknown key; `known` has the defaults of all settings."""
    # A setting such as `mesh` has its own keys, so a key may also begin with a known one that is not a single value.
    parents = [name for name, default in known.items() if not isinstance(default, str | int | float)]
    if key not in known and not any(key.startswith(f"{name}.") for name in parents):
        raise ValueError(f"unknown setting {key}{did_you_mean(key, known) or ': the settings are ' + ', '.join(known)}")
