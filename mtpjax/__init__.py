"""Multi-token prediction in JAX: train MTP modules, decode with them losslessly, on a CPU or a mesh of GPUs."""

from mtpjax.config import DecodeConfig, ModelConfig, TrainConfig, presets
from mtpjax.decode.generate import generate, speculative_generate
from mtpjax.decode.result import GenerationResult
from mtpjax.model import MTPModel, forward, init_params

__all__ = [
    "DecodeConfig",
    "GenerationResult",
    "MTPModel",
    "ModelConfig",
    "TrainConfig",
    "forward",
    "generate",
    "init_params",
    "presets",
    "speculative_generate",
]
