"""Computes the log-probabilities of a given text, for `echo` and for clients that compare answers by likelihood.

A text to score uses a slot and pages like a prompt, and is processed chunk by chunk between the rounds of other texts.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.capacity import MIN_PREFILL_CHUNK
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.gpu_graph import one_graph
from mtpjax.decoding.session import Batch, in_every_process, of_shard, put, take
from mtpjax.decoding.state import DecodeState, view_pass
from mtpjax.messages import require
from mtpjax.models.cache import commit
from mtpjax.models.decoding_layout import run_on_shards
from mtpjax.models.model import bind
from mtpjax.models.parallel import over_rows
from mtpjax.models.view import Pages, read_rows
from mtpjax.models.vocabulary import Vocabulary

MAX_TOP = 20  # maximum number of alternatives per token
MAX_LOGITS = 2**24  # maximum number of logits that exist at the same time (64 MiB)
MAX_ATTENTION_SCORES = 2**26  # maximum number of a layer's attention scores at the same time (256 MiB)


class ScoredChunk(flax.struct.PyTreeNode):
    """Log-probabilities of the tokens after each of C positions, in R rows."""

    logprobs: Any  # [R, C] float32
    ids: Any  # [R, C, n] int32 the best tokens, n = min(MAX_TOP, V)
    values: Any  # [R, C, n] float32 their log-probabilities


def check_text(tokens: list[int], num_top: int, *, vocab_size: int, max_length: int) -> None:
    """Raises ValueError if a text to score is empty or too long, or a token id or `num_top` is out of range."""
    require(1 <= len(tokens) <= max_length, f"a text to score must have 1..{max_length} tokens, got {len(tokens)}")
    require(all(0 <= token < vocab_size for token in tokens), f"the text has a token id outside 0..{vocab_size - 1}")
    require(0 <= num_top <= MAX_TOP, f"num_top must be within 0..{MAX_TOP}, got {num_top}")


@one_graph(donate_argnames=("state",), static_argnames=("decoder",))
def score_chunk(
    params: dict,
    draft_params: Any,
    state: DecodeState,
    batch: Batch,
    start: jax.Array,
    targets: jax.Array,
    *,
    decoder: Decoder,
) -> tuple[DecodeState, ScoredChunk]:
    """Runs the trunk over a chunk of each row's text, and scores the tokens that follow.

    Args:
        draft_params: the drafter's own parameters, of which only the layout on a mesh is used.
        state: the state; donated. Only the trunk's cache changes.
        start: `[P, b]` int32 first position of each row's chunk; the caches hold the positions before it. `NO_START`
            for padding.
        targets: `[P, b, C]` int32 token after each position; any value where the text has ended.

    Returns:
        The new state and the scores.
    """

    model = decoder.model

    def score_shard(params, _, state, batch, start, targets):
        batch, start, targets = of_shard(state, (batch, start, targets))
        vocab_size, width = model.config.vocab_size, targets.shape[-1]
        apply, vocabulary = bind(model, params), Vocabulary.of(vocab_size)
        assert isinstance(state.storage, Pages)
        num_slots = batch.table.shape[-1] * state.storage.size
        trunk_width = pass_width(width, len(start) * model.config.num_attention_heads * num_slots)
        size = piece_size(trunk_width, len(start) * vocab_size)
        split = lambda leaf: jnp.moveaxis(leaf.reshape(len(leaf), -1, size, *leaf.shape[2:]), 1, 0)
        join = lambda leaf: jnp.moveaxis(leaf, 0, 1).reshape(leaf.shape[1], trunk_width, *leaf.shape[3:])

        def score_piece(piece):
            hidden, given = piece  # [b, c, D], [b, c]
            logits = apply(hidden, method="own_logits").astype(jnp.float32)
            total, rows = vocabulary.logsumexp(logits), logits.reshape(-1, logits.shape[-1])
            own = vocabulary.at(rows, np.arange(len(rows)), given.reshape(-1)).reshape(given.shape)
            values, ids = vocabulary.top_k(logits, min(MAX_TOP, vocab_size))
            return ScoredChunk(own - total, ids, values - total[..., None])

        def score_pass(carry):
            index, rows, scores = carry
            # 1. Run the trunk over as many positions as the limit on attention scores allows.
            offset = index * trunk_width
            begin = jnp.minimum(start + offset, rows.length)
            num_valid = jnp.clip(rows.length - begin, 0, trunk_width)
            view = view_pass(rows, model.config, begin, trunk_width, num_used=num_valid, num_valid=num_valid)
            output = apply(read_rows(rows.tokens, begin, trunk_width), view, rows.trunk, method="run_trunk")
            # 2. Run the head over as many of these positions at a time as the limit on logits allows.
            given = jax.lax.dynamic_slice_in_dim(targets, offset, trunk_width, axis=1)
            new = jax.tree.map(join, jax.lax.map(score_piece, (split(output.hidden), split(given))))
            place = lambda all_scores, own: jax.lax.dynamic_update_slice_in_dim(all_scores, own, offset, axis=1)
            rows = rows.replace(trunk=commit(output.cache, begin + num_valid))
            return index + 1, rows, jax.tree.map(place, scores, new)

        rows = take(state, batch, decoder)
        num_top, shape = min(MAX_TOP, vocab_size), targets.shape
        empty = lambda dtype, *rest: jnp.zeros((*shape, *rest), dtype)
        scores = ScoredChunk(empty(jnp.float32), empty(jnp.int32, num_top), empty(jnp.float32, num_top))
        num_left = over_rows(jnp.max, jnp.where(rows.done, 0, jnp.clip(rows.length - start, 0, width)))
        num_passes = (num_left + trunk_width - 1) // trunk_width
        carry = (jnp.int32(0), rows, scores)
        _, rows, scores = jax.lax.while_loop(lambda carry: carry[0] < num_passes, score_pass, carry)
        return put(state, rows, batch, decoder), scores

    rest = batch, start, targets
    state, scores = run_on_shards(score_shard, model.config, params, draft_params, state, *rest, has_row_outputs=True)
    return state, in_every_process(scores)


def pass_width(width: int, row_size: int) -> int:
    """Returns the maximum number of positions in one pass of the trunk, which is a divisor of `width`.

    Args:
        width: positions in the chunk.
        row_size: attention scores per position, over all rows, where XLA computes them.
    """
    return _largest_divisor(width, max(MAX_ATTENTION_SCORES // row_size, MIN_PREFILL_CHUNK))


def piece_size(width: int, row_size: int) -> int:
    """Returns the maximum number of positions whose logits may exist at the same time, which is a divisor of `width`.

    Args:
        width: positions in the pass.
        row_size: logits per position, over all rows.
    """
    return _largest_divisor(width, MAX_LOGITS // row_size)


def _largest_divisor(width: int, limit: int) -> int:
    return max(size for size in range(1, width + 1) if width % size == 0 and size <= max(limit, 1))
