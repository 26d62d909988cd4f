"""Prefill: run the trunk and the drafter over prompts, chunk by chunk, and commit each row's first new token."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from mtpjax.decoding.commit import append_tokens
from mtpjax.decoding.drafter import Drafter
from mtpjax.decoding.logits import adjust_logits
from mtpjax.decoding.sampling import distribution, draw_target
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState, NewRows, gather_rows, scatter_rows, start_rows, view_pass
from mtpjax.models.cache import commit, reset_rows
from mtpjax.models.layers.entries import read_rows
from mtpjax.models.model import MTPModel, bind
from mtpjax.models.pages import NO_PAGE
from mtpjax.models.parallel import over_rows
from mtpjax.models.vocabulary import Vocabulary


def insert_rows(
    params: dict,
    prepared: Any,
    state: DecodeState,
    rows: NewRows,
    slots: jax.Array,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
) -> DecodeState:
    """Puts new requests into slots of a state and prefills them.

    Args:
        params: model parameters.
        prepared: the drafter's prepared parameters (`Drafter.prepare`).
        state: a state; the slots that the requests enter should be done.
        rows: R requests.
        slots: `[R]` int32, the slot of each request. Requests with a slot index outside the state are dropped, so a
            caller can pad R.
        model: the model.
        drafter: the draft method.
        spec: the shape of a round.

    Returns:
        The state with these rows running, each with one new token.
    """
    chex.assert_shape((rows.length, rows.num_cached), (rows.tokens.shape[0],))
    # Copy the slots into a state of R rows, prefill that, and write it back. The other rows cost nothing.
    row_state = gather_rows(state, slots)
    start = _prefill_start(row_state, rows, model=model, drafter=drafter)
    # Attention masks slots behind the text, so old entries may stay. A recurrent layer has one running state, which
    # must be zero at the start of a text.
    row_state = row_state.replace(trunk=reset_rows(row_state.trunk, start == 0))
    if rows.page_table is not None:
        # A request that is dropped must not write to pages, which all rows share.
        is_kept = (slots < len(state.length))[:, None]
        rows = rows.replace(page_table=jnp.where(is_kept, rows.page_table, NO_PAGE))
    row_state = start_rows(row_state, rows, vocab_size=model.config.vocab_size)
    row_state = prefill(params, prepared, row_state, start, model=model, drafter=drafter, spec=spec)
    return scatter_rows(state, row_state, slots)


def _prefill_start(state: DecodeState, rows: NewRows, *, model: MTPModel, drafter: Drafter) -> jax.Array:
    """Returns `[B]` int32 first position to prefill: 0, or the first one without reusable cache entries."""
    # The request states how many of its tokens the slot decoded before, and the cache states how many it holds. Pages
    # hold what the request states.
    start, extended = rows.num_cached, drafter.num_extended(state.drafter)
    if rows.page_table is None:
        start = jnp.minimum(start, state.trunk.length)
    if extended is not None:
        # Entry i of MTP module k (0-based) also depends on token i+k+1. The new prompt may differ from the old text
        # there, so the last M cached positions (`max_shift`) are processed again. In pages, the entries that do not
        # depend on what follows are kept.
        start = start - drafter.max_shift(model)
        if rows.page_table is None:
            start = jnp.minimum(start, extended)
    # The last prompt token is always processed, because its output gives the first new token.
    return jnp.clip(start, 0, rows.length - 1)


def prefill(
    params: dict,
    prepared: Any,
    state: DecodeState,
    start: jax.Array | None = None,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
    max_chunks: jax.Array | int | None = None,
    first_token: jax.Array | None = None,
    allowed: jax.Array | None = None,
    end: jax.Array | None = None,
) -> DecodeState:
    """Processes the prompts from `start` on and commits the first new token of each row.

    Args:
        params: model parameters.
        prepared: the drafter's prepared parameters (`Drafter.prepare`).
        state: rows whose committed text is the prompt.
        start: `[B]` int32 first position to process; the caches hold the positions before it. None: 0 for every row.
        model: the model.
        drafter: the draft method.
        spec: the shape of a round.
        max_chunks: the most chunks to process. A row whose prompt needs more gets no token, and another call continues
            where this one ends. None: no limit.
        first_token: `[B]` int32 the first new token where it is known already, as of a row that decoded before; -1
            where it is not. None: of no row.
        allowed: `[B, ceil(V/32)]` int32 tokens that the first new token may be, as in `adjust_logits`; needs a spec or
            sampling options that compute logits. None: all.
        end: `[B]` int32 position before which processing ends, so that recurrent layers have their state there. A row
            whose prompt goes on gets no token, as with `max_chunks`. None: the end of each prompt.

    Returns:
        The state before the first round. Each row has one new token, which is pending: no cache holds it.
    """
    # All rows run as many chunks as the row with the most tokens to process. The number of chunks is dynamic, so
    # prompts of other lengths compile nothing.
    apply = bind(model, params)
    chunk_width, length = spec.prefill_chunk, state.length
    B, dtype = len(length), params["embedding"].dtype
    last = length if end is None else jnp.minimum(length, end)
    num_to_process = last if start is None else jnp.maximum(last - start, 0)
    num_chunks = (over_rows(jnp.max, num_to_process) + chunk_width - 1) // chunk_width
    if max_chunks is not None:
        num_chunks = jnp.minimum(num_chunks, max_chunks)

    def process_chunk(carry):
        index, trunk, draft_state, last_hidden = carry
        # 1. Take each row's next tokens. Rows of different lengths share the passes: a row that is complete processes
        #    garbage in the slots behind its text, where later passes overwrite it. Behind `end` they do so too.
        #    Without `start` the position is one number for all rows, so XLA computes masks and angles only once.
        if start is None:
            chunk_start = jnp.full_like(length, index * chunk_width)
        else:
            chunk_start = jnp.minimum(start + index * chunk_width, last)
        num_valid = jnp.clip(last - chunk_start, 0, chunk_width)
        view = view_pass(state, model.config, chunk_start, chunk_width, num_used=num_valid, num_valid=num_valid)
        tokens = read_rows(state.tokens, chunk_start, chunk_width)
        # 2. Run the trunk, then the drafter over the same positions with the trunk's hidden states. The drafter's cache
        #    must cover the whole prompt, or its drafts are accepted less often.
        output = apply(tokens, view, trunk, layer_ids=drafter.layer_ids, method="run_trunk")
        draft_state = drafter.extend(
            prepared,
            state.replace(drafter=draft_state),
            drafter.select_states(output, model=model),
            chunk_start,
            model=model,
            spec=spec,
        )
        # 3. Keep the hidden state of each row's last prompt token, which may be in any chunk.
        offset = length - 1 - chunk_start
        hidden = read_rows(output.hidden, jnp.clip(offset, 0, chunk_width - 1), 1)
        is_in_chunk = (offset >= 0) & (offset < chunk_width)
        return index + 1, output.cache, draft_state, jnp.where(is_in_chunk[:, None, None], hidden, last_hidden)

    carry = (0, state.trunk, state.drafter, jnp.zeros((B, 1, model.config.hidden_size), dtype))
    _, trunk, draft_state, last_hidden = jax.lax.while_loop(lambda carry: carry[0] < num_chunks, process_chunk, carry)
    # Choose the first new token from the last prompt token's logits. The draw is keyed by the token's position, as in
    # plain decoding, so the same seed gives the same token there.
    # Where the arg-max is enough, no logits are stored, as in verification.
    logits, sampling = None, state.settings.sampling
    if spec.is_greedy and not sampling.changes_logits and not spec.logprobs:
        assert allowed is None
        values, tokens, _ = apply(last_hidden, k=1, method="top_tokens")
        first, best = tokens[:, :, 0], values[:, :, 0]
    else:
        logits, vocabulary = apply(last_hidden, method="own_logits"), Vocabulary.of(model.config.vocab_size)
        best = vocabulary.logsumexp(logits) if spec.check_nan else None
        num_new, masks = jnp.zeros_like(length)[:, None], None if allowed is None else allowed[:, None]
        adjusted = adjust_logits(logits, state, None, num_new, model, masks)
        if spec.is_greedy:
            first = vocabulary.argmax(adjusted)
        else:
            first = draw_target(distribution(adjusted, sampling, vocabulary), sampling, length[:, None], vocabulary)
    if first_token is not None:
        first = jnp.where(first_token[:, None] >= 0, first_token[:, None], first)
    # Append it as the pending token: the trunk's cache covers every token before it.
    processed = last
    if max_chunks is not None:
        begin = 0 if start is None else start
        processed = jnp.minimum(last, begin + num_chunks * chunk_width)
    is_complete = processed == length
    state = state.replace(trunk=trunk, drafter=draft_state)
    if spec.check_nan and best is not None:
        has_failed = is_complete & jnp.isnan(best[:, 0]) & ~state.done
        state = state.replace(failed=state.failed | has_failed, done=state.done | has_failed)
    no_draft = jnp.zeros_like(first)
    state, _ = append_tokens(state, first, no_draft, is_complete.astype(jnp.int32), logits, model=model)
    return state.replace(trunk=commit(trunk, processed))
