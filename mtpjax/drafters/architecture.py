"""Describes the architectures of drafters with their own network, and configures new layers of the trunk's width."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.messages import require
from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.masks import full_view


class TrunkSizes(NamedTuple):
    """Sizes of the trunk that a drafter drafts for."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int  # 0 means any number


class DraftArchitecture(Protocol):
    """The architecture of a drafter with its own network, as a hashable, frozen dataclass."""

    @property
    def trunk(self) -> TrunkSizes:
        """The trunk that the drafter is for."""
        ...

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Trunk layers whose input states the drafter reads. In a trunk with L layers, L stands for the output of the
        last layer before the final norm, and L + 1 for the output of that norm."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """The number of tokens that can be drafted (R)."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersConfig:
    """Base class for architectures of drafters with their own layers.

    Shape letters: D is the drafter's width, n the number of trunk states, V the vocabulary, R the draft vocabulary.

    Args:
        block: config of the drafter's layers, in which `num_hidden_layers` is their number and `vocab_size` is V.
        layer_ids: the n trunk layers whose input states are read, in the order of the projection's inputs; see
            `DraftArchitecture.layer_ids`.
        num_target_layers: number of layers in the trunk.
        draft_vocab_size: number of tokens that can be drafted (R); 0 means V.
        own_embedding: whether the drafter has its own embedding; otherwise it uses the trunk's.
        own_head: whether the drafter has its own head `[D, R]`; otherwise it uses the trunk's.
    """

    block: ModelConfig
    layer_ids: tuple[int, ...]
    num_target_layers: int
    draft_vocab_size: int = 0
    own_embedding: bool = False
    own_head: bool = False

    def __post_init__(self):
        V, layers = self.block.vocab_size, self.num_target_layers
        object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        object.__setattr__(self, "draft_vocab_size", self.draft_vocab_size or V)
        ids, size = self.layer_ids, self.draft_vocab_size
        require(
            bool(ids) and len(set(ids)) == len(ids) and all(0 <= layer <= layers + 1 for layer in ids),
            f"layer_ids {list(ids)} must be distinct and within 0..{layers + 1}, where {layers} is the output of the "
            f"last trunk layer and {layers + 1} the output of the final norm",
        )
        require(1 <= size <= V, f"draft_vocab_size {size} is not within 1..{V}")
        require(
            self.own_head or size == V,
            f"draft_vocab_size {size} is below the vocabulary size {V}, which requires own_head, because "
            "the trunk's head has columns for all tokens",
        )

    @property
    def trunk(self) -> TrunkSizes:
        """The trunk that the drafter is for."""
        return TrunkSizes(self.block.vocab_size, self.block.hidden_size, self.num_target_layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of the drafter's layers."""
        return self.block.trunk_kinds

    @property
    def features_size(self) -> int:
        """Width of the n concatenated trunk states."""
        return len(self.layer_ids) * self.trunk.hidden_size


def init_layers(network: Callable[[Any], nn.Module], config: LayersConfig, key: jax.Array) -> dict[str, Any]:
    """Initialises a network that is called with trunk states, embedded tokens and a view."""
    # Only the shapes of the inputs matter here.
    view = full_view(config.block, jnp.ones((1, 2), jnp.int32))
    features, embedded = jnp.zeros((1, 2, config.features_size)), jnp.zeros((1, 2, config.block.hidden_size))
    return jax.jit(network(config).init)(key, features, embedded, view)["params"]


def dense_layers(trunk: ModelConfig, **changes: Any) -> ModelConfig:
    """Returns the config of a new drafter's dense layers, with the trunk's width and number of attention heads."""
    D, is_grouped = trunk.hidden_size, trunk.attention == "grouped"
    return ModelConfig(
        vocab_size=trunk.vocab_size,
        hidden_size=D,
        num_attention_heads=trunk.num_attention_heads,
        num_key_value_heads=(trunk.num_key_value_heads if is_grouped else 0) or trunk.num_attention_heads,
        head_dim=(trunk.head_dim if is_grouped else 0) or D // trunk.num_attention_heads,
        intermediate_size=trunk.intermediate_size,
        max_position_embeddings=trunk.max_position_embeddings,
        rms_norm_eps=trunk.rms_norm_eps,
        rope_theta=trunk.rope_theta,
        **changes,
    )
