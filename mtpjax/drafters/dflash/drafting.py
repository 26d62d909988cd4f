"""The DFlash drafter (2602.06036), which drafts all levels in one pass over a block of mask tokens.

The drafter's cache holds keys and values for committed positions, computed from the trunk's states at these positions.
A round extends the cache over the positions that the last round committed. Then the block passes through the layers and
uses the slots after these positions. The next round overwrites the block's keys and values before anything reads them.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mtpjax.decoding.decoder import Decoder, Weights
from mtpjax.decoding.limits import DraftLimits
from mtpjax.decoding.sampling import PathTokens
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState, Draft, view_pass
from mtpjax.drafters.dflash.network import DFlash, DFlashConfig, block_states, context_entries
from mtpjax.drafters.levels import draft_levels
from mtpjax.drafters.modules import HIDDEN_BUFFER, BufferedDrafter, ModulesState, num_pending, of_drafter
from mtpjax.drafters.scoring import DraftScores
from mtpjax.drafters.trained import DraftLevels, TextRows, TrainedDrafter, embed, embedding_table
from mtpjax.models.cache import Cache, commit, empty_cache
from mtpjax.models.flops import RowCounts, matrices, product_flops
from mtpjax.models.layers.entries import append
from mtpjax.models.layers.rotary import rotary_angles
from mtpjax.models.model import MTPModel, multiply_head
from mtpjax.models.params import DRAFTER
from mtpjax.models.view import TreeSlots, View, read_rows


def block_limits(title: str) -> DraftLimits:
    """Returns the limits of methods that draft a block."""
    return dataclasses.replace(
        TrainedDrafter.limits,
        trees=f"{title} drafts chains only, because the slots of a block draft a single continuation",
        levels=f"drafts of a {title} block",
    )


@dataclasses.dataclass(frozen=True)
class DFlashDrafter(TrainedDrafter, BufferedDrafter):
    """Drafts chains with a DFlash network, which `mtpjax.load_drafter` loads with its parameters.

    The block always has as many slots as in training. With a smaller `num_steps`, the last drafts are not used.

    Attributes:
        architecture: the network, and the trunk states that it reads.
    """

    architecture: DFlashConfig = dataclasses.field(kw_only=True)

    title: ClassVar[str] = "DFlash"
    draws_anchors: ClassVar[bool] = True
    network_type: ClassVar[type[DFlash]] = DFlash
    limits: ClassVar[DraftLimits] = block_limits("DFlash")

    @property
    def max_levels(self) -> int:
        """Number of drafts in a block."""
        return self.architecture.num_drafts

    def network_flops(
        self, network: dict[str, Any], rows: RowCounts, num_levels: int, num_anchors: int
    ) -> tuple[float, float]:
        """Counts the context's projections at every token, and the layers and small heads at every slot of a block.

        A slot attends to its block and to the context before its anchor, which is drawn uniformly from the documents.
        Windows inside a block do not reduce the count.
        """
        own, block = self.architecture, self.architecture.block
        slots = rows.num_rows * num_anchors * own.block_size
        layers = {name: leaf for name, leaf in network.items() if name.startswith("layer")}
        small = [network[name].shape for name in ("markov_step", "confidence_out") if name in network]
        keys = 2 * block.num_key_value_heads * block.head_dim * block.hidden_size * block.num_hidden_layers
        context = product_flops(block, [("fc", network["fc"].shape)]) + 2 * keys
        each = product_flops(block, [*matrices(layers), *(("", shape) for shape in small)])
        tokens = max(int(rows.lengths.sum()), 1)
        seen = sum(rows.pairs(window) / tokens - 1 + own.block_size for window in own.windows)
        attention = 2 * block.num_attention_heads * (block.head_dim + block.value_dim) * slots * seen
        return rows.tokens * context + slots * each, attention

    def num_scratch_slots(self, decoder: Decoder) -> int:
        """Returns the maximum number of slots that extending and the block write after the committed text."""
        return max(self._buffer_size(decoder.spec), self.architecture.block_size)

    def init(self, decoder: Decoder, batch: int, capacity: int, dtype: Any) -> ModulesState:
        """Makes empty caches and an empty buffer of trunk states."""
        own, spec = self.architecture, decoder.spec
        return ModulesState(
            caches=(empty_cache(own.block, own.kinds, batch, capacity, dtype, spec.kv_cache_dtype, spec.pool),),
            hidden=jnp.zeros((batch, self._buffer_size(spec), own.features_size), dtype),
            hidden_start=jnp.zeros(batch, jnp.int32),
        )

    def _buffer_size(self, spec: DecodeSpec) -> int:
        """Returns the size of the buffer, which holds the positions of a round and the backlog of an adaptive call."""
        return spec.num_steps + 1 + HIDDEN_BUFFER * spec.is_adaptive

    def extend(
        self, decoder: Decoder, weights: Weights, state: DecodeState, states: jax.Array, start: jax.Array
    ) -> ModulesState:
        """Writes the context entries for one prefill chunk. The entries for a row's padding follow its text."""
        cache = self._extend_cache(decoder, weights, state, states, start)
        length = jnp.minimum(start + states.shape[1], state.length)
        # Clear the buffer, because the slot's previous request may have left NaN in it. The zeros are harmless, because
        # the cache entries computed from them go into slots after the end of the text.
        hidden = jnp.zeros_like(state.drafter.hidden)
        return ModulesState((commit(cache, length),), hidden, length)

    def _extend_cache(
        self, decoder: Decoder, weights: Weights, state: DecodeState, states: jax.Array, start: jax.Array
    ) -> Cache:
        """Projects trunk states `[B, T, n * D]` and writes their keys and values, starting at slot `start`."""
        config, network, (cache,) = self.architecture.block, weights.drafter.network, state.drafter.caches
        view = of_drafter(view_pass(state, config, start, states.shape[1], num_used=states.shape[1]))
        context = self._apply(decoder, weights, states, method="context")
        layers = []
        for index, kept in enumerate(cache.layers):
            attention = network[f"layer_{index}"]["attention"]
            layers.append(append(kept, context_entries(attention, context, view.angles, config), view))
        return cache.replace(layers=tuple(layers))

    def propose(self, decoder: Decoder, weights: Weights, state: DecodeState) -> tuple[Draft, DecodeState]:
        """Extends the context over the newly committed positions, then drafts all levels in one pass."""
        num_steps = decoder.spec.num_steps
        if not num_steps:
            return super().propose(decoder, weights, state)
        # 1. Extend over the states of the accepted nodes. Entries after them are garbage, which the block overwrites.
        drafter_state, own = state.drafter, self.architecture
        states = drafter_state.hidden[:, : num_steps + 1]
        cache = self._extend_cache(decoder, weights, state, states, drafter_state.hidden_start)
        # 2. Run the block. It consists of the pending token, whose state is not known yet, and mask tokens.
        anchor = read_rows(state.tokens, state.length - 1, 1)
        tokens = jnp.pad(anchor, ((0, 0), (0, own.block_size - 1)), constant_values=own.mask_token_id)
        embedded = embed(own, decoder, weights, tokens, states.dtype)
        views = self._block_views(state, decoder.spec)
        hidden, layers = self._apply(decoder, weights, embedded, views, cache.layers, method="run")
        # Rows that are done keep their length, because their pages may belong to other rows.
        cache = commit(cache.replace(layers=layers), jnp.where(state.done, cache.length, state.length - 1))
        # 3. Draft from the slots. The anchor's slot drafts only if the network was trained to do so.
        hidden = hidden[:, own.block_size - own.num_drafts :][:, :num_steps]
        draft = self._draft(decoder, weights, state, hidden)
        return draft, state.replace(drafter=drafter_state.replace(caches=(cache,)))

    def _draft(self, decoder: Decoder, weights: Weights, state: DecodeState, hidden: jax.Array) -> Draft:
        """Drafts from the slots' states `[B, K, D]`. No draft depends on another draft."""

        def score(level: int, previous: jax.Array, path: PathTokens | None, carry: None) -> tuple[DraftScores, None]:
            rows = hidden[:, level - 1 : level]
            return DraftScores(decoder, weights.params, state, weights.drafter.head, rows, 0, path, level), carry

        return draft_levels(decoder, score, state)

    def _block_views(self, state: DecodeState, spec: DecodeSpec) -> tuple[View, ...]:
        """Makes one view per layer, in which the slots attend to the context within the window and to each other.

        A view treats the block as a tree. The slots follow the text, and attend to it and to some slots of the block.
        """
        own, base = self.architecture, state.length - 1
        X, B = own.block_size, len(state.length)
        offset = jnp.broadcast_to(jnp.arange(X)[None, :], (B, X))
        distance = jnp.arange(X)[:, None] - jnp.arange(X)[None, :]  # the query's slot minus the key's
        made: dict[tuple[int, bool], View] = {}
        for window, is_causal in dict.fromkeys(zip(own.windows, own.is_causal, strict=True)):
            is_seen = distance >= 0 if is_causal else jnp.ones((X, X), bool)
            if window and not own.window_from_anchor:
                is_seen &= jnp.abs(distance) < window
            # `draft_window` limits full layers. Sliding layers use the smaller of the two windows, without sinks.
            limit = spec.window
            if window:
                width = window + own.window_from_anchor
                limit = (width if limit is None else min(width, limit[0]), 0)
            # If `window_from_anchor` is set, the windows of all slots count back from the anchor's position.
            depths = jnp.zeros_like(offset) if window and own.window_from_anchor else offset
            tree = TreeSlots(base, depths, jnp.broadcast_to(is_seen[None], (B, X, X)))
            view = view_pass(state, own.block, base, X, num_used=X, tree=tree, window=limit)
            made[window, is_causal] = of_drafter(view).replace(angles=rotary_angles(own.block, base[:, None] + offset))
        return tuple(made[kind] for kind in zip(own.windows, own.is_causal, strict=True))

    def drain_backlog(self, decoder: Decoder, weights: Weights, state: DecodeState, depth: jax.Array) -> DecodeState:
        """Extends the context over the whole buffer; see `Drafter.drain_backlog`."""

        def drain(state: DecodeState) -> DecodeState:
            drafter_state = state.drafter
            start = drafter_state.hidden_start
            cache = self._extend_cache(decoder, weights, state, drafter_state.hidden, start)
            end = start + num_pending(state)
            cache = commit(cache, jnp.where(state.done, cache.length, end))
            return state.replace(drafter=drafter_state.replace(caches=(cache,), hidden_start=end))

        return jax.lax.while_loop(lambda state: ~self.backlog_fits(decoder, state, depth), drain, state)

    def _apply(self, decoder: Decoder, weights: Weights, *arguments: Any, method: str) -> Any:
        network = self.network_type(self.architecture, decoder.model.implementation)
        return network.apply({"params": weights.drafter.network}, *arguments, method=method)

    def levels(
        self, params: dict, rows: TextRows, heads: tuple[jax.Array, ...], *, model: MTPModel, num_levels: int
    ) -> DraftLevels:
        """Runs one block after each anchor. By default, row i has anchor i + 1, and the last row has no anchor."""
        own, T, anchors = self.architecture, rows.tokens.shape[1], rows.anchors
        table = embedding_table(params, own, model)
        if anchors is None:
            anchors = jnp.broadcast_to(jnp.minimum(jnp.arange(1, T + 1), T - 1)[None], rows.tokens.shape)
        shape = {"config": own, "segment_ids": rows.segment_ids, "implementation": model.implementation}
        # Run the block only once for all levels, because slots do not read drafts and no level depends on another.
        hidden = block_states(params[DRAFTER], rows.features, rows.tokens, anchors, table, **shape)
        # Drop the anchor's slot if it does not draft.
        hidden = hidden[:, :, own.block_size - own.num_drafts :][:, :, :num_levels]
        inputs, confidence = self._head_inputs(params[DRAFTER], hidden, rows.tokens, anchors, model)
        return DraftLevels(tuple(multiply_head(state, heads[0]) for state in inputs), inputs, confidence)

    def _head_inputs(
        self, network: dict[str, Any], hidden: jax.Array, tokens: jax.Array, anchors: jax.Array, model: MTPModel
    ) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """Computes the head input of each level, `[B, A, D]`, and the confidence from the slots' states."""
        return tuple(hidden[:, :, level] for level in range(hidden.shape[2])), None
