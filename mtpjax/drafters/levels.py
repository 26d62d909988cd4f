"""Drafts chains whose scores need no further network pass, such as those from Medusa heads or a block's slots."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.sampling import PathTokens
from mtpjax.decoding.state import DecodeState, Draft
from mtpjax.drafters.scoring import DraftScores
from mtpjax.models.view import read_rows

# (level, previous token [B, 1], drafted tokens for penalties, previous level's carry) -> scores, carry.
ScoreLevel = Callable[[int, jax.Array, PathTokens | None, Any], tuple[DraftScores, Any]]


def draft_levels(decoder: Decoder, score: ScoreLevel, state: DecodeState, carry: Any = None) -> Draft:
    """Drafts one token per level with `DraftScores.draft_token`.

    Args:
        score: returns the scores at one level, from 1 to K.
        carry: the carry that the first level receives.
    """
    tokens, probabilities = [read_rows(state.tokens, state.length - 1, 1)], []
    for level in range(1, decoder.spec.num_steps + 1):
        # Penalties count the tokens drafted so far, as verification does.
        path = None
        if state.settings.sampling.has_penalties and level > 1:
            drafted = jnp.concatenate(tokens[1:], axis=1)
            path = PathTokens(drafted, jnp.ones((len(drafted), 1, level - 1), bool))
        scores, carry = score(level, tokens[-1], path, carry)
        token, q = scores.draft_token()
        tokens.append(token)
        probabilities += [] if q is None else [q]
    nodes = jnp.concatenate([token.astype(jnp.int32) for token in tokens], axis=1)
    return Draft(nodes, jnp.concatenate(probabilities, axis=1) if probabilities else None)
