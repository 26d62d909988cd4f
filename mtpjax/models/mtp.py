"""The MTP module: combines a hidden state with the next token's embedding and predicts one position further."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.models.config import ModelConfig
from mtpjax.models.layers.block import Block
from mtpjax.models.layers.norm import AddRMSNorm, RMSNorm
from mtpjax.models.quantized import partial_product
from mtpjax.models.view import Entries, Recycled, View


class MTPModule(nn.Module):
    """One MTP module: `hidden [B, T, D]` and `embedding [B, T, D]` of the following tokens to `[B, T, D]`.

    DeepSeek-V3 (2412.19437, equations 21-23), in the order of its checkpoints: embedding first. Row i of module k reads
    the embedding of t[i+k] and predicts t[i+k+1]. Returns the output after the module's final norm, which the head
    reads, the output before that norm, and the attention entries. Without a final norm (`mtp_output_norm`) both
    outputs are the same.
    """

    config: ModelConfig
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self, hidden: jax.Array, embedding: jax.Array, view: View, layer_cache: Entries | Recycled | None = None
    ) -> tuple[jax.Array, jax.Array, Entries]:
        config = self.config.of_modules

        def norm(name: str) -> RMSNorm:
            return RMSNorm(config.rms_norm_eps, config.zero_centred_norm, self.implementation, name=name)

        # Normalise both inputs, join them in the checkpoint's order, and project back to the model width.
        pair = [norm("norm_embedding")(embedding), norm("norm_hidden")(hidden)]
        if config.mtp_input == "hidden_embedding":
            pair.reverse()
        project = self.param("project", nn.initializers.lecun_normal(), (2 * config.hidden_size, config.hidden_size))
        projected = partial_product(jnp.concatenate(pair, axis=-1), project, implementation=self.implementation)
        # One decoder layer, and the module's final norm if it has one.
        block = Block(config, config.mtp_kind, self.implementation, name="block")
        x, update, entries, _ = block(None, view, layer_cache, update=projected)
        if config.mtp_output_norm != "own":
            output = x + update.total()
            return output, output, entries
        norm_output = AddRMSNorm(config.rms_norm_eps, config.zero_centred_norm, self.implementation, name="norm_output")
        before, after = norm_output(x, update)
        return after, before, entries
