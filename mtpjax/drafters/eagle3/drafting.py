"""The EAGLE-3 drafter (2503.01840): a small separate network that reads states of three trunk layers."""

import dataclasses
from typing import Any, ClassVar

import flax.struct
import jax

from mtpjax.decoding.sampling import PathTokens
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState
from mtpjax.drafters.cached import CachedDrafter
from mtpjax.drafters.eagle3.forward import eagle3_levels
from mtpjax.drafters.eagle3.network import Eagle3, Eagle3Config
from mtpjax.drafters.scoring import DraftScores, ReducedHead, own_head
from mtpjax.drafters.trained import (
    DraftLevels,
    DraftParams,
    TextRows,
    TrainedDrafter,
    embedding_table,
    require_whole_trunk,
)
from mtpjax.drafters.trunk_states import join_states
from mtpjax.models.cache import Cache, empty_cache
from mtpjax.models.config import ModelConfig
from mtpjax.models.masks import Entries, View
from mtpjax.models.model import MTPModel, TrunkOutput, bind
from mtpjax.models.params import DRAFTER


class PreparedEagle3(flax.struct.PyTreeNode):
    """The parameters that a round reads."""

    trunk: dict[str, Any]  # for the embedding, and for the head if the drafter has none
    network: dict[str, Any]
    head: ReducedHead | None


@dataclasses.dataclass(frozen=True)
class Eagle3Network:
    """The drafter's network as a `DraftNetwork` of one module.

    Attributes:
        prepared: its parameters.
        model: the trunk.
        architecture: its architecture.
    """

    prepared: PreparedEagle3
    model: MTPModel
    architecture: Eagle3Config

    @property
    def config(self) -> ModelConfig:
        """Sizes and rotary embedding of the drafter's own layers."""
        return self.architecture.block

    def input_hidden(self, states: jax.Array) -> jax.Array:
        """Projects the trunk's states to the drafter's width."""
        return self._apply(states, method="fuse")

    def run(
        self, index: int, hidden: jax.Array, tokens: jax.Array, view: View, layers: tuple[Entries, ...]
    ) -> tuple[jax.Array, jax.Array, tuple[Entries, ...]]:
        """Runs the drafter's layers; see `DraftNetwork.run`."""
        if self.architecture.own_embedding:
            embedding = self._apply(tokens, method="embed").astype(hidden.dtype)
        else:
            embedding = bind(self.model, self.prepared.trunk)(tokens, method="embed")
        return self._apply(hidden, embedding, view, layers, method="run")

    def scores(
        self,
        state: DecodeState,
        output: jax.Array,
        index: int,
        path: PathTokens | None,
        level: int,
        *,
        spec: DecodeSpec,
    ) -> DraftScores:
        """Scores tokens by the drafter's head, or the trunk's; see `DraftNetwork.scores`."""
        apply = bind(self.model, self.prepared.trunk)
        return DraftScores(apply, state, self.prepared.head, self.model, spec.min_rows, output, index, path, level)

    def _apply(self, *arguments: Any, method: str) -> Any:
        network = Eagle3(self.architecture, self.model.implementation)
        return network.apply({"params": self.prepared.network}, *arguments, method=method)


@dataclasses.dataclass(frozen=True)
class Eagle3Drafter(TrainedDrafter, CachedDrafter):
    """Drafts chains and trees with an EAGLE-3 network; `mtpjax.load_drafter` reads one with its parameters.

    Attributes:
        architecture: the network, and the trunk states that it reads.
    """

    architecture: Eagle3Config = dataclasses.field(kw_only=True)
    title: ClassVar[str] = "EAGLE-3"

    def prepare(self, params: dict, draft_params: DraftParams, *, model: MTPModel, dtype: Any) -> PreparedEagle3:
        """Joins the drafter's parameters with those that it shares with the trunk."""
        require_whole_trunk()
        head = None
        if self.architecture.own_head:
            head = own_head((draft_params.network["head"],), draft_params.draft_ids, model=model, dtype=dtype)
        return PreparedEagle3(params, draft_params.network, head)

    def max_shift(self, model: MTPModel) -> int:
        """Returns 1: row i reads the token of position i+1."""
        return 1

    def network(self, prepared: PreparedEagle3, *, model: MTPModel) -> Eagle3Network:
        """Returns the network with its parameters."""
        return Eagle3Network(prepared, model, self.architecture)

    def num_caches(self, model: MTPModel, num_steps: int) -> int:
        """Returns 1: later levels run the same network on its own output."""
        return 1

    def empty_module_cache(self, *, model: MTPModel, spec: DecodeSpec, batch: int, capacity: int, dtype: Any) -> Cache:
        """Makes the cache of the drafter's layers."""
        own = self.architecture
        return empty_cache(own.block, own.kinds, batch, capacity, dtype, spec.kv_cache_dtype, spec.pool)

    def state_size(self, model: MTPModel) -> int:
        """Returns the width of the trunk states side by side."""
        return self.architecture.features_size

    def select_states(self, output: TrunkOutput, *, model: MTPModel) -> jax.Array:
        """Joins the trunk states that the drafter reads, `[B, T, n * Dt]`."""
        return join_states(output, self.architecture.layer_ids, self.architecture.num_target_layers)

    def levels(
        self, params: dict, rows: TextRows, heads: tuple[jax.Array, ...], *, model: MTPModel, num_levels: int
    ) -> DraftLevels:
        """Runs the levels, each of which reads the output of the level before (`ttt`)."""
        return eagle3_levels(
            params[DRAFTER] | {"head": heads[0]},
            rows.features,
            rows.tokens,
            embedding_table(params, self.architecture, model),
            config=self.architecture,
            num_levels=num_levels,
            segment_ids=rows.segment_ids,
            implementation=model.implementation,
        )
