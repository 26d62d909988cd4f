"""Drafting: the modules take in what was committed, then run ahead."""

import jax
import jax.numpy as jnp

from mtpjax.cache import commit, read_rows, write_rows
from mtpjax.decode.state import DecodeState
from mtpjax.layers.attend import cached_view
from mtpjax.model import MTPModel, bind


def propose(params: dict, state: DecodeState, *, model: MTPModel, num_steps: int, min_rows: int) -> DecodeState:
    """Writes `num_steps` drafted tokens behind the committed ones.

    Level k <= M is module k over all rows of true hidden at once, which overwrites what it had written from drafts; its
    row of the newest slot is draft k, which module k+1 reads as a token. Later levels recycle module M on its own
    output, one slot further each, in passes of `min_rows` rows. Afterwards module k's cache is true up to the newest
    slot whose tokens are all committed.
    """
    apply = bind(model, params)
    capacity = state.tokens.shape[1]
    start, rows = state.hidden_start, state.hidden.shape[1]
    newest = state.length - 2  # the last slot with a committed hidden; a done row may have left its rows behind
    view = cached_view(model.config, start, rows, capacity)
    tokens, caches, carried = state.tokens, list(state.modules), state.hidden
    in_use = len(caches)
    passed, draft = state.hidden[:, :1], tokens[:, :1]  # level 1 makes the first real ones
    for level in range(1, num_steps + 1):
        index = min(level, in_use) - 1
        if level <= in_use:
            source = state.hidden if model.config.mtp_chaining == "trunk" else carried
            after, carried, entries = apply(
                source,
                read_rows(tokens, start + level, rows),
                view,
                caches[index].layers[0],
                index=index,
                method="run_module",
            )
            row = jnp.clip(newest - start, 0, rows - 1)
            after, passed = read_rows(after, row, 1), read_rows(carried, row, 1)
        else:
            step_view = cached_view(model.config, newest + level - in_use, min_rows, capacity)
            after, passed, entries = apply(
                _pad(passed, min_rows),
                _pad(draft, min_rows),
                step_view,
                caches[index].layers[0],
                index=index,
                method="run_module",
            )
            after, passed = after[:, :1], passed[:, :1]
        caches[index] = caches[index].replace(layers=(entries,))
        logits = apply(_pad(after, min_rows), index=index, method="logits")
        draft = jnp.argmax(logits[:, :1], axis=-1).astype(jnp.int32)  # [B, 1]
        tokens = write_rows(tokens, draft, state.length + level - 1)
    modules = tuple(commit(cache, jnp.maximum(state.length - 1 - index, 0)) for index, cache in enumerate(caches))
    return state.replace(tokens=tokens, modules=modules)


def _pad(rows: jax.Array, count: int) -> jax.Array:
    """The one row of `[B, 1, ...]` with zero rows behind it, `count` in all."""
    return jnp.pad(rows, ((0, 0), (0, count - 1), *((0, 0) for _ in rows.shape[2:])))


def keep_hidden(state: DecodeState, new: jax.Array, length: jax.Array, *, in_use: int) -> DecodeState:
    """The rows that the modules take in next: `new [B, W, D]` (from slot `length - 1`), and M-1 kept ones before them.

    Those M-1 newest slots had taken drafted tokens at some module, which may not have been accepted.
    """
    if in_use <= 1:
        return state.replace(hidden=new, hidden_start=length - 1)
    start = jnp.maximum(length - in_use, 0)
    position = start[:, None] + jnp.arange(state.hidden.shape[1])[None, :]
    is_old = position < length[:, None] - 1
    joined = jnp.concatenate([state.hidden, new], axis=1)
    old = position - state.hidden_start[:, None]
    fresh = position - (length[:, None] - 1) + state.hidden.shape[1]
    index = jnp.clip(jnp.where(is_old, old, fresh), 0, joined.shape[1] - 1)
    return state.replace(hidden=jnp.take_along_axis(joined, index[:, :, None], axis=1), hidden_start=start)
