"""The EAGLE-3 drafter (2503.01840): a small separate network that reads states of three trunk layers."""

import dataclasses
from typing import Any, ClassVar

import flax.struct
import jax

from mtpjax.decoding.decoder import Decoder, Weights
from mtpjax.decoding.sampling import PathTokens
from mtpjax.decoding.state import DecodeState
from mtpjax.drafters.cached import CachedDrafter
from mtpjax.drafters.eagle3.network import Eagle3, Eagle3Config, eagle3_levels
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
from mtpjax.models.cache import Cache, empty_cache
from mtpjax.models.config import ModelConfig
from mtpjax.models.model import MTPModel, TrunkOutput, bind
from mtpjax.models.params import DRAFTER
from mtpjax.models.view import Entries, View


class PreparedEagle3(flax.struct.PyTreeNode):
    """The drafter's parameters that a round reads."""

    network: dict[str, Any]
    head: ReducedHead | None  # None: the trunk's


@dataclasses.dataclass(frozen=True)
class Eagle3Network:
    """The drafter's network as a `DraftNetwork` of one module.

    Attributes:
        decoder: the decoder, with the trunk.
        weights: parameters of the trunk and of the network.
        architecture: the network's architecture.
    """

    decoder: Decoder
    weights: Weights
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
            embedding = bind(self.decoder.model, self.weights.params)(tokens, method="embed")
        return self._apply(hidden, embedding, view, layers, method="run")

    def scores(
        self, state: DecodeState, output: jax.Array, index: int, path: PathTokens | None, level: int
    ) -> DraftScores:
        """Scores tokens by the drafter's head, or the trunk's; see `DraftNetwork.scores`."""
        head = self.weights.drafter.head
        return DraftScores(self.decoder, self.weights.params, state, head, output, index, path, level)

    def _apply(self, *arguments: Any, method: str) -> Any:
        network = Eagle3(self.architecture, self.decoder.model.implementation)
        return network.apply({"params": self.weights.drafter.network}, *arguments, method=method)


@dataclasses.dataclass(frozen=True)
class Eagle3Drafter(TrainedDrafter, CachedDrafter):
    """Drafts chains and trees with an EAGLE-3 network; `mtpjax.load_drafter` reads one with its parameters.

    Attributes:
        architecture: the network, and the trunk states that it reads.
    """

    architecture: Eagle3Config = dataclasses.field(kw_only=True)
    title: ClassVar[str] = "EAGLE-3"

    def prepare(self, params: dict, draft_params: DraftParams, *, model: MTPModel) -> PreparedEagle3:
        """Casts the output matrix, if the drafter has its own, and indexes the draft vocabulary."""
        require_whole_trunk()
        head = None
        if self.architecture.own_head:
            head = own_head(params, (draft_params.network["head"],), draft_params.draft_ids, model=model)
        return PreparedEagle3(draft_params.network, head)

    def max_shift(self, model: MTPModel) -> int:
        """Returns 1: row i reads the token of position i+1."""
        return 1

    def network(self, decoder: Decoder, weights: Weights) -> Eagle3Network:
        """Returns the network with its parameters."""
        return Eagle3Network(decoder, weights, self.architecture)

    def num_caches(self, model: MTPModel, num_steps: int) -> int:
        """Returns 1: later levels run the same network on its own output."""
        return 1

    def empty_module_cache(self, decoder: Decoder, batch: int, capacity: int, dtype: Any) -> Cache:
        """Makes the cache of the drafter's layers."""
        own, spec = self.architecture, decoder.spec
        return empty_cache(own.block, own.kinds, batch, capacity, dtype, spec.kv_cache_dtype, spec.pool)

    def state_size(self, model: MTPModel) -> int:
        """Returns the width of the trunk states side by side."""
        return self.architecture.features_size

    def select_states(self, decoder: Decoder, output: TrunkOutput) -> jax.Array:
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
