"""Names of the tensors of one decoder layer: norms, attention, and dense or expert feed-forward layers.

Axes in comments and names: D model width, F inner width of a feed-forward layer, E experts.
"""

from collections.abc import Callable

from conversion.attention_names import ATTENTION_NAMES
from conversion.families import Layout
from conversion.tensor_slice import ALL, ParamSpec, copied, gate_up, linear, tensor_slice
from mtpjax.models.attention_kinds import ATTENTION_KINDS
from mtpjax.models.config import LayerKind, ModelConfig


def prefixed(prefix: str, specs: dict[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Puts a prefix in front of parameter names.

    Args:
        prefix: the prefix, such as "trunk/layer_0/".
        specs: specs by parameter name.

    Returns:
        The specs by their longer names.
    """
    return {f"{prefix}{path}": spec for path, spec in specs.items()}


def decoder_layer(
    config: ModelConfig, kind: LayerKind, prefix: str, layout: Layout, has: Callable[[str], bool]
) -> dict[str, ParamSpec]:
    """Lists the parameters of a decoder layer.

    Args:
        config: the model's configuration.
        kind: attention and feed-forward kind of the layer.
        prefix: what the layer's tensor names begin with, such as "model.layers.0.".
        layout: how the family names tensors.
        has: returns whether the checkpoint contains a tensor.

    Returns:
        The specs by parameter name within the layer.
    """
    D = config.hidden_size
    specs = {
        "norm_attention/scale": copied(f"{prefix}input_layernorm.weight", D),
        "norm_feed_forward/scale": copied(f"{prefix}post_attention_layernorm.weight", D),
    }
    attention = ATTENTION_NAMES[kind.attention](config, kind, prefix, layout)
    specs |= prefixed(f"{ATTENTION_KINDS[kind.attention].scope}/", attention)
    # Feed-forward: experts, or one dense SwiGLU.
    if kind.is_moe:
        return specs | prefixed("experts/", _experts(config, f"{prefix}mlp.", layout, has))
    F = config.intermediate_size
    specs["dense/gate_up"] = gate_up(f"{prefix}mlp.", D, F)
    specs["dense/down"] = linear(f"{prefix}mlp.down_proj.weight", F, D)
    return specs


def _experts(config: ModelConfig, prefix: str, layout: Layout, has: Callable[[str], bool]) -> dict[str, ParamSpec]:
    """Mixture of experts: a router, routed experts `gate_up [E, D, 2, F]` and `down [E, F, D]`, shared experts."""
    D, E, F = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    specs = {"router": linear(f"{prefix}{layout.router}.weight", D, E)}
    if config.router_correction_bias:
        name = f"{prefix}{layout.correction_bias}"
        specs["correction_bias"] = copied(name, E)
        if layout.has_bias_row:
            specs["correction_bias"] = ParamSpec((E,), (tensor_slice(name, (1, E), (ALL,), select=(0,)),))
    # Routed experts are one stacked tensor, `[E, 2F, D]` with the gate's rows first and `[E, D, F]`, or one per expert.
    if has(f"{prefix}experts.gate_up_proj"):
        name, shape = f"{prefix}experts.gate_up_proj", (E, 2 * F, D)
        up = [
            tensor_slice(
                name, shape, (e, ALL, ALL, ALL), rows=(e, e + 1), split=(1, 2, F, D), select=(0,), axes=(2, 0, 1)
            )
            for e in range(E)
        ]
        name, shape = f"{prefix}experts.down_proj", (E, D, F)
        down = [tensor_slice(name, shape, (e, ALL, ALL), rows=(e, e + 1), select=(0,), axes=(1, 0)) for e in range(E)]
    else:
        up = [
            tensor_slice(f"{prefix}experts.{e}.{name}_proj.weight", (F, D), (e, ALL, place, ALL), axes=(1, 0))
            for e in range(E)
            for place, name in enumerate(("gate", "up"))
        ]
        down = [
            tensor_slice(f"{prefix}experts.{e}.down_proj.weight", (D, F), (e, ALL, ALL), axes=(1, 0)) for e in range(E)
        ]
    specs["gate_up"] = ParamSpec((E, D, 2, F), tuple(up), in_axis=-3)
    specs["down"] = ParamSpec((E, F, D), tuple(down), in_axis=-2)
    # The shared expert sees every token; Qwen weighs it by a gate.
    if config.shared_width:
        name = "shared_expert" if config.shared_expert_gate else layout.shared_experts
        specs["shared/gate_up"] = gate_up(f"{prefix}{name}.", D, config.shared_width)
        specs["shared/down"] = linear(f"{prefix}{name}.down_proj.weight", config.shared_width, D)
    if config.shared_expert_gate:
        specs["shared_gate"] = linear(f"{prefix}shared_expert_gate.weight", D, 1)
    return specs
