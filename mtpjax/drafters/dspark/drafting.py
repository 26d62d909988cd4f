"""The DSpark drafter (2607.05147), which draws the drafts of a DFlash block one at a time."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Decoder, Weights
from mtpjax.decoding.limits import DraftLimits
from mtpjax.decoding.sampling import PathTokens
from mtpjax.decoding.state import DecodeState, Draft
from mtpjax.drafters.dflash.drafting import DFlashDrafter, block_limits
from mtpjax.drafters.dspark.network import DSpark, DSparkConfig
from mtpjax.drafters.levels import draft_levels
from mtpjax.drafters.scoring import DraftScores
from mtpjax.models.model import MTPModel
from pallas_kernels.top_k import top_k


@dataclasses.dataclass(frozen=True)
class MarkovScores(DraftScores):
    """Scores that include the Markov head's bias, which depends on the previous token.

    Attributes:
        bias: `[B, f, R]` float32, added to the head's logits.
    """

    bias: jax.Array

    def head_logits(self) -> jax.Array:
        """Runs the head and adds the bias."""
        return super().head_logits() + self.bias

    def top_tokens(self, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Finds the k best tokens; see `DraftScores.top_tokens`."""
        logits = self.logits()
        return *top_k(logits, k), jax.nn.logsumexp(logits, axis=-1)


@dataclasses.dataclass(frozen=True)
class DSparkDrafter(DFlashDrafter):
    """Drafts chains with a DSpark network, which `mtpjax.load_drafter` loads with its parameters.

    A row's draft ends before the first slot whose predicted chance of acceptance is below `confidence_threshold`. The
    prediction reads the tokens before this slot but not the slot's own token, so the text stays exact. The threshold
    does not change the width of the verification pass, only how many drafts count as proposed and can be accepted.

    Attributes:
        confidence_threshold: minimum chance of acceptance, from 0 to 1. At 0, every round drafts `num_steps` levels.
    """

    architecture: DSparkConfig = dataclasses.field(kw_only=True)  # pyright: ignore[reportIncompatibleVariableOverride]
    confidence_threshold: float = dataclasses.field(default=0.0, kw_only=True)
    title: ClassVar[str] = "DSpark"
    limits: ClassVar[DraftLimits] = block_limits("DSpark")
    network_type: ClassVar[type[DSpark]] = DSpark

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.confidence_threshold <= 1:
            raise ValueError(f"confidence_threshold must be within 0..1, got {self.confidence_threshold}")
        if self.confidence_threshold and not self.architecture.has_confidence:
            raise ValueError("confidence_threshold needs a drafter with a confidence head")

    @property
    def has_confidence(self) -> bool:
        """True if the network has a confidence head."""
        return self.architecture.has_confidence

    @property
    def ends_early(self) -> bool:
        """True if low confidence can end a draft."""
        return self.confidence_threshold > 0

    def check(self, model: MTPModel, config: DecodeConfig) -> None:
        """Raises `ValueError` if the drafter is for a different trunk or does not support the settings."""
        super().check(model, config)
        if self.confidence_threshold and config.depth_policy == "adaptive":
            raise ValueError(
                "confidence_threshold and depth_policy 'adaptive' both choose the depth, and the policy would count a "
                "draft that ended early as rejected: use only one of them"
            )

    def _draft(self, decoder: Decoder, weights: Weights, state: DecodeState, hidden: jax.Array) -> Draft:
        """Drafts from the slots' states `[B, K, D]`. The previous token adds a bias to each token's logits."""
        # 1. Draft all levels.
        draft_all = self._draft_markov if self.architecture.markov_rank else super()._draft
        draft = draft_all(decoder, weights, state, hidden)
        if not self.confidence_threshold:
            return draft
        # 2. End each row's draft before its first slot below the threshold. The chance `[B, K]` that a draft is
        # accepted is predicted from the slot's state and the previous token.
        logits = self._apply(decoder, weights, hidden, draft.tokens[:, :-1], method="confidence_logits")
        is_kept = jnp.cumprod(jax.nn.sigmoid(logits) >= self.confidence_threshold, axis=1)
        return draft.replace(num_drafted=is_kept.sum(axis=1).astype(jnp.int32))

    def _draft_markov(self, decoder: Decoder, weights: Weights, state: DecodeState, hidden: jax.Array) -> Draft:

        def score(
            level: int, previous: jax.Array, path: PathTokens | None, carry: jax.Array
        ) -> tuple[DraftScores, jax.Array]:
            rows = hidden[:, level - 1 : level]
            # The block ran once for all levels. Only this bias depends on the previously drafted token.
            bias, carry = self._apply(decoder, weights, rows, previous, carry, method="markov_bias")
            head = weights.drafter.head
            return MarkovScores(decoder, weights.params, state, head, rows, 0, path, level, bias), carry

        return draft_levels(decoder, score, state, self._apply(decoder, weights, hidden, method="first_carry"))

    def heads(self, network: dict[str, Any], trunk_head: jax.Array, num_levels: int) -> tuple[jax.Array, ...]:
        """Returns the head (`[D, R]`, or `[D + r, R]` with a Markov head).

        The Markov head adds `x @ markov_out` to the logits `h @ head`, so the combined head reads h and x concatenated.
        """
        (head,) = super().heads(network, trunk_head, num_levels)
        return (jnp.concatenate([head, network["markov_out"]]) if self.architecture.markov_rank else head,)

    def _head_inputs(
        self, network: dict[str, Any], hidden: jax.Array, tokens: jax.Array, anchors: jax.Array, model: MTPModel
    ) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """Runs the heads, which read the true token before each level.

        At temperature 0, this equals decoding for every draft that can be accepted, because all drafts before it are
        the true tokens.
        """
        (B, A, K, _), T, own = hidden.shape, tokens.shape[1], self.architecture
        apply: Any = functools.partial(DSpark(own, model.implementation).apply, {"params": network})
        # The token before level k is at position a + k - 1. From here on, each block is a row.
        columns = jnp.minimum(anchors[:, :, None] + jnp.arange(K)[None, None], T - 1).reshape(B, -1)
        previous = jnp.take_along_axis(tokens, columns, axis=1).reshape(B * A, K)
        flat, confidence = hidden.reshape(B * A, K, -1), None
        if own.has_confidence:
            confidence = jnp.moveaxis(apply(flat, previous, method="confidence_logits").reshape(B, A, K), 2, 0)
        inputs, carry = [], apply(flat, method="first_carry")
        for level in range(K):
            rows, tokens_before = flat[:, level : level + 1], previous[:, level : level + 1]
            if own.markov_rank:
                x, carry = apply(rows, tokens_before, carry, method="markov_features")
                rows = jnp.concatenate([rows, x], axis=-1)
            inputs.append(rows.reshape(B, A, -1))
        return tuple(inputs), confidence
