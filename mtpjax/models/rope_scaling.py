"""Rotary scalings for texts longer than the original training length; static and hashable."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from mtpjax.messages import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN rotary scaling (2309.00071) with DeepSeek's two softmax terms, named as in Hugging Face's `rope_scaling`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0  # 0: not set
    mscale_all_dim: float = 0.0  # 0: not set
    truncate: bool = True  # the ramp starts and ends at whole pairs
    attention_factor: float | None = None  # factor that multiplies cosines and sines; None: see `rotation_factor`

    def magnitude(self, mscale: float = 1.0) -> float:
        """Returns YaRN's attention temperature, `0.1 * mscale * ln(factor) + 1`."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def rotation_factor(self) -> float:
        """Factor that multiplies cosines and sines. As in transformers, `mscale` applies only with `mscale_all_dim`."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's rotary scaling by wavelength, named as in Hugging Face's `rope_scaling` of type "llama3"."""

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self):
        low, high = self.low_freq_factor, self.high_freq_factor
        require(low < high, f"low_freq_factor ({low}) must be below high_freq_factor ({high})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Linear rotary scaling, which divides every frequency (position interpolation, 2306.15595)."""

    factor: float
    rope_type: Literal["linear"] = "linear"  # identifies the type when only the values are stored


RopeScaling = Yarn | Llama3Scaling | LinearScaling


def make_scaling(values: Mapping[str, Any]) -> RopeScaling:
    """Makes a rotary scaling from its stored fields.

    Args:
        values: fields of the scaling. It is linear if `rope_type` is "linear", Llama 3 if there is a `low_freq_factor`,
            and YaRN otherwise.

    Raises:
        TypeError: a field is missing or unknown.
    """
    if values.get("rope_type") == "linear":
        return LinearScaling(**values)
    return Llama3Scaling(**values) if "low_freq_factor" in values else Yarn(**values)
