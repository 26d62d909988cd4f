"""The drafter interface: the methods of a draft method, and the draft that it passes to verification."""

import dataclasses
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.state import DecodeState
from mtpjax.models.model import MTPModel, TrunkOutput
from mtpjax.models.view import read_rows

if TYPE_CHECKING:
    from mtpjax.decoding.decoder import Decoder, Weights
    from mtpjax.decoding.state import Acceptance


class Draft(flax.struct.PyTreeNode):
    """The W nodes per row that one round verifies. Node 0 is the pending token.

    In a chain, node n is the child of node n-1, and `parents`, `depths` and `ancestor_mask` are None. Text stays exact
    only if no row's `num_drafted` depends on the token drawn at its end or on later ones. On a mesh
    `probabilities` may have the columns of this device's shard of the vocabulary, or all of them.
    """

    tokens: jax.Array  # [B, W] int32
    probabilities: jax.Array | None = None  # [B, W, V] (chain: [B, W-1, V]), q of each node's children
    parents: jax.Array | None = None  # [B, W] int32, parents before children, -1 for the root
    depths: jax.Array | None = None  # [B, W] int32
    ancestor_mask: jax.Array | None = None  # [B, W, W] bool, (n, m): m is n or an ancestor of n
    num_drafted: jax.Array | None = None  # [B] int32 drafts of each chain, the rest is padding; None: all


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A draft method. This base class drafts nothing, which makes every round a plain decoding step.

    A drafter is a frozen dataclass: hashable, and static under `jax.jit`. Arrays live in its parameters (a tree of its
    own) and in its state, whose leaves all have the batch as their first axis. A round calls `propose`, then
    `select_states` on the verification pass, then `commit`. Prefill calls `select_states` and `extend` once per chunk.
    An adaptive call keeps its depth while `backlog_fits` holds, and calls `drain_backlog` before it continues at any
    depth.

    Methods get the `Decoder` of the round, with model and spec (`spec.num_steps` is the depth of this round), the
    `Weights`, whose `drafter` is what `prepare` returned, and the rows' `DecodeState`, whose `tokens` after `length`
    are scratch space. They run inside a trace, except `check`, `default_params`, `num_scratch_slots` and `max_shift`.

    Text stays exact with any drafter if `Draft.probabilities` are those that the tokens were actually drawn from: the
    drafter's distribution for sampled tokens, one-hot for all others.

    Attributes:
        layer_ids: trunk layers whose input states the drafter reads (`TrunkOutput.states`).
    """

    layer_ids: tuple[int, ...] = ()

    # Before the loop.

    def check(self, model: MTPModel, config: DecodeConfig) -> None:
        """Raises `ValueError` if the drafter does not support a model or settings; not called for plain decoding."""

    def default_params(self, params: dict, config: DecodeConfig, *, model: MTPModel) -> Any:
        """Returns the drafter's parameters for calls without `draft_params`: arguments of the compiled call."""
        return None

    def prepare(self, params: dict, draft_params: Any, *, model: MTPModel) -> Any:
        """Computes the arrays that every round reads from the parameters of model and drafter, once per call."""
        return draft_params

    def num_scratch_slots(self, decoder: "Decoder") -> int:
        """Returns the maximum number of cache slots that drafting writes after the committed text."""
        return 0

    def max_shift(self, model: MTPModel) -> int:
        """Returns the maximum distance from a cache entry's position to a token that it depends on."""
        return 0

    def init(self, decoder: "Decoder", batch: int, capacity: int, dtype: Any) -> Any:
        """Makes the drafter's state for free slots.

        Args:
            batch: slots, B.
            capacity: cache slots per row, L.
            dtype: dtype of the activations, and of the caches unless `spec.kv_cache_dtype` names another.

        Returns:
            A tree of arrays `[B, ...]`.
        """
        return ()

    # Prefill, once per chunk. `select_states` also runs on every verification pass.

    def select_states(self, decoder: "Decoder", output: TrunkOutput) -> Any:
        """Picks the trunk states to keep from a pass: a tree of arrays `[B, T, ...]`."""
        return ()

    def extend(self, decoder: "Decoder", weights: "Weights", state: DecodeState, states: Any, start: jax.Array) -> Any:
        """Processes one prefill chunk, so that the drafter's cache covers the prompt.

        Args:
            state: the rows; `tokens` and `length` are the prompts.
            states: from `select_states`, `[B, T, ...]` for the chunk's T tokens.
            start: `[B]` position of the chunk's first token.

        Returns:
            The drafter's new state.
        """
        return state.drafter

    def num_extended(self, draft_state: Any) -> jax.Array | None:
        """Returns the `[B]` number of positions with final entries, from which a row can continue; None: no limit."""
        return None

    # Every round: draft before verification, commit after acceptance.

    def propose(self, decoder: "Decoder", weights: "Weights", state: DecodeState) -> tuple[Draft, DecodeState]:
        """Drafts `spec.num_steps` levels: `spec.num_nodes` nodes. Returns a state with a new `drafter` field too."""
        return Draft(read_rows(state.tokens, state.length - 1, 1)), state

    def commit(self, decoder: "Decoder", state: DecodeState, states: Any, accepted: "Acceptance") -> Any:
        """Keeps the trunk states of a verification pass that the next round needs.

        Args:
            state: the rows before the accepted tokens are appended.
            states: from `select_states`, `[B, K+1, ...]` along the accepted path, which starts with the pending token.
            accepted: the acceptance rule's decision.

        Returns:
            The drafter's new state.
        """
        return state.drafter

    # Rounds of changing depth (`depth_policy="adaptive"`). The decoder is that of the deepest round.

    def backlog_fits(self, decoder: "Decoder", state: DecodeState, depth: jax.Array | int) -> jax.Array:
        """Returns whether a round of this depth can follow, `[]` bool. If False, the loop calls `drain_backlog`."""
        return jnp.ones((), bool)

    def drain_backlog(
        self, decoder: "Decoder", weights: "Weights", state: DecodeState, depth: jax.Array
    ) -> DecodeState:
        """Processes the backlog of rounds of depth 0 until `backlog_fits` holds."""
        return state
