"""Prompt lookup: copy the tokens that followed the same n-gram earlier in the row's own text."""

import dataclasses

import jax
import jax.numpy as jnp

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Decoder, Drafter, Weights
from mtpjax.decoding.state import DecodeState, Draft
from mtpjax.models.model import MTPModel
from mtpjax.models.parallel import own_size
from mtpjax.models.view import read_rows
from mtpjax.models.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class LookupDrafter(Drafter):
    """Drafts by n-gram lookup, like vLLM's `ngram` method. Needs no modules, no parameters and no state.

    Attributes:
        min_n: shortest n-gram that counts as a match.
        max_n: longest n-gram that is compared.
    """

    min_n: int = 2
    max_n: int = 4

    def check(self, model: MTPModel, config: DecodeConfig) -> None:
        """Raises `ValueError` for trees and for settings that apply only to MTP modules."""
        if config.topk > 1:
            raise ValueError(f"drafter 'lookup' supports only chains: set topk to 1, got {config.topk}")
        for name in ("draft_vocabulary", "draft_window"):
            if getattr(config, name) is not None:
                raise ValueError(f"{name} applies only to drafter 'mtp'; drafter 'lookup' copies from the text")

    def propose(self, decoder: Decoder, weights: Weights, state: DecodeState) -> tuple[Draft, DecodeState]:
        """Copies `spec.num_steps` tokens; see `Drafter.propose`."""
        spec, vocab_size = decoder.spec, decoder.vocab_size
        # Depth 0 of an adaptive call verifies the pending token alone.
        pending = read_rows(state.tokens, state.length - 1, 1)
        if not spec.num_steps:
            return Draft(pending), state
        find = jax.vmap(lambda tokens, length: find_ngram(tokens, length, self.min_n, self.max_n, spec.num_steps))
        drafts, _ = find(state.tokens, state.length)
        # A copied token was not sampled: its draft distribution is one-hot.
        vocabulary = Vocabulary.of(vocab_size)
        q = vocabulary.one_hot(drafts, own_size(vocab_size, "tensor")) if spec.is_ratio_rule else None
        return Draft(jnp.concatenate([pending, drafts], axis=1), q), state


def find_ngram(
    tokens: jax.Array, length: jax.Array, min_n: int, max_n: int, num_drafts: int
) -> tuple[jax.Array, jax.Array]:
    """Finds an earlier occurrence of the text's last n tokens and copies what follows it.

    The longest suffix with `min_n <= n <= max_n` that occurs earlier wins; among its occurrences, the earliest. vLLM's
    `ngram_proposer.py` chooses in the same way. Matches may overlap the suffix.

    Args:
        tokens: `[L]` int32; the first `length` of them are the text.
        length: `[]` int32 tokens of the text.
        min_n: shortest n-gram.
        max_n: longest n-gram.
        num_drafts: tokens to copy, K.

    Returns:
        drafts `[K]` int32 and their number `[]` int32. Drafts past that number repeat the copied tokens, or the last
        token without a match, since a round of the compiled loop always verifies K of them.
    """
    L = tokens.shape[0]
    # Index an occurrence by its end: the position of the token that follows it. That token must be part of the text.
    end = jnp.arange(L)
    matched, num_matched = end < length, jnp.zeros(L, jnp.int32)
    for distance in range(1, max_n + 1):
        # Compare the token `distance` positions before each end with the one as far before the text's end. After this
        # step `num_matched` is the length of the common suffix, up to `distance`.
        before = jnp.pad(tokens, (distance, 0))[:L]
        matched &= (before == tokens[jnp.maximum(length - distance, 0)]) & (end >= distance)
        num_matched += matched
    # Prefer the longest match, then the earliest. Without a match the last token itself is copied.
    longest = num_matched.max()
    has_match = longest >= min_n
    continuation = jnp.where(has_match, jnp.argmax(num_matched == longest), length - 1)  # argmax: the first one
    # The text ends `available` tokens after the match. Further drafts repeat them from the first on.
    available = length - continuation
    step = jnp.arange(num_drafts) % jnp.maximum(available, 1)
    drafts = tokens[jnp.clip(continuation + step, 0, L - 1)]
    return drafts, jnp.where(has_match, jnp.minimum(available, num_drafts), 0).astype(jnp.int32)
