"""Identifies the trunk states that a drafter reads by the layers that they enter (`DraftArchitecture.layer_ids`).

In a trunk with L layers, id L means the output of the last layer, which enters the final norm, and id L + 1 means the
output of that norm.
"""

import logging
from typing import Literal

from conversion.config_reader import ConfigReader
from mtpjax.errors import ConfigError

log = logging.getLogger("mtpjax.conversion")

LastLayerState = Literal["before_norm", "after_norm"]
LAST_LAYER_STATE = "last_layer_state"  # key in `config.json`, written by mtpjax
STATES: tuple[LastLayerState, ...] = ("before_norm", "after_norm")


def entered_layers(
    listed: tuple[int, ...],
    key: str,
    num_layers: int,
    *,
    are_outputs: bool,
    stated: LastLayerState | None,
    usual: LastLayerState,
    choice: LastLayerState | None,
) -> tuple[int, ...]:
    """Converts a file's layer ids to the ids of the layers that the states enter.

    Args:
        listed: the ids.
        key: the key that lists them, for messages.
        num_layers: number of layers in the trunk.
        are_outputs: True if the ids are layers whose outputs are read, where -1 is the embedding; False if they are
            layers that the states enter.
        stated: the last-layer state that the file specifies.
        usual: the last-layer state that programs with this format train on.
        choice: the last-layer state that the caller chose.

    Returns:
        The ids.

    Raises:
        ConfigError: an id is outside the trunk, repeated or ambiguous, or `choice` contradicts the file.
    """
    if are_outputs and -1 in listed[1:]:
        raise ConfigError(
            f"config.json: {key} {list(listed)} has two readings: -1 is the embedding in this format, and the last "
            f"layer in others; write the last layer as {num_layers - 1}. To list the embedding after other "
            "layers, use speculators' format, where it is 0 in aux_hidden_state_layer_ids"
        )
    layers = tuple(layer + are_outputs for layer in listed)
    if len(set(layers)) != len(layers) or not all(0 <= layer <= num_layers for layer in layers):
        counts = f"; if the ids count from 1, subtract 1 from each: the last layer is {num_layers - 1}"
        hint = counts if are_outputs and max(listed) == num_layers else ""
        raise ConfigError(
            f"config.json: {key} {list(listed)} means the states that enter the layers {list(layers)}, which must be "
            f"distinct and within 0..{num_layers} in a trunk of {num_layers} layers{hint}"
        )
    if num_layers not in layers:
        return layers
    # The last layer's output is read. Published files do not say whether this was before or after the final norm.
    if stated is not None and choice not in (None, stated):
        raise ConfigError(f"config.json: {LAST_LAYER_STATE} is {stated!r}, not {choice!r}")
    state = stated or choice or usual
    if stated is None and choice is None:
        other = STATES[usual == STATES[0]]
        log.warning(
            "config.json: %s %s includes the last of %d trunk layers, but does not state which of its outputs the "
            "drafter was trained on: the one before the final norm, which SGLang and vLLM capture, or the one after "
            "it, the last of transformers' hidden_states. Using %s, the usual one in this format; pass %s='%s' "
            "(--last-layer-state %s) for the other one. Compare both: with the right one, more drafts are accepted",
            *(key, list(listed), num_layers, usual, LAST_LAYER_STATE, other, other),
        )
    return tuple(layer + (layer == num_layers and state == "after_norm") for layer in layers)


def read_last_layer_state(*sections: ConfigReader) -> LastLayerState | None:
    """Reads which last-layer state the drafter was trained on; returns None if no section specifies it."""
    for section in sections:
        section.require(LAST_LAYER_STATE, *STATES)
    return next((value for section in sections if (value := section.get(LAST_LAYER_STATE)) is not None), None)


def describe_last_layer(layer_ids: tuple[int, ...], num_layers: int) -> tuple[list[int], dict[str, str]]:
    """Returns the ids of the entered layers as files list them, and the last-layer state's entry if it is needed."""
    if {num_layers, num_layers + 1} <= set(layer_ids):
        raise ConfigError(
            "no format can express a drafter that reads the last layer both before and after the final norm"
        )
    listed = [min(layer, num_layers) for layer in layer_ids]
    if num_layers not in listed:
        return listed, {}
    return listed, {LAST_LAYER_STATE: STATES[num_layers + 1 in layer_ids]}
