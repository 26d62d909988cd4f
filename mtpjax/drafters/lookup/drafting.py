"""Prompt lookup, which copies the tokens that followed the same n-gram earlier in the row's text."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from mtpjax.decoding.decoder import Decoder, Drafter, Weights
from mtpjax.decoding.limits import DraftLimits
from mtpjax.decoding.state import DecodeState, Draft
from mtpjax.models.parallel import own_size
from mtpjax.models.view import read_rows
from mtpjax.models.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class LookupDrafter(Drafter):
    """Drafts by n-gram lookup, like vLLM's `ngram` method, without parameters or state.

    Attributes:
        min_n: minimum length of a matching n-gram.
        max_n: maximum length of a matching n-gram.
    """

    min_n: int = 2
    max_n: int = 4
    limits: ClassVar[DraftLimits] = DraftLimits(
        trees="drafter 'lookup' supports only chains, since it copies one continuation",
        draft_window="draft_window applies only to drafters with a cache; drafter 'lookup' copies from the text",
        draft_vocabulary="draft_vocabulary applies only to drafter 'mtp'; drafter 'lookup' copies from the text",
    )

    def propose(self, decoder: Decoder, weights: Weights, state: DecodeState) -> tuple[Draft, DecodeState]:
        """Copies `spec.num_steps` tokens; see `Drafter.propose`."""
        spec, vocab_size = decoder.spec, decoder.vocab_size
        # At depth 0, an adaptive call verifies only the pending token.
        pending = read_rows(state.tokens, state.length - 1, 1)
        if not spec.num_steps:
            return Draft(pending), state
        find = jax.vmap(lambda tokens, length: find_ngram(tokens, length, self.min_n, self.max_n, spec.num_steps))
        drafts, _ = find(state.tokens, state.length)
        # A copied token is not sampled, so its draft distribution is one-hot.
        vocabulary = Vocabulary.of(vocab_size)
        q = vocabulary.one_hot(drafts, own_size(vocab_size, "tensor")) if spec.is_ratio_rule else None
        return Draft(jnp.concatenate([pending, drafts], axis=1), q), state


def find_ngram(
    tokens: jax.Array, length: jax.Array, min_n: int, max_n: int, num_drafts: int
) -> tuple[jax.Array, jax.Array]:
    """Finds an earlier occurrence of the text's last n tokens and copies what follows it.

    Chooses the longest suffix with `min_n <= n <= max_n` that occurs earlier, and its earliest occurrence, as vLLM's
    `ngram_proposer.py` does. Matches may overlap the suffix.

    Args:
        tokens: `[L]` int32; the first `length` tokens are the text.
        length: `[]` int32, number of tokens in the text.
        min_n: minimum length of the n-gram.
        max_n: maximum length of the n-gram.
        num_drafts: number of tokens to copy, K.

    Returns:
        The drafts `[K]` int32, and the number of drafts that were found, `[]` int32. A round always verifies K drafts,
        so the other drafts repeat the copied tokens, or the last token if there is no match.
    """
    L = tokens.shape[0]
    # Index an occurrence by the position of the token that follows it. That token must be part of the text.
    end = jnp.arange(L)
    matched, num_matched = end < length, jnp.zeros(L, jnp.int32)
    for distance in range(1, max_n + 1):
        # Compare the token `distance` positions before each end with the token `distance` positions before the text's
        # end. After this step, `num_matched` is the length of the common suffix, up to `distance`.
        before = jnp.pad(tokens, (distance, 0))[:L]
        matched &= (before == tokens[jnp.maximum(length - distance, 0)]) & (end >= distance)
        num_matched += matched
    # Prefer the longest match, then the earliest. Without a match, copy the last token itself.
    longest = num_matched.max()
    has_match = longest >= min_n
    continuation = jnp.where(has_match, jnp.argmax(num_matched == longest), length - 1)  # argmax returns the first
    # The text ends `available` tokens after the match. Further drafts repeat these tokens, starting with the first.
    available = length - continuation
    step = jnp.arange(num_drafts) % jnp.maximum(available, 1)
    drafts = tokens[jnp.clip(continuation + step, 0, L - 1)]
    return drafts, jnp.where(has_match, jnp.minimum(available, num_drafts), 0).astype(jnp.int32)
