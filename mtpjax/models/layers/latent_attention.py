"""Multi-head latent attention (DeepSeek-V2, 2405.04434), expanded and absorbed."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.models.cache import remember
from mtpjax.models.config import ModelConfig
from mtpjax.models.layers.attend import attend, attend_cache
from mtpjax.models.layers.indexer import Indexer
from mtpjax.models.layers.norm import RMSNorm
from mtpjax.models.layers.rotary import rotate, softmax_scale
from mtpjax.models.masks import Entries, Masks, Recycled, View
from mtpjax.models.quantized import matrix_product


class LatentAttention(nn.Module):
    """`[B, T, D] -> [B, T, D]`. Keeps `latent [B, S, R + P]`: the normalised latent and one rotated key for all heads.

    Expanded, every position's keys and values are made from its latent; absorbed, the two matrices that would make them
    are applied to the query and to the attended latent instead. Same numbers; `expanded` forces one, None takes the one
    with fewer operations.

    With an indexer a query sees the keys that are `chosen` alone: by this layer's own (which keeps `index [B, S, I]`
    too and returns its choice), or by the layer before that had one.
    """

    config: ModelConfig
    indexer: str = ""
    expanded: bool | None = None
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self, x: jax.Array, view: View, memory: Entries | Recycled | None = None, chosen: Masks | None = None
    ) -> tuple[jax.Array, Entries, Masks | None]:
        config = self.config
        B, T, D = x.shape
        N, R, P = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
        C, V = config.qk_nope_head_dim, config.v_head_dim

        def product(name: str, x: jax.Array, width: int) -> jax.Array:
            kernel = self.param(name, nn.initializers.lecun_normal(), (x.shape[-1], width))
            return matrix_product(x, kernel, implementation=self.implementation)

        reduced = x
        if config.q_lora_rank:
            reduced = RMSNorm(config.latent_norm_eps, name="norm_query")(product("query_down", x, config.q_lora_rank))
            q = product("query_up", reduced, N * (C + P))
        else:
            q = product("query", x, N * (C + P))
        q_content, q_rope = jnp.split(q.reshape(B, T, N, C + P), [C], axis=-1)
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
            """`[B, T, N, C]` by `[N, C, R]`. No kernel's: a lone row gets another beside it, see
            `min_rows_per_pass`."""
            is_lone = B * T == 1 and self.implementation == "triton"
            made = jnp.einsum("BTNC,NCR->BTNR", jnp.repeat(rows, 2, axis=1) if is_lone else rows, matrices)
            return made[:, :T]

        indexer = Indexer(config, self.implementation, name="indexer") if self.indexer == "full" else None
        if indexer:
            entries["index"] = indexer.key(x, view)
        entries, sources, masks = remember(entries, view, memory)
        if indexer:
            chosen = indexer.choose(x, reduced, view, tuple(kept["index"] for kept in sources), masks)
        masks = chosen if chosen is not None else masks
        scale = softmax_scale(config, C + P)
        if self._expands(T, cached=view.start is not None):

            def keys_and_values(kept: Entries) -> tuple[jax.Array, jax.Array]:
                latent, rope = jnp.split(kept["latent"], [R], axis=-1)
                content = jnp.einsum("BSR,NCR->BNSC", latent, key_up)
                rope = jnp.broadcast_to(rope[:, None], (*content.shape[:3], P))
                return jnp.concatenate([content, rope], axis=-1), jnp.einsum("BSR,NRV->BNSV", latent, value_up)

            q = jnp.concatenate([q_content, q_rope], axis=-1).swapaxes(1, 2)[:, :, :, None]  # [B, N, T, 1, C+P]
            output = attend(q, [keys_and_values(kept) for kept in sources], masks, scale=scale)
            output = output[:, :, :, 0].swapaxes(1, 2)
        else:
            absorbed = by_head(q_content, key_up)
            q = jnp.concatenate([absorbed, q_rope], axis=-1)[:, None]  # [B, 1, T, N, R+P]: one key for all heads
            attended = None
            if chosen is None:
                latent, kernel = entries["latent"][:, None], self.implementation
                attended = attend_cache(q, latent, None, view, scale=scale, implementation=kernel, value_width=R)
            if attended is None:
                # The rotated key rides along as a value and is dropped: slicing the cache would copy it.
                latents = [kept["latent"][:, None] for kept in sources]
                attended = attend(q, list(zip(latents, latents, strict=True)), masks, scale=scale)[..., :R]
            output = by_head(attended[:, 0], value_up)
        return product("output", output.reshape(B, T, N * V), D), entries, chosen

    def _expands(self, T: int, *, cached: bool) -> bool:
        """Expanding costs R(C+V) per key, head and pass, but saves per query what the latent is wider than a head."""
        if self.expanded is not None:
            return self.expanded
        config = self.config
        R, P = config.kv_lora_rank, config.qk_rope_head_dim
        C, V = config.qk_nope_head_dim, config.v_head_dim
        return not cached or T * (2 * (R + P) - (C + P + V)) > R * (C + V)
