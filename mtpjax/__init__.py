"""Multi-token prediction in JAX: train MTP modules, and decode faster with them without changing the text."""

import importlib
from typing import TYPE_CHECKING

from mtpjax.version import __version__

# These imports are for type checkers and editors. At run time, `__getattr__` imports the names.
if TYPE_CHECKING:
    from mtpjax.data.tokenizer import load_tokenizer
    from mtpjax.decoding.config import DecodeConfig, SamplingParams
    from mtpjax.decoding.result import GenerationResult
    from mtpjax.drafters.methods import load_drafter, save_drafter
    from mtpjax.evaluation.self_check import check_acceptance
    from mtpjax.inference.generate import generate, speculative_generate
    from mtpjax.io.checkpoint import load
    from mtpjax.io.save import save
    from mtpjax.models.config import ModelConfig
    from mtpjax.models.forward import forward
    from mtpjax.models.model import MTPModel
    from mtpjax.models.params import add_mtp_modules, init_params, shard_for_decoding
    from mtpjax.models.presets import presets
    from mtpjax.serving.engine import Engine
    from mtpjax.serving.llm import LLM
    from mtpjax.serving.request import Request
    from mtpjax.serving.sizes import EngineSettings
    from mtpjax.training.config import TrainConfig
    from mtpjax.training.objective import Objective
    from mtpjax.training.trainer import train

__all__ = [
    "LLM",
    "DecodeConfig",
    "Engine",
    "EngineSettings",
    "GenerationResult",
    "MTPModel",
    "ModelConfig",
    "Objective",
    "Request",
    "SamplingParams",
    "TrainConfig",
    "__version__",
    "add_mtp_modules",
    "check_acceptance",
    "forward",
    "generate",
    "init_params",
    "load",
    "load_drafter",
    "load_tokenizer",
    "presets",
    "save",
    "save_drafter",
    "shard_for_decoding",
    "speculative_generate",
    "train",
]

# The modules that define the public names. `__getattr__` imports them on first use, because importing JAX takes seconds
# and `mtpjax --help` must be fast.
_HOMES = {
    "data.tokenizer": ("load_tokenizer",),
    "decoding.config": ("DecodeConfig", "SamplingParams"),
    "drafters.methods": ("load_drafter", "save_drafter"),
    "inference.generate": ("generate", "speculative_generate"),
    "decoding.result": ("GenerationResult",),
    "evaluation.self_check": ("check_acceptance",),
    "io.checkpoint": ("load",),
    "io.save": ("save",),
    "models.config": ("ModelConfig",),
    "models.forward": ("forward",),
    "models.model": ("MTPModel",),
    "models.params": ("add_mtp_modules", "init_params", "shard_for_decoding"),
    "models.presets": ("presets",),
    "serving.engine": ("Engine",),
    "serving.llm": ("LLM",),
    "serving.request": ("Request",),
    "serving.sizes": ("EngineSettings",),
    "training.config": ("TrainConfig",),
    "training.objective": ("Objective",),
    "training.trainer": ("train",),
}


def __getattr__(name: str):
    """Imports a public name when it is first used."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"mtpjax.{home}"), name)
    raise AttributeError(f"module 'mtpjax' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Lists the public names, which are not in `globals()`."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
