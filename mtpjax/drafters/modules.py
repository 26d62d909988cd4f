"""Runs the modules of a draft network: their state, and draft extend, the pass of a module over committed text.

Module k (0-based) reads, at slot i, the trunk's hidden state of position i (or the previous module's output) and the
token of position i+k+1. Its cache matches a teacher-forced prefill up to the last slot whose inputs are all committed.
Later entries come from drafted tokens; the next round overwrites them when it extends the module over the positions
that verification accepted. Prefill, every round and the backlog of an adaptive call use the same `extend_module`.
"""

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.state import DecodeState, view_pass
from mtpjax.drafters.modules import DraftNetwork
from mtpjax.drafters.scoring import pad_rows
from mtpjax.models.cache import Cache
from mtpjax.models.view import View, read_rows

# Rounds of depth 0 in an adaptive call do not run the modules: they store up to this many hidden states per row.
HIDDEN_BUFFER = 32
# A long backlog is processed in passes of this width.
EXTEND_CHUNK = HIDDEN_BUFFER // 2


class ModulesState(flax.struct.PyTreeNode):
    """State of a drafter with M modules: M caches, and the trunk states whose entries in some module are not final."""

    caches: tuple[Cache, ...]  # one per module; length: slots that match a teacher-forced prefill
    hidden: jax.Array  # [B, E, D] trunk states that the modules read, from position hidden_start on
    hidden_start: jax.Array  # [B] int32


def num_pending(state: DecodeState) -> jax.Array:
    """Counts `[B]` committed positions whose entries in some module are not final; 0 for rows that are done."""
    return jnp.where(state.done, 0, state.length - 1 - state.drafter.hidden_start)


def extend_module(
    network: DraftNetwork,
    caches: list[Cache],
    index: int,
    hidden: jax.Array,
    chained_hidden: jax.Array | None,
    tokens: jax.Array,
    start: jax.Array,
    view: View,
) -> tuple[jax.Array, jax.Array]:
    """Runs one module over committed positions (draft extend), and overwrites what drafting wrote to its cache.

    Args:
        hidden: `[B, T, D]` the hidden states that come from the trunk (`DraftNetwork.input_hidden`).
        chained_hidden: `[B, T, D]` the previous module's output; None for the first module.
        tokens: `[B, L]` the text.
        start: `[B]` position of `hidden[:, 0]`.
        view: cache slots, positions and masks of the T positions.

    Returns:
        The output for the head and the output for the next module, both `[B, T, D]`.
    """
    # A chained module reads the output of the module before it; others read the trunk (`mtp_chaining`).
    source = hidden if network.config.mtp_chaining == "trunk" or chained_hidden is None else chained_hidden
    # Slot i reads the token of position i + index + 1. After the committed text these are drafts, or garbage.
    shifted = read_rows(tokens, start + index + 1, hidden.shape[1])
    view = of_drafter(view, shift=index + 1)
    output, chained, layers = network.run(index, source, shifted, view, caches[index].layers)
    caches[index] = caches[index].replace(layers=layers)
    return output, chained


def of_drafter(view: View, shift: int = 0) -> View:
    """Returns the view of a pass over a drafter's cache, whose entries are shifted within the pages."""
    return view if view.pages is None else view.replace(pages=view.pages.replace(shift=shift, is_of_drafter=True))


def extend_modules(
    decoder: Decoder,
    network: DraftNetwork,
    state: DecodeState,
    states: jax.Array,
    start: jax.Array,
    num_used: jax.Array,
) -> tuple[Cache, ...]:
    """Runs all modules in order over positions whose tokens are known.

    Args:
        decoder: the decoder, for the window.
        states: `[B, T, D]` the trunk states that the drafter keeps.
        start: `[B]` position of `states[:, 0]`.
        num_used: `[B]` states at the beginning that belong to committed positions; others are padding.

    Returns:
        The caches with the entries of these positions.
    """
    caches, chained, hidden = list(state.drafter.caches), None, network.input_hidden(states)
    view = view_pass(state, network.config, start, hidden.shape[1], num_used=num_used, window=decoder.spec.window)
    for index in range(len(caches)):
        _, chained = extend_module(network, caches, index, hidden, chained, state.tokens, start, view)
    return tuple(caches)


def extend_backlog(decoder: Decoder, network: DraftNetwork, state: DecodeState, num_positions: int) -> DecodeState:
    """Runs the modules over the oldest positions of the backlog and drops the final ones from the buffer."""
    drafter_state = state.drafter
    hidden, start = drafter_state.hidden[:, :num_positions], drafter_state.hidden_start
    caches = extend_modules(decoder, network, state, hidden, start, num_pending(state))
    # The newest M positions stay in the buffer: their shifted input tokens are not all committed.
    processed = jnp.clip(num_pending(state) - len(caches), 0, num_positions)
    # Move the rest of the buffer to its front.
    E = drafter_state.hidden.shape[1]
    source = jnp.minimum(processed[:, None] + jnp.arange(E)[None, :], E - 1)
    hidden = jnp.take_along_axis(drafter_state.hidden, source[:, :, None], axis=1)
    return state.replace(drafter=ModulesState(caches, hidden, drafter_state.hidden_start + processed))


def extend_and_read(
    network: DraftNetwork,
    caches: list[Cache],
    index: int,
    chained_hidden: jax.Array | None,
    state: DecodeState,
    tokens: jax.Array,
    num_positions: int,
    view: View,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Extends a module over the hidden states of the last round and reads its newest output.

    Args:
        chained_hidden: `[B, num_positions, D]` the previous module's output; None for the first module.
        tokens: `[B, L]` the text and the drafts so far.
        num_positions: hidden states to process.
        view: cache slots, positions and masks of these positions.

    Returns:
        The outputs of the newest committed slot, for the head and to draft on, `[B, 1, D]`; and all outputs for the
        next module, `[B, num_positions, D]`.
    """
    drafter_state = state.drafter
    hidden = network.input_hidden(drafter_state.hidden[:, :num_positions])
    output, chained = extend_module(
        network, caches, index, hidden, chained_hidden, tokens, drafter_state.hidden_start, view
    )
    # The newest slot is length - 2: position length - 1 is pending, so the trunk has no hidden state for it. A row that
    # is done may have stopped within the buffer, so the index is clipped.
    newest = jnp.clip(state.length - 2 - drafter_state.hidden_start, 0, num_positions - 1)
    return read_rows(output, newest, 1), read_rows(chained, newest, 1), chained


def run_over_drafts(
    network: DraftNetwork, caches: list[Cache], index: int, chained_hidden: jax.Array, tokens: jax.Array, view: View
) -> tuple[jax.Array, jax.Array]:
    """Runs module `index` over drafted tokens `[B, f]`, padded to the view's width of f tokens or more.

    `chained_hidden [B, f, D]` are the module outputs that the tokens were drafted from. Replaces the module's cache in
    the list; returns the outputs for the head and to draft on, both `[B, f, D]`.
    """
    f, width = tokens.shape[1], view.mask.shape[1]
    view = of_drafter(view, shift=index + 1)
    output, chained, layers = network.run(
        index, pad_rows(chained_hidden, width), pad_rows(tokens, width), view, caches[index].layers
    )
    caches[index] = caches[index].replace(layers=layers)
    return output[:, :f], chained[:, :f]
