"""Adjusts logits with the sampling parameters and history of a decoding state, and draws the target's tokens."""

import jax
import jax.numpy as jnp

from mtpjax.decoding import rng
from mtpjax.decoding.sampling import PathTokens, SamplingArrays, apply_penalties_and_bias, draw
from mtpjax.decoding.state import DecodeState
from mtpjax.models.model import MTPModel
from mtpjax.models.vocabulary import WHOLE, Vocabulary


def adjust_logits(
    logits: jax.Array,
    state: DecodeState,
    path: PathTokens | None,
    num_new: jax.Array,
    model: MTPModel,
    allowed: jax.Array | None = None,
) -> jax.Array:
    """Applies `mtpjax.decoding.sampling.apply_penalties_and_bias` with the state's parameters, history and stop tokens.

    Prefill, drafting and verification all call this function, so p and q are transformed in the same way.

    Args:
        logits: `[B, T, V]` unmodified logits after each of T nodes.
        path: drafted tokens up to and including each node; None: no drafted tokens.
        num_new: `[B, T]` int32 new tokens up to each node.
        model: the model, for its vocabulary size.
        allowed: `[B, T, ceil(V/32)]` int32 bit mask of the tokens that may follow each node, lowest bit first; None:
            all tokens.

    Returns:
        `[B, T, V]` float32.
    """
    # `min_new` bans single stop tokens; a longer stop sequence cannot be banned token by token. Sequences are
    # right-aligned, so a single stop token has -1 in every column but the last.
    stops = state.settings.stops
    is_single = (stops[:, :, :-1] == -1).all(axis=2)
    adjusted = apply_penalties_and_bias(
        logits,
        state.settings.sampling,
        state.history,
        path=path,
        num_new=num_new,
        stop_ids=jnp.where(is_single, stops[:, :, -1], -1),
        num_tokens=model.config.num_tokens or model.config.vocab_size,
        vocabulary=Vocabulary.of(model.config.vocab_size),
    )
    if allowed is None:
        return adjusted
    return jnp.where(_unpack_bits(allowed, model.config.vocab_size), adjusted, -jnp.inf)


def draw_target(
    probabilities: jax.Array, sampling: SamplingArrays, position: jax.Array, vocabulary: Vocabulary = WHOLE
) -> jax.Array:
    """Draws the tokens `[B, T]` int32 that plain decoding with the same seed draws at `position [B, T]`."""
    # The draw is keyed only by the position. The node is always 0, since plain decoding has no tree.
    _, T, V = probabilities.shape
    node = jnp.zeros(T, jnp.int32)
    gumbel = rng.gumbel(sampling.seed, position, rng.TARGET, node, V, vocabulary.first_id(V))
    return draw(probabilities, gumbel, vocabulary)


def _unpack_bits(words: jax.Array, vocab_size: int) -> jax.Array:
    """Unpacks `[B, T, ceil(V/32)]` int32 to `[B, T, V]` bool."""
    bits = (words[..., None] >> jnp.arange(32)[None, None, None]) & 1
    bits = bits.reshape(*words.shape[:-1], -1)[..., :vocab_size]
    return Vocabulary.of(vocab_size).own(bits) == 1
