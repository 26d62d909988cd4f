"""RMSNorm as a module; the arithmetic is `pallas_kernels.rms_norm`."""

import flax.linen as nn
import jax

from pallas_kernels import rms_norm


class RMSNorm(nn.Module):
    """Computes `x / rms(x) * scale`, or `* (1 + scale)` when zero-centred, over the last axis, `[..., D]`.

    Always uses XLA, which fuses the norm with the operations around it.
    """

    eps: float = 1e-6
    zero_centred: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        initial = nn.initializers.zeros if self.zero_centred else nn.initializers.ones
        scale = self.param("scale", initial, (x.shape[-1],))
        return rms_norm(x, scale, eps=self.eps, zero_centred=self.zero_centred, implementation="xla")
