"""The trunk: embedded tokens `[B, T, D]` to hidden `[B, T, D]`, before the final norm."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.models.cache import Cache
from mtpjax.models.config import ModelConfig
from mtpjax.models.layers.block import Block
from mtpjax.models.masks import Masks, View


class Trunk(nn.Module):
    """All decoder layers.

    Unrolled, layer i has its own parameters `layer_i` and its own cache: the form for decoding, where scanning would
    copy every weight each step. With `scanned`, layers whose kinds repeat are stacked and scanned over whole rows: the
    form for training. `stack_layers` and `unstack_layers` go between the two. Of these the backward pass has
    what `_keeps` says; with `remat` nothing, and runs each repeated stretch of layers again.
    """

    config: ModelConfig
    scanned: bool = False
    remat: bool = False
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self, x: jax.Array, view: View, cache: Cache | None = None, *, layer_ids: tuple[int, ...] = ()
    ) -> tuple[jax.Array, Cache | None, tuple[jax.Array, ...]]:
        """Runs all layers.

        Args:
            x: `[B, T, D]` embedded tokens.
            view: positions and masks.
            cache: the layers' cache; None for a pass over whole rows.
            layer_ids: layers whose input states are returned as well; unrolled layers only.

        Returns:
            Hidden states `[B, T, D]` before the final norm, the cache with the tokens appended, and the states
            `[B, T, D]` that enter the layers `layer_ids`.

        Raises:
            ValueError: for a layer id out of range, or layer_ids with scanned layers.
        """
        config = self.config
        if layer_ids and (self.scanned or not all(0 <= layer < config.num_hidden_layers for layer in layer_ids)):
            raise ValueError(
                f"layer_ids {layer_ids} need unrolled layers and ids within 0..{config.num_hidden_layers - 1}"
            )
        chosen: Masks | None = None
        if self.scanned:
            if config.index_topk:
                chosen = (view.mask,)  # a scan carries the same structure through
            stretch = nn.remat(_Period, prevent_cse=False, policy=None if self.remat else _keeps)
            for name, (first, period, repeats) in _groups(config).items():
                scan = nn.scan(
                    lambda stack, carry, view: (stack(*carry, view), None),
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
                    length=repeats,
                )
                (x, chosen), _ = scan(stretch(config, first, period, self.implementation, name=name), (x, chosen), view)
            return x, None, ()
        layers, states = [], {}
        for index, kind in enumerate(config.trunk_kinds):
            states[index] = x
            block = Block(config, kind, self.implementation, name=f"layer_{index}")
            x, entries, chosen = block(x, view, cache.layers[index] if cache else None, chosen)
            layers.append(entries)
        cache = cache.replace(layers=tuple(layers)) if cache else None
        return x, cache, tuple(states[layer] for layer in layer_ids)


class _Period(nn.Module):
    """The `period` layers from `first` on, which a scan repeats with other parameters."""

    config: ModelConfig
    first: int
    period: int
    implementation: str

    @nn.compact
    def __call__(self, x: jax.Array, chosen: Masks | None, view: View) -> tuple[jax.Array, Masks | None]:
        for place in range(self.period):
            kind = self.config.layer_kind(self.first + place)
            x, _, chosen = Block(self.config, kind, self.implementation, name=f"layer_{place}")(x, view, None, chosen)
        return x, chosen


def _keeps(primitive, *_, **settings) -> bool:
    """What a scanned layer keeps for the backward pass: products with weights.

    Norms, activations and attention, whose products have batch axes for rows and for heads, are computed again. To keep
    all was slower: stacked over the layers it is some three times the memory, and fresh memory is dear on a CPU.
    """
    if primitive.name != "dot_general":
        return False
    _, (batch, _) = settings["dimension_numbers"]
    return len(batch) < 2


def _groups(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """The trunk as runs of repeating kinds: name -> first layer, period, repeats; each as long as can be."""
    kinds = config.trunk_kinds
    groups, first = {}, 0
    while first < len(kinds):
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
    """Model parameters with the `trunk/layer_i` of a group stacked along a new first axis.

    `trunk/group_<first>/layer_<place>` holds layers first + place, first + place + period, …. The inverse of
    `unstack_layers`.
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
    """Model parameters with one entry `trunk/layer_i` per layer."""
    layers = {}
    for name, (first, period, repeats) in _groups(config).items():
        for turn in range(repeats):
            for place in range(period):
                stacked = params["trunk"][name][f"layer_{place}"]
                layer = jax.tree.map(lambda leaf, turn=turn: leaf[turn], stacked)
                layers[f"layer_{first + place + period * turn}"] = layer
    return {**params, "trunk": layers}
