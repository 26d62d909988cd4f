"""Drafters with a separate network, which is read from files or trained on the frozen trunk.

In a tree of parameters that holds trunk and drafter, the network is at `DRAFTER`, and at `DRAFT_IDS` the token of each
column of its head, if it cannot draft all tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.struct
import jax

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Drafter
from mtpjax.drafters.trained import inner_layers
from mtpjax.models.model import MTPModel
from mtpjax.models.parallel import num_shards
from mtpjax.models.params import DRAFT_IDS, DRAFTER


class DraftParams(flax.struct.PyTreeNode):
    """Parameters of a drafter."""

    network: dict[str, Any]
    draft_ids: jax.Array | None = None  # [R] int32 token of each column of the head; None: column j is token j

    @classmethod
    def of(cls, params: dict) -> "DraftParams":
        """Extracts them from a tree that holds trunk and drafter."""
        return cls(params[DRAFTER], params.get(DRAFT_IDS))

    def beside_trunk(self) -> dict[str, Any]:
        """Returns them by their names in a tree that also holds the trunk."""
        return {DRAFTER: dict(self.network)} | ({} if self.draft_ids is None else {DRAFT_IDS: self.draft_ids})


class TextRows(flax.struct.PyTreeNode):
    """Rows of true tokens with the trunk's states, which the levels of a drafter read in one teacher-forced pass."""

    states: jax.Array  # [B, T, (n + 1) * D] input states of the n layers that the drafter reads, and the final states
    hidden: jax.Array  # [B, T, D] the final states after the final norm
    tokens: jax.Array  # [B, T] int32
    segment_ids: jax.Array  # [B, T] int32 documents; 0 is padding
    anchors: jax.Array | None = None  # [B, A] int32 columns of the anchors of blocks; None: after every row

    @property
    def features(self) -> jax.Array:
        """The states of the n layers side by side, `[B, T, n * D]`."""
        return self.states[..., : -self.hidden.shape[-1]]


class DraftLevels(flax.struct.PyTreeNode):
    """Outputs of K levels. With anchors, the arrays are `[B, A, ...]`, and level k predicts token a+k of anchor a."""

    logits: tuple[jax.Array, ...]  # [B, T, R] float32 each; row i of level k predicts token i+k+1
    head_input: tuple[jax.Array, ...]  # [B, T, D] each: what the heads multiply
    confidence: jax.Array | None = None  # [K, B, T] float32 logits of the chance of acceptance


@dataclasses.dataclass(frozen=True)
class TrainedDrafter(Drafter):
    """A drafter with its own network. A subclass implements drafting, and the same levels as a teacher-forced pass.

    Attributes:
        architecture: the network, and the trunk states that it reads: a `DraftArchitecture`.
        title: the method's name in messages.
        draws_anchors: whether training draws positions at which the levels start, instead of running them after every
            position.
    """

    architecture: Any = dataclasses.field(kw_only=True)
    title: ClassVar[str]
    draws_anchors: ClassVar[bool] = False

    def __post_init__(self):
        # The output of the last layer is no layer's input: `select_states` takes it from the pass itself.
        own = self.architecture
        object.__setattr__(self, "layer_ids", inner_layers(own.layer_ids, own.trunk.num_hidden_layers))

    @property
    def max_levels(self) -> int | None:
        """The draft levels that the network has; None: any number."""
        return None

    @property
    def has_confidence(self) -> bool:
        """True if the network predicts whether each draft is accepted; training then needs the overlap."""
        return False

    @property
    def ends_early(self) -> bool:
        """True if a draft may have fewer than `num_steps` tokens; a teacher-forced pass cannot predict that."""
        return False

    def heads(self, network: dict[str, Any], trunk_head: jax.Array, num_levels: int) -> tuple[jax.Array, ...]:
        """Returns the heads `[D, R]` of the levels.

        Args:
            network: the drafter's parameters.
            trunk_head: `[D, V]`, for levels without a head of their own.
            num_levels: levels to run.

        Returns:
            One head per level, or a single one that all levels share. By default that is "head", or the trunk's.
        """
        return (network.get("head", trunk_head),)

    def levels(
        self, params: dict, rows: TextRows, heads: tuple[jax.Array, ...], *, model: MTPModel, num_levels: int
    ) -> DraftLevels:
        """Runs the levels that decoding drafts over true tokens: the plain twin of `propose`.

        Args:
            params: parameters of trunk and drafter.
            rows: the text.
            heads: from `heads`.
            model: the trunk.
            num_levels: levels to run, at most `max_levels`.

        Returns:
            The outputs of every level.
        """
        raise NotImplementedError

    def check(self, model: MTPModel, config: DecodeConfig) -> None:
        """Raises `ValueError` if the drafter is for a different trunk or does not support the settings."""
        trunk, found = self.architecture.trunk, model.config
        if trunk[:2] != (found.vocab_size, found.hidden_size):
            raise ValueError(
                f"the {self.title} drafter is for a trunk of width {trunk.hidden_size} and vocabulary "
                f"{trunk.vocab_size}; this one has {found.hidden_size} and {found.vocab_size}"
            )
        if trunk.num_hidden_layers not in (0, found.num_hidden_layers):
            raise ValueError(
                f"the {self.title} drafter is for a trunk of {trunk.num_hidden_layers} layers; "
                f"this one has {found.num_hidden_layers}"
            )
        if config.draft_vocabulary is not None:
            raise ValueError(
                f"draft_vocabulary applies only to drafter 'mtp': the head of a {self.title} drafter has a vocabulary "
                "of its own"
            )
        if config.topk > self.architecture.draft_vocab_size:
            raise ValueError(
                f"topk {config.topk} exceeds the {self.architecture.draft_vocab_size} tokens that can be drafted"
            )

    def default_params(self, params: dict, config: DecodeConfig, *, model: MTPModel) -> Any:
        """Raises `ValueError`: the drafter's parameters are not part of the model's."""
        raise ValueError(
            f"{type(self).__name__} has parameters of its own: pass draft_params, the second result of "
            "mtpjax.load_drafter"
        )


def embedding_table(params: dict, architecture: Any, model: MTPModel) -> jax.Array:
    """Returns the embedding `[V, D]` that a drafter's network reads: its own, or the trunk's."""
    table = params[DRAFTER]["embedding"] if architecture.own_embedding else params["embedding"]
    return table if model.dtype is None else table.astype(model.dtype)


def require_whole_trunk(sizes: Mapping[str, int] | None = None) -> None:
    """Raises `ValueError` if a mesh axis splits the trunk's width or heads: only MTP modules are split with the trunk.

    Args:
        sizes: sizes of the mesh axes by name; None: those of the call that is traced.
    """
    for axis in ("tensor", "expert"):
        count = num_shards(axis) if sizes is None else sizes.get(axis, 1)
        if count > 1:
            raise ValueError(
                f"drafters with parameters of their own do not support a mesh that splits the trunk ({axis} {count}): "
                "split only the rows, over data"
            )
