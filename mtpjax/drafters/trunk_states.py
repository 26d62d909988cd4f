"""The states of trunk layers that a drafter reads: EAGLE-3's three, DFlash's `target_layer_ids`."""

import jax
import jax.numpy as jnp

from mtpjax.models.model import TrunkOutput


def inner_layers(layer_ids: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Returns the layers below `num_layers`, whose input states the trunk must return (`Drafter.layer_ids`).

    In a drafter's architecture, `num_layers` means the output of the last layer, and `num_layers + 1` that of the final
    norm; neither is a layer's input.
    """
    return tuple(layer for layer in layer_ids if layer < num_layers)


def join_states(output: TrunkOutput, layer_ids: tuple[int, ...], num_layers: int) -> jax.Array:
    """Joins trunk states side by side, `[B, T, n * D]` in the order of `layer_ids`; see `inner_layers`."""
    states = dict(zip(inner_layers(layer_ids, num_layers), output.states, strict=True))
    states |= {num_layers: output.prenorm, num_layers + 1: output.hidden}
    return jnp.concatenate([states[layer] for layer in layer_ids], axis=-1)
