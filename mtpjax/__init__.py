"""Multi-token prediction in JAX: train MTP modules, decode with them losslessly, on a CPU or a mesh of GPUs."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtpjax import train
    from mtpjax.architectures import presets
    from mtpjax.checkpoint import load
    from mtpjax.config import ModelConfig, Objective, TrainConfig
    from mtpjax.decode.config import DecodeConfig, SamplingParams
    from mtpjax.decode.generate import generate, speculative_generate
    from mtpjax.decode.result import GenerationResult
    from mtpjax.decode.self_check import check_acceptance
    from mtpjax.model import MTPModel, add_mtp_modules, forward, init_params

__all__ = [
    "DecodeConfig",
    "GenerationResult",
    "MTPModel",
    "ModelConfig",
    "Objective",
    "SamplingParams",
    "TrainConfig",
    "add_mtp_modules",
    "check_acceptance",
    "forward",
    "generate",
    "init_params",
    "load",
    "presets",
    "speculative_generate",
    "train",
]

_HOMES = {
    "checkpoint": ("load",),
    "config": ("ModelConfig", "Objective", "TrainConfig"),
    "decode.config": ("DecodeConfig", "SamplingParams"),
    "decode.generate": ("generate", "speculative_generate"),
    "decode.result": ("GenerationResult",),
    "decode.self_check": ("check_acceptance",),
    "model": ("MTPModel", "add_mtp_modules", "forward", "init_params"),
    "architectures": ("presets",),
}


def __getattr__(name: str):
    """Imports a public name when it is asked for, so that `mtpjax --help` need not wait for JAX."""
    if name == "train":
        return importlib.import_module("mtpjax.train")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"mtpjax.{home}"), name)
    raise AttributeError(f"module 'mtpjax' has no attribute '{name}'")
