"""The `config.json` of Step-3.5 and Step-3.7, whose lists have an entry per layer and then per MTP module."""

from typing import Any

from conversion.config_reader import ConfigReader
from mtpjax.errors import ConfigError

STEP = ("step3p5", "step3p7")  # model types


def expand_step(values: dict[str, Any]) -> dict[str, Any]:
    """Translates Step-3.5's lists, with an entry per layer, to the keys of other families.

    Returns:
        The values with `rope_parameters` per type of layer, `layer_types` and limits of the trunk's layers alone,
        `mlp_layer_types` and `mtp_layer_type`. Other keys stay.

    Raises:
        ConfigError: a list has the wrong length or type, layers of one type differ, or a module is clamped.
    """
    reader = ConfigReader(values)
    layers, modules = reader.integer("num_hidden_layers"), reader.integer("num_nextn_predict_layers", 0, low=0)

    def listed(key: str, kind: type | tuple[type, ...]) -> list[Any]:
        """Reads one entry per layer and module. A single value counts for all; a missing key gives an empty list."""
        value = values.get(key)
        if value is None or value == []:
            return []
        value = value if isinstance(value, list) else [value] * (layers + modules)
        if len(value) not in (layers, layers + modules) or not all(isinstance(entry, kind) for entry in value):
            raise ConfigError(f"config.json: {key} is not a list of {layers} layers and {modules} modules: {value!r}")
        return value

    if values.get("rope_parameters") is not None:
        raise ConfigError(
            "config.json: rope_parameters, as transformers writes them for this family, are not supported: take the "
            "config.json of the release, with rope_theta for each layer"
        )
    # transformers saves the modules' kinds under keys of their own.
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(values.get(f"mtp_{key}"), list) and len(listed(key, str)) == layers:
            values = {**values, key: [*values[key], *values[f"mtp_{key}"]]}
        values = {name: value for name, value in values.items() if name != f"mtp_{key}"}
    types = listed("layer_types", str)
    if not types or (modules and len(types) == layers):
        raise ConfigError(f"config.json: layer_types must name the type of {layers} layers and {modules} modules")
    if len(set(types[layers:])) > 1:
        raise ConfigError(f"config.json: modules of several types, {types[layers:]}, are not supported")
    rest = dict(values)
    made: dict[str, Any] = {"layer_types": types[:layers], "rope_parameters": {}}
    if modules:
        made["mtp_layer_type"] = types[layers]
    # Rotary embeddings: base and rotated share by layer, scaling for the types that `yarn_only_types` names.
    scaling = values.get("rope_scaling") or {}
    scaled = values.get("yarn_only_types") or ["full_attention", "sliding_attention"]
    bases, shares = listed("rope_theta", (int, float)), listed("partial_rotary_factors", (int, float))
    for kind in ("full_attention", "sliding_attention"):
        section = dict(scaling) if kind in scaled else {}
        for key, entries in (("rope_theta", bases), ("partial_rotary_factor", shares)):
            own = {entry for entry, of in zip(entries, types, strict=False) if of == kind}
            if len(own) > 1:
                raise ConfigError(f"config.json: {key} {sorted(own)} within layers of type {kind} is not supported")
            if own:
                section[key] = own.pop()
        made["rope_parameters"][kind] = section
    if not all(listed("use_rope_layers", bool)):
        raise ConfigError("config.json: use_rope_layers with layers without rotary embedding is not supported")
    # Layers with experts, by number.
    sparse = values.get("moe_layers_enum")
    if sparse is not None:
        sparse = sparse.split(",") if isinstance(sparse, str) else sparse
        if not isinstance(sparse, list) or not all(str(layer).strip().isdigit() for layer in sparse):
            raise ConfigError(f"config.json: moe_layers_enum is {sparse!r}, not a list of layers")
        numbers = {int(layer) for layer in sparse}
        if any(layer >= layers for layer in numbers):
            raise ConfigError("config.json: moe_layers_enum with modules is not supported")
        made["mlp_layer_types"] = ["sparse" if layer in numbers else "dense" for layer in range(layers)]
    else:
        made["mlp_layer_types"] = values.get("mlp_layer_types") or [
            "dense" if layer < 3 else "sparse" for layer in range(layers)
        ]
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        limits = [entry or 0.0 for entry in listed(key, (int, float, type(None)))]
        if any(limits[layers:]):
            raise ConfigError(f"config.json: {key} with clamped modules is not supported")
        made[key] = limits[:layers]
    # Settings that differ in layers with a window.
    other = reader.section("attention_other_setting")
    other.require("attention_type", "sliding_attention")
    other.require("head_dim", values.get("head_dim"))
    made["swa_num_attention_heads"] = other.get("num_attention_heads")
    made["swa_num_key_value_heads"] = other.get("num_attention_groups")
    made["add_swa_attention_sink_bias"] = False
    unknown = other.values.keys() - other.seen - {"true_head_dim"}
    if unknown:
        raise ConfigError(f"config.json: attention_other_setting with {', '.join(sorted(unknown))} is not supported")
    for key in ("rope_theta", "partial_rotary_factors", "rope_scaling", "yarn_only_types", "use_rope_layers"):
        rest.pop(key, None)
    for key in ("moe_layers_enum", "attention_other_setting"):
        rest.pop(key, None)
    return {**rest, **made}
