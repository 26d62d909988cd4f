"""The heads of a Medusa drafter (2401.10774)."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.drafters.architecture import TrunkSizes
from mtpjax.messages import require
from mtpjax.models.model import multiply_head
from mtpjax.models.quantized import matrix_product


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """The architecture of Medusa heads.

    Args:
        hidden_size: width of the trunk (D).
        vocab_size: vocabulary size of the trunk (V).
        num_heads: number of heads. Head k (0-based) predicts the token k+2 positions after the hidden state.
        num_layers: number of residual layers per head.
        has_bias: whether the residual layers have a bias.
        draft_vocab_size: number of tokens that can be drafted (R); 0 means V.
        shares_output: whether all heads share one output matrix (vLLM's `original_lm_head`).

    Raises:
        ValueError: the values are inconsistent.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    has_bias: bool = True
    draft_vocab_size: int = 0
    shares_output: bool = False

    def __post_init__(self):
        for name in ("hidden_size", "vocab_size", "num_heads"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(self.num_layers >= 0, f"num_layers must be at least 0, got {self.num_layers}")
        object.__setattr__(self, "draft_vocab_size", self.draft_vocab_size or self.vocab_size)
        require(
            1 <= self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size {self.draft_vocab_size} is not within 1..{self.vocab_size}",
        )

    @property
    def trunk(self) -> TrunkSizes:
        """The trunk that the heads are for; its depth does not matter."""
        return TrunkSizes(self.vocab_size, self.hidden_size, 0)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Empty, because the heads read only the final hidden state."""
        return ()


class MedusaHead(nn.Module):
    """The residual layers of one head, `[..., D] -> [..., D]`; each computes `x + silu(x W + b)`."""

    config: MedusaConfig
    implementation: str = "auto"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        D = self.config.hidden_size
        for layer in range(self.config.num_layers):
            # Initialise with zeros, so that an untrained head only applies its output matrix.
            kernel = self.param(f"kernel_{layer}", nn.initializers.zeros, (D, D))
            projected = matrix_product(x, kernel, implementation=self.implementation)
            if self.config.has_bias:
                bias = self.param(f"bias_{layer}", nn.initializers.zeros, (D,)).astype(x.dtype)
                projected = projected + bias.reshape((1,) * (x.ndim - 1) + (D,))
            x = x + nn.silu(projected)
        return x


class Medusa(nn.Module):
    """All heads, which read the trunk's hidden states after the final norm and do not depend on drafts."""

    config: MedusaConfig
    implementation: str = "auto"

    def setup(self):
        config, matrix = self.config, nn.initializers.lecun_normal()
        self.block = [MedusaHead(config, self.implementation) for _ in range(config.num_heads)]
        shape = (config.hidden_size, config.draft_vocab_size)
        self.output = [
            self.param(f"output_{index}", matrix, shape)
            for index in range(1 if config.shares_output else config.num_heads)
        ]

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Computes the logits of every head, `[num_heads, ..., R]` float32, from states `[..., D]`."""
        inputs = [self.hidden(hidden, index) for index in range(self.config.num_heads)]
        return jnp.stack([multiply_head(x, self.output[k % len(self.output)]) for k, x in enumerate(inputs)])

    def hidden(self, hidden: jax.Array, index: int) -> jax.Array:
        """Runs the residual layers of head `index` on states `[..., D]`."""
        return self.block[index](hidden)
