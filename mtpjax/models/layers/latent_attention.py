"""Multi-head latent attention (DeepSeek-V2, 2405.04434) in expanded and absorbed form, with its sparse indexer."""

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.layers.attend import attend, attend_cache
from mtpjax.models.layers.attention_kind import AttentionKind
from mtpjax.models.layers.entries import append_and_select, select
from mtpjax.models.layers.norm import AddRMSNorm, NormScale, fused_norm
from mtpjax.models.parallel import add_parts, own_size
from mtpjax.models.quantized import matrix_product, partial_product, partial_products
from mtpjax.models.view import CONTIGUOUS, Entries, Masks, Recycled, View
from pallas_kernels.append_latents import append_latents
from pallas_kernels.append_latents import choose_implementation as choose_append
from pallas_kernels.batch_invariance import is_batch_invariant, map_row_blocks
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.range_attention import KeyRanges, chosen_keys
from pallas_kernels.rotation import rotate

MAX_SCORES = 1 << 26  # maximum number of index scores in memory at once (256 MiB in float32), for long rows


class Indexer(nn.Module):
    """The lightning indexer of sparse latent attention (DeepSeek-V3.2, GLM-5).

    Scores every key for every query with a few narrow heads and keeps the best `index_topk`.

    `I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s])` (DeepSeek-V3.2-Exp, equation 1), with one key per position for all
    heads. Scores are float32. The published kernels apply a Hadamard transform to queries and keys, which cancels in
    the product, and round to fp8; both are left out here.
    """

    config: ModelConfig
    implementation: str = "auto"

    def setup(self):
        config = self.config
        J, width, D = config.index_n_heads, config.index_head_dim, config.hidden_size
        matrix = nn.initializers.lecun_normal()
        self.query_up = self.param("query_up", matrix, (config.q_lora_rank, J * width))
        self.key_down = self.param("key", matrix, (D, width))
        self.head_weights = self.param("head_weights", matrix, (D, J))
        self.norm_scale = self.param("norm_scale", nn.initializers.ones, (width,))
        self.norm_bias = self.param("norm_bias", nn.initializers.zeros, (width,))

    def _product(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return matrix_product(x, weight, implementation=self.implementation)

    def key(self, x: jax.Array, view: View) -> jax.Array:
        """Computes keys `[B, T, I]` from `x [B, T, D]`, with LayerNorm (eps 1e-6) and rotary on the first channels."""
        key = self._product(x, self.key_down).astype(jnp.float32)
        key = key - jnp.mean(key, axis=-1, keepdims=True)
        key = key * jax.lax.rsqrt(jnp.mean(key * key, axis=-1, keepdims=True) + 1e-6)
        key = key * self.norm_scale[None, None].astype(jnp.float32) + self.norm_bias[None, None].astype(jnp.float32)
        interleaved = self.config.indexer_rope_interleave
        return rotate(key[:, :, None], view.angles, interleaved=interleaved)[:, :, 0].astype(x.dtype)

    def select(
        self, x: jax.Array, query_latent: jax.Array, view: View, keys: tuple[jax.Array, ...], masks: Masks
    ) -> Masks:
        """Narrows the masks to each query's best `index_topk` keys over all sources. Ties go to the earlier key.

        No gradient flows through the selection. The first mask of a long row is `KeyRanges`. Its queries are scored in
        blocks, and `KeyRanges.chosen` holds the selection, so that nothing is stored per pair of tokens.

        Args:
            x: `[B, T, D]` input of the layer.
            query_latent: `[B, T, q_lora_rank]` normalised latent of the queries.
            keys: `[B, S, I]` index keys of each source, converted to x's dtype.
            masks: the mask of each source.
        """
        (B, T, _), topk, first = x.shape, self.config.index_topk, masks[0]
        is_long = isinstance(first, KeyRanges)
        widths = [keys[0].shape[1] if is_long else first.shape[-1], *(mask.shape[-1] for mask in masks[1:])]
        # If there are at most `index_topk` keys, all are selected.
        if sum(widths) <= topk:
            return masks
        if is_long:
            # Score as many queries at a time as fit into memory.
            size = min(T, max(1, MAX_SCORES // (B * self.config.index_n_heads * sum(widths))))
            arrays = jax.lax.stop_gradient((x, query_latent, view.angles, keys[1:], masks))
            blocks = jax.tree.map(lambda array: _split(array, size), arrays)

            def best_keys(block: Any) -> jax.Array:
                x, query_latent, angles, own_keys, masks = block
                return self._best_keys(x, query_latent, angles, (keys[0], *own_keys), masks)

            best = jax.lax.map(best_keys, blocks)
            best = jnp.moveaxis(best, 0, 1).reshape(B, -1, topk)[:, :T]
            is_best = lambda column: (best == column).any(axis=-1, keepdims=True)
            own = (mask & is_best(column) for column, mask in enumerate(masks[1:], widths[0]))
            return first._replace(chosen=best), *own
        # Mark the best keys over all sources, then split the marks by source.
        marks = chosen_keys(self._best_keys(x, query_latent, view.angles, keys, masks), sum(widths))
        ends = [0, *itertools.accumulate(widths)]
        return tuple(mask & marks[..., a:b] for mask, a, b in zip(masks, ends[:-1], ends[1:], strict=True))

    def _best_keys(
        self,
        x: jax.Array,
        query_latent: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        keys: tuple[jax.Array, ...],
        masks: Masks,
    ) -> jax.Array:
        """Returns each query's best keys `[B, T, index_topk]` int32, as columns of all sources.

        The arguments are those of `select`. Masked keys come last.
        """
        # Compute narrow queries and one weight per head.
        config, (B, T, _) = self.config, x.shape
        J, width = config.index_n_heads, config.index_head_dim
        q = self._product(query_latent, self.query_up).reshape(B, T, J, width)
        q = rotate(q, angles, interleaved=config.indexer_rope_interleave)
        weights = self._product(x, self.head_weights).astype(jnp.float32) * (width * J) ** -0.5

        def score(key: jax.Array, mask: jax.Array) -> jax.Array:
            # A source with one slot holds each token's own key.
            equation = "BTJI,BTI->BTJ" if mask.shape[-1] == 1 else "BTJI,BSI->BTJS"
            products = jax.nn.relu(jnp.einsum(equation, q, key.astype(q.dtype), preferred_element_type=jnp.float32))
            scores = jnp.einsum("BTJS,BTJ->BTS", products.reshape(B, T, J, -1), weights)
            return jnp.where(mask, scores, -jnp.inf)

        masks = tuple(mask.dense(keys[0].shape[1]) if isinstance(mask, KeyRanges) else mask for mask in masks)

        scores = jnp.concatenate([score(key, mask) for key, mask in zip(keys, masks, strict=True)], axis=-1)
        return jax.lax.top_k(scores, config.index_topk)[1]


def _split(array: jax.Array, size: int) -> jax.Array:
    """Splits the rows of `array [B, T, ...]` into blocks `[T / size, B, size, ...]`, and pads the last one."""
    padded = jnp.pad(array, ((0, 0), (0, -array.shape[1] % size), *((0, 0),) * (array.ndim - 2)))
    return jnp.moveaxis(padded.reshape(len(array), -1, size, *array.shape[2:]), 1, 0)


class LatentAttention(nn.Module):
    """Latent attention, `[B, T, D] -> [B, T, D]`. Caches `latent [B, S, R + P]`.

    An entry holds the normalised latent (R) and one rotated key for all heads (P). Two forms compute the same result.
    The expanded form computes every position's keys and values from the latents. The absorbed form instead applies the
    two up-projections to the query and to the attended latent. `expanded` forces one form; None picks the form that
    needs fewer operations.

    With a sparse indexer (DeepSeek-V3.2), a query attends only to the selected keys. A layer with an indexer selects
    them and also caches `index [B, S, I]`; a layer without an indexer uses the selection of the last indexer before it.
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

        # 1. Project to the queries and the latent.
        query, query_latent, latent = self._project(x, N)
        norm_scale = NormScale(R, name="norm_latent")()
        head_wise = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=2, out_axis=1, batch_axis=0)
        key_up = self.param("key_up", head_wise, (N, C, R)).astype(x.dtype)
        head_wise = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=2, batch_axis=0)
        value_up = self.param("value_up", head_wise, (N, R, V)).astype(x.dtype)
        project = self.param("output", nn.initializers.lecun_normal(), (N * V, D))

        # 2. Compute the absorbed queries, and append the normalised latent and rotated key to the cache, in one
        # kernel or in XLA. An indexer narrows the masks to its selected keys.
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
            scale = config.softmax_scale(C + P)

            def keys_and_values(kept: jax.Array) -> tuple[jax.Array, jax.Array]:
                latent, rope = jnp.split(kept.astype(x.dtype), [R], axis=-1)
                content = jnp.einsum("BSR,NCR->BNSC", latent, key_up)
                rope = jnp.broadcast_to(rope[:, None], (*content.shape[:3], P))
                return jnp.concatenate([content, rope], axis=-1), jnp.einsum("BSR,NRV->BNSV", latent, value_up)

            # Expanded: N key/value heads with one query each, [B, N, T, 1, C + P].
            q = jnp.concatenate([q_content, q_rope], axis=-1).swapaxes(1, 2)[:, :, :, None]
            settings = {"scale": scale, "implementation": self.implementation, "selection": selection}
            rows = view.storage.first(entries["latent"])
            whole = keys_and_values(rows)
            output = attend_cache(q, *whole, view.replace(storage=CONTIGUOUS), **settings)
            if output is None:
                pairs = [whole if kept["latent"] is rows else keys_and_values(kept["latent"]) for kept in sources]
                output = attend(q, pairs, masks, scale=scale, implementation=self.implementation)
            output = output[:, :, :, 0].swapaxes(1, 2)
        else:
            output = self._attend_absorbed(absorbed, entries, sources, view, masks, selection, value_up)
        output = partial_product(output.reshape(B, T, N * V), project, implementation=self.implementation)
        output = add_parts(output, config.num_attention_heads, "tensor")
        if config.attention_output_bias:
            output = output.plus(self.param("output_bias", nn.initializers.zeros, (D,)))
        return output, entries, selection

    def _project(self, x: jax.Array, N: int) -> tuple[PartialSums, jax.Array, PartialSums]:
        """Projects x to queries `[B, T, N, C + P]` and the latent `[B, T, R + P]`; the projections of x share a launch.

        The second of the three results is the input of the query projection, either the normalised query latent or x.
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
            # Only the projections to the latents have a bias, as in transformers.
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
        """Attends with N queries `[B, T, N, R + P]` to a single head, the latent itself; returns `[B, T, N, V]`."""
        config, q = self.config, absorbed[:, None]
        scale = config.softmax_scale(config.qk_nope_head_dim + config.qk_rope_head_dim)
        settings = {"scale": scale, "implementation": self.implementation, "selection": selection}
        attended = attend_cache(q, entries["latent"][:, None], None, view, **settings, value_up=value_up)
        if attended is not None:
            return attended[:, 0]
        # The values include the rotated key. Drop its columns from the result, because slicing the cache would copy
        # it.
        latents = [kept["latent"][:, None] for kept in sources]
        attended = attend(q, list(zip(latents, latents, strict=True)), masks, scale=scale)[..., : config.kv_lora_rank]
        return _by_head(attended[:, 0], value_up)

    def _new_entry(self, latent: jax.Array, norm_scale: jax.Array, view: View) -> jax.Array:
        """Computes cache entries `[B, T, R + P]`, which hold the normalised latent and the rotated key of all heads."""
        config = self.config
        latent, k_rope = jnp.split(latent, [config.kv_lora_rank], axis=-1)
        latent = fused_norm(latent, norm_scale, eps=config.latent_norm_eps, implementation=self.implementation)
        k_rope = rotate(k_rope[:, :, None], view.angles, interleaved=config.rope_interleave)[:, :, 0]
        return jnp.concatenate([latent, k_rope], axis=-1)

    def _expands(self, T: int, *, cached: bool) -> bool:
        """Returns whether to expand. This costs R(C+V) per key and head, but narrows each query from R+P to C+P."""
        if self.expanded is not None:
            return self.expanded
        if is_batch_invariant():
            return False  # XLA would expand, with matmul sizes that depend on the batch
        return not cached or is_expanded_cheaper(self.config, T)


def is_expanded_cheaper(config: ModelConfig, T: int) -> bool:
    """Returns whether the expanded form needs fewer operations for a cached pass with T tokens per row."""
    R, P = config.kv_lora_rank, config.qk_rope_head_dim
    C, V = config.qk_nope_head_dim, config.v_head_dim
    return T * (2 * (R + P) - (C + P + V)) > R * (C + V)


def _by_head(rows: jax.Array, matrices: jax.Array) -> jax.Array:
    """Multiplies `[B, T, N, C]` by `[N, C, R]`, head by head."""

    def product(rows):
        return jnp.einsum("BTNC,NCR->BTNR", rows, matrices)

    if is_batch_invariant():
        flat = rows.reshape(-1, *rows.shape[2:])
        return map_row_blocks(lambda block: product(block[None])[0], flat).reshape(*rows.shape[:3], -1)
    # Double a single row on a GPU, because XLA would otherwise write all elementwise products to memory.
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
