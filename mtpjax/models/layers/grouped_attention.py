"""Grouped-query attention, with optional bias, query/key norm and output gate."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.layers.attend import attend, attend_cache
from mtpjax.models.layers.attention_kind import AttentionKind
from mtpjax.models.layers.entries import append_and_select, select
from mtpjax.models.layers.norm import NormScale
from mtpjax.models.layers.rotary import softmax_scale
from mtpjax.models.masks import Entries, Masks, Recycled, View
from mtpjax.models.parallel import add_parts, own_size
from mtpjax.models.quantized import partial_product
from pallas_kernels import PartialSums, append_heads
from pallas_kernels.append_heads import Heads, split_heads
from pallas_kernels.append_heads import choose_implementation as choose_append


class GroupedAttention(nn.Module):
    """Grouped-query attention, `[B, T, D] -> [B, T, D]`. Keeps `key` and `value` `[B, K, S, H]`, keys rotated.

    One matrix `[D, K, G + 2, H]` makes everything of a key/value head: its G = N/K queries, its key, its value, and
    with an output gate G gates. A mesh then splits whole key/value heads, and a step has one product in the place of
    three.
    """

    config: ModelConfig
    implementation: str = "auto"
    output_size: int = 0  # channels of the output; 0: those of the input

    @nn.compact
    def __call__(
        self, x: jax.Array, view: View, layer_cache: Entries | Recycled | None = None, selection: Masks | None = None
    ) -> tuple[PartialSums, Entries, Masks | None]:
        config = self.config
        B, T, D = x.shape
        K, H = own_size(config.num_key_value_heads, "tensor"), config.head_dim
        G = config.num_attention_heads // config.num_key_value_heads
        parts = [G, 1, 1] + [G] * config.attn_output_gate

        # Project to queries, key, value and gates of each key/value head. The gates have no bias and no norm.
        initial = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(1, 2, 3))
        kernel = self.param("qkv", initial, (D, K, sum(parts), H))
        projected = partial_product(x, kernel, implementation=self.implementation).reshape(B, T, K, sum(parts), H)
        bias = norms = None
        if config.attention_bias:
            bias = self.param("qkv_bias", nn.initializers.zeros, (K, G + 2, H))
        if config.use_qk_norm:
            norm_q, norm_k = (NormScale(H, config.zero_centred_norm, name=name) for name in ("norm_q", "norm_k"))
            norms = norm_q(), norm_k()
        heads = Heads(bias, norms, config.rms_norm_eps, config.zero_centred_norm, config.rope_interleave)

        # Normalise and rotate each head, and append to the cache, which keeps rotated keys, heads before slots: in one
        # kernel, or by XLA.
        kept = layer_cache if isinstance(layer_cache, dict) else None
        if kept and choose_append(projected, kept["key"], self.implementation) != "xla":
            caches = kept["key"], kept["value"]
            settings = {"group_size": G, "implementation": self.implementation}
            q, key, value = append_heads(projected, view.angles, *caches, view.start, heads, view.places, **settings)
            entries = {"key": key, "value": value}
            sources, masks = select(entries, view)
        else:
            q, k, v = split_heads(projected.total(), view.angles, heads, group_size=G)
            q, entries = q.swapaxes(1, 2), {"key": k.swapaxes(1, 2), "value": v.swapaxes(1, 2)}
            entries, sources, masks = append_and_select(entries, view, layer_cache)

        # Attend by a kernel over the whole cache, or by XLA over the selected sources.
        scale = softmax_scale(config, H)
        output = attend_cache(
            q, entries["key"], entries["value"], view, scale=scale, implementation=self.implementation
        )
        if output is None:
            output = attend(q, [(kept["key"], kept["value"]) for kept in sources], masks, scale=scale)

        # Gate and project back to the model width.
        output = output.swapaxes(1, 2)
        if config.attn_output_gate:
            output = output * jax.nn.sigmoid(projected.total()[:, :, :, G + 2 :])
        project = self.param("output", nn.initializers.lecun_normal(), (K * G * H, self.output_size or D))
        output = output.reshape(B, T, K * G * H)
        product = partial_product(output, project, implementation=self.implementation)
        return add_parts(product, config.num_key_value_heads, "tensor"), entries, selection


def _empty_entries(config: ModelConfig, kind: LayerKind, batch: int, capacity: int, dtype: Any) -> Entries:
    shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
    return {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}


GROUPED = AttentionKind(
    scope="attention",
    module=lambda config, kind, implementation, name: GroupedAttention(config, implementation, name=name),
    empty_entries=_empty_entries,
    cache_axes={"key": ("batch", "heads", None, None), "value": ("batch", "heads", None, None)},
    param_axes=(
        (r"attention/qkv$", ("embed", "heads", None, None)),
        (r"attention/qkv_bias$", ("heads", None, None)),
        (r"attention/output$", ("heads", "embed")),
    ),
)
