"""Reads training settings from a YAML file and `key=value` pairs."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jsonargparse
import yaml

from mtpjax.messages import did_you_mean
from mtpjax.training.config import TrainConfig
from mtpjax.training.yaml_config import (
    describe_type_error,
    flatten_settings,
    read_model_setting,
    read_yaml,
    split_model_pairs,
)

# Settings that the command line sets by flags that all commands share, not by pairs.
FLAGS = {"mesh": "--mesh data=2,fsdp=4", "model_type": "--model-type FAMILY"}


def read_train_config(
    path=None, overrides: Sequence[str] = (), *, flags: Mapping[str, Any] | None = None
) -> TrainConfig:
    """Reads settings from a YAML file, then applies flags and `key=value` pairs over them.

    Args:
        path: the file; None: the defaults.
        overrides: pairs such as "steps=100", "objective.mix.kl=1.0", "model.num_mtp_modules=3", or "model=FILE.yaml",
            which names a whole architecture (`mtpjax.training.model_yaml`). Dots name nested settings; pairs of a
            mapping such as `objective.mix` replace the one in the file.
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TrainConfig, skip={"model"})
    known = {**dict(parser.get_defaults().items()), "model": None}
    # Check the keys of both first, so that the message for an unknown key can name the nearest one.
    values = {} if path is None else read_yaml(path)
    for key in flatten_settings(values):
        _check_key(key, known)
    for pair in overrides:
        _check_pair(pair, known)
        _remove_parent(values, pair.partition("=")[0], known)
    values |= flags or {}
    # The architecture has its own types. The settings hold the content of its file, not the name, so that a run always
    # resumes with its original architecture.
    others, fields, file = split_model_pairs(overrides)
    in_file = values.pop("model", None)
    model = read_model_setting(in_file if file is None else file, fields)
    # jsonargparse converts and checks types, `TrainConfig` checks ranges. The former's errors may span several lines.
    try:
        parsed = parser.parse_args([f"--{pair}" for pair in others], parser.parse_object(values))
        return TrainConfig(**parser.instantiate(parsed).as_dict(), model=model)
    except argparse.ArgumentError as error:
        raise ValueError(describe_type_error(error)) from error


def to_yaml(config: TrainConfig) -> str:
    """Formats all settings as YAML that `read_train_config` reads."""
    settings = dataclasses.asdict(config)
    # Mappings are kept as pairs.
    for values, names in ((settings, ("model", "draft_reading", "mesh")), (settings["objective"], ("mix", "start"))):
        values |= {name: dict(values[name]) for name in names}
    return yaml.safe_dump(settings, sort_keys=False)


def _check_pair(pair: str, known: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a pair that is not `key=value`, or must be written in a different form."""
    key, found, value = pair.partition("=")
    if not value:
        raise ValueError(f"{pair!r} has no value" if found else f"{pair!r} is not a key=value pair")
    _check_key(key, known)
    # Each setting has one spelling.
    if flag := FLAGS.get(key.partition(".")[0]):
        raise ValueError(f"{pair!r} is written as a flag: {flag}")
    if key == "sources":
        raise ValueError("sources are written in a file of --config; `data` names one folder or file")
    if value.startswith("{") and not isinstance(known.get(key), str):
        raise ValueError(f"{pair!r} is written with dots: {key}.NAME=VALUE for each value")


def _remove_parent(values: dict[str, Any], key: str, known: Mapping[str, Any]) -> None:
    """Removes the mapping of a file that a key belongs to, such as `objective.mix` of `objective.mix.kl`."""
    parent = next((name for name in known if name != "model" and key.startswith(f"{name}.")), None)
    if parent is not None:
        *groups, name = parent.split(".")
        for group in groups:
            values = values.get(group, {})
        values.pop(name, None)


def _check_key(key: str, known: Mapping[str, Any]) -> None:
    """Raises `ValueError` for an unknown key; `known` has the defaults of all settings."""
    # A setting such as `mesh` has its own keys, so a key may also start with a known one that is not a single value.
    parents = [name for name, default in known.items() if not isinstance(default, str | int | float)]
    if key not in known and not any(key.startswith(f"{name}.") for name in parents):
        raise ValueError(f"unknown setting {key}{did_you_mean(key, known) or ': the settings are ' + ', '.join(known)}")
