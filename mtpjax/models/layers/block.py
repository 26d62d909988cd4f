"""One decoder layer: pre-norm attention and feed-forward with residuals."""

import flax.linen as nn
import jax

from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.layers.delta_rule import DeltaRule
from mtpjax.models.layers.experts import Experts, SwiGLU
from mtpjax.models.layers.grouped_attention import GroupedAttention
from mtpjax.models.layers.latent_attention import LatentAttention
from mtpjax.models.layers.norm import RMSNorm
from mtpjax.models.masks import Entries, Masks, Recycled, View


class Block(nn.Module):
    """`[B, T, D] -> [B, T, D]`, the entries that attention keeps, and an indexer's choice of keys.

    `memory` is one layer of a cache (which comes back appended to), `Recycled`, or None for a pass over whole rows.
    `chosen` is the choice of the last indexer before, which passes through layers that have none.
    """

    config: ModelConfig
    kind: LayerKind
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self, x: jax.Array, view: View, memory: Entries | Recycled | None = None, chosen: Masks | None = None
    ) -> tuple[jax.Array, Entries, Masks | None]:
        config = self.config
        normed = RMSNorm(config.rms_norm_eps, config.zero_centred_norm, name="norm_attention")(x)
        attended, entries, chosen = self._attention()(normed, view, memory, chosen)
        x = x + attended
        normed = RMSNorm(config.rms_norm_eps, config.zero_centred_norm, name="norm_feed_forward")(x)
        if self.kind.is_moe:
            made = Experts(config, self.implementation, name="experts")(normed, cached=view.start is not None)
        else:
            made = SwiGLU(config.intermediate_size, self.implementation, name="dense")(normed)
        return x + made, entries, chosen

    def _attention(self) -> nn.Module:
        config, name, implementation = self.config, self.kind.attention, self.implementation
        if name == "delta":
            return DeltaRule(config, implementation, name="delta")
        if name == "latent":
            return LatentAttention(config, self.kind.indexer, implementation=implementation, name="attention")
        return GroupedAttention(config, implementation, name="attention")
