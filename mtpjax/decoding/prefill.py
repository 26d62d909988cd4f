"""Prefill: run the trunk and the drafter over prompts, chunk by chunk, and commit each row's first new token."""

from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.decoding.commit import append_tokens
from mtpjax.decoding.drafters.base import Drafter
from mtpjax.decoding.logits import adjust_logits
from mtpjax.decoding.sampling import distribution, draw_target
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState, NewRows, begin_rows, put_rows, take_rows
from mtpjax.models.cache import commit, read_rows, reset_rows
from mtpjax.models.masks import cached_view
from mtpjax.models.model import MTPModel, bind


def insert_rows(
    params: dict,
    prepared: Any,
    state: DecodeState,
    rows: NewRows,
    slots: jax.Array | None = None,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
) -> DecodeState:
    """Puts new requests into slots of a state and prefills them.

    Args:
        params: model parameters.
        prepared: the drafter's prepared parameters.
        state: a state; the slots that are written should be done.
        rows: R requests.
        slots: `[R]` int32, the slot of each request; slots outside the state are ignored, which pads R. None: R is the
            number of slots, request r goes to slot r, and the state is updated in place.
        model: the model.
        drafter: the draft method.
        spec: the shape of a round.

    Returns:
        The state with these rows running, each with one new token.
    """
    if slots is not None:
        # Prefill in a small state of R rows, so the other rows of the batch cost nothing.
        part = take_rows(state, slots)
        part = insert_rows(params, prepared, part, rows, model=model, drafter=drafter, spec=spec)
        return put_rows(state, part, slots)
    start = _first_position(state, rows, model=model, drafter=drafter)
    # Attention layers ignore what a slot held before. Recurrent layers must start from a zero state.
    state = state.replace(trunk=reset_rows(state.trunk, start == 0))
    state = begin_rows(state, rows, vocab_size=model.config.vocab_size)
    return prefill(params, prepared, state, start, model=model, drafter=drafter, spec=spec)


def _first_position(state: DecodeState, rows: NewRows, *, model: MTPModel, drafter: Drafter) -> jax.Array:
    """Returns `[B]` the position that prefill starts from: 0, or behind the entries that the slot already holds."""
    start = jnp.minimum(rows.num_cached, state.trunk.length)
    extended = drafter.num_extended(state.drafter)
    if extended is not None:
        # A drafter's entries also depend on the next tokens: the last M cached positions are processed again.
        start = jnp.minimum(start - model.config.num_mtp_modules, extended)
    # The last prompt token is always processed: its output gives the first new token.
    return jnp.clip(start, 0, rows.length - 1)


def prefill(
    params: dict,
    prepared: Any,
    state: DecodeState,
    start: jax.Array,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
) -> DecodeState:
    """Processes the prompts from `start` on and commits the first new token of each row.

    Args:
        params: model parameters.
        prepared: the drafter's prepared parameters.
        state: rows whose committed text is the prompt.
        start: `[B]` first position to process; the caches hold the positions before it.
        model: the model.
        drafter: the draft method.
        spec: the shape of a round.

    Returns:
        The state before the first round: the newest token is pending.
    """
    apply = bind(model, params)
    capacity, chunk, length = state.tokens.shape[1], spec.chunk, state.length
    B, dtype = len(length), params["embedding"].dtype
    num_chunks = (jnp.maximum(length - start, 0).max() + chunk - 1) // chunk

    def process_chunk(carry):
        index, trunk, draft_state, last_hidden = carry
        # 1. Rows of different lengths share the passes. A row that is complete writes behind its text.
        begin = jnp.minimum(start + index * chunk, length)
        num_valid = jnp.clip(length - begin, 0, chunk)
        view = cached_view(model.config, begin, chunk, capacity, num_valid=num_valid)
        tokens = read_rows(state.tokens, begin, chunk)
        # 2. The trunk, then the drafter over the same positions.
        output = apply(tokens, view, trunk, layer_ids=drafter.layer_ids, method="run_trunk")
        draft_state = drafter.extend(
            prepared,
            state.replace(drafter=draft_state),
            drafter.select(output, model=model),
            begin,
            model=model,
            spec=spec,
        )
        # 3. Keep the hidden state of the last prompt token, in whichever chunk it is.
        place = length - 1 - begin
        found = read_rows(output.hidden, jnp.clip(place, 0, chunk - 1), 1)
        is_here = (place >= 0) & (place < chunk)
        return index + 1, output.cache, draft_state, jnp.where(is_here[:, None, None], found, last_hidden)

    carry = (0, state.trunk, state.drafter, jnp.zeros((B, 1, model.config.hidden_size), dtype))
    _, trunk, draft_state, last_hidden = jax.lax.while_loop(lambda carry: carry[0] < num_chunks, process_chunk, carry)
    # The first new token comes from the last prompt token's output, as in plain decoding.
    logits = apply(last_hidden, method="logits")
    adjusted = adjust_logits(logits, state, None, jnp.zeros_like(length)[:, None], model)
    first = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    if spec.rule != "greedy":
        sampling = state.settings.sampling
        first = draw_target(distribution(adjusted, sampling), sampling, length[:, None])
    state, _ = append_tokens(state.replace(trunk=trunk, drafter=draft_state), first, jnp.ones_like(length), logits)
    return state.replace(trunk=commit(trunk, state.length - 1))
