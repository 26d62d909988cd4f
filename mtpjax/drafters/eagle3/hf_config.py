"""Parses and generates the `config.json` of EAGLE-3 drafters in SpecForge's and speculators' formats.

SpecForge (`LlamaForCausalLMEagle3`) writes EAGLE's original format, which SGLang reads; speculators
(`Eagle3Speculator`) writes vLLM's. Both formats can be ambiguous about what the network computes. Ambiguous files are
rejected with an error that describes both readings, unless the caller chooses one.
"""

from typing import Any

from conversion.config_reader import ConfigReader
from conversion.tensor_slice import ParamSpec, copied
from mtpjax.drafters.architecture import TrunkSizes
from mtpjax.drafters.eagle3.network import Eagle3Config
from mtpjax.drafters.files.layers_config import (
    class_names,
    describe_layers,
    describe_speculators,
    is_speculators,
    layers_specs,
    make_architecture,
    parse_layers,
    warn_of_unknown_keys,
)
from mtpjax.drafters.files.trunk_layers import (
    LAST_LAYER_STATE,
    describe_last_layer,
    entered_layers,
    read_last_layer_state,
)
from mtpjax.drafters.method import Reading, Shapes
from mtpjax.errors import ConfigError

SPECFORGE_CLASS, SPECULATORS_CLASS = "LlamaForCausalLMEagle3", "Eagle3Speculator"
NUM_STATES = 3  # number of trunk states that the default layers provide
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SWITCHES = ("norm_before_fc", "fc_norm", "norm_output")
KNOWN_KEYS = {
    *("draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "eagle_config", "norm_before_residual"),
    *(LAYER_IDS, LAST_LAYER_STATE, "bias", *SWITCHES),
    *("speculators_config", "speculators_model_type", "speculators_version"),
}


# Keys of `eagle_config` in ModelOpt exports, with the values for which they have no effect.
EAGLE_KEYS = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (1,),
}


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose input states EAGLE, SGLang and vLLM read if a file lists no layers."""
    return (2, num_layers // 2, num_layers - 3)


def parse_eagle3(
    values: dict[str, Any], shapes: Shapes, trunk: TrunkSizes, reading: Reading
) -> tuple[Eagle3Config, str]:
    """Parses `config.json`. See `DrafterFiles.parse` for the arguments and the result.

    Raises:
        ConfigError: the configuration is damaged or not supported, or it is ambiguous and no reading is chosen.
    """
    reader = ConfigReader(values)
    eagle = reader.section("eagle_config")
    # speculators nests the layers' keys; SpecForge mixes them with its own keys.
    form = "speculators" if is_speculators(values) else "specforge"
    layers = reader.section("transformer_layer_config").values if form == "speculators" else values
    block = parse_layers(layers, KNOWN_KEYS, shapes, classes=class_names(values))
    for key, allowed in EAGLE_KEYS.items():
        eagle.require(key, *allowed)
    known = {*EAGLE_KEYS, *SWITCHES, LAYER_IDS, LAST_LAYER_STATE, "num_aux_hidden_states"}
    warn_of_unknown_keys("eagle_config", eagle.values.keys() - known)
    reader.require("bias", False)
    for section in (reader, ConfigReader(layers)):
        section.require("tie_word_embeddings", False)

    if form == "specforge":
        residual = False  # SGLang has no such switch
    elif reader.get("norm_before_residual") is None:
        # speculators' class and vLLM's reader for these files have different defaults.
        if (chosen := reading.get("norm_before_residual")) is None:
            raise ConfigError(
                "config.json lacks norm_before_residual: speculators then assumes false, and vLLM true; pass "
                "norm_before_residual to choose one"
            )
        residual = chosen
    else:
        residual = reader.flag("norm_before_residual", False)
    if form == "specforge" and block.num_hidden_layers > 1:
        raise ConfigError(
            f"config.json: num_hidden_layers {block.num_hidden_layers} is not supported in SpecForge's format, "
            "because the programs that read this format disagree about the residual and the norms after the first "
            "layer; use 1 layer or speculators' format"
        )
    return make_architecture(
        Eagle3Config,
        shapes,
        block=block,
        layer_ids=_layer_ids(reader, eagle, trunk, form, reading),
        num_target_layers=trunk.num_hidden_layers,
        target_hidden_size=reader.integer("target_hidden_size", block.hidden_size),
        draft_vocab_size=reader.integer("draft_vocab_size", block.vocab_size),
        norm_before_residual=residual,
        **{name: eagle.flag(name, reader.flag(name, False)) for name in SWITCHES},
    ), form


def _layer_ids(
    reader: ConfigReader, eagle: ConfigReader, trunk: TrunkSizes, form: str, reading: Reading
) -> tuple[int, ...]:
    """Reads the ids of the trunk layers whose input states the drafter reads."""
    count = reader.integer("num_aux_hidden_states", eagle.integer("num_aux_hidden_states", 0, low=0), low=0)
    nested, beside = (section.items(LAYER_IDS, int) for section in (eagle, reader))
    if nested and beside and nested != beside:
        raise ConfigError(f"config.json: {LAYER_IDS} is {list(beside)}, and {list(nested)} in eagle_config")
    listed = nested or beside
    default = default_layer_ids(trunk.num_hidden_layers)
    if not listed:
        if count not in (0, NUM_STATES):
            raise ConfigError(f"config.json: num_aux_hidden_states is {count}, but {LAYER_IDS} is missing")
        return default
    if count and count != len(listed):
        raise ConfigError(f"config.json: num_aux_hidden_states is {count}, but {LAYER_IDS} has length {len(listed)}")
    entered, output = listed, tuple(layer + 1 for layer in listed)
    # speculators and vLLM read the states that enter these layers, but SGLang reads the outputs, and the file does not
    # say which program made it. The wrong reading is easy to miss, because it only makes acceptance far less frequent.
    if reading.get("aux_layers") is None and form == "specforge":
        usual = {default: "; the usual default of this trunk is the first", output: ""}.get(entered, "")
        usual = "; the second is the usual default of this trunk" if output == default else usual
        raise ConfigError(
            f"config.json: {LAYER_IDS} {list(listed)} has two readings: the states that enter these layers (vLLM, "
            f"EAGLE), or the outputs of these layers, which enter {list(output)} (SGLang){usual}. Pass aux_layers "
            "'entered' or 'output' (--aux-layers); with the right one, drafts are accepted far more often on any text"
        )
    # SGLang and vLLM capture the last layer's output before the final norm.
    return entered_layers(
        listed,
        LAYER_IDS,
        trunk.num_hidden_layers,
        are_outputs=reading.get("aux_layers") == "output",
        stated=read_last_layer_state(eagle, reader),
        usual="before_norm",
        choice=reading.get("last_layer_state"),
    )


def describe_eagle3(config: Eagle3Config, form: str) -> dict[str, Any]:
    """Makes a `config.json` that `parse_eagle3` parses back to `config`; raises `ConfigError` if none exists.

    In SpecForge's format, the file lists the layers whose outputs are read, as SGLang does, unless they are the default
    layers. Pass `aux_layers="output"` to read such files.
    """
    layers = describe_layers(config.block)
    switches = {name: getattr(config, name) for name in SWITCHES}
    sizes = {"draft_vocab_size": config.draft_vocab_size, "target_hidden_size": config.target_hidden_size}
    listed, last_layer = describe_last_layer(config.layer_ids, config.num_target_layers)
    if form == "speculators":
        return {
            "architectures": [SPECULATORS_CLASS],
            **sizes,
            LAYER_IDS: listed,
            **last_layer,
            "norm_before_residual": config.norm_before_residual,
            **switches,
            "tie_word_embeddings": False,
            **describe_speculators("eagle3", layers, num_tokens=3),
        }
    if config.norm_before_residual or config.block.num_hidden_layers > 1:
        raise ConfigError(
            "SpecForge's format supports neither norm_before_residual nor several layers: use speculators' format"
        )
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    if config.layer_ids != default_layer_ids(config.num_target_layers):
        if min(config.layer_ids) == 0:
            raise ConfigError("SpecForge's format cannot list the embedding as a trunk state: use speculators' format")
        eagle |= {LAYER_IDS: [layer - 1 for layer in listed], **last_layer}
    present = {name: value for name, value in switches.items() if value}
    return {**layers, "architectures": [SPECFORGE_CLASS], **sizes, "eagle_config": eagle, **present}


def eagle3_specs(config: Eagle3Config) -> dict[str, ParamSpec]:
    """Lists every parameter with its tensors, by plain name."""
    specs = layers_specs(config, has_wide_first=True)
    if config.norm_before_fc:
        specs["norm_features/scale"] = copied("input_norm.weight", config.features_size)
    if config.fc_norm:
        for index in range(len(config.layer_ids)):
            specs[f"norm_state_{index}/scale"] = copied(f"fc_norm.{index}.weight", config.target_hidden_size)
    return specs
