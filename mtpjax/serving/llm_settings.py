"""The settings of an `LLM`: fields of `DecodeConfig` and of `EngineSettings`."""

import dataclasses
from typing import Any

from mtpjax.decoding.config import DecodeConfig
from mtpjax.drafters.methods import default_num_steps
from mtpjax.errors import UsageError
from mtpjax.messages import did_you_mean
from mtpjax.models.model import MTPModel
from mtpjax.serving.sizes import EngineSettings

# Fields of `DecodeConfig` that each text has for itself, and one that only `speculative_generate` supports.
REQUEST_FIELDS = ("max_new_tokens", "stop_token_ids", "stop_sequences", "logprobs", "depth_policy")


def split_settings(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides settings into the fields of `DecodeConfig` and of `EngineSettings`, which has `max_length`."""
    engine_names, decode_names = (
        [field.name for field in dataclasses.fields(kind) if field.name not in REQUEST_FIELDS]
        for kind in (EngineSettings, DecodeConfig)
    )
    for name in settings:
        if name in REQUEST_FIELDS:
            raise UsageError(f"{name} is not a setting of LLM: pass it to generate, chat or stream")
        if name not in engine_names and name not in decode_names:
            hint = did_you_mean(name, [*engine_names, *decode_names])
            raise UsageError(f"unknown setting {name}{hint}; LLM takes the fields of DecodeConfig and EngineSettings")
    engine = {name: value for name, value in settings.items() if name in engine_names}
    return {name: value for name, value in settings.items() if name not in engine_names}, engine


def make_config(decode: dict[str, Any], model: MTPModel) -> DecodeConfig:
    """Makes the `DecodeConfig`. Without `num_steps`, it has the default number of draft levels."""
    if decode.get("num_steps") is None:
        decode["num_steps"] = default_num_steps(decode.get("drafter", "mtp"), model.config)
    return DecodeConfig(**decode)
