"""One decoder layer with pre-norm attention, a feed-forward layer and residual connections."""

import flax.linen as nn
import jax

from mtpjax.models.attention_kinds import ATTENTION_KINDS
from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.layers.experts import Experts, SwiGLU
from mtpjax.models.layers.norm import AddRMSNorm
from mtpjax.models.view import Entries, Masks, Recycled, View
from pallas_kernels.partial_sums import PartialSums


class Block(nn.Module):
    """Maps the residual stream `[B, T, D]` to the stream after attention and, separately, the feed-forward update.

    The feed-forward update is not added yet, because the next layer's norm adds it in the same kernel; the argument
    `update` is the previous layer's update. If `x` is None, the stream starts with `update`. Also returns the new cache
    entries of attention and the indexer's selection.

    `layer_cache` is one layer of a cache (returned with the new entries appended), `Recycled`, or None for a pass over
    whole rows. `selection` holds the masks from the last indexer before this layer; layers without an indexer pass them
    on.
    """

    config: ModelConfig
    kind: LayerKind
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self,
        x: jax.Array | None,
        view: View,
        layer_cache: Entries | Recycled | None = None,
        selection: Masks | None = None,
        update: PartialSums | None = None,
    ) -> tuple[jax.Array, PartialSums, Entries, Masks | None]:
        config = self.config

        def add_and_norm(name: str) -> AddRMSNorm:
            return AddRMSNorm(config.rms_norm_eps, config.zero_centred_norm, self.implementation, name=name)

        # Attention of this layer's kind.
        record = ATTENTION_KINDS[self.kind.attention]
        attention = record.module(config, self.kind, self.implementation, record.scope)
        x, normed = add_and_norm("norm_attention")(x, update)
        own_view = view.of_layer(is_sliding=self.kind.is_sliding)
        attended, entries, selection = attention(normed, own_view, layer_cache, selection)
        # The feed-forward layer is experts or one dense SwiGLU. A pass with a cache needs no gradients.
        x, normed = add_and_norm("norm_feed_forward")(x, attended)
        if self.kind.is_moe:
            limits = self.kind.expert_limit, self.kind.dense_limit
            experts = Experts(config, self.implementation, *limits, name="experts")
            update = experts(normed, cached=view.start is not None, is_used=view.is_used, all_used=view.all_used)
        else:
            limit = self.kind.dense_limit
            update = SwiGLU(config.intermediate_size, self.implementation, limit=limit, name="dense")(normed)
        return x, update, entries, selection
