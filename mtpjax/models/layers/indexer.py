"""The lightning indexer of sparse latent attention (DeepSeek-V3.2, GLM-5): selects the keys that a query attends to."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.models.config import ModelConfig
from mtpjax.models.quantized import matrix_product
from mtpjax.models.view import Masks, View
from pallas_kernels.rotation import rotate


class Indexer(nn.Module):
    """Scores every key for every query with a few narrow heads and keeps the best `index_topk`.

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
        """Computes the keys `[B, T, I]` of `x [B, T, D]`: a LayerNorm (eps 1e-6), then rotary on the first channels."""
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

        Args:
            x: `[B, T, D]` input of the layer.
            query_latent: `[B, T, q_lora_rank]` normalised latent of the queries.
            keys: `[B, S, I]` index keys of each source, converted to x's dtype.
            masks: `[B, T, S]` bool of each source.
        """
        config = self.config
        J, width = config.index_n_heads, config.index_head_dim
        total = sum(mask.shape[-1] for mask in masks)
        # With few keys, all are selected.
        if total <= config.index_topk:
            return masks
        # Narrow queries, and one weight per head.
        B, T, _ = x.shape
        q = self._product(query_latent, self.query_up).reshape(B, T, J, width)
        q = rotate(q, view.angles, interleaved=config.indexer_rope_interleave)
        weights = self._product(x, self.head_weights).astype(jnp.float32) * (width * J) ** -0.5

        def score(key: jax.Array, mask: jax.Array) -> jax.Array:
            # A source of one slot holds each row's own key.
            equation = "BTJI,BTI->BTJ" if mask.shape[-1] == 1 else "BTJI,BSI->BTJS"
            products = jax.nn.relu(jnp.einsum(equation, q, key.astype(q.dtype), preferred_element_type=jnp.float32))
            scores = jnp.einsum("BTJS,BTJ->BTS", products.reshape(B, T, J, -1), weights)
            return jnp.where(mask, scores, -jnp.inf)

        scores = jnp.concatenate([score(key, mask) for key, mask in zip(keys, masks, strict=True)], axis=-1)
        # Mark the best keys over all sources, then split the marks by source.
        _, best = jax.lax.top_k(scores, config.index_topk)
        places = jnp.arange(B)[:, None, None], jnp.arange(T)[None, :, None], best
        is_best = jnp.zeros((B, T, total), bool).at[places].set(True)
        ends = [0]
        for mask in masks:
            ends.append(ends[-1] + mask.shape[-1])
        return tuple(mask & is_best[..., a:b] for mask, a, b in zip(masks, ends[:-1], ends[1:], strict=True))
