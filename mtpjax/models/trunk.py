"""The trunk: embedded tokens `[B, T, D]` to hidden states `[B, T, D]` before the final norm."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.models.cache import Cache
from mtpjax.models.config import ModelConfig
from mtpjax.models.layers.block import Block
from mtpjax.models.parallel import gather_axis, num_shards
from mtpjax.models.quantized import is_scaled
from mtpjax.models.sharding import param_axes, path_name
from mtpjax.models.view import Masks, View


class Trunk(nn.Module):
    """All decoder layers, in one of two forms; `stack_layers` and `unstack_layers` convert the parameters.

    Unrolled layers have parameters `layer_i` and a cache each. Decoding uses this form, because a scan would copy every
    weight in each step. With `scanned`, layers whose kinds repeat are stacked and scanned over whole rows, without a
    cache. Training uses this form, because it compiles one layer instead of all. For the backward pass a scanned layer
    keeps the weight products (`_is_kept`); with `remat` it keeps only its input and runs again.
    """

    config: ModelConfig
    scanned: bool = False
    remat: bool = False
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self, x: jax.Array, view: View, cache: Cache | None = None, *, layer_ids: tuple[int, ...] = ()
    ) -> tuple[jax.Array, Cache | None, tuple[jax.Array, ...]]:
        """Runs all layers over embedded tokens `[B, T, D]`.

        Returns the states before the final norm, the cache with the tokens appended, and the states that enter the
        unrolled layers `layer_ids`.

        Raises:
            ValueError: for a layer id out of range, or layer_ids with scanned layers.
        """
        config = self.config
        if layer_ids and (self.scanned or not all(0 <= layer < config.num_hidden_layers for layer in layer_ids)):
            raise ValueError(
                f"layer_ids {layer_ids} need unrolled layers and ids within 0..{config.num_hidden_layers - 1}"
            )
        selection: Masks | None = None
        if self.scanned:
            # One scan per run of repeating kinds. The carry needs a constant structure, so a selection exists from the
            # start; the first layer's indexer replaces it.
            if config.index_topk:
                selection = (view.mask,)
            period_type = _Period
            if num_shards("fsdp") > 1:
                # Inside the rematerialised part, so that the backward pass gathers again and no whole layer is kept.
                gather = functools.partial(gather_layers, config=config)
                period_type = nn.map_variables(_Period, "params", trans_in_fn=gather)
            stretch = nn.remat(period_type, prevent_cse=False, policy=None if self.remat else _is_kept)
            for name, (first, period, repeats) in _groups(config).items():
                scan = nn.scan(
                    lambda stack, carry, view: (stack(*carry, view), None),
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
                    length=repeats,
                )
                period_layers = stretch(config, first, period, self.implementation, name=name)
                (x, selection), _ = scan(period_layers, (x, selection), view)
            return x, None, ()
        # Unrolled: each layer has its own parameters and its own part of the cache.
        layers, states, update = [], {}, None
        for index, kind in enumerate(config.trunk_kinds):
            if index in layer_ids:
                states[index] = x if update is None else x + update.total()
            block = Block(config, kind, self.implementation, name=f"layer_{index}")
            x, update, entries, selection = block(x, view, cache.layers[index] if cache else None, selection, update)
            layers.append(entries)
        cache = cache.replace(layers=tuple(layers)) if cache else None
        return x if update is None else x + update.total(), cache, tuple(states[layer] for layer in layer_ids)


class _Period(nn.Module):
    """The `period` layers from layer `first` on, which a scan repeats with other parameters."""

    config: ModelConfig
    first: int
    period: int
    implementation: str

    @nn.compact
    def __call__(self, x: jax.Array, selection: Masks | None, view: View) -> tuple[jax.Array, Masks | None]:
        for place in range(self.period):
            kind = self.config.layer_kind(self.first + place)
            block = Block(self.config, kind, self.implementation, name=f"layer_{place}")
            x, update, _, selection = block(x, view, None, selection)
            x = x + update.total()
        return x, selection


def gather_layers(params: Any, config: ModelConfig) -> Any:
    """Joins the shards of layers that training splits over `fsdp`, along the axis that has the model's width.

    Args:
        params: a tree of parameters whose paths end as those of a layer, without an axis of stacked layers.
    """

    def gather(path, leaf):
        axes = param_axes(path_name(path))
        if "embed" not in axes:
            return leaf
        axis = axes.index("embed")
        if not is_scaled(leaf):
            return gather_axis(leaf, axis, config.hidden_size)
        is_input = leaf.axis % leaf.ndim == axis
        num_scales = -(-config.hidden_size // leaf.block) if is_input else config.hidden_size
        values, scales = gather_axis(leaf.values, axis, config.hidden_size), gather_axis(leaf.scales, axis, num_scales)
        return leaf.replace(values=values, scales=scales)

    return jax.tree_util.tree_map_with_path(gather, params, is_leaf=is_scaled)


def _is_kept(primitive, *_, **settings) -> bool:
    """Returns whether the backward pass of a scanned layer keeps a result: it keeps the products with weights.

    Norms, activations and attention are recomputed. Attention's products have two batch axes, for rows and heads.
    Keeping everything takes more memory for all layers, which costs more time than the recomputation.
    """
    if primitive.name != "dot_general":
        return False
    _, (batch, _) = settings["dimension_numbers"]
    return len(batch) < 2


def _groups(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Splits the trunk into runs of repeating layer kinds: name -> (first layer, period, repeats)."""
    kinds = config.trunk_kinds
    groups, first = {}, 0
    while first < len(kinds):
        # Try every period from here on, and take the one that covers the most layers.
        best = (1, 1)
        for period in range(1, (len(kinds) - first) // 2 + 1):
            repeats = 1
            while kinds[first : first + period] == kinds[first + repeats * period : first + (repeats + 1) * period]:
                repeats += 1
            if repeats > 1 and period * repeats > best[0] * best[1]:
                best = (period, repeats)
        groups[f"group_{first}"] = (first, *best)
        first += best[0] * best[1]
    return groups


def stack_layers(params: dict, config: ModelConfig) -> dict:
    """Stacks the trunk's layers for training: the inverse of `unstack_layers`.

    Returns:
        The parameters with `trunk/group_<first>/layer_<place>`, which holds the layers first + place,
        first + place + period, … along a new first axis.
    """
    trunk = params["trunk"]
    stacked = {}
    for name, (first, period, repeats) in _groups(config).items():
        stacked[name] = {}
        for place in range(period):
            layers = [trunk[f"layer_{first + place + period * turn}"] for turn in range(repeats)]
            stacked[name][f"layer_{place}"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return {**params, "trunk": stacked}


def unstack_layers(params: dict, config: ModelConfig) -> dict:
    """Unstacks the trunk's layers for decoding: the inverse of `stack_layers`.

    Returns:
        The parameters with one entry `trunk/layer_i` per layer.
    """
    layers = {}
    for name, (first, period, repeats) in _groups(config).items():
        for turn in range(repeats):
            for place in range(period):
                stacked = params["trunk"][name][f"layer_{place}"]
                layer = jax.tree.map(lambda leaf, turn=turn: leaf[turn], stacked)
                layers[f"layer_{first + place + period * turn}"] = layer
    return {**params, "trunk": layers}
