"""The engine's calls that count and move experts, for `mtpjax.serving.rebalancing`."""

from typing import Any

import jax

from mtpjax.decoding.gpu_graph import one_graph
from mtpjax.decoding.session import in_every_process
from mtpjax.models import expert_moves
from mtpjax.models.config import ModelConfig
from mtpjax.models.expert_counts import count_on_shards
from mtpjax.models.model import MTPModel


@one_graph(static_argnames=("model", "capacity"))
def count_experts(params: dict, tokens: jax.Array, lengths: jax.Array, *, model: MTPModel, capacity: int) -> jax.Array:
    """Returns how many tokens chose each expert, `[L, E]`; see `count_on_shards`."""
    return in_every_process(count_on_shards(params, tokens, lengths, model=model, capacity=capacity))


@one_graph(static_argnames=("config",))
def move_experts(experts: dict[str, Any], placement: dict[str, jax.Array], *, config: ModelConfig) -> dict[str, Any]:
    """Moves the experts of a layer to new slots; see `mtpjax.models.expert_moves.move_experts`."""
    return expert_moves.move_experts(experts, placement, config=config)
