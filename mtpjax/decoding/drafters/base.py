"""The drafter protocol: what a draft method must provide, and the draft that it hands to verification."""

import dataclasses
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState
from mtpjax.models.cache import read_rows
from mtpjax.models.model import MTPModel, TrunkOutput

if TYPE_CHECKING:
    from mtpjax.decoding.verify import Acceptance


class Draft(flax.struct.PyTreeNode):
    """The W nodes per row that one round verifies. Node 0 is the pending token.

    In a chain, node n is the child of node n-1, and `parents`, `depths` and `ancestor_mask` are None.
    """

    tokens: jax.Array  # [B, W] int32
    probabilities: jax.Array | None = None  # [B, W, V] (chain: [B, W-1, V]) the q that each node's children came from
    parents: jax.Array | None = None  # [B, W] int32, parents before children, -1 for the root
    depths: jax.Array | None = None  # [B, W] int32
    ancestor_mask: jax.Array | None = None  # [B, W, W] bool, (n, m): m is n or an ancestor of n


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A draft method. This base class drafts nothing, which makes every round a plain decoding step.

    A drafter is a frozen dataclass: hashable, and static under `jax.jit`. Arrays live in its parameters (a tree of its
    own) and in its state, whose leaves all have the batch as their first axis. A round calls `propose`, then
    `select` on the verification pass, then `commit`. Prefill calls `select` and `extend` once per chunk.

    Text stays exact with any drafter, as long as `Draft.probabilities` are the ones the tokens were really drawn from:
    the drafter's distribution for sampled tokens, one-hot for tokens that were chosen in any other way.

    Attributes:
        layer_ids: trunk layers whose input states the drafter reads (`TrunkOutput.states`).
    """

    layer_ids: tuple[int, ...] = ()

    def check(self, model: MTPModel, config: DecodeConfig) -> None:
        """Raises `ValueError` if the drafter cannot serve this model or these settings."""

    def own_params(self, params: dict, config: DecodeConfig, *, model: MTPModel) -> Any:
        """Returns the drafter's parameters when the caller passes no `draft_params`; called once, on the host."""
        return None

    def prepare(self, params: dict, draft_params: Any, *, model: MTPModel, dtype: Any) -> Any:
        """Computes what every round reads from the parameters; traced once, before the loop."""
        return draft_params

    def scratch_slots(self, model: MTPModel, spec: DecodeSpec) -> int:
        """Returns the most cache slots that a round writes behind the committed text."""
        return 0

    def init(self, *, model: MTPModel, spec: DecodeSpec, batch: int, capacity: int, dtype: Any) -> Any:
        """Makes the drafter's state for B free slots."""
        return ()

    def select(self, output: TrunkOutput, *, model: MTPModel) -> Any:
        """Picks the trunk states to keep from a pass: a tree of arrays `[B, T, ...]`."""
        return ()

    def extend(
        self, prepared: Any, state: DecodeState, states: Any, start: jax.Array, *, model: MTPModel, spec: DecodeSpec
    ) -> Any:
        """Processes one prefill chunk.

        Args:
            prepared: from `prepare`.
            state: the rows; `tokens` and `length` are the prompts.
            states: from `select`, `[B, T, ...]` for the chunk's T tokens.
            start: `[B]` position of the chunk's first token.
            model: trunk and modules.
            spec: the shape of a round.

        Returns:
            The drafter's new state.
        """
        return state.drafter

    def num_extended(self, draft_state: Any) -> jax.Array | None:
        """Returns `[B]` positions whose entries are final, to continue a row from; None if any position will do."""
        return None

    def propose(
        self, prepared: Any, state: DecodeState, *, model: MTPModel, spec: DecodeSpec
    ) -> tuple[Draft, DecodeState]:
        """Drafts `spec.num_steps` levels.

        Args:
            prepared: from `prepare`.
            state: the rows. `tokens` behind `length` is scratch space.
            model: trunk and modules.
            spec: the shape of a round.

        Returns:
            The draft of `spec.num_nodes` nodes, and the state with a new `drafter` field.
        """
        return Draft(read_rows(state.tokens, state.length - 1, 1)), state

    def commit(
        self, state: DecodeState, states: Any, accepted: "Acceptance", *, model: MTPModel, spec: DecodeSpec
    ) -> Any:
        """Keeps what the next round needs of a verification pass.

        Args:
            state: the rows before the accepted tokens are appended.
            states: from `select`, `[B, K+1, ...]` along the accepted path, which starts with the pending token.
            accepted: what the acceptance rule decided.
            model: trunk and modules.
            spec: the shape of the round.

        Returns:
            The drafter's new state.
        """
        return state.drafter

    def has_room(self, state: DecodeState, depth: jax.Array | int, *, model: MTPModel, spec: DecodeSpec) -> jax.Array:
        """Returns whether a round of this depth can follow, `[]` bool. False makes the loop call `make_room`."""
        return jnp.ones((), bool)

    def make_room(
        self, prepared: Any, state: DecodeState, depth: jax.Array, *, model: MTPModel, spec: DecodeSpec
    ) -> DecodeState:
        """Processes positions that wait since rounds of depth 0, until `has_room` holds."""
        return state
