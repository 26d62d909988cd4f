"""The EAGLE-3 drafter (2503.01840), a small network that reads the states of three trunk layers."""

import dataclasses
from typing import Any, ClassVar

import jax

from mtpjax.decoding.decoder import Decoder, Weights
from mtpjax.decoding.sampling import PathTokens
from mtpjax.decoding.state import DecodeState
from mtpjax.drafters.cached import CachedDrafter, ModuleSizes
from mtpjax.drafters.eagle3.network import Eagle3, Eagle3Config, eagle3_levels
from mtpjax.drafters.scoring import DraftScores
from mtpjax.drafters.trained import DraftLevels, TextRows, TrainedDrafter, embed, embedding_table
from mtpjax.models.config import ModelConfig
from mtpjax.models.flops import RowCounts, attention_flops, matrices, product_flops
from mtpjax.models.model import MTPModel
from mtpjax.models.params import DRAFTER
from mtpjax.models.view import Entries, View


@dataclasses.dataclass(frozen=True)
class Eagle3Network:
    """The drafter's network as a `DraftNetwork` with one module."""

    decoder: Decoder
    weights: Weights
    architecture: Eagle3Config

    @property
    def config(self) -> ModelConfig:
        """Sizes and rotary embedding of the drafter's layers."""
        return self.architecture.block

    def input_hidden(self, states: jax.Array) -> jax.Array:
        """Projects the trunk's states to the drafter's width."""
        return self._apply(states, method="fuse")

    def run(
        self, index: int, hidden: jax.Array, tokens: jax.Array, view: View, layers: tuple[Entries, ...]
    ) -> tuple[jax.Array, jax.Array, tuple[Entries, ...]]:
        """Runs the drafter's layers; see `DraftNetwork.run`."""
        embedding = embed(self.architecture, self.decoder, self.weights, tokens, hidden.dtype)
        return self._apply(hidden, embedding, view, layers, method="run")

    def scores(
        self, state: DecodeState, output: jax.Array, index: int, path: PathTokens | None, level: int
    ) -> DraftScores:
        """Scores tokens with the drafter's head or the trunk's; see `DraftNetwork.scores`."""
        head = self.weights.drafter.head
        return DraftScores(self.decoder, self.weights.params, state, head, output, index, path, level)

    def _apply(self, *arguments: Any, method: str) -> Any:
        network = Eagle3(self.architecture, self.decoder.model.implementation)
        return network.apply({"params": self.weights.drafter.network}, *arguments, method=method)


@dataclasses.dataclass(frozen=True)
class Eagle3Drafter(TrainedDrafter, CachedDrafter):
    """Drafts chains and trees with an EAGLE-3 network, which `mtpjax.load_drafter` loads with its parameters.

    Attributes:
        architecture: the network, and the trunk states that it reads.
    """

    architecture: Eagle3Config = dataclasses.field(kw_only=True)
    title: ClassVar[str] = "EAGLE-3"

    def network(self, decoder: Decoder, weights: Weights) -> Eagle3Network:
        """Returns the network with its parameters."""
        return Eagle3Network(decoder, weights, self.architecture)

    def sizes(self, model: MTPModel) -> ModuleSizes:
        """Returns the sizes of one module. Later levels run the network on its own output."""
        own = self.architecture
        return ModuleSizes(1, own.block, own.kinds, own.features_size)

    def network_flops(
        self, network: dict[str, Any], rows: RowCounts, num_levels: int, num_anchors: int
    ) -> tuple[float, float]:
        """Counts the projection of the trunk's states once, and the layers at every level."""
        own = self.architecture
        layers = {name: leaf for name, leaf in network.items() if name.startswith("layer")}
        once = product_flops(own.block, [("fc", network["fc"].shape)])
        each = product_flops(own.block, matrices(layers))
        attention = num_levels * attention_flops(own.block, own.kinds, rows)
        return rows.tokens * (once + num_levels * each), attention

    def levels(
        self, params: dict, rows: TextRows, heads: tuple[jax.Array, ...], *, model: MTPModel, num_levels: int
    ) -> DraftLevels:
        """Runs the levels. Each level after the first reads the previous level's output (training-time test)."""
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
