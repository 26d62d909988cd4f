"""One decoder layer: pre-norm attention and feed-forward with residuals."""

import flax.linen as nn
import jax

from mtpjax.config import ModelConfig
from mtpjax.layers.attend import Entries, Recycled, View
from mtpjax.layers.experts import Experts, SwiGLU
from mtpjax.layers.grouped_attention import GroupedAttention
from mtpjax.layers.latent_attention import LatentAttention
from mtpjax.layers.norm import RMSNorm

ATTENTION = {"grouped": GroupedAttention, "latent": LatentAttention}


class Block(nn.Module):
    """`[B, T, D] -> [B, T, D]`, and the entries that attention keeps.

    `memory` is one layer of a cache (which comes back appended to), `Recycled`, or None for a pass over whole rows.
    """

    config: ModelConfig
    is_moe: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, view: View, memory: Entries | Recycled | None = None) -> tuple[jax.Array, Entries]:
        config = self.config
        normed = RMSNorm(config.rms_norm_eps, config.zero_centred_norm, name="norm_attention")(x)
        attended, entries = ATTENTION[config.attention](config, name="attention")(normed, view, memory)
        x = x + attended
        normed = RMSNorm(config.rms_norm_eps, config.zero_centred_norm, name="norm_feed_forward")(x)
        if self.is_moe:
            made = Experts(config, name="experts")(normed, cached=view.start is not None)
        else:
            made = SwiGLU(config.intermediate_size, name="dense")(normed)
        return x + made, entries
