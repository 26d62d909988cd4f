"""What the modules take in: the trunk's true hidden of committed positions, which waits in rows until then."""

import jax
import jax.numpy as jnp

from mtpjax.decoding.state import DecodeState, Plan
from mtpjax.models.cache import read_rows, write_rows
from mtpjax.models.layers.attend import cached_view
from mtpjax.models.model import MTPModel, bind


def take_in(apply, state: DecodeState, model: MTPModel, plan: Plan, tokens, caches, carried, index: int, rows: int):
    """Module `index` over the oldest `rows` of true hidden, which overwrites what it had written from drafts.

    Returns its outputs of the newest slot, for the head and to pass on `[B, 1, D]`, and all that it passes on.
    """
    start = state.hidden_start
    view = cached_view(model.config, start, rows, tokens.shape[1], window=plan.window)
    source = state.hidden[:, :rows] if model.config.mtp_chaining == "trunk" or carried is None else carried
    shifted = read_rows(tokens, start + index + 1, rows)
    after, carried, entries = apply(source, shifted, view, caches[index].layers[0], index=index, method="run_module")
    caches[index] = caches[index].replace(layers=(entries,))
    newest = jnp.clip(state.length - 2 - start, 0, rows - 1)  # a done row may have left its rows behind
    return read_rows(after, newest, 1), read_rows(carried, newest, 1), carried


def catch_up(params: dict, state: DecodeState, *, model: MTPModel, plan: Plan, rows: int) -> DecodeState:
    """The modules take in the oldest waiting `rows`, or as many as there are; what drafting needs of them stays."""
    apply = bind(model, params)
    caches, in_use = list(state.modules), len(state.modules)
    carried = None
    for index in range(in_use):
        _, _, carried = take_in(apply, state, model, plan, state.tokens, caches, carried, index, rows)
    taken = jnp.clip(waiting(state) - in_use, 0, rows)
    place = jnp.minimum(taken[:, None] + jnp.arange(state.hidden.shape[1])[None, :], state.hidden.shape[1] - 1)
    return state.replace(
        modules=tuple(caches),
        hidden=jnp.take_along_axis(state.hidden, place[:, :, None], axis=1),
        hidden_start=state.hidden_start + taken,
    )


def waiting(state: DecodeState) -> jax.Array:
    """Committed positions `[B]` whose hidden some module has not taken in for good; 0 for rows that are done."""
    return jnp.where(state.done, 0, state.length - 1 - state.hidden_start)


def keep_hidden(state: DecodeState, new: jax.Array, length: jax.Array, *, has_drafted: bool) -> DecodeState:
    """The rows that the modules take in next: `new [B, W, D]` (from slot `length - 1`), and older ones before them.

    After drafting these are the M-1 newest slots, which had taken drafted tokens at some module that may not have been
    accepted; without drafting all that wait.
    """
    E, in_use = state.hidden.shape[1], len(state.modules)
    if not in_use:
        return state
    if has_drafted and in_use == 1:
        hidden = jnp.pad(new, ((0, 0), (0, E - new.shape[1]), (0, 0)))
        return state.replace(hidden=hidden, hidden_start=length - 1)
    if not has_drafted:
        place = jnp.minimum(length - 1 - state.hidden_start, E - 1)
        return state.replace(hidden=write_rows(state.hidden, new, place))
    start = jnp.maximum(length - in_use, 0)
    position = start[:, None] + jnp.arange(E)[None, :]
    is_old = position < length[:, None] - 1
    joined = jnp.concatenate([state.hidden, new], axis=1)
    old = position - state.hidden_start[:, None]
    fresh = position - (length[:, None] - 1) + E
    index = jnp.clip(jnp.where(is_old, old, fresh), 0, joined.shape[1] - 1)
    return state.replace(hidden=jnp.take_along_axis(joined, index[:, :, None], axis=1), hidden_start=start)
