"""The speculation loop: prefill, then propose, verify, accept, commit in one `lax.while_loop`."""

import functools

import jax
import jax.numpy as jnp

from mtpjax.cache import commit, read_rows, write_rows
from mtpjax.decode.acceptance import accept_greedy
from mtpjax.decode.draft import keep_hidden, propose
from mtpjax.decode.state import DecodeState
from mtpjax.layers.attend import cached_view
from mtpjax.model import MTPModel, bind


def prefill(params: dict, state: DecodeState, *, model: MTPModel, chunk: int) -> DecodeState:
    """Takes in the prompts, chunk by chunk, over trunk and modules, and commits the first new token of each row.

    The modules' caches cover the prompt but for the slots whose token is not there yet: the first round takes those in.
    """
    apply = bind(model, params)
    capacity = state.tokens.shape[1]
    in_use = len(state.modules)
    kept = jnp.maximum(state.length - max(in_use, 1), 0)  # position of the first hidden row to keep
    kept_rows = kept[:, None] + jnp.arange(state.hidden.shape[1])[None, :]

    def take_in(carry):
        index, trunk, modules, hidden_kept = carry
        start = jnp.full_like(state.length, index * chunk)
        taken = jnp.clip(state.length - start, 0, chunk)
        view = cached_view(model.config, start, chunk, capacity, taken=taken)
        hidden, before, trunk = apply(read_rows(state.tokens, start, chunk), view, trunk, method="run_trunk")
        entering = carried = apply(hidden, before, method="entering")
        caches = []
        for number, cache in enumerate(modules):
            source = entering if model.config.mtp_chaining == "trunk" else carried
            _, carried, entries = apply(
                source,
                read_rows(state.tokens, start + number + 1, chunk),
                view,
                cache.layers[0],
                index=number,
                method="run_module",
            )
            caches.append(cache.replace(layers=(entries,)))
        place = kept_rows - start[:, None]
        found = jnp.take_along_axis(entering, jnp.clip(place, 0, chunk - 1)[:, :, None], axis=1)
        is_here = (place >= 0) & (place < chunk)
        return index + 1, trunk, tuple(caches), jnp.where(is_here[:, :, None], found, hidden_kept)

    num_chunks = (state.length.max() + chunk - 1) // chunk
    _, trunk, modules, hidden = jax.lax.while_loop(
        lambda carry: carry[0] < num_chunks, take_in, (0, state.trunk, state.modules, state.hidden)
    )
    modules = tuple(commit(cache, jnp.maximum(state.length - 1 - index, 0)) for index, cache in enumerate(modules))
    last = read_rows(hidden, state.length - 1 - kept, 1)
    first = jnp.argmax(apply(apply(last, method="after_final_norm"), method="logits"), axis=-1).astype(jnp.int32)
    state = state.replace(trunk=trunk, modules=modules, hidden=hidden, hidden_start=kept)
    state, _ = _emit(state, first, jnp.ones_like(state.length))
    return state.replace(trunk=commit(trunk, state.length - 1))


def least_rows(batch: int, platform: str) -> int:
    """Fewest rows worth passing through a model: on a GPU a lone one gets another beside it, which is thrown away.

    There XLA writes the product of one row with a matrix out as an elementwise product the size of the matrix.
    """
    return 2 if batch == 1 and platform != "cpu" else 1


def run_round(params: dict, state: DecodeState, *, model: MTPModel, num_steps: int, min_rows: int) -> DecodeState:
    """One round for every row that is not done: drafts, one trunk pass, acceptance, commit."""
    apply = bind(model, params)
    if num_steps:
        state = propose(params, state, model=model, num_steps=num_steps, min_rows=min_rows)
    start = state.length - 1
    width = max(num_steps + 1, min_rows)
    taken = None if num_steps else (~state.done).astype(jnp.int32)
    view = cached_view(model.config, start, width, state.tokens.shape[1], taken=taken)
    nodes = read_rows(state.tokens, start, width)
    hidden, before, trunk = apply(nodes, view, state.trunk, method="run_trunk")
    choices = jnp.argmax(apply(hidden, method="logits"), axis=-1).astype(jnp.int32)
    hidden, before, nodes, choices = (array[:, : num_steps + 1] for array in (hidden, before, nodes, choices))

    count = accept_greedy(nodes[:, 1:], choices)
    is_running = ~state.done
    was_accepted = jnp.arange(num_steps)[None, :] < count[:, None]
    length = state.length
    state = state.replace(
        steps=state.steps + is_running,
        proposed=state.proposed + is_running[:, None],
        accepted=state.accepted + (was_accepted & is_running[:, None]),
    )
    state = keep_hidden(state, apply(hidden, before, method="entering"), length, in_use=len(state.modules))
    levels = jnp.arange(1, num_steps + 2)[None, :]
    origin = write_rows(state.origin, jnp.where(levels <= count[:, None], levels, 0), length)
    state, emitted = _emit(state, choices, count + 1)
    discarded = state.discarded + jnp.where(is_running, count + 1 - emitted, 0)
    return state.replace(origin=origin, discarded=discarded, trunk=commit(trunk, state.length - 1))


def _emit(state: DecodeState, candidates: jax.Array, count: jax.Array) -> tuple[DecodeState, jax.Array]:
    """Commits the first `count [B]` of `candidates [B, W]`, less what lies behind a stop token or the row's limit.

    Rows that are done stay as they are. Returns how many tokens were committed, too.
    """
    W = candidates.shape[1]
    is_stop = (candidates[:, :, None] == state.stop_ids[None, None, :]).any(axis=-1)
    before_stop = jnp.where(is_stop.any(axis=1), jnp.argmax(is_stop, axis=1) + 1, W + 1)
    emitted = jnp.minimum(jnp.minimum(count, before_stop), state.limit - state.length)
    emitted = jnp.where(state.done, 0, emitted).astype(jnp.int32)
    length = state.length + emitted
    stopped = state.stopped | (~state.done & (before_stop <= emitted))
    return state.replace(
        tokens=write_rows(state.tokens, candidates, state.length),
        length=length,
        stopped=stopped,
        done=state.done | stopped | (length >= state.limit),
    ), emitted


@functools.partial(jax.jit, static_argnames=("model", "num_steps", "min_rows", "chunk"), donate_argnames=("state",))
def decode(
    params: dict, state: DecodeState, *, model: MTPModel, num_steps: int, min_rows: int, chunk: int
) -> DecodeState:
    """From prompts to the end of every row, in one call without a trip to the host. `state` is donated."""
    state = prefill(params, state, model=model, chunk=chunk)
    round_ = functools.partial(run_round, params, model=model, num_steps=num_steps, min_rows=min_rows)
    return jax.lax.while_loop(lambda state: ~state.done.all(), lambda state: round_(state), state)
