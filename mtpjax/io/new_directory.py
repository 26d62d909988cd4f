"""Describes and writes the files other than weights in an exported Hugging Face directory."""

import dataclasses
import json
import logging
import pathlib
from typing import Any, NamedTuple

from conversion.describe_config import describe_config, differing_fields
from conversion.families import FAMILIES, Layout
from conversion.hf_config import parse_config
from conversion.hf_config_write import edit_config
from mtpjax.errors import CheckpointFileError, ConfigError
from mtpjax.io.checkpoint_format import read_kept
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.io.huggingface_files import HEADERS_FILE, HUGGINGFACE_FOLDER
from mtpjax.models.config import ModelConfig
from mtpjax.safe_open import ADDITIONAL_TEMPLATES, parse_json

log = logging.getLogger("mtpjax.conversion")

KEPT_CONFIG, GENERATION_CONFIG = f"{HUGGINGFACE_FOLDER}/config.json", "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class OriginalDirectory(NamedTuple):
    """The Hugging Face directory from which a checkpoint was converted, or one that describes its model."""

    model_type: str
    content: dict[str, Any]  # the values in config.json
    headers: dict[str, bytes]  # by file; empty if the checkpoint was not converted
    keeps_dtypes: bool = False  # whether the conversion kept the weights' dtypes

    @property
    def layout(self) -> Layout:
        """The family's tensor names."""
        return FAMILIES[self.model_type].layout


def read_original(reader: CheckpointReader) -> OriginalDirectory | None:
    """Reads what a converted checkpoint keeps from its Hugging Face directory; None if it was not converted."""
    if HEADERS_FILE not in reader.files:
        return None
    kept = _read_object(reader, HEADERS_FILE)
    headers, model_type = kept.get("headers"), kept.get("model_type")
    if not isinstance(headers, dict) or model_type not in FAMILIES:
        raise CheckpointFileError(
            f"{reader.path / HEADERS_FILE} is damaged: it lacks headers or a supported model_type"
        )
    # The export writes files with these names, so a path among them could lead out of the target folder.
    for file, text in headers.items():
        if pathlib.PurePath(file).name != file or not file.endswith(".safetensors") or not isinstance(text, str):
            raise CheckpointFileError(
                f"{reader.path / HEADERS_FILE} lists {file!r}, which is not the name of a safetensors file"
            )
    # A header starts with its length as 8 little-endian bytes.
    encoded = {file: text.encode() for file, text in headers.items()}
    content = _read_object(reader, KEPT_CONFIG)
    headers = {file: len(text).to_bytes(8, "little") + text for file, text in encoded.items()}
    return OriginalDirectory(model_type, content, headers, kept.get("keeps_dtypes") is True)


def describe_directory(reader: CheckpointReader, config: ModelConfig, model_type: str | None) -> OriginalDirectory:
    """Chooses the family and makes the `config.json` for a model that was not converted.

    A model that was trained from a Hugging Face checkpoint keeps that checkpoint's family and other configuration keys.

    Args:
        model_type: the family to use; by default, the family of the checkpoint that training started from, or else the
            first that fits.
    """
    initial = _initial_config(reader)
    if initial is not None and model_type in (None, initial["model_type"]):
        # The original's keys are valid for the new weights if the trunk is the same.
        if not set(differing_fields(parse_config(initial).model, config)) - {"num_mtp_modules"}:
            initial = edit_config(
                initial, FAMILIES[initial["model_type"]].layout, num_mtp_modules=config.num_mtp_modules
            )
            return OriginalDirectory(initial["model_type"], initial, {})
        try:
            return OriginalDirectory(*describe_config(config, initial["model_type"]), {})
        except ConfigError as error:
            log.warning("the model can no longer be written as model_type %s: %s", initial["model_type"], error)
    made, values = describe_config(config, model_type)
    return OriginalDirectory(made, values | _token_ids(reader), {})


def module_layout(layout: Layout, config: ModelConfig) -> Layout:
    """Returns a new directory's layout, with separate tensor names for each module if there are several."""
    is_shared = layout.mtp == "mtp" and config.num_mtp_modules > 1
    return dataclasses.replace(layout, mtp="mtp_each") if is_shared else layout


def copy_kept_files(reader: CheckpointReader, folder: pathlib.Path, without: set[str]) -> None:
    """Copies the small files that a checkpoint keeps, such as the tokenizer, chat templates and generation settings.

    Args:
        without: names of files to omit.
    """
    # Copy only files with verified digests that are directly in the folder or are additional chat templates.
    sources = (HUGGINGFACE_FOLDER, f"{HUGGINGFACE_FOLDER}/{ADDITIONAL_TEMPLATES}")
    for file in sorted(reader.files):
        path = pathlib.PurePosixPath(file)
        if str(path.parent) in sources and path.name not in without:
            kept = folder / path.relative_to(HUGGINGFACE_FOLDER)
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(read_kept(reader.path, file))


def write_generation_config(folder: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes `generation_config.json` with the special token ids from `config.json`, unless the file exists."""
    if (folder / GENERATION_CONFIG).exists():
        return
    values = {name: content[name] for name in TOKEN_IDS if content.get(name) is not None}
    (folder / GENERATION_CONFIG).write_text(json.dumps({"_from_model_config": True, **values}, indent=2) + "\n")


def _initial_config(reader: CheckpointReader) -> dict[str, Any] | None:
    """Returns the `config.json` of the checkpoint that training started from, reduced to the text model's settings."""
    if KEPT_CONFIG not in reader.files:
        return None
    values = _read_object(reader, KEPT_CONFIG)
    # If the model is multimodal, only its text model was trained.
    if isinstance(values.get("text_config"), dict):
        model_type = f"{values.get('model_type')}_text"
        outer = {key: values[key] for key in ("dtype", "torch_dtype") if key in values}
        tied = {key: values[key] for key in ("tie_word_embeddings",) if values.get(key) is not None}
        values = {**outer, **values["text_config"], **tied, "model_type": model_type}
    if values.get("model_type") not in FAMILIES:
        return None
    # Trained weights are not quantized.
    values.pop("quantization_config", None)
    return {**values, "architectures": [FAMILIES[values["model_type"]].architecture]}


def _token_ids(reader: CheckpointReader) -> dict[str, Any]:
    """Returns the special token ids from the checkpoint's tokenizer files, or the byte tokenizer's special ids."""
    file = f"{HUGGINGFACE_FOLDER}/{GENERATION_CONFIG}"
    if file in reader.files:
        return {key: value for key, value in _read_object(reader, file).items() if key in TOKEN_IDS}
    return {"eos_token_id": 0} if reader.metadata.get("tokenizer") == "bytes" else {}


def _read_object(reader: CheckpointReader, file: str) -> dict[str, Any]:
    """Reads a file of the checkpoint that contains a JSON object."""
    path, content = reader.path / file, read_kept(reader.path, file)
    try:
        values = parse_json(content)
    except ValueError as error:
        raise CheckpointFileError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointFileError(f"{path} contains a {type(values).__name__}, not an object")
    return values
