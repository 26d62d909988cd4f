"""Grouped-query attention, with optional bias, query/key norm, output gate, narrow values and sinks."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.layers.attend import attend, attend_cache
from mtpjax.models.layers.attention_kind import AttentionKind
from mtpjax.models.layers.entries import append_and_select, select
from mtpjax.models.layers.norm import NormScale
from mtpjax.models.parallel import add_parts, own_size
from mtpjax.models.quantized import partial_product
from mtpjax.models.view import Entries, Masks, Recycled, View
from pallas_kernels.append_heads import Heads, append_heads, split_heads
from pallas_kernels.append_heads import choose_implementation as choose_append
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.rotation import rotate


class GroupedAttention(nn.Module):
    """Grouped-query attention, `[B, T, D] -> [B, T, D]`. Caches `key` (rotated) and `value`, each `[B, K, S, H]`.

    One matrix `[D, K, G + 2, H]` computes the G = N/K queries, the key, the value and, with an output gate, the G gates
    of each key/value head. This lets a mesh split whole key/value heads, and replaces three matmuls with one. If values
    are narrower than keys, a second matrix `[D, K, Hv]` computes them.
    """

    config: ModelConfig
    implementation: str = "auto"
    output_size: int = 0  # output channels; 0: as many as the input has
    has_sinks: bool = False

    @nn.compact
    def __call__(
        self, x: jax.Array, view: View, layer_cache: Entries | Recycled | None = None, selection: Masks | None = None
    ) -> tuple[PartialSums, Entries, Masks | None]:
        config = self.config
        B, T, D = x.shape
        K, H, V = own_size(config.num_key_value_heads, "tensor"), config.head_dim, config.value_dim
        G = config.num_attention_heads // config.num_key_value_heads
        parts = [G, 1] + [1] * (V == H) + [G] * config.attn_output_gate

        # Project to queries, key, value and gates for each key/value head. Gates are not normalised.
        initial = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(1, 2, 3))
        kernel = self.param("qkv", initial, (D, K, sum(parts), H))
        projected = partial_product(x, kernel, implementation=self.implementation).reshape(B, T, K, sum(parts), H)
        bias = gate_bias = norms = None
        if config.attention_bias:
            bias, gate_bias = jnp.split(self.param("qkv_bias", nn.initializers.zeros, (K, sum(parts), H)), [G + 2], 1)
        if config.use_qk_norm:
            norm_q, norm_k = (NormScale(H, config.zero_centred_norm, name=name) for name in ("norm_q", "norm_k"))
            norms = norm_q(), norm_k()
        heads = Heads(bias, norms, config.rms_norm_eps, config.zero_centred_norm, config.rope_interleave)

        # Normalise and rotate each head, and append to the cache (rotated keys, heads before slots), in one kernel or
        # in XLA.
        kept = layer_cache if isinstance(layer_cache, dict) else None
        fits_kernel = V == H and config.attention_value_scale == 1
        if kept and fits_kernel and choose_append(projected, kept["key"], self.implementation) != "xla":
            caches = kept["key"], kept["value"]
            settings = {"group_size": G, "implementation": self.implementation}
            q, key, value = append_heads(projected, view.angles, *caches, view.start, heads, view.places, **settings)
            entries = {"key": key, "value": value}
            sources, masks = select(entries, view)
        else:
            if V == H:
                q, k, v = split_heads(projected.total(), view.angles, heads, group_size=G)
            else:
                # Values of a different width need a separate matrix.
                q, k = self._split_narrow(projected.total(), view)
                initial = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(1, 2))
                kernel = self.param("value", initial, (D, K, V))
                v = partial_product(x, kernel, implementation=self.implementation).total().reshape(B, T, K, V)
            if config.attention_value_scale != 1:
                v = v * config.attention_value_scale
            q, entries = q.swapaxes(1, 2), {"key": k.swapaxes(1, 2), "value": v.swapaxes(1, 2)}
            entries, sources, masks = append_and_select(entries, view, layer_cache)

        # Attend with a kernel over the whole cache, or in XLA over the selected sources.
        scale = config.softmax_scale(H)
        sinks = self.param("sinks", nn.initializers.zeros, (K, G)) if self.has_sinks else None
        if not self.has_sinks:
            operands = q, entries["key"], entries["value"], view
            output = attend_cache(*operands, scale=scale, implementation=self.implementation)
        elif view.reach is not None and self.implementation not in ("auto", "xla"):
            hint = f"use implementation xla or auto, not {self.implementation}"
            raise ValueError(f"the attention kernels do not support learned sinks: {hint}")
        else:
            output = None
        if output is None:
            pairs = [(kept["key"], kept["value"]) for kept in sources]
            settings = {"scale": scale, "sinks": sinks, "implementation": self.implementation}
            output = attend(q, pairs, masks, **settings)

        # Gate and project back to the model width.
        output = output.swapaxes(1, 2)
        if config.attn_output_gate:
            gates = projected.total()[:, :, :, G + 2 :]
            gates = gates if gate_bias is None else gates + gate_bias.astype(x.dtype)[None, None]
            output = output * jax.nn.sigmoid(gates)
        if config.attn_head_gate:
            initial = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(1, 2))
            kernel = self.param("head_gate", initial, (D, K, G))
            gates = partial_product(x, kernel, implementation=self.implementation).total().reshape(B, T, K, G, 1)
            output = output * jax.nn.sigmoid(gates)
        project = self.param("output", nn.initializers.lecun_normal(), (K * G * V, self.output_size or D))
        output = output.reshape(B, T, K * G * V)
        product = partial_product(output, project, implementation=self.implementation)
        product = add_parts(product, config.num_key_value_heads, "tensor")
        if config.attention_output_bias:
            bias = self.param("output_bias", nn.initializers.zeros, (self.output_size or D,))
            product = product.plus(bias)
        return product, entries, selection

    def _split_narrow(self, projected: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
        """Splits `[B, T, K, G + 1, H]` into rotated queries `[B, T, K, G, H]` and keys `[B, T, K, H]`."""
        B, T, K, parts, H = projected.shape
        heads = rotate(projected.reshape(B, T, K * parts, H), view.angles, interleaved=self.config.rope_interleave)
        q, k = jnp.split(heads.reshape(projected.shape), [parts - 1], axis=3)
        return q, k[:, :, :, 0]


def _empty_entries(config: ModelConfig, kind: LayerKind, batch: int, capacity: int, dtype: Any) -> Entries:
    heads = (batch, config.of_layer(kind).num_key_value_heads, capacity)
    widths = {"key": config.head_dim, "value": config.value_dim}
    return {name: jnp.zeros((*heads, width), dtype) for name, width in widths.items()}


GROUPED = AttentionKind(
    scope="attention",
    module=lambda config, kind, implementation, name: GroupedAttention(
        config.of_layer(kind), implementation, has_sinks=config.has_sinks(kind), name=name
    ),
    empty_entries=_empty_entries,
    cache_axes={"key": ("batch", "heads", None, None), "value": ("batch", "heads", None, None)},
    split_sizes=("num_attention_heads", "num_key_value_heads"),
    param_axes=(
        (r"attention/qkv$", ("embed", "heads", None, None)),
        (r"attention/qkv_bias$", ("heads", None, None)),
        (r"attention/value$", ("embed", "heads", None)),
        (r"attention/sinks$", ("heads", None)),
        (r"attention/head_gate$", ("embed", "heads", None, None)),
        (r"attention/output$", ("heads", "embed")),
    ),
)
