"""Log-probabilities of a text's tokens, and the most likely tokens at their positions, from one teacher-forced pass."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.compat import library_settings
from mtpjax.decoding.capacity import round_up_capacity
from mtpjax.distributed import gather_processes
from mtpjax.models.forward import shift_left, trunk_states
from mtpjax.models.model import MTPModel, bind

PIECE = 64  # positions whose logits exist at the same time


class TokenScores(NamedTuple):
    """Log-probabilities under the trunk's unmodified logits, as Python numbers.

    Attributes:
        logprobs: of each of n tokens.
        top_ids: per token, the most likely ids in its place, the most likely first.
        top_logprobs: their log-probabilities.
    """

    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


@library_settings()
def score_tokens(
    params: dict, prompts: Sequence[list[int]], texts: Sequence[list[int]], *, model: MTPModel, num_top: int
) -> list[TokenScores]:
    """Scores the tokens of texts that continue prompts.

    A prompt has at least one token. `num_top` is the number of most likely tokens to report in each place.
    """
    # All rows have one shape and share a compiled program. One at a time bounds the memory.
    columns = round_up_capacity(max(len(prompt) + len(text) for prompt, text in zip(prompts, texts, strict=True)))
    assert columns % PIECE == 0
    num_top = min(num_top, model.config.num_tokens or model.config.vocab_size)
    scores = []
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = np.zeros((1, columns), np.int32)
        tokens[0, : len(prompt) + len(text)] = [*prompt, *text]
        found = jax.device_get(gather_processes(_score(params, tokens, model=model, num_top=num_top)))
        # The logits after a token score the next one.
        place = slice(len(prompt) - 1, len(prompt) + len(text) - 1)
        scores.append(TokenScores(*(array[0, place].tolist() for array in found)))
    return scores


@functools.partial(jax.jit, static_argnames=("model", "num_top"))
def _score(params: dict, tokens: Any, *, model: MTPModel, num_top: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns per place the log-probability of the next token, the best ids, and their log-probabilities."""
    apply = bind(model, params)
    hidden = trunk_states(params, tokens, jnp.ones_like(tokens), model=model)
    hidden, targets = apply(hidden, method="head_input_hidden"), shift_left(tokens, 1)
    # Ids that only pad the embedding table are never decoded.
    is_token = jnp.arange(model.config.vocab_size) < (model.config.num_tokens or model.config.vocab_size)

    def score_piece(begin):
        part, given = (jax.lax.dynamic_slice_in_dim(each, begin, PIECE, axis=1) for each in (hidden, targets))
        logits = jax.nn.log_softmax(apply(part, method="logits").astype(jnp.float32))
        own = jnp.take_along_axis(logits, given[..., None], axis=-1)[..., 0]
        best, ids = jax.lax.top_k(jnp.where(is_token, logits, -jnp.inf), num_top)
        return own, ids, best

    pieces = jax.lax.map(score_piece, jnp.arange(0, tokens.shape[1], PIECE))  # each [T / PIECE, 1, PIECE, ...]
    return jax.tree.map(lambda piece: jnp.moveaxis(piece, 0, 1).reshape(1, tokens.shape[1], *piece.shape[3:]), pieces)
