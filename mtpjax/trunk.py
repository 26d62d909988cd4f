"""The trunk: embedded tokens `[B, T, D]` to hidden `[B, T, D]`, before the final norm."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.cache import Cache
from mtpjax.config import ModelConfig
from mtpjax.layers.attend import View
from mtpjax.layers.block import Block


class Trunk(nn.Module):
    """All decoder layers.

    Unrolled, layer i has its own parameters `layer_i` and its own cache: the form for decoding, where scanning would
    copy every weight each step. With `scanned`, layers of one kind are stacked in `dense` and `moe` and scanned over
    whole rows: the form for training. `stack_layers` and `unstack_layers` go between the two.
    """

    config: ModelConfig
    scanned: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, view: View, cache: Cache | None = None) -> tuple[jax.Array, Cache | None]:
        config = self.config
        if self.scanned:
            for name, layers in _groups(config).items():
                scan = nn.scan(
                    lambda block, x, view: (block(x, view)[0], None),
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
                    length=len(layers),
                )
                x, _ = scan(Block(config, is_moe=name == "moe", name=name), x, view)
            return x, None
        layers = []
        for index in range(config.num_hidden_layers):
            block = Block(config, is_moe=config.is_moe_layer(index), name=f"layer_{index}")
            x, entries = block(x, view, cache.layers[index] if cache else None)
            layers.append(entries)
        return x, cache.replace(layers=tuple(layers)) if cache else None


def _groups(config: ModelConfig) -> dict[str, list[int]]:
    """Layer numbers of each kind, in the order in which they run."""
    groups: dict[str, list[int]] = {}
    for index in range(config.num_hidden_layers):
        groups.setdefault("moe" if config.is_moe_layer(index) else "dense", []).append(index)
    return groups


def stack_layers(params: dict, config: ModelConfig) -> dict:
    """Model parameters with `trunk/layer_i` stacked along a new first axis; the inverse of `unstack_layers`."""
    trunk = params["trunk"]
    stacked = {
        name: jax.tree.map(lambda *leaves: jnp.stack(leaves), *(trunk[f"layer_{index}"] for index in layers))
        for name, layers in _groups(config).items()
    }
    return {**params, "trunk": stacked}


def unstack_layers(params: dict, config: ModelConfig) -> dict:
    """Model parameters with one entry `trunk/layer_i` per layer."""
    layers = {}
    for name, indices in _groups(config).items():
        for place, index in enumerate(indices):
            layers[f"layer_{index}"] = jax.tree.map(lambda leaf, place=place: leaf[place], params["trunk"][name])
    return {**params, "trunk": layers}
