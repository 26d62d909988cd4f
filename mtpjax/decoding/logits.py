"""Adjusts logits with the sampling parameters and history of a decoding state."""

import jax
import jax.numpy as jnp

from mtpjax.decoding.sampling import PathTokens, apply_penalties_and_bias
from mtpjax.decoding.state import DecodeState
from mtpjax.models.model import MTPModel
from mtpjax.models.vocabulary import Vocabulary


def adjust_logits(
    logits: jax.Array, state: DecodeState, path: PathTokens | None, num_new: jax.Array, model: MTPModel
) -> jax.Array:
    """Applies `mtpjax.decoding.sampling.apply_penalties_and_bias` with the state's parameters, history and stop tokens.

    Prefill, drafting and verification all call this function, so p and q refer to the same transformation.

    Args:
        logits: `[B, T, own V]` unmodified logits after each of T nodes.
        state: the rows.
        path: drafted tokens up to each node, that node included; None: none.
        num_new: `[B, T]` int32 new tokens up to each node.
        model: the model, for its vocabulary size.

    Returns:
        `[B, T, own V]` float32.
    """
    # `min_new` bans single stop tokens; a longer stop sequence cannot be banned token by token. Sequences are
    # right-aligned, so a single stop token has -1 in every column but the last.
    stops = state.settings.stops
    is_single = (stops[:, :, :-1] == -1).all(axis=2)
    return apply_penalties_and_bias(
        logits,
        state.settings.sampling,
        state.history,
        path=path,
        num_new=num_new,
        stop_ids=jnp.where(is_single, stops[:, :, -1], -1),
        num_tokens=model.config.num_tokens or model.config.vocab_size,
        vocabulary=Vocabulary.of(model.config.vocab_size),
    )
