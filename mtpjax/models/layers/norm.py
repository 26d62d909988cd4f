"""RMSNorm as modules; the arithmetic is `pallas_kernels.rms_norm` and `add_rms_norm`."""

import flax.linen as nn
import jax

from pallas_kernels import PartialSums, add_rms_norm, rms_norm


class NormScale(nn.Module):
    """The parameter of `RMSNorm`: returns the scale `[width]`."""

    width: int
    zero_centred: bool = False

    @nn.compact
    def __call__(self) -> jax.Array:
        return _scale(self, self.width)


class RMSNorm(nn.Module):
    """Computes `x / rms(x) * scale`, or `* (1 + scale)` when zero-centred, over the last axis, `[..., D]`.

    Always uses XLA, which fuses the norm with the operations around it.
    """

    eps: float = 1e-6
    zero_centred: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = _scale(self, x.shape[-1])
        return rms_norm(x, scale, eps=self.eps, zero_centred=self.zero_centred, implementation="xla")


class AddRMSNorm(nn.Module):
    """Adds an update to the residual stream and normalises it: returns the sum and its norm, both `[..., D]`.

    Has the parameter of `RMSNorm`. Without an update, only normalises; without a stream, it begins with the update. One
    kernel does both, or XLA.
    """

    eps: float = 1e-6
    zero_centred: bool = False
    implementation: str = "auto"

    @nn.compact
    def __call__(self, x: jax.Array | None, update: PartialSums | None = None) -> tuple[jax.Array, jax.Array]:
        settings = {"eps": self.eps, "zero_centred": self.zero_centred}
        if update is None:
            assert x is not None, "a norm needs a stream or an update"
            return x, rms_norm(x, _scale(self, x.shape[-1]), **settings, implementation="xla")
        scale = _scale(self, update.shape[-1])
        return add_rms_norm(x, update, scale, **settings, implementation=self.implementation)


def _scale(norm: NormScale | RMSNorm | AddRMSNorm, width: int) -> jax.Array:
    """Makes or reads the norm's parameter, which starts as the identity."""
    initial = nn.initializers.zeros if norm.zero_centred else nn.initializers.ones
    return norm.param("scale", initial, (width,))
