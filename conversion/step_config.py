"""Translates the `config.json` of Step-3.5 and Step-3.7, whose lists have one entry per layer and per MTP module."""

from typing import Any

from conversion.config_reader import ConfigReader
from mtpjax.errors import ConfigError

STEP = ("step3p5", "step3p7")  # model types
# Keys that `expand_step` replaces with other families' keys.
TRANSLATED = (
    *("rope_theta", "partial_rotary_factors", "rope_scaling", "yarn_only_types", "use_rope_layers"),
    *("moe_layers_enum", "attention_other_setting"),
)


def expand_step(values: dict[str, Any]) -> dict[str, Any]:
    """Translates Step-3.5's lists to the keys of other families.

    Returns:
        The values with `rope_parameters` per layer type, with `layer_types` and limits only for the trunk's layers, and
        with `mlp_layer_types` and `mtp_layer_type`. Other keys are kept.

    Raises:
        ConfigError: a list has the wrong length or type, layers of the same type differ, or an MTP module has a SwiGLU
            limit.
    """
    reader = ConfigReader(values)
    layers, modules = reader.integer("num_hidden_layers"), reader.integer("num_nextn_predict_layers", 0, low=0)
    if values.get("rope_parameters") is not None:
        raise ConfigError(
            "config.json: rope_parameters, which transformers writes for this family, is not supported: use the "
            "config.json of the release, which has rope_theta for each layer"
        )
    # transformers saves the modules' kinds under separate keys.
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(values.get(f"mtp_{key}"), list) and len(_listed(values, key, str, layers, modules)) == layers:
            values = {**values, key: [*values[key], *values[f"mtp_{key}"]]}
        values = {name: value for name, value in values.items() if name != f"mtp_{key}"}
    types = _listed(values, "layer_types", str, layers, modules)
    if not types or (modules and len(types) == layers):
        raise ConfigError(f"config.json: layer_types must list the types of {layers} layers and {modules} MTP modules")
    if len(set(types[layers:])) > 1:
        raise ConfigError(f"config.json: MTP modules of different types, {types[layers:]}, are not supported")
    made: dict[str, Any] = {"layer_types": types[:layers]}
    if modules:
        made["mtp_layer_type"] = types[layers]
    made["rope_parameters"] = _rope_by_type(values, types, layers, modules)
    if not all(_listed(values, "use_rope_layers", bool, layers, modules)):
        raise ConfigError("config.json: use_rope_layers with false entries (no rotary embedding) is not supported")
    made["mlp_layer_types"] = _feed_forward_types(values, layers)
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        limits = [entry or 0.0 for entry in _listed(values, key, (int, float, type(None)), layers, modules)]
        if any(limits[layers:]):
            raise ConfigError(f"config.json: {key} with bounds for MTP modules is not supported")
        made[key] = limits[:layers]
    # Read the settings that differ in layers with a window.
    other = reader.section("attention_other_setting")
    other.require("attention_type", "sliding_attention")
    other.require("head_dim", values.get("head_dim"))
    made["swa_num_attention_heads"] = other.get("num_attention_heads")
    made["swa_num_key_value_heads"] = other.get("num_attention_groups")
    made["add_swa_attention_sink_bias"] = False
    unknown = other.values.keys() - other.seen - {"true_head_dim"}
    if unknown:
        raise ConfigError(f"config.json: attention_other_setting with {', '.join(sorted(unknown))} is not supported")
    return {key: value for key, value in values.items() if key not in TRANSLATED} | made


def _listed(values: dict[str, Any], key: str, kind: type | tuple[type, ...], layers: int, modules: int) -> list[Any]:
    """Reads one entry per layer and module. A single value applies to all. Without the key, the list is empty."""
    value = values.get(key)
    if value is None or value == []:
        return []
    value = value if isinstance(value, list) else [value] * (layers + modules)
    if len(value) not in (layers, layers + modules) or not all(isinstance(entry, kind) for entry in value):
        raise ConfigError(
            f"config.json: {key} must have entries for {layers} layers and {modules} MTP modules, got {value!r}"
        )
    return value


def _rope_by_type(values: dict[str, Any], types: list[str], layers: int, modules: int) -> dict[str, Any]:
    """Reads the rotary base and rotated share of each layer, and the scaling for the types in `yarn_only_types`."""
    kinds, made = ("full_attention", "sliding_attention"), {}
    scaling, scaled = values.get("rope_scaling") or {}, values.get("yarn_only_types") or kinds
    for kind in kinds:
        section = made[kind] = dict(scaling) if kind in scaled else {}
        for name, key in (("rope_theta", "rope_theta"), ("partial_rotary_factor", "partial_rotary_factors")):
            entries = _listed(values, key, (int, float), layers, modules)
            own = {entry for entry, of in zip(entries, types, strict=False) if of == kind}
            if len(own) > 1:
                raise ConfigError(f"config.json: layers of type {kind} must share one {name}, but have {sorted(own)}")
            if own:
                section[name] = own.pop()
    return made


def _feed_forward_types(values: dict[str, Any], layers: int) -> list[str]:
    """Reads which layers have experts, by index or by type. By default, all layers except the first three have them."""
    sparse = values.get("moe_layers_enum")
    if sparse is None:
        return values.get("mlp_layer_types") or ["dense" if layer < 3 else "sparse" for layer in range(layers)]
    sparse = sparse.split(",") if isinstance(sparse, str) else sparse
    if not isinstance(sparse, list) or not all(str(layer).strip().isdigit() for layer in sparse):
        raise ConfigError(f"config.json: moe_layers_enum is {sparse!r}, not a list of layer numbers")
    numbers = {int(layer) for layer in sparse}
    if any(layer >= layers for layer in numbers):
        raise ConfigError("config.json: moe_layers_enum with MTP modules is not supported")
    return ["sparse" if layer in numbers else "dense" for layer in range(layers)]
