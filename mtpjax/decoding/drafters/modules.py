"""Running the MTP modules: their state, and how they extend over committed text.

Module k (0-based) reads, at slot i, the trunk's hidden state of position i (or the previous module's output) and the
token of position i+k+1. Its cache matches a teacher-forced prefill up to the last slot whose inputs are all committed.
Later entries come from drafted tokens; the next round overwrites them when it extends the module over the positions
that verification accepted. Prefill, every round and the backlog of an adaptive call use the same `extend_module`.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding.drafters.scoring import ReducedHead, pad_rows
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState
from mtpjax.models.cache import Cache, read_rows
from mtpjax.models.masks import View, cached_view
from mtpjax.models.model import MTPModel, bind

HIDDEN_BUFFER = 32  # hidden states that can wait for the modules while an adaptive call runs at depth 0
EXTEND_CHUNK = HIDDEN_BUFFER // 2  # of them processed in one pass when many wait


class MTPState(flax.struct.PyTreeNode):
    """State of the MTP drafter: M caches, and the hidden states that the modules have not processed for good."""

    caches: tuple[Cache, ...]  # one layer each; length: slots that match a teacher-forced prefill
    hidden: jax.Array  # [B, E, D] what enters the modules, from position hidden_start on
    hidden_start: jax.Array  # [B] int32


class MTPParams(flax.struct.PyTreeNode):
    """Parameters of the MTP drafter."""

    modules: dict[str, Any]  # the model's top-level parameters whose names begin with `mtp_`
    draft_ids: jax.Array | None = None  # [R] int32 reduced draft vocabulary, ascending


class PreparedMTP(flax.struct.PyTreeNode):
    """What a round reads: the modules beside the embedding, head and final norm that they share with the trunk."""

    params: dict[str, Any]
    head: ReducedHead | None


def num_modules_used(model: MTPModel, num_steps: int) -> int:
    """Returns the modules that a call with `num_steps` draft levels runs; deeper ones are left out."""
    return min(model.config.num_mtp_modules, num_steps)


def rows_per_round(model: MTPModel, num_steps: int) -> int:
    """Returns the positions that each module processes per round.

    These are the verified positions and the M-1 before them, whose entries in some module came from drafted tokens.
    """
    return max(num_steps + num_modules_used(model, num_steps), 1)


def num_pending(state: DecodeState) -> jax.Array:
    """Counts `[B]` committed positions that some module has not processed for good; 0 for rows that are done."""
    return jnp.where(state.done, 0, state.length - 1 - state.drafter.hidden_start)


def extend_module(
    apply: Callable[..., Any],
    caches: list[Cache],
    index: int,
    hidden: jax.Array,
    chained_hidden: jax.Array | None,
    tokens: jax.Array,
    start: jax.Array,
    view: View,
    *,
    model: MTPModel,
) -> tuple[jax.Array, jax.Array]:
    """Runs one module over committed positions and overwrites what drafting had written to its cache.

    Args:
        apply: calls the model's methods.
        caches: all modules' caches; the module's own is replaced in place in this list.
        index: the module.
        hidden: `[B, T, D]` the trunk's hidden states.
        chained_hidden: `[B, T, D]` the previous module's output; None for the first module.
        tokens: `[B, L]` the text.
        start: `[B]` position of `hidden[:, 0]`.
        view: where the T positions stand in the cache.
        model: the model.

    Returns:
        The output for the head and the output for the next module, both `[B, T, D]`.
    """
    source = hidden if model.config.mtp_chaining == "trunk" or chained_hidden is None else chained_hidden
    shifted = read_rows(tokens, start + index + 1, hidden.shape[1])
    output, chained, entries = apply(source, shifted, view, caches[index].layers[0], index=index, method="run_module")
    caches[index] = caches[index].replace(layers=(entries,))
    return output, chained


def extend_modules(
    params: dict,
    caches: tuple[Cache, ...],
    hidden: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    *,
    model: MTPModel,
    spec: DecodeSpec,
) -> tuple[Cache, ...]:
    """Runs all modules, one after the other, over positions whose tokens are known; arguments as in `extend_module`."""
    apply, updated, chained = bind(model, params), list(caches), None
    view = cached_view(model.config, start, hidden.shape[1], tokens.shape[1], window=spec.window)
    for index in range(len(caches)):
        _, chained = extend_module(apply, updated, index, hidden, chained, tokens, start, view, model=model)
    return tuple(updated)


def extend_backlog(
    prepared: PreparedMTP, state: DecodeState, *, model: MTPModel, spec: DecodeSpec, rows: int
) -> DecodeState:
    """Runs the modules over the oldest `rows` waiting positions and drops those that are final from the buffer."""
    kept = state.drafter
    caches = extend_modules(
        prepared.params, kept.caches, kept.hidden[:, :rows], state.tokens, kept.hidden_start, model=model, spec=spec
    )
    # The newest M positions stay: their shifted tokens are not all committed.
    processed = jnp.clip(num_pending(state) - len(caches), 0, rows)
    E = kept.hidden.shape[1]
    place = jnp.minimum(processed[:, None] + jnp.arange(E)[None, :], E - 1)
    hidden = jnp.take_along_axis(kept.hidden, place[:, :, None], axis=1)
    return state.replace(drafter=MTPState(caches, hidden, kept.hidden_start + processed))


def extend_and_read(
    apply: Callable[..., Any],
    caches: list[Cache],
    index: int,
    chained_hidden: jax.Array | None,
    state: DecodeState,
    tokens: jax.Array,
    rows: int,
    view: View,
    *,
    model: MTPModel,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Extends module `index` over the round's `rows` hidden states.

    Returns:
        The outputs of the newest committed slot, for the head and to draft on, `[B, 1, D]`; and all outputs for the
        next module, `[B, rows, D]`.
    """
    kept = state.drafter
    output, chained = extend_module(
        apply, caches, index, kept.hidden[:, :rows], chained_hidden, tokens, kept.hidden_start, view, model=model
    )
    # The newest slot is length - 2. A row that is done may have stopped within the buffer, hence the clip.
    newest = jnp.clip(state.length - 2 - kept.hidden_start, 0, rows - 1)
    return read_rows(output, newest, 1), read_rows(chained, newest, 1), chained


def run_drafted(
    apply: Callable[..., Any], caches: list[Cache], index: int, chained_hidden: jax.Array, tokens: jax.Array, view: View
) -> tuple[jax.Array, jax.Array]:
    """Runs a module over drafted tokens `[B, f]`, padded to the view's width; its cache is updated in the list.

    Returns:
        The outputs for the head and to draft on, both `[B, f, D]`.
    """
    f, width = tokens.shape[1], view.mask.shape[1]
    output, chained, entries = apply(
        pad_rows(chained_hidden, width), pad_rows(tokens, width), view, caches[index].layers[0], index=index,
        method="run_module",
    )  # fmt: skip
    caches[index] = caches[index].replace(layers=(entries,))
    return output[:, :f], chained[:, :f]
