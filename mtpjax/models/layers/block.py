"""One decoder layer: pre-norm attention and feed-forward with residuals."""

import flax.linen as nn
import jax

from mtpjax.models.attention_kinds import ATTENTION_KINDS
from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.layers.experts import Experts, SwiGLU
from mtpjax.models.layers.norm import RMSNorm
from mtpjax.models.masks import Entries, Masks, Recycled, View


class Block(nn.Module):
    """Maps `[B, T, D]` to `[B, T, D]`, the attention's new cache entries, and the selection of an indexer.

    `layer_cache` is one layer of a cache, which comes back with the new entries appended; `Recycled`; or None for a
    pass over whole rows. `selection` holds the masks of the last indexer before, which layers without one pass on.
    """

    config: ModelConfig
    kind: LayerKind
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self, x: jax.Array, view: View, layer_cache: Entries | Recycled | None = None, selection: Masks | None = None
    ) -> tuple[jax.Array, Entries, Masks | None]:
        config = self.config
        # Attention, of the layer's kind.
        record = ATTENTION_KINDS[self.kind.attention]
        attention = record.module(config, self.kind, self.implementation, record.scope)
        normed = RMSNorm(config.rms_norm_eps, config.zero_centred_norm, name="norm_attention")(x)
        attended, entries, selection = attention(normed, view, layer_cache, selection)
        x = x + attended
        # Feed-forward: experts or one dense SwiGLU. A pass with a cache needs no gradients.
        normed = RMSNorm(config.rms_norm_eps, config.zero_centred_norm, name="norm_feed_forward")(x)
        if self.kind.is_moe:
            output = Experts(config, self.implementation, name="experts")(normed, cached=view.start is not None)
        else:
            output = SwiGLU(config.intermediate_size, self.implementation, name="dense")(normed)
        return x + output, entries, selection
