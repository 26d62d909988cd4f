"""Multi-head latent attention (DeepSeek-V2, 2405.04434), expanded and absorbed."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.layers.attend import attend, attend_cache
from mtpjax.models.layers.attention_kind import AttentionKind
from mtpjax.models.layers.entries import append_and_select
from mtpjax.models.layers.indexer import Indexer
from mtpjax.models.layers.norm import RMSNorm
from mtpjax.models.layers.rotary import softmax_scale
from mtpjax.models.masks import Entries, Masks, Recycled, View
from mtpjax.models.quantized import partial_product
from pallas_kernels import PartialSums
from pallas_kernels.rotation import rotate


class LatentAttention(nn.Module):
    """Latent attention, `[B, T, D] -> [B, T, D]`. Keeps `latent [B, S, R + P]`.

    An entry is the normalised latent (R) and one rotated key for all heads (P). There are two forms with the same
    result. The expanded form computes keys and values of every position from the latents. The absorbed form applies
    the two up-projections to the query and to the attended latent instead. `expanded` forces one form; None picks the
    one with fewer operations.

    With a sparse indexer (DeepSeek-V3.2) a query attends only to the selected keys. Its own indexer selects them and
    keeps `index [B, S, I]` too; a layer without one uses the selection of the last indexer before it.
    """

    config: ModelConfig
    indexer: str = ""
    expanded: bool | None = None
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self, x: jax.Array, view: View, layer_cache: Entries | Recycled | None = None, selection: Masks | None = None
    ) -> tuple[PartialSums, Entries, Masks | None]:
        config = self.config
        B, T, D = x.shape
        N, R, P = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
        C, V = config.qk_nope_head_dim, config.v_head_dim

        def partial(name: str, x: jax.Array, width: int) -> PartialSums:
            kernel = self.param(name, nn.initializers.lecun_normal(), (x.shape[-1], width))
            return partial_product(x, kernel, implementation=self.implementation)

        def product(name: str, x: jax.Array, width: int) -> jax.Array:
            return partial(name, x, width).total()

        # 1. Queries: through a latent of their own, or directly. Each has a content part C and a rotated part P.
        query_latent = x
        if config.q_lora_rank:
            down = product("query_down", x, config.q_lora_rank)
            query_latent = RMSNorm(config.latent_norm_eps, name="norm_query")(down)
            q = product("query_up", query_latent, N * (C + P))
        else:
            q = product("query", x, N * (C + P))
        q_content, q_rope = jnp.split(q.reshape(B, T, N, C + P), [C], axis=-1)

        # 2. The cache entry: the normalised latent, and the key that all heads share for the rotated part.
        latent, k_rope = jnp.split(product("latent_down", x, R + P), [R], axis=-1)
        latent = RMSNorm(config.latent_norm_eps, name="norm_latent")(latent)
        q_rope = rotate(q_rope, view.angles, interleaved=config.rope_interleave)
        k_rope = rotate(k_rope[:, :, None], view.angles, interleaved=config.rope_interleave)[:, :, 0]
        entries = {"latent": jnp.concatenate([latent, k_rope], axis=-1)}

        head_wise = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=2, out_axis=1, batch_axis=0)
        key_up = self.param("key_up", head_wise, (N, C, R)).astype(x.dtype)
        head_wise = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=2, batch_axis=0)
        value_up = self.param("value_up", head_wise, (N, R, V)).astype(x.dtype)

        def by_head(rows, matrices):
            """Multiplies `[B, T, N, C]` by `[N, C, R]` head by head."""

            def product(rows):
                return jnp.einsum("BTNC,NCR->BTNR", rows, matrices)

            # A single row is doubled on a GPU, where XLA would write out all of its products.
            if B * T > 1:
                return product(rows)
            return jax.lax.platform_dependent(
                rows, cpu=product, default=lambda rows: product(jnp.repeat(rows, 2, axis=1))[:, :1]
            )

        # 3. Append to the cache, and let the indexer narrow the masks to the selected keys.
        indexer = Indexer(config, self.implementation, name="indexer") if self.indexer == "full" else None
        if indexer:
            entries["index"] = indexer.key(x, view)
        entries, sources, masks = append_and_select(entries, view, layer_cache)
        if indexer:
            selection = indexer.select(x, query_latent, view, tuple(kept["index"] for kept in sources), masks)
        masks = selection if selection is not None else masks

        # 4. Attend.
        scale = softmax_scale(config, C + P)
        if self._expands(T, cached=view.start is not None):

            def keys_and_values(kept: Entries) -> tuple[jax.Array, jax.Array]:
                latent, rope = jnp.split(kept["latent"], [R], axis=-1)
                content = jnp.einsum("BSR,NCR->BNSC", latent, key_up)
                rope = jnp.broadcast_to(rope[:, None], (*content.shape[:3], P))
                return jnp.concatenate([content, rope], axis=-1), jnp.einsum("BSR,NRV->BNSV", latent, value_up)

            # Expanded: N key/value heads with one query each, [B, N, T, 1, C + P].
            q = jnp.concatenate([q_content, q_rope], axis=-1).swapaxes(1, 2)[:, :, :, None]
            output = attend(q, [keys_and_values(kept) for kept in sources], masks, scale=scale)
            output = output[:, :, :, 0].swapaxes(1, 2)
        else:
            # Absorbed: one key/value head, the latent itself, with N queries, [B, 1, T, N, R + P].
            absorbed = by_head(q_content, key_up)
            q = jnp.concatenate([absorbed, q_rope], axis=-1)[:, None]
            attended = None
            if selection is None:
                latent, kernel = entries["latent"][:, None], self.implementation
                attended = attend_cache(q, latent, None, view, scale=scale, implementation=kernel, value_width=R)
            if attended is None:
                # The values include the rotated key, whose columns are dropped: slicing the cache would copy it.
                latents = [kept["latent"][:, None] for kept in sources]
                attended = attend(q, list(zip(latents, latents, strict=True)), masks, scale=scale)[..., :R]
            output = by_head(attended[:, 0], value_up)
        return partial("output", output.reshape(B, T, N * V), D), entries, selection

    def _expands(self, T: int, *, cached: bool) -> bool:
        """Compares operations: expanding costs R(C+V) per key and head, and narrows each query from R+P to C+P."""
        if self.expanded is not None:
            return self.expanded
        config = self.config
        R, P = config.kv_lora_rank, config.qk_rope_head_dim
        C, V = config.qk_nope_head_dim, config.v_head_dim
        return not cached or T * (2 * (R + P) - (C + P + V)) > R * (C + V)


def _empty_entries(config: ModelConfig, kind: LayerKind, batch: int, capacity: int, dtype: Any) -> Entries:
    entries = {"latent": jnp.zeros((batch, capacity, config.kv_lora_rank + config.qk_rope_head_dim), dtype)}
    if kind.indexer == "full":
        entries["index"] = jnp.zeros((batch, capacity, config.index_head_dim), dtype)
    return entries


LATENT = AttentionKind(
    scope="attention",
    module=lambda config, kind, implementation, name: LatentAttention(
        config, kind.indexer, implementation=implementation, name=name
    ),
    empty_entries=_empty_entries,
    cache_axes={"latent": ("batch",), "index": ("batch",)},  # every query head reads the whole latent
    param_axes=(
        (r"attention/(query|query_up)$", (None, "heads")),
        (r"attention/(query_down|latent_down)$", ("embed", None)),
        (r"attention/(key_up|value_up)$", ("heads", None, None)),
        (r"attention/output$", ("heads", "embed")),
    ),
)
