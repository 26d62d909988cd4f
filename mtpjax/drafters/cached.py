"""Implements extend, propose and the backlog for drafters whose modules read trunk states and keep KV caches."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mtpjax.decoding.decoder import Decoder, Weights
from mtpjax.decoding.sampling import PathTokens
from mtpjax.decoding.state import DecodeState, Draft, view_pass
from mtpjax.drafters.modules import (
    EXTEND_CHUNK,
    HIDDEN_BUFFER,
    BufferedDrafter,
    DraftNetwork,
    ModulesState,
    extend_and_read,
    extend_backlog,
    extend_modules,
    num_pending,
    run_over_drafts,
    view_pending,
)
from mtpjax.drafters.tree import extend_ancestor_mask, tree_builder
from mtpjax.models.cache import Cache, commit, empty_cache
from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.parallel import over_rows
from mtpjax.models.view import TreeSlots, read_rows, write_rows


class ModuleSizes(NamedTuple):
    """The number of a drafter's modules, and the sizes that they all share."""

    num_modules: int  # M; a call runs at most one module per draft level
    config: ModelConfig  # sizes of the layers
    kinds: tuple[LayerKind, ...]  # kinds of one module's layers
    state_size: int  # width of the trunk states that `select_states` picks


@dataclasses.dataclass(frozen=True)
class CachedDrafter(BufferedDrafter):
    """Base class for drafters with M modules, each with a KV cache. A subclass defines the modules.

    Slot i of module k (0-based) depends on the token at position i+k+1.
    """

    def network(self, decoder: Decoder, weights: Weights) -> DraftNetwork:
        """Returns the modules with their parameters."""
        raise NotImplementedError

    def sizes(self, model: MTPModel) -> ModuleSizes:
        """Returns the number and the sizes of the modules."""
        raise NotImplementedError

    def max_shift(self, model: MTPModel) -> int:
        """Returns the shift of the last module."""
        return self.sizes(model).num_modules

    def num_extend_positions(self, model: MTPModel, num_steps: int) -> int:
        """Returns the number of positions that each module processes per round (K + M, but at least 1).

        These are the K+1 verified positions and the M-1 positions before them, for which at least one module computed
        its entries from drafted tokens.
        """
        return max(num_steps + min(self.sizes(model).num_modules, num_steps), 1)

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
        # From level 2 on, a module runs over drafted tokens, and each level uses its own slots.
        num_drafted = sum(map(len, shape.inner_levels()[1:])) if shape else spec.topk * (spec.num_steps - 1)
        return max(num_extended, num_drafted + spec.min_rows)

    def init(self, decoder: Decoder, batch: int, capacity: int, dtype: Any) -> ModulesState:
        """Makes empty caches and an empty buffer of trunk states."""
        model, spec = decoder.model, decoder.spec
        num_modules, config, kinds, state_size = self.sizes(model)
        # An adaptive call also buffers the states from rounds at depth 0, because such rounds do not run the modules.
        buffer_size = self.num_extend_positions(model, spec.num_steps)
        if spec.is_adaptive:
            buffer_size = HIDDEN_BUFFER + spec.num_steps
        return ModulesState(
            caches=tuple(
                empty_cache(config, kinds, batch, capacity, dtype, spec.kv_cache_dtype, spec.pool)
                for _ in range(min(num_modules, spec.num_steps))
            ),
            hidden=jnp.zeros((batch, buffer_size, state_size), dtype),
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
        # Keep the hidden states of the newest M positions. They may span two chunks, so positions outside this chunk
        # keep their value in the buffer.
        hidden_start = jnp.maximum(state.length - len(caches), 0)
        offset = hidden_start[:, None] + jnp.arange(drafter_state.hidden.shape[1])[None, :] - start[:, None]
        chunk_hidden = jnp.take_along_axis(states, jnp.clip(offset, 0, chunk - 1)[:, :, None], axis=1)
        is_in_chunk = (offset >= 0) & (offset < chunk)
        hidden = jnp.where(is_in_chunk[:, :, None], chunk_hidden, drafter_state.hidden)
        return ModulesState(caches, hidden, hidden_start)

    def propose(self, decoder: Decoder, weights: Weights, state: DecodeState) -> tuple[Draft, DecodeState]:
        """Extends the modules over the newly committed positions, then drafts a chain or a tree."""
        if not decoder.spec.num_steps:
            return super().propose(decoder, weights, state)
        propose = draft_tree if decoder.spec.topk > 1 else draft_chain
        draft, caches, tokens = propose(decoder, self.network(decoder, weights), state)
        # The extended slots are now final in each module, up to the newest slot whose shifted token is committed. Rows
        # that are done keep their length, because their experts did not run and their pages may belong to other rows.
        caches = tuple(
            commit(cache, jnp.where(state.done, cache.length, jnp.maximum(state.length - 1 - index, 0)))
            for index, cache in enumerate(caches)
        )
        return draft, state.replace(tokens=tokens, drafter=state.drafter.replace(caches=caches))

    def drain_backlog(self, decoder: Decoder, weights: Weights, state: DecodeState, depth: jax.Array) -> DecodeState:
        """Extends the modules over the backlog; see `Drafter.drain_backlog`.

        Wide passes process most of a long backlog, and passes as wide as a round process the rest.
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


def draft_chain(decoder: Decoder, network: DraftNetwork, state: DecodeState) -> tuple[Draft, list[Cache], jax.Array]:
    """Drafts K tokens and writes them after the committed text.

    Level k <= M extends module k over all hidden states in the buffer at once. Its output at the newest slot determines
    draft k, which module k+1 reads as a token. Later levels run module M on its own output, one slot further each time.

    Returns:
        The draft, the modules' caches, and the tokens `[B, L]`.
    """
    # The levels k <= M extend over the same positions, so they share one view.
    spec, tokens, caches = decoder.spec, state.tokens, list(state.drafter.caches)
    num_modules, K = len(caches), spec.num_steps
    sampling = state.settings.sampling
    extend_view = view_pending(decoder, network, state)
    draft, probabilities = tokens[:, :1], []
    output = newest = chained = None
    for level in range(1, max(K, num_modules) + 1):
        index = min(level, num_modules) - 1
        if level <= num_modules:
            # 1. Draft extend: run a module over the positions that the last round committed. This overwrites entries
            # that the last round computed from drafted tokens.
            output, newest, chained = extend_and_read(network, caches, index, chained, state, tokens, extend_view)
            if level > K:
                continue  # a shallow round of an adaptive call only extends the deeper modules
        else:
            # 2. After the last module, run it again on its own output and the token that it just drafted.
            slot = state.length - 2 + level - num_modules
            view = view_pass(state, network.config, slot, spec.min_rows, num_used=1, window=spec.window)
            assert newest is not None
            output, newest = run_over_drafts(network, caches, index, newest, draft, view)
        # 3. Score the next token. Penalties also count the tokens drafted so far.
        path = None
        if sampling.has_penalties:
            is_before = jnp.broadcast_to(jnp.arange(K) < level - 1, (len(tokens), 1, K))
            path = PathTokens(read_rows(tokens, state.length, K), is_before)
        assert output is not None
        scores = network.scores(state, output, index, path, level)
        # 4. Sample the token from q if the acceptance rule compares p with q; otherwise choose the arg-max.
        draft, q = scores.draft_token()
        probabilities += [] if q is None else [q]
        tokens = write_rows(tokens, draft, state.length + level - 1)
    # The nodes to verify are the pending token and the drafts after it.
    nodes = read_rows(tokens, state.length - 1, K + 1)
    return Draft(nodes, jnp.concatenate(probabilities, axis=1) if probabilities else None), caches, tokens


def draft_tree(decoder: Decoder, network: DraftNetwork, state: DecodeState) -> tuple[Draft, list[Cache], jax.Array]:
    """Drafts a tree. At each level, the module runs once over all nodes that have children.

    Returns:
        The draft, the module's cache in a list, and the unchanged tokens `[B, L]`.
    """
    spec, caches = decoder.spec, list(state.drafter.caches)
    builder = tree_builder(state, spec)
    B = len(state.tokens)
    base = state.length - 1  # the module's slots from here on hold drafted nodes
    slot_tokens, num_slots = jnp.zeros((B, 0), jnp.int32), 0
    # The state of the current level is its ancestor mask, each node's token, and the index of each node's parent in the
    # previous level.
    mask = path = tokens = parent = None

    # 1. Extend the module over the positions that the last round committed. Its newest output scores the root's
    # children.
    view = view_pending(decoder, network, state)
    output, chained, _ = extend_and_read(network, caches, 0, None, state, state.tokens, view)

    for level in range(1, builder.num_levels + 1):
        if tokens is not None and parent is not None:
            # 2. Run the module over the nodes that the previous level chose. Each node attends to the text, its
            # ancestors and itself, so its mask is its parent's mask plus one column per node of this level.
            num_nodes = tokens.shape[1]
            slot_tokens = jnp.concatenate([slot_tokens, tokens], axis=1)
            mask = extend_ancestor_mask(mask, parent)
            # The nodes occupy the slots after the nodes of earlier levels, but all have the position of their depth.
            width = max(num_nodes, spec.min_rows)
            tree = TreeSlots(
                base, jnp.full((B, width), level - 2), jnp.pad(mask, ((0, 0), (0, width - num_nodes), (0, 0)))
            )
            view = view_pass(
                state, network.config, base + num_slots, width, num_used=num_nodes, tree=tree, window=spec.window
            )
            # Each node reads the module's output at its parent.
            chained = jnp.take_along_axis(chained, parent[:, :, None], axis=1)
            output, chained = run_over_drafts(network, caches, 0, chained, tokens, view)
            num_slots += num_nodes
            path = PathTokens(slot_tokens, mask) if state.settings.sampling.has_penalties else None
        # 3. Score the children of these nodes, and choose the nodes that get children of their own.
        scores = network.scores(state, output, 0, path, level)
        tokens, parent = builder.add_level(level, scores)
    return builder.draft(), caches, state.tokens
