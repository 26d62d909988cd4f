"""The drafter protocol: the methods of a draft method, and the draft that it hands to verification."""

import dataclasses
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState
from mtpjax.models.layers.entries import read_rows
from mtpjax.models.model import MTPModel, TrunkOutput

if TYPE_CHECKING:
    from mtpjax.decoding.verify import Acceptance


class Draft(flax.struct.PyTreeNode):
    """The W nodes per row that one round verifies. Node 0 is the pending token.

    In a chain, node n is the child of node n-1, and `parents`, `depths` and `ancestor_mask` are None. Text stays exact
    only if no row's `num_drafted` depends on the token drawn at its end or on later ones. On a mesh
    `probabilities` may have the columns of this device's part of the vocabulary, or all of them.
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
    An adaptive call keeps its depth while `backlog_fits` holds, and calls `drain_backlog` before it continues at the
    same or another depth.

    Text stays exact with any drafter, as long as `Draft.probabilities` are the ones the tokens were really drawn from:
    the drafter's distribution for sampled tokens, one-hot for tokens that were chosen in any other way.

    Attributes:
        layer_ids: trunk layers whose input states the drafter reads (`TrunkOutput.states`).
    """

    layer_ids: tuple[int, ...] = ()

    # Before the loop. `check` and `default_params` run on the host; `prepare` and `init` are traced once.

    def check(self, model: MTPModel, config: DecodeConfig) -> None:
        """Checks that the drafter supports a model and settings; not called for plain decoding.

        Args:
            model: trunk and modules.
            config: the settings of the call.

        Raises:
            ValueError: if it does not.
        """

    def default_params(self, params: dict, config: DecodeConfig, *, model: MTPModel) -> Any:
        """Returns the drafter's parameters for calls without `draft_params`.

        Args:
            params: the model's parameters.
            config: the settings of the call.
            model: trunk and modules.

        Returns:
            A tree of arrays, which the compiled call gets as an argument.
        """
        return None

    def prepare(self, params: dict, draft_params: Any, *, model: MTPModel, dtype: Any) -> Any:
        """Computes from the parameters what every round reads, so that rounds do not repeat the work.

        Args:
            params: the model's parameters.
            draft_params: the drafter's own parameters.
            model: trunk and modules.
            dtype: dtype of the activations.

        Returns:
            A tree of arrays, which the other methods get as `prepared`.
        """
        return draft_params

    def num_scratch_slots(self, model: MTPModel, spec: DecodeSpec) -> int:
        """Returns the most cache slots that a round writes behind the committed text."""
        return 0

    def max_shift(self, model: MTPModel) -> int:
        """Returns how far ahead of its own position a cache entry of the drafter reads a token, at most."""
        return 0

    def init(self, *, model: MTPModel, spec: DecodeSpec, batch: int, capacity: int, dtype: Any) -> Any:
        """Makes the drafter's state for free slots.

        Args:
            model: trunk and modules.
            spec: the shape of a round.
            batch: slots, B.
            capacity: cache slots per row, S.
            dtype: dtype of the activations, and of the caches unless `spec.kv_cache_dtype` names another.

        Returns:
            A tree of arrays `[B, ...]`.
        """
        return ()

    # Prefill, once per chunk. `select_states` also runs on every verification pass.

    def select_states(self, output: TrunkOutput, *, model: MTPModel) -> Any:
        """Picks the trunk states to keep from a pass: a tree of arrays `[B, T, ...]`."""
        return ()

    def extend(
        self, prepared: Any, state: DecodeState, states: Any, start: jax.Array, *, model: MTPModel, spec: DecodeSpec
    ) -> Any:
        """Processes one prefill chunk, so that the drafter's cache covers the prompt.

        Args:
            prepared: from `prepare`.
            state: the rows; `tokens` and `length` are the prompts.
            states: from `select_states`, `[B, T, ...]` for the chunk's T tokens.
            start: `[B]` position of the chunk's first token.
            model: trunk and modules.
            spec: the shape of a round.

        Returns:
            The drafter's new state.
        """
        return state.drafter

    def num_extended(self, draft_state: Any) -> jax.Array | None:
        """Returns the `[B]` number of positions with final entries, from which a row can continue; None: no limit."""
        return None

    # Every round: draft before verification, commit after acceptance.

    def propose(
        self, prepared: Any, state: DecodeState, *, model: MTPModel, spec: DecodeSpec
    ) -> tuple[Draft, DecodeState]:
        """Drafts `spec.num_steps` levels.

        Args:
            prepared: from `prepare`.
            state: the rows. `tokens` past `length` is scratch space.
            model: trunk and modules.
            spec: the shape of a round.

        Returns:
            The draft of `spec.num_nodes` nodes, and the state with a new `drafter` field.
        """
        return Draft(read_rows(state.tokens, state.length - 1, 1)), state

    def commit(
        self, state: DecodeState, states: Any, accepted: "Acceptance", *, model: MTPModel, spec: DecodeSpec
    ) -> Any:
        """Keeps the trunk states of a verification pass that the next round needs.

        Args:
            state: the rows before the accepted tokens are appended.
            states: from `select_states`, `[B, K+1, ...]` along the accepted path, which starts with the pending token.
            accepted: the acceptance rule's decision.
            model: trunk and modules.
            spec: the shape of the round.

        Returns:
            The drafter's new state.
        """
        return state.drafter

    # Rounds of changing depth (`depth_policy="adaptive"`).

    def backlog_fits(
        self, state: DecodeState, depth: jax.Array | int, *, model: MTPModel, spec: DecodeSpec
    ) -> jax.Array:
        """Returns whether a round of this depth can follow, `[]` bool. False makes the loop call `drain_backlog`."""
        return jnp.ones((), bool)

    def drain_backlog(
        self, prepared: Any, state: DecodeState, depth: jax.Array, *, model: MTPModel, spec: DecodeSpec
    ) -> DecodeState:
        """Processes the backlog of rounds of depth 0 until `backlog_fits` holds; arguments as in `propose`."""
        return state
