"""The MTP module: hidden and the next token's embedding to hidden one position further."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.models.config import ModelConfig
from mtpjax.models.layers.block import Block
from mtpjax.models.layers.norm import RMSNorm
from mtpjax.models.masks import Entries, Recycled, View
from mtpjax.models.quantized import matrix_product


class MTPModule(nn.Module):
    """Carries hidden `[B, T, D]` one position further, given the next tokens' embedding `[B, T, D]`.

    DeepSeek-V3 (2412.19437, equations 21-23) in the order of its checkpoints, embedding first. Slot i of module k takes
    the embedding of t[i+k] and predicts t[i+k+1]. Returns the output after the module's own norm (the head reads it),
    before it, and what attention keeps.
    """

    config: ModelConfig
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self, hidden: jax.Array, embedding: jax.Array, view: View, memory: Entries | Recycled | None = None
    ) -> tuple[jax.Array, jax.Array, Entries]:
        config = self.config

        def norm(name: str) -> RMSNorm:
            return RMSNorm(config.rms_norm_eps, config.zero_centred_norm, name=name)

        pair = [norm("norm_embedding")(embedding), norm("norm_hidden")(hidden)]
        if config.mtp_input == "hidden_embedding":
            pair.reverse()
        project = self.param("project", nn.initializers.lecun_normal(), (2 * config.hidden_size, config.hidden_size))
        x = matrix_product(jnp.concatenate(pair, axis=-1), project, implementation=self.implementation)
        before, entries, _ = Block(config, config.mtp_kind, self.implementation, name="block")(x, view, memory)
        return norm("norm_output")(before), before, entries
