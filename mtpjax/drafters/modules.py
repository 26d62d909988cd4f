"""Defines the interface and state of a draft network's modules, and draft extend, the pass over committed text.

At slot i, module k (0-based) reads the trunk's hidden state at position i (or the previous module's output) and the
token at position i+k+1. Its cache matches a teacher-forced prefill up to the last slot whose inputs are all committed.
Later entries come from drafted tokens; the next round overwrites them when it extends the module over the positions
that verification accepted. Prefill, every round and the backlog of an adaptive call use the same `extend_module`.
"""

import dataclasses
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding.decoder import Decoder, Drafter
from mtpjax.decoding.sampling import PathTokens
from mtpjax.decoding.state import Acceptance, DecodeState, view_pass
from mtpjax.drafters.scoring import DraftScores, pad_rows
from mtpjax.models.cache import Cache
from mtpjax.models.config import ModelConfig
from mtpjax.models.parallel import over_rows
from mtpjax.models.view import Entries, View, read_rows, write_rows

# In an adaptive call, rounds of depth 0 do not run the modules, but store up to this many hidden states per row.
HIDDEN_BUFFER = 32
# A long backlog is processed in passes of this width.
EXTEND_CHUNK = HIDDEN_BUFFER // 2


class ModulesState(flax.struct.PyTreeNode):
    """A drafter's state, with a cache per module and the trunk states that not all modules have processed yet."""

    caches: tuple[Cache, ...]  # one per module; `length` counts the slots that match a teacher-forced prefill
    hidden: jax.Array  # [B, E, D] trunk states that the modules read, from position hidden_start on
    hidden_start: jax.Array  # [B] int32


class DraftNetwork(Protocol):
    """One or several modules that read hidden states and tokens; module k's output can feed module k+1 or itself."""

    @property
    def config(self) -> ModelConfig:
        """Sizes and rotary embedding of the modules' layers."""
        ...

    def input_hidden(self, states: jax.Array) -> jax.Array:
        """Converts the trunk states that the drafter keeps to a module's input, `[B, T, D]`."""
        ...

    def run(
        self, index: int, hidden: jax.Array, tokens: jax.Array, view: View, layers: tuple[Entries, ...]
    ) -> tuple[jax.Array, jax.Array, tuple[Entries, ...]]:
        """Runs one module.

        Args:
            hidden: `[B, T, D]` from `input_hidden`, or a module's output.
            tokens: `[B, T]` int32; module k reads the token k + 1 positions after each hidden state.
            view: cache slots, positions and masks.
            layers: the module's cache, one entry per layer.

        Returns:
            The output for the head and the output for the next level, both `[B, T, D]`, and the cache with the new
            entries.
        """
        ...

    def scores(
        self, state: DecodeState, output: jax.Array, index: int, path: PathTokens | None, level: int
    ) -> DraftScores:
        """Scores the tokens after each row of `output [B, f, D]`; see `DraftScores` for the arguments."""
        ...


def num_pending(state: DecodeState) -> jax.Array:
    """Counts the committed positions `[B]` that lack a final entry in some module; 0 for rows that are done."""
    return jnp.where(state.done, 0, state.length - 1 - state.drafter.hidden_start)


@dataclasses.dataclass(frozen=True)
class BufferedDrafter(Drafter):
    """Base class for drafters with a `ModulesState`, which has caches and the trunk states that are not in them yet."""

    def num_extended(self, draft_state: ModulesState) -> jax.Array:
        """Returns the number of slots `[B]` that match a prefill in every module; the last module has the fewest."""
        return draft_state.caches[-1].length

    def commit(self, decoder: Decoder, state: DecodeState, states: jax.Array, accepted: Acceptance) -> ModulesState:
        """Keeps the hidden states that the modules process next; see `Drafter.commit`.

        After a round with drafts, these are the new states and the M-1 states before them, because those slots hold
        entries from drafted tokens. After a round of depth 0, the new state is appended to the backlog.
        """
        drafter_state = state.drafter
        E, num_modules = drafter_state.hidden.shape[1], len(drafter_state.caches)
        new_start = state.length - 1  # position of states[:, 0], the pending token
        # 1. With one module, drafting has made all earlier slots final, so the new states replace the buffer.
        if decoder.spec.num_steps and num_modules == 1:
            hidden = jnp.pad(states, ((0, 0), (0, E - states.shape[1]), (0, 0)))
            return drafter_state.replace(hidden=hidden, hidden_start=new_start)
        # 2. At depth 0, the modules did not run, so the new state is appended to the backlog.
        if not decoder.spec.num_steps:
            slot = jnp.minimum(new_start - drafter_state.hidden_start, E - 1)
            return drafter_state.replace(hidden=write_rows(drafter_state.hidden, states, slot))
        # 3. With several modules, also keep the M-1 states before the new ones.
        start = jnp.maximum(state.length - num_modules, 0)
        position = start[:, None] + jnp.arange(E)[None, :]
        # Take the states before the pending token from the old buffer, and the others from this round.
        candidates = jnp.concatenate([drafter_state.hidden, states], axis=1)
        old = position - drafter_state.hidden_start[:, None]
        new = position - new_start[:, None] + E
        index = jnp.clip(jnp.where(position < new_start[:, None], old, new), 0, candidates.shape[1] - 1)
        return drafter_state.replace(
            hidden=jnp.take_along_axis(candidates, index[:, :, None], axis=1), hidden_start=start
        )

    def backlog_fits(self, decoder: Decoder, state: DecodeState, depth: jax.Array | int) -> jax.Array:
        """Returns whether a round of this depth can follow; see `Drafter.backlog_fits`.

        A round of depth 0 needs a free slot in the buffer. A round with drafts must process the whole backlog in its
        single pass over depth + M positions.
        """
        drafter_state = state.drafter
        max_backlog = jnp.where(depth == 0, drafter_state.hidden.shape[1] - 1, depth + len(drafter_state.caches))
        return state.drafting_disabled | (over_rows(jnp.max, num_pending(state)) <= max_backlog)


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
        hidden: `[B, T, D]` the trunk's hidden states (from `DraftNetwork.input_hidden`).
        chained_hidden: `[B, T, D]` the previous module's output; None for the first module.
        tokens: `[B, L]` the text.
        start: `[B]` position of `hidden[:, 0]`.
        view: cache slots, positions and masks of the T positions.

    Returns:
        The output for the head and the output for the next module, both `[B, T, D]`.
    """
    # A chained module reads the previous module's output; others read the trunk (`mtp_chaining`).
    source = hidden if network.config.mtp_chaining == "trunk" or chained_hidden is None else chained_hidden
    # Slot i reads the token at position i + index + 1. The tokens after the committed text are drafts or garbage.
    shifted = read_rows(tokens, start + index + 1, hidden.shape[1])
    view = of_drafter(view, shift=index + 1)
    output, chained, layers = network.run(index, source, shifted, view, caches[index].layers)
    caches[index] = caches[index].replace(layers=layers)
    return output, chained


def of_drafter(view: View, shift: int = 0) -> View:
    """Marks a view as belonging to a drafter's cache, in which entries are shifted within the pages."""
    return view.replace(storage=view.storage.of_drafter(shift))


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
        states: `[B, T, D]` the trunk states that the drafter keeps.
        start: `[B]` position of `states[:, 0]`.
        num_used: `[B]` number of states at committed positions; the rest is padding.

    Returns:
        The caches with the entries of these positions.
    """
    caches, chained, hidden = list(state.drafter.caches), None, network.input_hidden(states)
    view = view_pass(state, network.config, start, hidden.shape[1], num_used=num_used, window=decoder.spec.window)
    for index in range(len(caches)):
        _, chained = extend_module(network, caches, index, hidden, chained, state.tokens, start, view)
    return tuple(caches)


def extend_backlog(decoder: Decoder, network: DraftNetwork, state: DecodeState, num_positions: int) -> DecodeState:
    """Runs the modules over the oldest positions in the backlog, and drops finished positions from the buffer."""
    drafter_state = state.drafter
    hidden, start = drafter_state.hidden[:, :num_positions], drafter_state.hidden_start
    caches = extend_modules(decoder, network, state, hidden, start, num_pending(state))
    # The newest M positions stay in the buffer, because their shifted input tokens are not all committed.
    processed = jnp.clip(num_pending(state) - len(caches), 0, num_positions)
    # Move the rest of the buffer to its front.
    E = drafter_state.hidden.shape[1]
    source = jnp.minimum(processed[:, None] + jnp.arange(E)[None, :], E - 1)
    hidden = jnp.take_along_axis(drafter_state.hidden, source[:, :, None], axis=1)
    return state.replace(drafter=ModulesState(caches, hidden, drafter_state.hidden_start + processed))


def view_pending(decoder: Decoder, network: DraftNetwork, state: DecodeState) -> View:
    """Makes the view of the K + M positions that a round extends over."""
    num_positions = decoder.spec.num_steps + len(state.drafter.caches)
    start, num_used = state.drafter.hidden_start, num_pending(state)
    return view_pass(state, network.config, start, num_positions, num_used=num_used, window=decoder.spec.window)


def extend_and_read(
    network: DraftNetwork,
    caches: list[Cache],
    index: int,
    chained_hidden: jax.Array | None,
    state: DecodeState,
    tokens: jax.Array,
    view: View,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Extends a module over the hidden states of the last round and reads its newest output.

    Args:
        chained_hidden: `[B, K + M, D]` the previous module's output; None for the first module.
        tokens: `[B, L]` the text and the drafts so far.
        view: from `view_pending`.

    Returns:
        The outputs at the newest committed slot for the head and for the next level, each `[B, 1, D]`, and all outputs
        for the next module, `[B, K + M, D]`.
    """
    drafter_state, num_positions = state.drafter, view.angles[0].shape[1]
    hidden = network.input_hidden(drafter_state.hidden[:, :num_positions])
    start = drafter_state.hidden_start
    output, chained = extend_module(network, caches, index, hidden, chained_hidden, tokens, start, view)
    # The newest slot is length - 2, because position length - 1 is pending and the trunk has no hidden state for it. A
    # row that is done may have stopped within the buffer, so the index is clipped.
    newest = jnp.clip(state.length - 2 - start, 0, num_positions - 1)
    return read_rows(output, newest, 1), read_rows(chained, newest, 1), chained


def run_over_drafts(
    network: DraftNetwork, caches: list[Cache], index: int, chained_hidden: jax.Array, tokens: jax.Array, view: View
) -> tuple[jax.Array, jax.Array]:
    """Runs module `index` over drafted tokens `[B, f]`, padded to the width of the view (at least f).

    `chained_hidden [B, f, D]` are the module outputs from which the tokens were drafted. Replaces the module's cache in
    the list, and returns the outputs for the head and for the next level, both `[B, f, D]`.
    """
    f, width = tokens.shape[1], view.angles[0].shape[1]
    view = of_drafter(view, shift=index + 1)
    output, chained, layers = network.run(
        index, pad_rows(chained_hidden, width), pad_rows(tokens, width), view, caches[index].layers
    )
    caches[index] = caches[index].replace(layers=layers)
    return output[:, :f], chained[:, :f]
