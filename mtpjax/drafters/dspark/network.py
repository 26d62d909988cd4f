"""The network of a DSpark drafter (2607.05147), which extends DFlash with heads that read the previous draft."""

import dataclasses
from typing import Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.drafters.dflash.network import DFlash, DFlashConfig
from mtpjax.messages import require, require_choice
from mtpjax.models.view import View
from pallas_kernels.row_product import multiply_rows

MarkovHead = Literal["none", "vanilla", "gated", "rnn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """The architecture of a DSpark drafter; r is the rank of the Markov head.

    Args:
        markov_head: how a slot's logits depend on drafted tokens. "vanilla" adds a rank-r bias from the previous
            token, "gated" also scales it by a function of the slot's state, and "rnn" adds a bias from all previous
            tokens in the block, through a recurrent state.
        markov_rank: rank of the Markov head (r); 0 if `markov_head` is "none".
        has_confidence: whether the drafter predicts the acceptance of each draft.
        confidence_with_markov: whether this prediction also reads the previous token's embedding.

    Raises:
        ValueError: the values are inconsistent.
    """

    markov_head: MarkovHead = "none"
    markov_rank: int = 0
    has_confidence: bool = False
    confidence_with_markov: bool = False

    def __post_init__(self):
        super().__post_init__()
        require_choice("markov_head", self.markov_head, get_args(MarkovHead))
        require(
            (self.markov_rank > 0) == (self.markov_head != "none"),
            f"markov_rank {self.markov_rank} contradicts markov_head '{self.markov_head}'",
        )
        require(
            not self.confidence_with_markov or (self.has_confidence and self.markov_rank > 0),
            "confidence_with_markov needs a confidence head and a Markov head",
        )


class DSpark(DFlash):
    """The drafter's network, with the parameters of both heads."""

    config: DSparkConfig  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]

    def setup(self):
        super().setup()
        config, matrix, zeros = self.config, nn.initializers.lecun_normal(), nn.initializers.zeros
        D, r = config.block.hidden_size, config.markov_rank
        if r:
            self.markov_in = self.param("markov_in", nn.initializers.normal(0.02), (config.block.vocab_size, r))
            self.markov_out = self.param("markov_out", matrix, (r, config.draft_vocab_size))
        # Input and output widths of the gate or the recurrent step.
        sizes = {"gated": (D + r, r), "rnn": (2 * r + D, 3 * r)}.get(config.markov_head)
        if sizes:
            self.markov_step = self.param("markov_step", matrix, sizes)
            self.markov_step_bias = self.param("markov_step_bias", zeros, sizes[1:])
        if config.has_confidence:
            width = D + r * config.confidence_with_markov
            self.confidence_out = self.param("confidence_out", matrix, (width, 1))
            self.confidence_bias = self.param("confidence_bias", zeros, (1,))

    def __call__(self, features: jax.Array, embedded: jax.Array, view: View) -> jax.Array:
        """Uses every parameter once, so that `init` creates all of them."""
        hidden = super().__call__(features, embedded, view)
        tokens = jnp.zeros(hidden.shape[:2], jnp.int32)
        if self.config.markov_rank:
            self.markov_bias(hidden[:, :1], tokens[:, :1], self.first_carry(hidden))
        if self.config.has_confidence:
            self.confidence_logits(hidden, tokens)
        return hidden

    def first_carry(self, hidden: jax.Array) -> jax.Array:
        """Makes the recurrent state before the first slot (`[B, 1, r]`, or `[B, 1, 0]` without recurrence)."""
        r = self.config.markov_rank if self.config.markov_head == "rnn" else 0
        return jnp.zeros((len(hidden), 1, r), hidden.dtype)

    def markov_features(self, hidden: jax.Array, previous: jax.Array, carry: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes the features that `markov_out` projects to a bias on the logits.

        Args:
            hidden: `[B, T, D]` states of the slots, after the final norm; T is 1 with recurrence.
            previous: `[B, T]` int32 token before the one that each slot drafts.
            carry: the recurrent state, from `first_carry` or the previous slot.

        Returns:
            The features `[B, T, r]`, and the recurrent state for the next slot.
        """
        kind = self.config.markov_head
        x = self.markov_in[previous].astype(hidden.dtype)
        if kind == "gated":
            x = jax.nn.sigmoid(self._step(hidden, x)) * x
        elif kind == "rnn":
            # Run a gated recurrent step over the block's tokens, with the slot's state as an additional input.
            gate, candidate, output = jnp.split(self._step(carry, x, hidden), 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            carry = gate * carry + (1 - gate) * jnp.tanh(candidate)
            x = jnp.tanh(output)
        return x, carry

    def markov_bias(self, hidden: jax.Array, previous: jax.Array, carry: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes the bias that the Markov head adds to the logits; see `markov_features` for the arguments.

        Returns:
            The bias `[B, T, R]` float32, and the recurrent state for the next slot.
        """
        x, carry = self.markov_features(hidden, previous, carry)
        return multiply_rows(x, self.markov_out.astype(x.dtype), jnp.float32), carry

    def confidence_logits(self, hidden: jax.Array, previous: jax.Array) -> jax.Array:
        """Predicts whether each slot's draft is accepted, from the tokens before it.

        Args:
            hidden: `[B, T, D]` states of the slots, after the final norm.
            previous: `[B, T]` int32 token before the one that each slot drafts.

        Returns:
            `[B, T]` float32 logits.
        """
        # The slot's own draft is not an input, because deciding by it would change the distribution of the text.
        x = hidden
        if self.config.confidence_with_markov:
            x = jnp.concatenate([x, self.markov_in[previous].astype(x.dtype)], axis=-1)
        logits = jnp.matmul(x, self.confidence_out.astype(x.dtype), preferred_element_type=jnp.float32)
        return logits[..., 0] + self.confidence_bias[0]

    def _step(self, *inputs: jax.Array) -> jax.Array:
        """Applies the linear layer of the gate or the recurrent step."""
        joined = jnp.concatenate(inputs, axis=-1)
        bias = self.markov_step_bias.astype(joined.dtype)
        return joined @ self.markov_step.astype(joined.dtype) + bias.reshape((1,) * (joined.ndim - 1) + (-1,))
