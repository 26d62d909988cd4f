"""Adjusting logits by what a decoding state knows about its rows."""

import jax
import jax.numpy as jnp

from mtpjax.decoding.sampling import Path, adjust
from mtpjax.decoding.state import DecodeState
from mtpjax.models.model import MTPModel


def adjust_logits(
    logits: jax.Array, state: DecodeState, path: Path | None, num_new: jax.Array, model: MTPModel
) -> jax.Array:
    """Applies `mtpjax.decoding.sampling.adjust` with the state's parameters, history and stop tokens.

    Args:
        logits: `[B, T, V]`.
        state: the rows being decoded.
        path: drafted tokens before each of the T nodes.
        num_new: `[B, T]` new tokens before each node.
        model: the model, for its vocabulary size.

    Returns:
        `[B, T, V]` float32.
    """
    # Sequences are right-aligned: a single stop token has -1 everywhere but in the last column.
    stops = state.settings.stops
    is_single = (stops[:, :, :-1] == -1).all(axis=2)
    return adjust(
        logits,
        state.settings.sampling,
        state.history,
        path=path,
        num_new=num_new,
        stop_ids=jnp.where(is_single, stops[:, :, -1], -1),
        num_tokens=model.config.num_tokens or model.config.vocab_size,
    )
