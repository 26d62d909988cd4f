"""Stacks the trunk's layers for training, and unstacks them for decoding."""

import jax
import jax.numpy as jnp

from mtpjax.models.config import ModelConfig


def layer_groups(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Splits the trunk into runs of repeating layer kinds; maps their names to (first layer, period, repeats)."""
    kinds = config.trunk_kinds
    groups, first = {}, 0
    while first < len(kinds):
        # Try every period from here on, and choose the one that covers the most layers.
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
    """Stacks the trunk's layers for training; the inverse of `unstack_layers`.

    Returns:
        The parameters with `trunk/group_<first>/layer_<place>`, which holds the layers first + place,
        first + place + period, … along a new first axis.
    """
    trunk = params["trunk"]
    stacked = {}
    for name, (first, period, repeats) in layer_groups(config).items():
        stacked[name] = {}
        for place in range(period):
            layers = [trunk[f"layer_{first + place + period * turn}"] for turn in range(repeats)]
            stacked[name][f"layer_{place}"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return {**params, "trunk": stacked}


def unstack_layers(params: dict, config: ModelConfig) -> dict:
    """Unstacks the trunk's layers for decoding; the inverse of `stack_layers`.

    Returns:
        The parameters with one entry `trunk/layer_i` per layer.
    """
    layers = {}
    for name, (first, period, repeats) in layer_groups(config).items():
        for turn in range(repeats):
            for place in range(period):
                stacked = params["trunk"][name][f"layer_{place}"]
                layer = jax.tree.map(lambda leaf, turn=turn: leaf[turn], stacked)
                layers[f"layer_{first + place + period * turn}"] = layer
    return {**params, "trunk": layers}
