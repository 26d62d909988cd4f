"""The MTP drafter: the model's MTP modules propose a chain or a tree."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.drafters.base import Draft, Drafter
from mtpjax.decoding.drafters.modules import (
    EXTEND_CHUNK,
    HIDDEN_BUFFER,
    MTPParams,
    MTPState,
    PreparedMTP,
    extend_backlog,
    extend_modules,
    num_extend_positions,
    num_modules_used,
    num_pending,
)
from mtpjax.decoding.drafters.mtp_chain import draft_chain
from mtpjax.decoding.drafters.mtp_tree import draft_tree
from mtpjax.decoding.drafters.scoring import reduce_head
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState
from mtpjax.models.cache import commit, empty_cache
from mtpjax.models.layers.entries import write_rows
from mtpjax.models.model import MTPModel, TrunkOutput
from mtpjax.models.parallel import over_rows
from mtpjax.models.params import is_of_modules

if TYPE_CHECKING:
    from mtpjax.decoding.verify import Acceptance


@dataclasses.dataclass(frozen=True)
class MTPDrafter(Drafter):
    """Drafts with the model's MTP modules: a chain with any number of them, a tree with one."""

    def check(self, model: MTPModel, config: DecodeConfig) -> None:
        """Raises `ValueError` if the model has no modules or cannot draft the tree."""
        if not model.config.num_mtp_modules:
            raise ValueError(
                f"num_steps {config.num_steps} with drafter 'mtp' needs at least one MTP module, but the model has "
                "none; use drafter 'lookup', or add_mtp_modules and train"
            )
        if config.topk > 1:
            check_tree(model, config)

    def default_params(self, params: dict, config: DecodeConfig, *, model: MTPModel) -> MTPParams:
        """Returns the `mtp_*` leaves of the model's parameters, and the reduced vocabulary if there is one."""
        modules = {name: leaf for name, leaf in params.items() if is_of_modules(name)}
        ids = None
        if config.draft_vocabulary is not None:
            ids = jnp.asarray(draftable_ids(config.draft_vocabulary, model))
        return MTPParams(modules, ids)

    def prepare(self, params: dict, draft_params: MTPParams, *, model: MTPModel, dtype: Any) -> PreparedMTP:
        """Joins the modules with the parameters that they share with the trunk, and gathers the reduced head."""
        merged = {**params, **draft_params.modules}
        head = None
        if draft_params.draft_ids is not None:
            head = reduce_head(merged, draft_params.draft_ids, model=model, dtype=dtype)
        return PreparedMTP(merged, head)

    def num_scratch_slots(self, model: MTPModel, spec: DecodeSpec) -> int:
        """Returns the most slots that extending and drafting write behind the committed text."""
        # Extending rewrites slots up to the newest position, and an adaptive call does so in chunks.
        num_extended = max(num_extend_positions(model, spec.num_steps), EXTEND_CHUNK if spec.is_adaptive else 0)
        if spec.num_steps < 2:
            return max(num_extended, spec.min_rows)
        shape = spec.tree_shape
        # Levels from 2 on run a module over drafted tokens, each level in slots of its own.
        num_drafted = sum(map(len, shape.inner_levels()[1:])) if shape else spec.topk * (spec.num_steps - 1)
        return max(num_extended, num_drafted + spec.min_rows)

    def init(self, *, model: MTPModel, spec: DecodeSpec, batch: int, capacity: int, dtype: Any) -> MTPState:
        """Makes empty module caches and an empty buffer of hidden states."""
        # An adaptive call also buffers the hidden states of rounds of depth 0, which do not run the modules.
        config = model.config
        buffer_size = (
            HIDDEN_BUFFER + spec.num_steps if spec.is_adaptive else num_extend_positions(model, spec.num_steps)
        )
        return MTPState(
            caches=tuple(
                empty_cache(config, (config.mtp_kind,), batch, capacity, dtype, spec.kv_cache_dtype, spec.pool)
                for _ in range(num_modules_used(model, spec.num_steps))
            ),
            hidden=jnp.zeros((batch, buffer_size, config.hidden_size), dtype),
            hidden_start=jnp.zeros(batch, jnp.int32),
        )

    def select_states(self, output: TrunkOutput, *, model: MTPModel) -> jax.Array:
        """Picks the hidden states `[B, T, D]` that enter the modules."""
        return model.mtp_input_hidden(output)

    def extend(
        self,
        prepared: PreparedMTP,
        state: DecodeState,
        states: jax.Array,
        start: jax.Array,
        *,
        model: MTPModel,
        spec: DecodeSpec,
    ) -> MTPState:
        """Runs all modules over one prefill chunk; see `Drafter.extend`.

        Afterwards the caches hold the prompt except the last slots, whose shifted input token does not exist yet. The
        hidden states of those slots are kept, and round 1 processes them.
        """
        drafter_state, chunk = state.drafter, states.shape[1]
        num_used = state.length - start
        caches = extend_modules(prepared.params, state, states, start, num_used, model=model, spec=spec)
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
        return MTPState(caches, hidden, hidden_start)

    def num_extended(self, draft_state: MTPState) -> jax.Array:
        """Returns `[B]` slots that match a prefill in every module; the last module has the fewest."""
        return draft_state.caches[-1].length

    def propose(
        self, prepared: PreparedMTP, state: DecodeState, *, model: MTPModel, spec: DecodeSpec
    ) -> tuple[Draft, DecodeState]:
        """Extends the modules over the positions that the last round committed, then drafts a chain or a tree."""
        if not spec.num_steps:
            return super().propose(prepared, state, model=model, spec=spec)
        propose = draft_tree if spec.topk > 1 else draft_chain
        draft, caches, tokens = propose(prepared, state, model=model, spec=spec)
        # The extended slots are now final in each module, up to the newest slot whose shifted token is committed. A row
        # that is done was not extended: its experts did not run, and its pages may belong to another.
        caches = tuple(
            commit(cache, jnp.where(state.done, cache.length, jnp.maximum(state.length - 1 - index, 0)))
            for index, cache in enumerate(caches)
        )
        return draft, state.replace(tokens=tokens, drafter=state.drafter.replace(caches=caches))

    def commit(
        self, state: DecodeState, states: jax.Array, accepted: "Acceptance", *, model: MTPModel, spec: DecodeSpec
    ) -> MTPState:
        """Keeps the hidden states that the modules process next; see `Drafter.commit`.

        After a round with drafts these are the new ones and the M-1 before them, whose slots hold entries of drafted
        tokens. After a round of depth 0 the new one is appended to the backlog.
        """
        drafter_state = state.drafter
        E, num_modules = drafter_state.hidden.shape[1], len(drafter_state.caches)
        new_start = state.length - 1  # position of states[:, 0], the pending token
        # 1. One module: drafting has made all earlier slots final, so the new states replace the buffer.
        if spec.num_steps and num_modules == 1:
            hidden = jnp.pad(states, ((0, 0), (0, E - states.shape[1]), (0, 0)))
            return drafter_state.replace(hidden=hidden, hidden_start=new_start)
        # 2. Depth 0: the modules did not run, so the new state is appended to the backlog.
        if not spec.num_steps:
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

    def backlog_fits(
        self, state: DecodeState, depth: jax.Array | int, *, model: MTPModel, spec: DecodeSpec
    ) -> jax.Array:
        """Returns whether a round of this depth can follow; see `Drafter.backlog_fits`.

        A round of depth 0 needs a free slot in the buffer. A round with drafts must process the whole backlog in its
        one pass over depth + M positions.
        """
        drafter_state = state.drafter
        max_backlog = jnp.where(depth == 0, drafter_state.hidden.shape[1] - 1, depth + len(drafter_state.caches))
        return state.drafting_disabled | (over_rows(jnp.max, num_pending(state)) <= max_backlog)

    def drain_backlog(
        self, prepared: PreparedMTP, state: DecodeState, depth: jax.Array, *, model: MTPModel, spec: DecodeSpec
    ) -> DecodeState:
        """Extends the modules over the backlog; see `Drafter.drain_backlog`.

        Wide passes process a long backlog, and passes of a round's width the rest.
        """
        num_modules = len(state.drafter.caches)
        for num_positions, min_backlog in (
            (EXTEND_CHUNK, EXTEND_CHUNK + num_modules),
            (spec.num_steps + num_modules, 0),
        ):
            state = jax.lax.while_loop(
                lambda state, min_backlog=min_backlog: (
                    ~self.backlog_fits(state, depth, model=model, spec=spec)
                    & (over_rows(jnp.max, num_pending(state)) >= min_backlog)
                ),
                lambda state, num_positions=num_positions: extend_backlog(
                    prepared, state, model=model, spec=spec, num_positions=num_positions
                ),
                state,
            )
        return state


def check_tree(model: MTPModel, config: DecodeConfig) -> None:
    """Checks that the model's modules can draft the tree that `config` asks for.

    Args:
        model: the model.
        config: settings with topk above 1.

    Raises:
        ValueError: if they cannot.
    """
    num_modules, num_draftable = model.config.num_mtp_modules, model.config.num_tokens or model.config.vocab_size
    if num_modules > 1:
        raise ValueError(
            f"topk {config.topk} drafts trees, which need exactly one MTP module; the model has {num_modules}"
        )
    if "linear_attention" in model.config.layer_types:
        raise ValueError(f"linear attention supports only chains: set topk to 1, got {config.topk}")
    if config.draft_vocabulary is not None:
        num_draftable = len(draftable_ids(config.draft_vocabulary, model))
    if config.topk > num_draftable:
        raise ValueError(f"topk {config.topk} exceeds the {num_draftable} tokens that can be drafted")


def draftable_ids(ids: tuple[int, ...], model: MTPModel) -> np.ndarray:
    """Sorts a reduced vocabulary and drops ids that only pad the embedding table.

    Args:
        ids: token ids.
        model: the model.

    Returns:
        `[R]` int32, ascending.

    Raises:
        ValueError: if no id remains, or one is outside the vocabulary.
    """
    unique = np.unique(np.asarray(ids, np.int32))
    num_tokens = model.config.num_tokens or model.config.vocab_size
    if not unique.size or unique[0] < 0 or unique[-1] >= model.config.vocab_size:
        raise ValueError(f"draft_vocabulary is empty or has ids outside 0..{model.config.vocab_size - 1}")
    if num_tokens <= unique[0]:
        raise ValueError(f"draft_vocabulary has no usable token: ids from {num_tokens} on only pad the embedding table")
    return unique[unique < num_tokens]
