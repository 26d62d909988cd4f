"""Drafts a chain from scores that need no further pass of a network: Medusa's heads, the slots of a DFlash block."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.decoding import rng
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.sampling import PathTokens, distribution, draw
from mtpjax.decoding.state import DecodeState, Draft
from mtpjax.drafters.scoring import DraftScores
from mtpjax.models.view import read_rows

# (level, the token before it [B, 1], drafted tokens for penalties, the carry of the level before) -> scores, carry.
ScoreLevel = Callable[[int, jax.Array, PathTokens | None, Any], tuple[DraftScores, Any]]


def draft_levels(decoder: Decoder, score: ScoreLevel, state: DecodeState, carry: Any = None) -> Draft:
    """Drafts one token per level: sampled from q where the rule compares p with q, else the arg-max.

    Args:
        decoder: the decoder of a chain.
        score: returns the scores of a level, 1 to K.
        carry: the carry that the first level gets.
    """
    spec, sampling = decoder.spec, state.settings.sampling
    tokens, probabilities = [read_rows(state.tokens, state.length - 1, 1)], []
    for level in range(1, spec.num_steps + 1):
        # Penalties count the tokens drafted so far, as verification does.
        path = None
        if sampling.has_penalties and level > 1:
            drafted = jnp.concatenate(tokens[1:], axis=1)
            path = PathTokens(drafted, jnp.ones((len(drafted), 1, level - 1), bool))
        scores, carry = score(level, tokens[-1], path, carry)
        vocabulary = scores.vocabulary
        if spec.is_ratio_rule:
            logits = scores.logits()
            probabilities.append(distribution(logits, sampling, vocabulary))
            # Drafts have their own noise: the draws of acceptance and of the bonus token must not depend on it.
            V, node = logits.shape[-1], jnp.array([level])
            noise = rng.gumbel(sampling.seed, state.length[:, None], rng.DRAFT, node, V, vocabulary.first_id(V))
            tokens.append(draw(probabilities[-1], noise, vocabulary))
        elif sampling.changes_logits:
            tokens.append(vocabulary.argmax(scores.logits()))
        else:
            tokens.append(scores.top_tokens(1)[1][:, :, 0])
    nodes = jnp.concatenate([token.astype(jnp.int32) for token in tokens], axis=1)
    return Draft(nodes, jnp.concatenate(probabilities, axis=1) if probabilities else None)
