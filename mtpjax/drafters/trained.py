"""Drafters with their own network, which is read from files or trained on the frozen trunk.

A parameter tree for trunk and drafter contains the network under `DRAFTER`. If the drafter cannot draft all tokens, the
tree also contains the token id of each head column under `DRAFT_IDS`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Decoder, Drafter, Weights
from mtpjax.decoding.limits import DraftLimits
from mtpjax.drafters.scoring import PreparedDrafter, own_head
from mtpjax.models.flops import RowCounts
from mtpjax.models.model import MTPModel, TrunkOutput, bind
from mtpjax.models.parallel import num_shards
from mtpjax.models.params import DRAFT_IDS, DRAFTER


class DraftParams(flax.struct.PyTreeNode):
    """Parameters of a drafter with its own network."""

    network: dict[str, Any]
    draft_ids: jax.Array | None = None  # [R] int32 token id of each head column; None if column j is token j

    @classmethod
    def of(cls, params: dict) -> "DraftParams":
        """Extracts the drafter's parameters from a tree for trunk and drafter."""
        return cls(params[DRAFTER], params.get(DRAFT_IDS))

    def beside_trunk(self) -> dict[str, Any]:
        """Returns the parameters under their names in a tree for trunk and drafter."""
        return {DRAFTER: dict(self.network)} | ({} if self.draft_ids is None else {DRAFT_IDS: self.draft_ids})


class TextRows(flax.struct.PyTreeNode):
    """Rows of true tokens and the trunk's states, as input to a teacher-forced pass."""

    states: jax.Array  # [B, T, (n + 1) * D] input states of the n layers that the drafter reads, and the final states
    hidden: jax.Array  # [B, T, D] the final states after the final norm
    tokens: jax.Array  # [B, T] int32
    segment_ids: jax.Array  # [B, T] int32 document ids; 0 is padding
    anchors: jax.Array | None = None  # [B, A] int32 positions of the block anchors; None means every position

    @property
    def features(self) -> jax.Array:
        """The concatenated states of the n layers, `[B, T, n * D]`."""
        return self.states[..., : -self.hidden.shape[-1]]


class DraftLevels(flax.struct.PyTreeNode):
    """Outputs of K levels. With anchors, the arrays are `[B, A, ...]`, and level k predicts token a+k of anchor a."""

    logits: tuple[jax.Array, ...]  # [B, T, R] float32 each; row i of level k predicts token i+k+1
    head_input: tuple[jax.Array, ...]  # [B, T, D] each: the inputs of the heads
    confidence: jax.Array | None = None  # [K, B, T] float32 logits of the acceptance probability


@dataclasses.dataclass(frozen=True)
class TrainedDrafter(Drafter):
    """A drafter with its own network. A subclass implements drafting, and the same levels in a teacher-forced pass.

    Attributes:
        architecture: a `DraftArchitecture`, which describes the network and the trunk states that it reads.
        title: the method's name in messages.
        draws_anchors: whether training runs the levels after random positions instead of every position.
    """

    architecture: Any = dataclasses.field(kw_only=True)
    title: ClassVar[str]
    draws_anchors: ClassVar[bool] = False
    limits: ClassVar[DraftLimits] = DraftLimits(
        draft_vocabulary="draft_vocabulary applies only to drafter 'mtp': the head of a drafter with its own network "
        "has its own draft vocabulary",
        sharded_trunk="drafters with their own parameters do not support a mesh that splits the trunk",
    )

    def __post_init__(self):
        # The last layer's output is not a layer input; `select_states` takes it from the pass itself.
        own = self.architecture
        object.__setattr__(self, "layer_ids", inner_layers(own.layer_ids, own.trunk.num_hidden_layers))

    @property
    def max_levels(self) -> int | None:
        """Maximum number of draft levels; None means no limit."""
        return None

    @property
    def has_confidence(self) -> bool:
        """True if the network predicts each draft's acceptance; training then also needs the overlap of p and q."""
        return False

    @property
    def ends_early(self) -> bool:
        """True if a draft may have fewer than `num_steps` tokens, which a teacher-forced pass cannot predict."""
        return False

    @property
    def head_names(self) -> tuple[str, ...]:
        """Names of the output matrices, one per level or one for all. The trunk's head replaces missing matrices."""
        return ("head",)

    def heads(self, network: dict[str, Any], trunk_head: jax.Array, num_levels: int) -> tuple[jax.Array, ...]:
        """Returns the levels' heads `[D, R]`, either one per level or a single shared head.

        Args:
            network: the drafter's parameters.
            trunk_head: `[D, V]`, for levels without their own head.
            num_levels: number of levels to run.
        """
        return tuple(network.get(name, trunk_head) for name in self.head_names[:num_levels])

    def prepare(self, params: dict, draft_params: DraftParams, *, model: MTPModel) -> Any:
        """Casts the drafter's own output matrices, and indexes the draft vocabulary."""
        require_whole_trunk()
        network, ids = draft_params.network, draft_params.draft_ids
        matrices = tuple(network[name] for name in self.head_names if name in network)
        return PreparedDrafter(network, own_head(params, matrices, ids, model=model) if matrices else None)

    def select_states(self, decoder: Decoder, output: TrunkOutput) -> Any:
        """Joins the trunk states that the network reads, `[B, T, n * D]`."""
        own = self.architecture
        return join_states(output, own.layer_ids, own.trunk.num_hidden_layers) if own.layer_ids else ()

    def levels(
        self, params: dict, rows: TextRows, heads: tuple[jax.Array, ...], *, model: MTPModel, num_levels: int
    ) -> DraftLevels:
        """Runs the draft levels in a teacher-forced pass, the reference for `propose`.

        Args:
            params: parameters of trunk and drafter.
            rows: the text.
            heads: from `heads`.
            model: the trunk.
            num_levels: number of levels to run, at most `max_levels`.

        Returns:
            The outputs of every level.
        """
        raise NotImplementedError

    def network_flops(
        self, network: dict[str, Any], rows: RowCounts, num_levels: int, num_anchors: int
    ) -> tuple[float, float] | None:
        """Counts the operations of the network without its heads in a teacher-forced pass, for training's utilisation.

        Args:
            network: the drafter's parameters, or their shapes.
            rows: the rows of the pass.
            num_levels: number of levels.
            num_anchors: number of anchors per row, if the drafter draws them.

        Returns:
            The operations in products with matrices and in attention (`mtpjax.models.flops`); None: not counted.
        """
        return None

    def check(self, model: MTPModel, config: DecodeConfig) -> None:
        """Raises `ValueError` if the drafter is for a different trunk or does not support the settings."""
        trunk, found = self.architecture.trunk, model.config
        if trunk[:2] != (found.vocab_size, found.hidden_size):
            raise ValueError(
                f"the {self.title} drafter is for a trunk of width {trunk.hidden_size} and vocabulary "
                f"{trunk.vocab_size}; this one has width {found.hidden_size} and vocabulary {found.vocab_size}"
            )
        if trunk.num_hidden_layers not in (0, found.num_hidden_layers):
            raise ValueError(
                f"the {self.title} drafter is for a trunk of depth {trunk.num_hidden_layers}; "
                f"this one has depth {found.num_hidden_layers}"
            )
        if self.max_levels is not None and config.num_steps > self.max_levels:
            raise ValueError(f"num_steps {config.num_steps} exceeds the {self.max_levels} {self.limits.levels}")
        if config.topk > self.architecture.draft_vocab_size:
            raise ValueError(
                f"topk {config.topk} exceeds the {self.architecture.draft_vocab_size} tokens that can be drafted"
            )

    def default_params(self, params: dict, config: DecodeConfig, *, model: MTPModel) -> Any:
        """Raises `ValueError`, because the drafter's parameters are not part of the model's parameters."""
        raise ValueError(f"{type(self).__name__} needs draft_params: pass the second result of mtpjax.load_drafter")


def embedding_table(params: dict, architecture: Any, model: MTPModel) -> jax.Array:
    """Returns the embedding `[V, D]` that a drafter's network reads, either the drafter's own or the trunk's."""
    table = params[DRAFTER]["embedding"] if architecture.own_embedding else params["embedding"]
    return table if model.dtype is None else table.astype(model.dtype)


def embed(architecture: Any, decoder: Decoder, weights: Weights, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Embeds tokens `[B, T]` in a round, with the drafter's embedding or the trunk's."""
    if architecture.own_embedding:
        return weights.drafter.network["embedding"][tokens].astype(dtype)
    return bind(decoder.model, weights.params)(tokens, method="embed")


def inner_layers(layer_ids: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Returns the ids below `num_layers`. The trunk must return the input states of these layers (`Drafter.layer_ids`).

    An architecture's ids `num_layers` and `num_layers + 1` mean the outputs of the last layer and the final norm.
    """
    return tuple(layer for layer in layer_ids if layer < num_layers)


def join_states(output: TrunkOutput, layer_ids: tuple[int, ...], num_layers: int) -> jax.Array:
    """Concatenates trunk states to `[B, T, n * D]`, in the order of `layer_ids`."""
    states = dict(zip(inner_layers(layer_ids, num_layers), output.states, strict=True))
    states |= {num_layers: output.prenorm, num_layers + 1: output.hidden}
    return jnp.concatenate([states[layer] for layer in layer_ids], axis=-1)


def require_whole_trunk(sizes: Mapping[str, int] | None = None) -> None:
    """Raises `ValueError` if a mesh axis splits the trunk's width or heads, which only MTP modules support.

    Args:
        sizes: sizes of the mesh axes by name; None means the mesh of the call that is being traced.
    """
    for axis in ("tensor", "expert"):
        count = num_shards(axis) if sizes is None else sizes.get(axis, 1)
        if count > 1:
            reason = TrainedDrafter.limits.sharded_trunk
            raise ValueError(f"{reason} (mesh axis {axis} has size {count}): split only the rows, over data")
