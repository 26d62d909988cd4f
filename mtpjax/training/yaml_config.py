"""Reads and writes training settings and architectures as YAML, and applies `key=value` pairs from the command line."""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonargparse
import yaml

from mtpjax.errors import printable
from mtpjax.messages import did_you_mean, require
from mtpjax.models.config import ModelConfig
from mtpjax.models.overrides import MODEL_FIELDS, check_field_name, model_changes, override_config
from mtpjax.safe_open import open_regular
from mtpjax.training.config import TrainConfig

MAX_YAML_BYTES = 1 << 20  # maximum size of a file, and of its text with aliases expanded
REQUIRED = tuple(field.name for field in dataclasses.fields(ModelConfig) if field.default is dataclasses.MISSING)
# Settings with a flag that all commands share. On the command line, the flag replaces the pair.
FLAGS = {"mesh": "--mesh data=2,fsdp=4", "model_type": "--model-type FAMILY"}


def read_train_config(
    path=None, overrides: Sequence[str] = (), *, flags: Mapping[str, Any] | None = None
) -> TrainConfig:
    """Reads settings from a YAML file, which flags and `key=value` pairs override.

    Args:
        path: the file; None: the defaults.
        overrides: pairs such as "steps=100", "objective.mix.kl=1.0", "model.num_mtp_modules=3", or "model=FILE.yaml"
            for a complete architecture. Dots separate the names of nested settings; pairs for a mapping such as
            `objective.mix` replace the whole mapping in the file.
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TrainConfig, skip={"model"})
    known = {**dict(parser.get_defaults().items()), "model": None}
    # Check the keys in the file and the pairs first, so that the error for an unknown key can suggest a similar one.
    values = {} if path is None else read_yaml(path)
    for key in flatten_settings(values):
        _check_key(key, known)
    for pair in overrides:
        _check_pair(pair, known)
        _remove_parent(values, pair.partition("=")[0], known)
    values |= flags or {}
    # Read the architecture separately, because its fields have their own types. The settings store the content of its
    # file, not the file name, so that a run always resumes with its original architecture.
    others, fields, file = split_model_pairs(overrides)
    in_file = values.pop("model", None)
    model = read_model_setting(in_file if file is None else file, fields)
    # jsonargparse converts and checks types, and its errors may span several lines. `TrainConfig` checks ranges.
    try:
        parsed = parser.parse_args([f"--{pair}" for pair in others], parser.parse_object(values))
        return TrainConfig(**parser.instantiate(parsed).as_dict(), model=model)
    except argparse.ArgumentError as error:
        raise ValueError(describe_type_error(error)) from error


def to_yaml(config: TrainConfig) -> str:
    """Formats all settings as YAML that `read_train_config` reads."""
    settings = dataclasses.asdict(config)
    # `TrainConfig` stores mappings as pairs.
    for values, names in ((settings, ("model", "draft_reading", "mesh")), (settings["objective"], ("mix", "start"))):
        values |= {name: dict(values[name]) for name in names}
    return yaml.safe_dump(settings, sort_keys=False)


def _check_pair(pair: str, known: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a pair that is not `key=value` or must be written in a different form."""
    key, found, value = pair.partition("=")
    if not value:
        raise ValueError(f"{pair!r} has no value" if found else f"{pair!r} is not a key=value pair")
    _check_key(key, known)
    # Each setting has one spelling.
    if flag := FLAGS.get(key.partition(".")[0]):
        raise ValueError(f"{pair!r} must be given as a flag: {flag}")
    if key == "sources":
        raise ValueError("sources can only be set in the --config file; data= takes one folder or file")
    if value.startswith("{") and not isinstance(known.get(key), str):
        raise ValueError(f"{pair!r} must be given with dots: {key}.NAME=VALUE for each value")


def _remove_parent(values: dict[str, Any], key: str, known: Mapping[str, Any]) -> None:
    """Removes a key's parent mapping from the values of a file, such as `objective.mix` for `objective.mix.kl`."""
    parent = next((name for name in known if name != "model" and key.startswith(f"{name}.")), None)
    if parent is not None:
        *groups, name = parent.split(".")
        for group in groups:
            values = values.get(group, {})
        values.pop(name, None)


def _check_key(key: str, known: Mapping[str, Any]) -> None:
    """Raises `ValueError` for an unknown key; `known` holds the defaults of all settings."""
    # A setting such as `mesh` has nested keys, so a key may also start with the name of a setting that is a mapping.
    parents = [name for name, default in known.items() if not isinstance(default, str | int | float)]
    if key not in known and not any(key.startswith(f"{name}.") for name in parents):
        raise ValueError(f"unknown setting {key}{did_you_mean(key, known) or ': the settings are ' + ', '.join(known)}")


def read_model_config(path) -> ModelConfig:
    """Reads an architecture from a YAML file, which maps fields of `ModelConfig` to their values.

    Fields that are not in the file have the defaults of `ModelConfig`.

    Args:
        path: the file.

    Returns:
        The architecture.

    Raises:
        ValueError: the file cannot be read, a field is unknown (the message names the nearest ones) or missing, or a
            value has the wrong type or does not fit the others. The message is one line.

    Example:
        >>> import pathlib, tempfile
        >>> from mtpjax import presets
        >>> from mtpjax.training import model_to_yaml, read_model_config
        >>> file = pathlib.Path(tempfile.mkdtemp(), "model.yaml")
        >>> _ = file.write_text(model_to_yaml(presets["tiny"]))
        >>> read_model_config(file) == presets["tiny"]
        True
    """
    content = read_yaml(path)
    missing = [name for name in REQUIRED if name not in content]
    try:
        values = model_changes(typed_fields(content))
        require(not missing, f"{', '.join(missing)} missing: a model needs {', '.join(REQUIRED)}")
        return ModelConfig(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def model_to_yaml(config: ModelConfig) -> str:
    """Formats an architecture as YAML that `read_model_config` reads.

    Args:
        config: the architecture.

    Returns:
        A line for each field.

    Example:
        >>> from mtpjax import presets
        >>> from mtpjax.training import model_to_yaml
        >>> model_to_yaml(presets["tiny"]).splitlines()[:2]
        ['vocab_size: 256', 'hidden_size: 64']
    """
    return yaml.safe_dump(config.to_dict(), sort_keys=False)


def read_model_setting(value: Any, overrides: Sequence[str]) -> ModelConfig | dict[str, Any]:
    """Reads a run's setting `model`, which is a file or a mapping of fields that `model.*` pairs override.

    Args:
        value: the path of a YAML file with a complete architecture, a mapping of fields, or None for no fields.
        overrides: pairs without the prefix "model.", such as "num_mtp_modules=3".

    Returns:
        The complete architecture if there is a file, otherwise the fields that are set.
    """
    if isinstance(value, str):
        return override_config(read_model_config(value), model_changes(typed_fields({}, overrides)))
    if not isinstance(value or {}, Mapping):
        raise ValueError(f"model must be the path of a YAML file or a mapping of fields, not {value!r}")
    return typed_fields(dict(value or {}), overrides)


def typed_fields(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Checks the names and types of `ModelConfig` fields, and parses pairs by these types.

    Args:
        overrides: pairs such as "hidden_size=96", which override `values`.
    """
    # Only the given fields become arguments, because required fields of a complete architecture may be missing here.
    names = dict.fromkeys([*map(str, values), *(pair.partition("=")[0].partition(".")[0] for pair in overrides)])
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    for name in names:
        check_field_name(name, "model.")
        parser.add_argument(f"--model.{name}", type=MODEL_FIELDS[name])
    if not names:
        return {}
    try:
        parsed = parser.parse_object({"model": dict(values)}) if values else None
        parsed = parser.parse_args([f"--model.{pair}" for pair in overrides], parsed)
        return parser.instantiate(parsed).model.as_dict()
    except argparse.ArgumentError as error:
        raise ValueError(describe_type_error(error)) from error


def describe_type_error(error: argparse.ArgumentError) -> str:
    """Describes in one plain line which value has the wrong type, such as "steps must be an integer, not 'abc'".

    Other errors keep their text, in one line.
    """
    return printable(_in_plain_words(" ".join(str(error).split())), 400)


def _in_plain_words(text: str) -> str:
    # Handle settings with nested fields, such as sources.
    if nested := re.fullmatch(r'Parser key "([^"]+)": Problem with given class_path \S+: (.*)', text):
        return f"{nested[1]}: {_in_plain_words(nested[2])}"
    if option := re.fullmatch(r"Option '([^']+)' is not accepted", text):
        return f"unknown setting {option[1]}"
    if union := re.fullmatch(r'Parser key "([^"]+)": Does not validate against .* Given value: (.*)', text):
        return f"{union[1]} has a value of the wrong type: {union[2]!r}"
    found = re.fullmatch(r'Parser key "([^"]+)": Expected a (.+?)\. Got value: (.*)', text)
    if not found:
        return text
    name, kind, value = found.groups()
    if choices := re.fullmatch(r"typing\.Literal\[(.*)\]", kind):
        return f"{name} {value!r} is not one of {choices[1].replace(chr(39), '')}"
    kinds = {"int": "an integer", "float": "a number", "bool": "true or false", "tuple": "a list, such as [A, B]"}
    kind = kind.removeprefix("<class '").removesuffix("'>")
    return f"{name} must be {kinds.get(kind, kind)}, not {value!r}"


def read_yaml(path) -> dict[str, Any]:
    """Reads a YAML mapping.

    Args:
        path: the file; an empty file has no settings.
    """
    try:
        with open_regular(path) as stream:
            content = stream.read(MAX_YAML_BYTES + 1)
        if len(content) > MAX_YAML_BYTES:
            raise ValueError(f"larger than {MAX_YAML_BYTES} bytes")
        values = yaml.safe_load(content)
        _check_expanded_size(values)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{path} must be a mapping of settings")
    return values or {}


def _check_expanded_size(values: Any) -> None:
    """Raises `ValueError` for aliases that form a cycle, or that expand to much more text than the file has."""
    size = 0
    for part in json.JSONEncoder(default=str, skipkeys=True).iterencode(values):
        size += len(part)
        if size > MAX_YAML_BYTES:
            raise ValueError(f"the aliases expand to more than {MAX_YAML_BYTES} bytes")


def split_model_pairs(overrides: Sequence[str]) -> tuple[list[str], list[str], str | None]:
    """Separates the model's settings from the others.

    Returns:
        The other pairs, the pairs `model.key=value` without "model.", and the file in the last `model=FILE`, or None.
    """
    files = [pair.removeprefix("model=") for pair in overrides if pair.startswith("model=")]
    others = [pair for pair in overrides if not pair.startswith(("model=", "model."))]
    fields = [pair.removeprefix("model.") for pair in overrides if pair.startswith("model.")]
    return others, fields, files[-1] if files else None


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings into dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_group = isinstance(value, dict) and value
        flat |= flatten_settings(value, f"{prefix}{key}.") if is_group else {f"{prefix}{key}": value}
    return flat
