"""Computes log-probabilities of a text's tokens and of the most likely tokens, in one teacher-forced pass."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.capacity import round_up_capacity
from mtpjax.evaluation.row_pass import run_on_rows
from mtpjax.models.decoding_layout import run_on_shards
from mtpjax.models.forward import shift_left, trunk_states
from mtpjax.models.model import MTPModel, bind

PIECE = 64  # number of positions whose logits are in memory at the same time


class TokenScores(NamedTuple):
    """Log-probabilities under the trunk's unmodified logits, as Python numbers.

    Attributes:
        logprobs: the log-probability of each token.
        top_ids: per token, the most likely ids at its position, most likely first.
        top_logprobs: the log-probabilities of `top_ids`.
    """

    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


def score_tokens(
    params: dict, prompts: Sequence[list[int]], texts: Sequence[list[int]], *, model: MTPModel, num_top: int
) -> list[TokenScores]:
    """Scores the tokens of texts that continue prompts.

    Each prompt must have at least one token. The `num_top` most likely tokens are returned for each position.
    """
    # Each device scores one row at a time, to bound the memory.
    columns = round_up_capacity(max(len(prompt) + len(text) for prompt, text in zip(prompts, texts, strict=True)))
    assert columns % PIECE == 0
    num_top = min(num_top, model.config.num_tokens or model.config.vocab_size)
    tokens = np.zeros((len(prompts), columns), np.int32)
    for row, prompt, text in zip(tokens, prompts, texts, strict=True):
        row[: len(prompt) + len(text)] = [*prompt, *text]
    found = run_on_rows(_score, params, {}, tokens, batch_size=1, model=model, num_top=num_top)
    # The logits after a token score the next one.
    places = [slice(len(prompt) - 1, len(prompt) + len(text) - 1) for prompt, text in zip(prompts, texts, strict=True)]
    return [TokenScores(*(array[row, place].tolist() for array in found)) for row, place in enumerate(places)]


@functools.partial(jax.jit, static_argnames=("model", "num_top"))
def _score(params: dict, draft_params: Any, tokens: Any, *, model: MTPModel, num_top: int) -> tuple[jax.Array, ...]:
    """Returns, per position, the log-probability of the next token, the best ids, and their log-probabilities."""

    def score_shard(params: dict, _: Any, tokens: jax.Array):
        B, T = tokens.shape
        apply = bind(model, params)
        hidden = trunk_states(params, tokens, jnp.ones_like(tokens), model=model)
        hidden, targets = apply(hidden, method="head_input_hidden"), shift_left(tokens, 1)
        # Ids that are only padding in the embedding table are never decoded.
        is_token = jnp.arange(model.config.vocab_size) < (model.config.num_tokens or model.config.vocab_size)

        def score_piece(begin):
            part, given = (jax.lax.dynamic_slice_in_dim(each, begin, PIECE, axis=1) for each in (hidden, targets))
            logits = jax.nn.log_softmax(apply(part, method="logits").astype(jnp.float32))
            own = jnp.take_along_axis(logits, given[..., None], axis=-1)[..., 0]
            best, ids = jax.lax.top_k(jnp.where(is_token, logits, -jnp.inf), num_top)
            return own, ids, best

        pieces = jax.lax.map(score_piece, jnp.arange(0, T, PIECE))  # each [T / PIECE, B, PIECE, ...]
        join = lambda piece: jnp.moveaxis(piece, 0, 1).reshape(B, T, *piece.shape[3:])
        return tokens, jax.tree.map(join, pieces)

    return run_on_shards(score_shard, model.config, params, draft_params, tokens, has_row_outputs=True)[1]
