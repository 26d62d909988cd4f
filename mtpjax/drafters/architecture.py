"""The properties that every drafter with its own network declares for itself and its trunk, and their checks."""

from typing import Any, NamedTuple, Protocol

from mtpjax.messages import require
from mtpjax.models.config import ModelConfig


class TrunkSizes(NamedTuple):
    """Sizes of the trunk that a drafter is for."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int  # 0: the drafter is for any number


class DraftArchitecture(Protocol):
    """The architecture of a drafter with its own network: a frozen dataclass, hashable."""

    @property
    def trunk(self) -> TrunkSizes:
        """The trunk that it is for."""
        ...

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Trunk layers whose input states it reads; the number of trunk layers, L, means the last one's output, before
        the final norm, and L + 1 the output of this norm."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that can be drafted, R."""
        ...


def check_layer_ids(layer_ids: tuple[int, ...], num_target_layers: int) -> None:
    """Raises `ValueError` if the ids are empty, repeat a layer, or exceed the depth of the trunk."""
    ids, layers = layer_ids, num_target_layers
    require(
        bool(ids) and len(set(ids)) == len(ids) and all(0 <= layer <= layers + 1 for layer in ids),
        f"layer_ids {list(ids)} must be different layers within 0..{layers + 1}; {layers} is the output of the last "
        f"one of a trunk of {layers}, {layers + 1} that of the final norm",
    )


def check_draft_vocabulary(draft_vocab_size: int, vocab_size: int, *, own_head: bool) -> None:
    """Raises `ValueError` for an invalid size of the draft vocabulary; the trunk's head has columns for all tokens."""
    require(1 <= draft_vocab_size <= vocab_size, f"draft_vocab_size {draft_vocab_size} is not within 1..{vocab_size}")
    require(
        own_head or draft_vocab_size == vocab_size,
        f"draft_vocab_size {draft_vocab_size} is below the vocabulary of {vocab_size}: "
        "the trunk's head has the columns of all tokens",
    )


def dense_layers(trunk: ModelConfig, **changes: Any) -> ModelConfig:
    """Returns the config of dense layers of the trunk's width, with as many attention heads, for a new drafter."""
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
