"""Multi-head latent attention (DeepSeek-V2, 2405.04434), expanded and absorbed."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.layers.attend import attend, attend_cache
from mtpjax.models.layers.attention_kind import AttentionKind
from mtpjax.models.layers.entries import append_and_select, select, side_by_side
from mtpjax.models.layers.latent_attention import Indexer
from mtpjax.models.layers.norm import AddRMSNorm, NormScale, fused_norm
from mtpjax.models.layers.rotary import softmax_scale
from mtpjax.models.parallel import add_parts, own_size
from mtpjax.models.quantized import partial_product, partial_products
from mtpjax.models.view import Entries, Masks, Recycled, View
from pallas_kernels.append_latents import append_latents
from pallas_kernels.append_latents import choose_implementation as choose_append
from pallas_kernels.batch_invariance import is_batch_invariant, map_row_blocks
from pallas_kernels.partial_sums import PartialSums
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
        N = own_size(config.num_attention_heads, "tensor")
        R, P = config.kv_lora_rank, config.qk_rope_head_dim
        C, V = config.qk_nope_head_dim, config.v_head_dim

        # 1. Queries and the latent.
        query, query_latent, latent = self._project(x, N)
        norm_scale = NormScale(R, name="norm_latent")()
        head_wise = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=2, out_axis=1, batch_axis=0)
        key_up = self.param("key_up", head_wise, (N, C, R)).astype(x.dtype)
        head_wise = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=2, batch_axis=0)
        value_up = self.param("value_up", head_wise, (N, R, V)).astype(x.dtype)
        project = self.param("output", nn.initializers.lecun_normal(), (N * V, D))

        # 2. The absorbed queries, and the normalised latent and rotated key appended to the cache: in one kernel, or by
        # XLA. An indexer narrows the masks to its selected keys.
        is_expanded = self._expands(T, cached=view.start is not None)
        kept = layer_cache if isinstance(layer_cache, dict) else None
        fits_kernel = not is_expanded and not self.indexer and selection is None and view.reach is not None
        absorbed = None
        if kept and fits_kernel and choose_append(query, key_up, kept["latent"], self.implementation) != "xla":
            operands = query, latent, norm_scale, key_up, view.angles, kept["latent"], view.start, view.places
            settings = {"eps": config.latent_norm_eps, "interleaved": config.rope_interleave}
            absorbed, new = append_latents(*operands, **settings, implementation=self.implementation)
            entries = {"latent": new}
            sources, masks = select(entries, view)
        else:
            q_content, q_rope = jnp.split(query.total(), [C], axis=-1)
            q_rope = rotate(q_rope, view.angles, interleaved=config.rope_interleave)
            entries = {"latent": self._new_entry(latent.total(), norm_scale, view)}
            indexer = Indexer(config, self.implementation, name="indexer") if self.indexer == "full" else None
            if indexer:
                entries["index"] = indexer.key(x, view)
            entries, sources, masks = append_and_select(entries, view, layer_cache)
            if indexer:
                selection = indexer.select(x, query_latent, view, tuple(kept["index"] for kept in sources), masks)
            masks = selection if selection is not None else masks
            if not is_expanded:
                absorbed = jnp.concatenate([_by_head(q_content, key_up), q_rope], axis=-1)

        # 3. Attend.
        if absorbed is None:
            scale = softmax_scale(config, C + P)

            def keys_and_values(kept: Entries) -> tuple[jax.Array, jax.Array]:
                latent, rope = jnp.split(kept["latent"].astype(x.dtype), [R], axis=-1)
                content = jnp.einsum("BSR,NCR->BNSC", latent, key_up)
                rope = jnp.broadcast_to(rope[:, None], (*content.shape[:3], P))
                return jnp.concatenate([content, rope], axis=-1), jnp.einsum("BSR,NRV->BNSV", latent, value_up)

            # Expanded: N key/value heads with one query each, [B, N, T, 1, C + P].
            q = jnp.concatenate([q_content, q_rope], axis=-1).swapaxes(1, 2)[:, :, :, None]
            settings = {"scale": scale, "implementation": self.implementation, "selection": selection}
            whole = keys_and_values(side_by_side(entries, view))
            output = attend_cache(q, *whole, view.replace(pages=None), **settings)
            if output is None:
                pairs = [whole if kept is entries else keys_and_values(kept) for kept in sources]
                output = attend(q, pairs, masks, scale=scale)
            output = output[:, :, :, 0].swapaxes(1, 2)
        else:
            output = self._attend_absorbed(absorbed, entries, sources, view, masks, selection, value_up)
        output = partial_product(output.reshape(B, T, N * V), project, implementation=self.implementation)
        output = add_parts(output, config.num_attention_heads, "tensor")
        if config.attention_output_bias:
            output = output.plus(self.param("output_bias", nn.initializers.zeros, (D,)))
        return output, entries, selection

    def _project(self, x: jax.Array, N: int) -> tuple[PartialSums, jax.Array, PartialSums]:
        """Projects to queries `[B, T, N, C + P]` and the latent `[B, T, R + P]`, both from x in one launch.

        Between them it returns the input of the query projection: the normalised query latent, or x.
        """
        config, D = self.config, x.shape[-1]
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        latent_width = config.kv_lora_rank + config.qk_rope_head_dim
        wide = N * width
        matrix = nn.initializers.lecun_normal()
        first_name, first_width = ("query_down", config.q_lora_rank) if config.q_lora_rank else ("query", wide)
        down = [self.param(first_name, matrix, (D, first_width)), self.param("latent_down", matrix, (D, latent_width))]
        query, latent = partial_products(x, down, implementation=self.implementation)
        if config.attention_bias:
            # Bias only on the projections to the latents, as in transformers.
            zeros = nn.initializers.zeros
            latent = latent.plus(self.param("latent_down_bias", zeros, (latent_width,)))
            query = query.plus(self.param("query_down_bias", zeros, (first_width,))) if config.q_lora_rank else query
        query_latent = x
        if config.q_lora_rank:
            norm_query = AddRMSNorm(config.latent_norm_eps, implementation=self.implementation, name="norm_query")
            _, query_latent = norm_query(None, query)
            query_up = self.param("query_up", matrix, (config.q_lora_rank, wide))
            query = partial_product(query_latent, query_up, implementation=self.implementation)
        return query.reshape(*x.shape[:2], N, width), query_latent, latent

    def _attend_absorbed(
        self,
        absorbed: jax.Array,
        entries: Entries,
        sources: tuple[Entries, ...],
        view: View,
        masks: Masks,
        selection: Masks | None,
        value_up: jax.Array,
    ) -> jax.Array:
        """Attends with one key/value head, the latent itself, and N queries `[B, T, N, R + P]`: `[B, T, N, V]`."""
        config, q = self.config, absorbed[:, None]
        scale = softmax_scale(config, config.qk_nope_head_dim + config.qk_rope_head_dim)
        settings = {"scale": scale, "implementation": self.implementation, "selection": selection}
        attended = attend_cache(q, entries["latent"][:, None], None, view, **settings, value_up=value_up)
        if attended is not None:
            return attended[:, 0]
        # The values include the rotated key, whose columns are dropped: slicing the cache would copy it.
        latents = [kept["latent"][:, None] for kept in sources]
        attended = attend(q, list(zip(latents, latents, strict=True)), masks, scale=scale)[..., : config.kv_lora_rank]
        return _by_head(attended[:, 0], value_up)

    def _new_entry(self, latent: jax.Array, norm_scale: jax.Array, view: View) -> jax.Array:
        """Computes cache entries `[B, T, R + P]`: the normalised latent, and the rotated key of all heads."""
        config = self.config
        latent, k_rope = jnp.split(latent, [config.kv_lora_rank], axis=-1)
        latent = fused_norm(latent, norm_scale, eps=config.latent_norm_eps, implementation=self.implementation)
        k_rope = rotate(k_rope[:, :, None], view.angles, interleaved=config.rope_interleave)[:, :, 0]
        return jnp.concatenate([latent, k_rope], axis=-1)

    def _expands(self, T: int, *, cached: bool) -> bool:
        """Compares operations: expanding costs R(C+V) per key and head, and narrows each query from R+P to C+P."""
        if self.expanded is not None:
            return self.expanded
        if is_batch_invariant():
            return False  # XLA expands, in products whose sizes depend on the batch
        return not cached or is_expanded_cheaper(self.config, T)


def is_expanded_cheaper(config: ModelConfig, T: int) -> bool:
    """Returns whether a pass of T tokens per row over a cache takes fewer operations in the expanded form."""
    R, P = config.kv_lora_rank, config.qk_rope_head_dim
    C, V = config.qk_nope_head_dim, config.v_head_dim
    return T * (2 * (R + P) - (C + P + V)) > R * (C + V)


def _by_head(rows: jax.Array, matrices: jax.Array) -> jax.Array:
    """Multiplies `[B, T, N, C]` by `[N, C, R]` head by head."""

    def product(rows):
        return jnp.einsum("BTNC,NCR->BTNR", rows, matrices)

    if is_batch_invariant():
        flat = rows.reshape(-1, *rows.shape[2:])
        return map_row_blocks(lambda block: product(block[None])[0], flat).reshape(*rows.shape[:3], -1)
    # A single row is doubled on a GPU, where XLA would write out all of its products.
    if rows.shape[0] * rows.shape[1] > 1:
        return product(rows)
    return jax.lax.platform_dependent(
        rows, cpu=product, default=lambda rows: product(jnp.repeat(rows, 2, axis=1))[:, :1]
    )


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
    split_sizes=("num_attention_heads",),
    param_axes=(
        (r"attention/(query|query_up)$", (None, "heads")),
        (r"attention/(query_down|latent_down)$", ("embed", None)),
        (r"attention/(key_up|value_up)$", ("heads", None, None)),
        (r"attention/output$", ("heads", "embed")),
    ),
)
