"""Drafters whose network reads the trunk's states and keeps KV caches: extend, propose, commit, and their backlog."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mtpjax.decoding.decoder import Decoder, Drafter, Weights
from mtpjax.decoding.state import DecodeState, Draft
from mtpjax.drafters.cached import draft_chain, draft_tree
from mtpjax.drafters.modules import (
    EXTEND_CHUNK,
    HIDDEN_BUFFER,
    DraftNetwork,
    ModulesState,
    extend_backlog,
    extend_modules,
    num_pending,
)
from mtpjax.models.cache import Cache, commit
from mtpjax.models.model import MTPModel
from mtpjax.models.parallel import over_rows
from mtpjax.models.view import write_rows

if TYPE_CHECKING:
    from mtpjax.decoding.state import Acceptance


@dataclasses.dataclass(frozen=True)
class CachedDrafter(Drafter):
    """Base of drafters with M modules and a KV cache each. A subclass defines the modules.

    The state is a `ModulesState`. Slot i of module k (0-based) depends on the token of position i+k+1.
    """

    def network(self, decoder: Decoder, weights: Weights) -> DraftNetwork:
        """Returns the modules, with their parameters."""
        raise NotImplementedError

    def num_caches(self, model: MTPModel, num_steps: int) -> int:
        """Returns how many modules a call with `num_steps` draft levels runs, M."""
        raise NotImplementedError

    def empty_module_cache(self, decoder: Decoder, batch: int, capacity: int, dtype: Any) -> Cache:
        """Makes the cache of one module; arguments as in `init`."""
        raise NotImplementedError

    def state_size(self, model: MTPModel) -> int:
        """Returns the width of the trunk states that `select_states` picks."""
        raise NotImplementedError

    def num_extend_positions(self, model: MTPModel, num_steps: int) -> int:
        """Returns how many positions each module processes per round: K + M, at least 1.

        These are the K+1 verified positions and the M-1 before them, whose entries in some module came from drafted
        tokens.
        """
        return max(num_steps + self.num_caches(model, num_steps), 1)

    def num_scratch_slots(self, decoder: Decoder) -> int:
        """Returns the maximum number of slots that extending and drafting write after the committed text."""
        spec = decoder.spec
        # Extending rewrites slots up to the newest position, and an adaptive call does so in chunks.
        num_extended = max(
            self.num_extend_positions(decoder.model, spec.num_steps), EXTEND_CHUNK if spec.is_adaptive else 0
        )
        if spec.num_steps < 2:
            return max(num_extended, spec.min_rows)
        shape = spec.tree_shape
        # Levels from 2 on run a module over drafted tokens, each level in its own slots.
        num_drafted = sum(map(len, shape.inner_levels()[1:])) if shape else spec.topk * (spec.num_steps - 1)
        return max(num_extended, num_drafted + spec.min_rows)

    def init(self, decoder: Decoder, batch: int, capacity: int, dtype: Any) -> ModulesState:
        """Makes empty module caches and an empty buffer of trunk states."""
        model, spec = decoder.model, decoder.spec
        num_caches = self.num_caches(model, spec.num_steps)
        # An adaptive call also buffers the states of rounds of depth 0, which do not run the modules.
        buffer_size = self.num_extend_positions(model, spec.num_steps)
        if spec.is_adaptive:
            buffer_size = HIDDEN_BUFFER + spec.num_steps
        return ModulesState(
            caches=tuple(self.empty_module_cache(decoder, batch, capacity, dtype) for _ in range(num_caches)),
            hidden=jnp.zeros((batch, buffer_size, self.state_size(model)), dtype),
            hidden_start=jnp.zeros(batch, jnp.int32),
        )

    def extend(
        self, decoder: Decoder, weights: Weights, state: DecodeState, states: jax.Array, start: jax.Array
    ) -> ModulesState:
        """Runs all modules over one prefill chunk; see `Drafter.extend`.

        Afterwards the caches hold the prompt except the last slots, whose shifted input token does not exist yet. The
        hidden states of those slots are kept, and round 1 processes them.
        """
        drafter_state, chunk = state.drafter, states.shape[1]
        num_used = state.length - start
        caches = extend_modules(decoder, self.network(decoder, weights), state, states, start, num_used)
        # Module k has all inputs of a slot once the token k+1 positions later is known.
        num_known_tokens = jnp.minimum(start + chunk, state.length)
        caches = tuple(
            commit(cache, jnp.maximum(num_known_tokens - 1 - index, 0)) for index, cache in enumerate(caches)
        )
        # Keep the hidden states of the newest M positions. They may be spread over two chunks, so positions outside
        # this chunk keep their value in the buffer.
        hidden_start = jnp.maximum(state.length - len(caches), 0)
        offset = hidden_start[:, None] + jnp.arange(drafter_state.hidden.shape[1])[None, :] - start[:, None]
        chunk_hidden = jnp.take_along_axis(states, jnp.clip(offset, 0, chunk - 1)[:, :, None], axis=1)
        is_in_chunk = (offset >= 0) & (offset < chunk)
        hidden = jnp.where(is_in_chunk[:, :, None], chunk_hidden, drafter_state.hidden)
        return ModulesState(caches, hidden, hidden_start)

    def num_extended(self, draft_state: ModulesState) -> jax.Array:
        """Returns `[B]` slots that match a prefill in every module; the last module has the fewest."""
        return draft_state.caches[-1].length

    def propose(self, decoder: Decoder, weights: Weights, state: DecodeState) -> tuple[Draft, DecodeState]:
        """Extends the modules over the positions that the last round committed, then drafts a chain or a tree."""
        if not decoder.spec.num_steps:
            return super().propose(decoder, weights, state)
        propose = draft_tree if decoder.spec.topk > 1 else draft_chain
        draft, caches, tokens = propose(decoder, self.network(decoder, weights), state)
        # The extended slots are now final in each module, up to the newest slot whose shifted token is committed. Rows
        # that are done were not extended: their experts did not run, and their pages may belong to other rows.
        caches = tuple(
            commit(cache, jnp.where(state.done, cache.length, jnp.maximum(state.length - 1 - index, 0)))
            for index, cache in enumerate(caches)
        )
        return draft, state.replace(tokens=tokens, drafter=state.drafter.replace(caches=caches))

    def commit(self, decoder: Decoder, state: DecodeState, states: jax.Array, accepted: "Acceptance") -> ModulesState:
        """Keeps the hidden states that the modules process next; see `Drafter.commit`.

        After a round with drafts these are the new ones and the M-1 before them, whose slots hold entries of drafted
        tokens. After a round of depth 0 the new one is appended to the backlog.
        """
        drafter_state = state.drafter
        E, num_modules = drafter_state.hidden.shape[1], len(drafter_state.caches)
        new_start = state.length - 1  # position of states[:, 0], the pending token
        # 1. One module: drafting has made all earlier slots final, so the new states replace the buffer.
        if decoder.spec.num_steps and num_modules == 1:
            hidden = jnp.pad(states, ((0, 0), (0, E - states.shape[1]), (0, 0)))
            return drafter_state.replace(hidden=hidden, hidden_start=new_start)
        # 2. Depth 0: the modules did not run, so the new state is appended to the backlog.
        if not decoder.spec.num_steps:
            slot = jnp.minimum(new_start - drafter_state.hidden_start, E - 1)
            return drafter_state.replace(hidden=write_rows(drafter_state.hidden, states, slot))
        # 3. Several modules: keep the M-1 states before the new ones too.
        start = jnp.maximum(state.length - num_modules, 0)
        position = start[:, None] + jnp.arange(E)[None, :]
        # Row by row: a position before the pending token comes from the old buffer, any other from this round.
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
        one pass over depth + M positions.
        """
        drafter_state = state.drafter
        max_backlog = jnp.where(depth == 0, drafter_state.hidden.shape[1] - 1, depth + len(drafter_state.caches))
        return state.drafting_disabled | (over_rows(jnp.max, num_pending(state)) <= max_backlog)

    def drain_backlog(self, decoder: Decoder, weights: Weights, state: DecodeState, depth: jax.Array) -> DecodeState:
        """Extends the modules over the backlog; see `Drafter.drain_backlog`.

        Wide passes process most of a long backlog, and passes of a round's width the rest.
        """
        network, num_modules = self.network(decoder, weights), len(state.drafter.caches)
        for num_positions, min_backlog in (
            (EXTEND_CHUNK, EXTEND_CHUNK + num_modules),
            (decoder.spec.num_steps + num_modules, 0),
        ):
            state = jax.lax.while_loop(
                lambda state, min_backlog=min_backlog: (
                    ~self.backlog_fits(decoder, state, depth) & (over_rows(jnp.max, num_pending(state)) >= min_backlog)
                ),
                lambda state, num_positions=num_positions: extend_backlog(decoder, network, state, num_positions),
                state,
            )
        return state
