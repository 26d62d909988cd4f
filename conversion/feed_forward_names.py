"""Maps the tensor names of feed-forward layers, both dense layers and mixtures of experts.

Axes in comments and names: D model width, F inner width of a feed-forward layer, E experts.
"""

from collections.abc import Callable

from conversion.families import Layout
from conversion.tensor_slice import ALL, ParamSpec, TensorSlice, copied, gate_up, linear, tensor_slice
from mtpjax.models.config import ModelConfig


def dense_names(config: ModelConfig, prefix: str) -> dict[str, ParamSpec]:
    """Maps a dense SwiGLU layer."""
    D, F = config.hidden_size, config.intermediate_size
    return {"gate_up": gate_up(f"{prefix}mlp.", D, F), "down": linear(f"{prefix}mlp.down_proj.weight", F, D)}


def expert_names(config: ModelConfig, prefix: str, layout: Layout, has: Callable[[str], bool]) -> dict[str, ParamSpec]:
    """Maps the router, the routed experts (`gate_up [E, D, 2, F]` and `down [E, F, D]`) and the shared experts."""
    D, E, F = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    within = f"{prefix}{layout.experts}."
    specs = {"router": linear(f"{within}{layout.router}.weight", D, E)}
    if config.router_correction_bias:
        name = f"{within}{layout.correction_bias}"
        specs["correction_bias"] = copied(name, E)
        if layout.has_bias_row:
            specs["correction_bias"] = ParamSpec((E,), (tensor_slice(name, (1, E), (ALL,), select=(0,)),))
    if config.expert_bias:
        specs["router_bias"] = copied(f"{within}{layout.router}.bias", E)
        specs |= _interleaved_experts(f"{within}experts.", E, D, F)
    else:
        up, down = _routed_experts(within, layout, has, (E, D, F))
        specs["gate_up"] = ParamSpec((E, D, 2, F), tuple(up), in_axis=-3)
        specs["down"] = ParamSpec((E, F, D), tuple(down), in_axis=-2)
    # The shared expert processes every token. Qwen multiplies its output by a gate.
    if config.shared_width:
        name = f"{prefix}{'mlp.shared_expert' if config.shared_expert_gate else layout.shared_experts}."
        specs["shared/gate_up"] = gate_up(name, D, config.shared_width)
        specs["shared/down"] = linear(f"{name}down_proj.weight", config.shared_width, D)
    if config.shared_expert_gate:
        specs["shared_gate"] = linear(f"{within}shared_expert_gate.weight", D, 1)
    return specs


def _routed_experts(
    within: str, layout: Layout, has: Callable[[str], bool], sizes: tuple[int, int, int]
) -> tuple[list[TensorSlice], list[TensorSlice]]:
    """Returns the slices of the routed experts for gate and up, and those for down. `sizes` is (E, D, F)."""
    E, D, F = sizes
    # Step-3.5 stacks the experts of each matrix, with gate and up `[E, F, D]` and down `[E, D, F]`.
    if layout.stacks_matrices:
        matrices = enumerate(f"{within}{name}_proj.weight" for name in ("gate", "up"))
        up = [_stacked(name, (E, F, D), (ALL, place, ALL), axes=(1, 0)) for place, name in matrices]
        return [*up[0], *up[1]], _stacked(f"{within}down_proj.weight", (E, D, F), axes=(1, 0))
    # Other families have stacked tensors `[E, 2F, D]` (the gate's rows first) and `[E, D, F]`, or tensors per expert.
    if has(f"{within}experts.gate_up_proj"):
        how = {"split": (1, 2, F, D), "axes": (2, 0, 1)}
        up = _stacked(f"{within}experts.gate_up_proj", (E, 2 * F, D), (ALL,) * 3, **how)
        return up, _stacked(f"{within}experts.down_proj", (E, D, F), axes=(1, 0))
    up = [
        tensor_slice(f"{within}experts.{e}.{name}_proj.weight", (F, D), (e, ALL, place, ALL), axes=(1, 0))
        for e in range(E)
        for place, name in enumerate(("gate", "up"))
    ]
    down = [tensor_slice(f"{within}experts.{e}.down_proj.weight", (D, F), (e, ALL, ALL), axes=(1, 0)) for e in range(E)]
    return up, down


def _stacked(name: str, shape: tuple[int, int, int], target=(ALL, ALL), **how) -> list[TensorSlice]:
    """Lists the slices of a tensor `[E, ...]`, one per expert. `how` contains `tensor_slice`'s `split` and `axes`."""
    experts = range(shape[0])
    return [tensor_slice(name, shape, (e, *target), rows=(e, e + 1), select=(0,), **how) for e in experts]


def _interleaved_experts(within: str, E: int, D: int, F: int) -> dict[str, ParamSpec]:
    """Maps gpt-oss's experts `[E, D, 2F]` and `[E, F, D]` with biases, where gate and up columns alternate."""
    how = {"split": (1, D, F, 2), "axes": (0, 2, 1)}
    up = _stacked(f"{within}gate_up_proj", (E, D, 2 * F), (ALL,) * 3, **how)
    bias = tensor_slice(f"{within}gate_up_proj_bias", (E, 2 * F), (ALL,) * 3, split=(E, F, 2), axes=(0, 2, 1))
    return {
        "gate_up": ParamSpec((E, D, 2, F), tuple(up), in_axis=-3),
        "gate_up_bias": ParamSpec((E, 2, F), (bias,)),
        "down": ParamSpec((E, F, D), tuple(_stacked(f"{within}down_proj", (E, F, D))), in_axis=-2),
        "down_bias": copied(f"{within}down_proj_bias", E, D),
    }
