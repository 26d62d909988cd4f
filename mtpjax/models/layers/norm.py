"""RMSNorm modules, which call `pallas_kernels.rms_norm` and `add_rms_norm`."""

import flax.linen as nn
import jax

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.batch_invariance import is_batch_invariant
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.rms_norm import rms_norm


def fused_norm(x: jax.Array, scale: jax.Array, *, implementation: str, **settings) -> jax.Array:
    """Computes `rms_norm` in XLA, which fuses it with neighbouring ops, or with the kernel inside `batch_invariant`."""
    return rms_norm(x, scale, **settings, implementation=implementation if is_batch_invariant() else "xla")


class NormScale(nn.Module):
    """Declares the parameter of an `RMSNorm` and returns it, the scale `[width]`."""

    width: int
    zero_centred: bool = False

    @nn.compact
    def __call__(self) -> jax.Array:
        return _scale(self, self.width)


class RMSNorm(nn.Module):
    """Computes `x / rms(x) * scale`, or `* (1 + scale)` when zero-centred, over the last axis, `[..., D]`.

    See `fused_norm` for the implementation.
    """

    eps: float = 1e-6
    zero_centred: bool = False
    implementation: str = "auto"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = _scale(self, x.shape[-1])
        settings = {"eps": self.eps, "zero_centred": self.zero_centred}
        return fused_norm(x, scale, **settings, implementation=self.implementation)


class AddRMSNorm(nn.Module):
    """Adds an update to the residual stream; returns the sum and the normalised sum, both `[..., D]`.

    Has the same parameter as `RMSNorm`. Without an update it only normalises; without a stream, the update becomes the
    stream. Runs in one kernel or in XLA.
    """

    eps: float = 1e-6
    zero_centred: bool = False
    implementation: str = "auto"

    @nn.compact
    def __call__(self, x: jax.Array | None, update: PartialSums | None = None) -> tuple[jax.Array, jax.Array]:
        settings = {"eps": self.eps, "zero_centred": self.zero_centred}
        if update is None:
            assert x is not None, "a norm needs a stream or an update"
            return x, fused_norm(x, _scale(self, x.shape[-1]), **settings, implementation=self.implementation)
        scale = _scale(self, update.shape[-1])
        return add_rms_norm(x, update, scale, **settings, implementation=self.implementation)


def _scale(norm: NormScale | RMSNorm | AddRMSNorm, width: int) -> jax.Array:
    """Makes or reads the norm's parameter, initialised to the identity."""
    initial = nn.initializers.zeros if norm.zero_centred else nn.initializers.ones
    return norm.param("scale", initial, (width,))
