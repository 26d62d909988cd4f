"""Multi-token prediction in JAX: train MTP modules, decode with them losslessly, on a CPU or a mesh of GPUs."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtpjax.decoding.config import DecodeConfig, SamplingParams
    from mtpjax.decoding.generate import generate, speculative_generate
    from mtpjax.decoding.result import GenerationResult
    from mtpjax.evaluation.self_check import check_acceptance
    from mtpjax.io.checkpoint import load
    from mtpjax.models.config import ModelConfig
    from mtpjax.models.model import MTPModel, add_mtp_modules, forward, init_params
    from mtpjax.models.presets import presets
    from mtpjax.training.config import Objective, TrainConfig
    from mtpjax.training.trainer import train

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
    "decoding.config": ("DecodeConfig", "SamplingParams"),
    "decoding.generate": ("generate", "speculative_generate"),
    "decoding.result": ("GenerationResult",),
    "evaluation.self_check": ("check_acceptance",),
    "io.checkpoint": ("load",),
    "models.config": ("ModelConfig",),
    "models.model": ("MTPModel", "add_mtp_modules", "forward", "init_params"),
    "models.presets": ("presets",),
    "training.config": ("Objective", "TrainConfig"),
    "training.trainer": ("train",),
}


def __getattr__(name: str):
    """Imports a public name when it is asked for, so that `mtpjax --help` need not wait for JAX."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"mtpjax.{home}"), name)
    raise AttributeError(f"module 'mtpjax' has no attribute '{name}'")
