"""The DFlash drafter (2602.06036): one pass over a block of mask tokens drafts all levels at once.

A cache of the drafter holds the keys and values of committed positions only, made of the trunk's states there. A round
extends the caches by the states of the positions that the last round committed. Then the block passes the layers in the
slots after them. The next round overwrites its keys and values before anything reads them.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Decoder, Weights
from mtpjax.decoding.sampling import PathTokens
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState, Draft, view_pass
from mtpjax.drafters.dflash.network import DFlash, DFlashConfig, block_states, context_entries
from mtpjax.drafters.levels import draft_levels
from mtpjax.drafters.modules import HIDDEN_BUFFER, num_pending, of_drafter
from mtpjax.drafters.scoring import DraftScores, ReducedHead, own_head
from mtpjax.drafters.trained import (
    DraftLevels,
    DraftParams,
    TextRows,
    TrainedDrafter,
    embedding_table,
    join_states,
    require_whole_trunk,
)
from mtpjax.models.cache import Cache, commit, empty_cache
from mtpjax.models.layers.entries import append
from mtpjax.models.layers.rotary import rotary_angles
from mtpjax.models.model import MTPModel, TrunkOutput, bind, multiply_head
from mtpjax.models.parallel import over_rows
from mtpjax.models.params import DRAFTER
from mtpjax.models.view import TreeSlots, View, read_rows, write_rows

if TYPE_CHECKING:
    from mtpjax.decoding.state import Acceptance


class PreparedDFlash(flax.struct.PyTreeNode):
    """The drafter's parameters that a round reads."""

    network: dict[str, Any]
    head: ReducedHead | None  # None: the trunk's


class DFlashState(flax.struct.PyTreeNode):
    """State of the DFlash drafter: its caches, and the trunk states that are not in them yet."""

    cache: Cache  # keys and values of the context; length: positions that they cover
    hidden: jax.Array  # [B, E, n * D] trunk states side by side, from position hidden_start on
    hidden_start: jax.Array  # [B] int32


@dataclasses.dataclass(frozen=True)
class DFlashDrafter(TrainedDrafter):
    """Drafts chains with a DFlash network; `mtpjax.load_drafter` reads one with its parameters.

    The block always has as many slots as in training. With a smaller `num_steps` the last drafts are not used.

    Attributes:
        architecture: the network, and the trunk states that it reads.
    """

    architecture: DFlashConfig = dataclasses.field(kw_only=True)

    title: ClassVar[str] = "DFlash"
    draws_anchors: ClassVar[bool] = True
    network_type: ClassVar[type[DFlash]] = DFlash

    @property
    def max_levels(self) -> int:
        """The drafts of a block."""
        return self.architecture.num_drafts

    def check(self, model: MTPModel, config: DecodeConfig) -> None:
        """Raises `ValueError` if the drafter is for a different trunk or does not support the settings."""
        super().check(model, config)
        if config.topk > 1:
            raise ValueError(
                f"{self.title} drafts chains only: the slots of a block stand for one continuation, and verification "
                f"of a tree would need blocks after other tokens; set topk to 1, got {config.topk}"
            )
        if config.num_steps > self.max_levels:
            raise ValueError(
                f"num_steps {config.num_steps} exceeds the {self.max_levels} drafts of a {self.title} block"
            )

    def prepare(self, params: dict, draft_params: DraftParams, *, model: MTPModel) -> PreparedDFlash:
        """Casts the output matrix, if the drafter has its own, and indexes the draft vocabulary."""
        require_whole_trunk()
        head = None
        if self.architecture.own_head:
            head = own_head(params, (draft_params.network["head"],), draft_params.draft_ids, model=model)
        return PreparedDFlash(draft_params.network, head)

    def num_scratch_slots(self, decoder: Decoder) -> int:
        """Returns the maximum number of slots that extending and the block write after the committed text."""
        return max(self._buffer_size(decoder.spec), self.architecture.block_size)

    def init(self, decoder: Decoder, batch: int, capacity: int, dtype: Any) -> DFlashState:
        """Makes empty caches and an empty buffer of trunk states."""
        own, spec = self.architecture, decoder.spec
        return DFlashState(
            cache=empty_cache(own.block, own.kinds, batch, capacity, dtype, spec.kv_cache_dtype, spec.pool),
            hidden=jnp.zeros((batch, self._buffer_size(spec), own.features_size), dtype),
            hidden_start=jnp.zeros(batch, jnp.int32),
        )

    def _buffer_size(self, spec: DecodeSpec) -> int:
        """Returns the positions that the buffer holds: those of a round, and an adaptive call's backlog."""
        return spec.num_steps + 1 + HIDDEN_BUFFER * spec.is_adaptive

    def select_states(self, decoder: Decoder, output: TrunkOutput) -> jax.Array:
        """Joins the trunk states that the drafter reads, `[B, T, n * D]`."""
        return join_states(output, self.architecture.layer_ids, self.architecture.num_target_layers)

    def extend(
        self, decoder: Decoder, weights: Weights, state: DecodeState, states: jax.Array, start: jax.Array
    ) -> DFlashState:
        """Writes the context of one prefill chunk. A row's padding lands after its text."""
        cache = self._extend_cache(decoder, weights, state, states, start)
        length = jnp.minimum(start + states.shape[1], state.length)
        # The slot's previous request may have left NaN in the buffer, which is harmless: it is written after the text.
        hidden = jnp.zeros_like(state.drafter.hidden)
        return DFlashState(commit(cache, length), hidden, length)

    def _extend_cache(
        self, decoder: Decoder, weights: Weights, state: DecodeState, states: jax.Array, start: jax.Array
    ) -> Cache:
        """Projects trunk states `[B, T, n * D]` and writes their keys and values from slot `start` on."""
        config, cache, network = self.architecture.block, state.drafter.cache, weights.drafter.network
        view = of_drafter(view_pass(state, config, start, states.shape[1], num_used=states.shape[1]))
        context = self._apply(decoder, weights, states, method="context")
        layers = []
        for index, kept in enumerate(cache.layers):
            attention = network[f"layer_{index}"]["attention"]
            layers.append(append(kept, context_entries(attention, context, view.angles, config), view))
        return cache.replace(layers=tuple(layers))

    def num_extended(self, draft_state: DFlashState) -> jax.Array:
        """Returns `[B]` positions whose context is in the caches."""
        return draft_state.cache.length

    def propose(self, decoder: Decoder, weights: Weights, state: DecodeState) -> tuple[Draft, DecodeState]:
        """Extends the context by what the last round committed, then drafts all levels in one pass."""
        num_steps = decoder.spec.num_steps
        if not num_steps:
            return super().propose(decoder, weights, state)
        # 1. Extend over the states of the accepted nodes. Entries after them are garbage, which the block overwrites.
        drafter_state, own = state.drafter, self.architecture
        states = drafter_state.hidden[:, : num_steps + 1]
        cache = self._extend_cache(decoder, weights, state, states, drafter_state.hidden_start)
        # 2. The block: the pending token, whose own state is not known yet, and mask tokens.
        anchor = read_rows(state.tokens, state.length - 1, 1)
        tokens = jnp.pad(anchor, ((0, 0), (0, own.block_size - 1)), constant_values=own.mask_token_id)
        if own.own_embedding:
            embedded = self._apply(decoder, weights, tokens, method="embed").astype(states.dtype)
        else:
            embedded = bind(decoder.model, weights.params)(tokens, method="embed")
        views = self._block_views(state, decoder.spec)
        hidden, layers = self._apply(decoder, weights, embedded, views, cache.layers, method="run")
        # Rows that are done were not extended: their pages may belong to other rows.
        cache = commit(cache.replace(layers=layers), jnp.where(state.done, cache.length, state.length - 1))
        # 3. Draft from the slots. The anchor's slot drafts only if the network was trained that way.
        hidden = hidden[:, own.block_size - own.num_drafts :][:, :num_steps]
        draft = self._draft(decoder, weights, state, hidden)
        return draft, state.replace(drafter=drafter_state.replace(cache=cache))

    def _draft(self, decoder: Decoder, weights: Weights, state: DecodeState, hidden: jax.Array) -> Draft:
        """Drafts from the states `[B, K, D]` of the slots; no draft depends on another."""

        def score(level: int, previous: jax.Array, path: PathTokens | None, carry: None) -> tuple[DraftScores, None]:
            rows = hidden[:, level - 1 : level]
            return DraftScores(decoder, weights.params, state, weights.drafter.head, rows, 0, path, level), carry

        return draft_levels(decoder, score, state)

    def _block_views(self, state: DecodeState, spec: DecodeSpec) -> tuple[View, ...]:
        """Makes the view of each layer: the slots attend to the context within the layer's window, and to each other.

        In a view the block is a tree: slots after the text that attend to it and to some of each other.
        """
        own, base = self.architecture, state.length - 1
        X, B = own.block_size, len(state.length)
        offset = jnp.broadcast_to(jnp.arange(X)[None, :], (B, X))
        distance = jnp.arange(X)[:, None] - jnp.arange(X)[None, :]  # from the key's slot to the query's
        made: dict[tuple[int, bool], View] = {}
        for kind in zip(own.windows, own.is_causal, strict=True):
            window, is_causal = kind
            if kind in made:
                continue
            is_seen = distance >= 0 if is_causal else jnp.ones((X, X), bool)
            if window and not own.window_from_anchor:
                is_seen &= jnp.abs(distance) < window
            # `draft_window` narrows full layers, and sliding ones to the smaller window without sinks.
            limit = spec.window
            if window:
                width = window + own.window_from_anchor
                limit = (width if limit is None else min(width, limit[0]), 0)
            # With windows from the anchor, all slots count back from its position.
            depths = jnp.zeros_like(offset) if window and own.window_from_anchor else offset
            tree = TreeSlots(base, depths, jnp.broadcast_to(is_seen[None], (B, X, X)))
            view = view_pass(state, own.block, base, X, num_used=X, tree=tree, window=limit)
            made[kind] = of_drafter(view).replace(angles=rotary_angles(own.block, base[:, None] + offset))
        return tuple(made[kind] for kind in zip(own.windows, own.is_causal, strict=True))

    def commit(self, decoder: Decoder, state: DecodeState, states: jax.Array, accepted: "Acceptance") -> DFlashState:
        """Keeps the states of the verified nodes. A round of depth 0 appends its one state to the backlog."""
        drafter_state, start = state.drafter, state.length - 1
        size = drafter_state.hidden.shape[1]
        if decoder.spec.num_steps:
            hidden = jnp.pad(states, ((0, 0), (0, size - states.shape[1]), (0, 0)))
            return drafter_state.replace(hidden=hidden, hidden_start=start)
        slot = jnp.minimum(start - drafter_state.hidden_start, size - 1)
        return drafter_state.replace(hidden=write_rows(drafter_state.hidden, states, slot))

    def backlog_fits(self, decoder: Decoder, state: DecodeState, depth: jax.Array | int) -> jax.Array:
        """Returns whether a round of this depth can follow; see `Drafter.backlog_fits`."""
        # A round of depth 0 needs a free place in the buffer; one with drafts extends by depth + 1 positions.
        max_backlog = jnp.where(depth == 0, state.drafter.hidden.shape[1] - 1, depth + 1)
        return state.drafting_disabled | (over_rows(jnp.max, num_pending(state)) <= max_backlog)

    def drain_backlog(self, decoder: Decoder, weights: Weights, state: DecodeState, depth: jax.Array) -> DecodeState:
        """Extends the context by the whole buffer; see `Drafter.drain_backlog`."""

        def drain(state: DecodeState) -> DecodeState:
            drafter_state = state.drafter
            start = drafter_state.hidden_start
            cache = self._extend_cache(decoder, weights, state, drafter_state.hidden, start)
            end = start + num_pending(state)
            cache = commit(cache, jnp.where(state.done, cache.length, end))
            return state.replace(drafter=drafter_state.replace(cache=cache, hidden_start=end))

        return jax.lax.while_loop(lambda state: ~self.backlog_fits(decoder, state, depth), drain, state)

    def _apply(self, decoder: Decoder, weights: Weights, *arguments: Any, method: str) -> Any:
        network = self.network_type(self.architecture, decoder.model.implementation)
        return network.apply({"params": weights.drafter.network}, *arguments, method=method)

    def levels(
        self, params: dict, rows: TextRows, heads: tuple[jax.Array, ...], *, model: MTPModel, num_levels: int
    ) -> DraftLevels:
        """Runs one block after each anchor. Without anchors, that of row i is token i + 1; the last row has none."""
        own, T, anchors = self.architecture, rows.tokens.shape[1], rows.anchors
        table = embedding_table(params, own, model)
        if anchors is None:
            anchors = jnp.broadcast_to(jnp.minimum(jnp.arange(1, T + 1), T - 1)[None], rows.tokens.shape)
        shape = {"config": own, "segment_ids": rows.segment_ids, "implementation": model.implementation}
        # One pass of the block for all levels: a slot reads no draft, so no level waits for another.
        hidden = block_states(params[DRAFTER], rows.features, rows.tokens, anchors, table, **shape)
        # The anchor's slot may have no draft.
        hidden = hidden[:, :, own.block_size - own.num_drafts :][:, :, :num_levels]
        inputs, confidence = self._head_inputs(params[DRAFTER], hidden, rows.tokens, anchors, model)
        return DraftLevels(tuple(multiply_head(state, heads[0]) for state in inputs), inputs, confidence)

    def _head_inputs(
        self, network: dict[str, Any], hidden: jax.Array, tokens: jax.Array, anchors: jax.Array, model: MTPModel
    ) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """Returns what the head multiplies in each level, of the slots' states `[B, A, K, D]`, and the confidence."""
        return tuple(hidden[:, :, level] for level in range(hidden.shape[2])), None
