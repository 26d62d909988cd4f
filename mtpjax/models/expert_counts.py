"""Counts the tokens routed to each expert of a mixture, for `mtpjax.models.expert_placement`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.messages import require
from mtpjax.models.cache import Cache, empty_cache
from mtpjax.models.config import ModelConfig
from mtpjax.models.decoding_layout import run_on_shards
from mtpjax.models.masks import cached_view, full_view
from mtpjax.models.model import MTPModel
from mtpjax.models.parallel import first_row


def count_expert_tokens(params: dict, tokens: jax.Array | np.ndarray, *, model: MTPModel) -> dict[str, np.ndarray]:
    """Counts the tokens routed to each expert, in one trunk pass over whole rows.

    Args:
        tokens: `[B, T]` int32 texts without padding, similar to those that will be decoded.

    Returns:
        `[E]` counts, keyed by layer name, such as "layer_3". Layers without experts are omitted.

    Raises:
        ValueError: the model has no routed experts.
    """
    require(model.config.is_moe, "the model has no routed experts")
    tokens = jnp.asarray(tokens, jnp.int32)
    counts = _count_chosen(params, tokens, jnp.ones(tokens.shape, bool), model=model)
    return {name: np.asarray(count) for name, count in counts.items()}


def count_on_shards(
    params: dict, tokens: jax.Array, lengths: jax.Array, *, model: MTPModel, capacity: int
) -> jax.Array:
    """Counts like `count_expert_tokens`, but with decoding's sharding and in one pass that resembles a prefill call.

    Args:
        tokens: `[P, b, T]` int32 right-padded texts, b for each of the P shards of the `data` axis.
        lengths: `[P, b]` int32 text lengths; 0 marks an unused row.
        capacity: slots of the pass's cache, at least T.

    Returns:
        `[L, E]` int32 counts, one row per layer of `expert_layers`.
    """
    config = model.config
    num_shards, rows, T = tokens.shape
    cache = empty_cache(config, config.trunk_kinds, num_shards * rows, capacity, params["embedding"].dtype)

    def count_shard(params: dict, _: Any, cache: Cache, tokens: jax.Array, lengths: jax.Array):
        part = first_row(1)
        is_used = jnp.arange(T)[None, :] < lengths[part][:, None]
        counts = _count_chosen(params, tokens[part], is_used, cache, model=model, capacity=capacity)
        return cache, jnp.stack([counts[name] for name in expert_layers(config)])[None]

    _, counts = run_on_shards(count_shard, config, params, {}, cache, tokens, lengths, has_row_outputs=True)
    return counts.sum(axis=0)


def expert_layers(config: ModelConfig) -> list[str]:
    """Returns the names of the trunk's layers with routed experts, such as "layer_3"."""
    return [f"layer_{index}" for index, kind in enumerate(config.trunk_kinds) if kind.is_moe]


@functools.partial(jax.jit, static_argnames=("model", "capacity"))
def _count_chosen(
    params: dict,
    tokens: jax.Array,
    is_used: jax.Array,
    cache: Cache | None = None,
    *,
    model: MTPModel,
    capacity: int | None = None,
) -> dict[str, jax.Array]:
    """Counts, per layer, the tokens in `is_used [B, T]` that choose each expert; with a cache, runs as in prefill."""
    (B, T), E = tokens.shape, model.config.n_routed_experts
    if cache is None or capacity is None:
        view = full_view(model.config, is_used.astype(jnp.int32))
    else:
        start, lengths = jnp.zeros(B, jnp.int32), is_used.sum(axis=1, dtype=jnp.int32)
        view = cached_view(model.config, start, T, capacity, num_valid=lengths, is_used=is_used)
    _, kept = model.apply({"params": params}, tokens, view, cache, method="run_trunk", mutable=["router"])

    def count(ids: jax.Array) -> jax.Array:
        # If the `data` axis splits the experts, each device routes all devices' rows; count only this device's rows.
        if len(ids) > B * T:
            ids = jax.lax.dynamic_slice_in_dim(ids, first_row(B * T), B * T)
        # `bincount` ignores ids of E or more.
        return jnp.bincount(jnp.where(is_used.reshape(-1, 1), ids, E).ravel(), length=E)

    layers: Any = kept["router"]["trunk"]
    return {name: count(layer["experts"]["ids"][0]) for name, layer in layers.items()}
