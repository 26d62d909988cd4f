"""Splits parameters and states over a mesh: parameter path -> axis names, and axis name -> mesh axis."""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mtpjax.models.attention_kinds import ATTENTION_KINDS
from mtpjax.models.config import ModelConfig
from mtpjax.models.layers.experts import MIN_FP8_BLOCK
from mtpjax.models.parallel import EXPERT_AXES, divides
from mtpjax.models.quantized import is_scaled

# (pattern, axis names): the first pattern found in a parameter's path counts. Parameters without a pattern (norms,
# routers) are replicated.
PARAMETER_AXES = (
    (r"embedding(_\d+)?$", ("vocab", "embed")),
    (r"(^|/|mtp_)head(_\d+)?$", ("embed", "vocab")),
    (r"project$", ("embed", None)),
    *itertools.chain.from_iterable(kind.param_axes for kind in ATTENTION_KINDS.values()),
    (r"(dense|shared)/gate_up$", ("embed", None, "ffn")),
    (r"(dense|shared)/down$", ("ffn", "embed")),
    (r"experts/gate_up$", ("expert", "embed", None, "ffn")),
    (r"experts/down$", ("expert", "ffn", "embed")),
)

CACHE_AXES = {name: axes for kind in ATTENTION_KINDS.values() for name, axes in kind.cache_axes.items()}

MESH_AXES = {
    "batch": "data",
    "vocab": "tensor",
    "heads": "tensor",
    "ffn": "tensor",
    "expert": "expert",
    "embed": "fsdp",
}


def spec(axes: tuple[str | None, ...], shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """Splits an array over a mesh.

    Args:
        axes: axis names of the array; missing ones are not split.
        shape: its shape.
        sizes: sizes of the mesh axes by name.

    Returns:
        The partition spec. An array axis that its mesh axis does not divide is not split.
    """
    names = []
    for axis, size in zip(axes, shape, strict=False):
        name = MESH_AXES.get(axis or "", "")
        names.append(name if name in sizes and size % sizes[name] == 0 else None)
    return PartitionSpec(*names)


def param_spec(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """Splits one parameter over a mesh.

    Args:
        path: its path, such as `trunk/layer_3/attention/qkv`. Values and scales of a `BlockScaled` weight are split as
            the weight is. Stacked layers (`trunk/group_...`) have one more axis in front.
        shape: its shape.
        sizes: sizes of the mesh axes by name.

    Returns:
        The partition spec.
    """
    path = re.sub("/(values|scales)$", "", path)
    axes = next((axes for pattern, axes in PARAMETER_AXES if re.search(pattern, path)), ())
    if path.startswith("trunk/group_"):
        axes = (None, *axes)
    return spec(axes, shape, sizes)


def param_sharding(path: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Returns the sharding of one parameter over `mesh`; arguments as in `param_spec`."""
    return NamedSharding(mesh, param_spec(path, shape, mesh.shape))


def param_shardings(params: dict, mesh: Mesh) -> dict:
    """Returns the sharding of every parameter over `mesh`, in the structure of `params`."""

    def of(path, leaf):
        name = "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        return param_sharding(name, leaf.shape, mesh)

    return jax.tree_util.tree_map_with_path(of, params)


def shard_params(params: dict, mesh: Mesh) -> dict:
    """Moves parameters to their shardings over `mesh`. Arrays that already have theirs are not copied."""
    return jax.tree.map(jax.device_put, params, param_shardings(params, mesh))


def run_in_parts(
    function: Callable[..., Any], config: ModelConfig, params: dict, draft_params: Any, state: Any, *rest: Any
) -> Any:
    """Calls `function(params, draft_params, state, *rest)` in one `shard_map` over the mesh that is set.

    Without a mesh, and inside of another `shard_map`, it is a plain call.

    Every device gets its part of weights, rows and caches, as `mtpjax.models.parallel` describes. Training's axis
    `fsdp` is gathered once, before the call.

    Args:
        function: returns the new state.
        config: the model's config.
        params: model parameters.
        draft_params: the drafter's parameters.
        state: a decoding state; its first axes are rows.
        *rest: arrays that every device gets whole.

    Returns:
        The new state, laid out as the old one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or any(kind is AxisType.Manual for kind in mesh.axis_types):
        return function(params, draft_params, state, *rest)
    # Rows that `data` does not divide are copied: the axis is left to XLA then, which knows that they are.
    manual = {name for name in mesh.axis_names if name != "data" or state.length.shape[0] % mesh.shape[name] == 0}
    sizes = {name: mesh.shape[name] for name in manual if name in ("data", "expert", "tensor")}
    params, draft_params = (align_blocks(tree, config, sizes) for tree in (params, draft_params))
    specs = [part_specs(tree, config, sizes) for tree in (params, draft_params)]
    specs.append(part_specs(state, config, sizes, is_state=True))
    whole = (PartitionSpec(),) * len(rest)
    in_parts = jax.shard_map(
        function, in_specs=(*specs, *whole), out_specs=specs[2], axis_names=manual, check_vma=False
    )
    return in_parts(params, draft_params, state, *rest)


def shard_for_decoding(params: dict, config: ModelConfig, mesh: Mesh) -> dict:
    """Moves parameters to the parts in which `run_in_parts` wants them.

    Args:
        params: model parameters.
        config: the model's config.
        mesh: the mesh.

    Returns:
        The parameters. fp8 blocks may be smaller, as in `align_blocks`.
    """
    params = align_blocks(params, config, mesh.shape)
    specs = part_specs(params, config, mesh.shape)
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, specs)


def part_specs(tree: Any, config: ModelConfig, sizes: Mapping[str, int], *, is_state: bool = False) -> Any:
    """Returns the partition spec of every array of parameters or of a state, by whole heads, experts and columns.

    Args:
        tree: parameters, the drafter's parameters, or a `DecodeState`.
        config: the model's config.
        sizes: sizes of the mesh axes by name.
        is_state: the tree is a `DecodeState`.

    Returns:
        `PartitionSpec`s in the structure of the tree. What an axis does not divide is not split.
    """

    def of(path, leaf):
        name = _names(path)
        return _part_spec(name, leaf, _state_axes(name) if is_state else _param_axes(name), config, sizes)

    return jax.tree_util.tree_map_with_path(of, tree)


def _names(path) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def _param_axes(path: str) -> tuple[str | None, ...]:
    path = re.sub("/(values|scales)$", "", path)
    return next((axes for pattern, axes in PARAMETER_AXES if re.search(pattern, path)), ())


def _state_axes(path: str) -> tuple[str | None, ...]:
    if path.split("/")[0] in ("policy", "drafting_disabled"):
        return ()  # all rows share them
    return CACHE_AXES.get(path.rsplit("/", 1)[-1], ("batch",))


def _part_spec(path: str, leaf, axes: tuple[str | None, ...], config: ModelConfig, sizes) -> PartitionSpec:
    units, names = _units(path, config), []
    for axis in axes[: leaf.ndim]:
        if axis == "expert":
            candidates = [{name: sizes.get(name, 1) for name in over} for over in EXPERT_AXES]
            chosen = next((over for over in candidates if divides(units["expert"], over)), {})
            names.append(tuple(chosen) or None)
            continue
        name = MESH_AXES.get(axis or "", "")
        size = sizes.get(name, 1)
        is_split = size > 1 and (axis == "batch" or units.get(axis or "", 1) % size == 0)
        names.append(name if is_split else None)
    return PartitionSpec(*names)


def _units(path: str, config: ModelConfig) -> dict[str, int]:
    """Returns how many wholes each axis of an array has: heads of one kind, experts, columns, tokens."""
    is_delta = "delta/" in path or path.endswith(("/state", "/conv"))
    of_attention = config.num_key_value_heads if config.attention == "grouped" else config.num_attention_heads
    ffn = config.intermediate_size
    if "experts/" in path:
        ffn = config.shared_width if "/shared/" in path else config.moe_intermediate_size
    return {
        "vocab": config.vocab_size,
        "heads": config.linear_num_key_heads if is_delta else of_attention,
        "ffn": ffn,
        "expert": config.n_routed_experts,
    }


def align_blocks(tree: Any, config: ModelConfig, sizes: Mapping[str, int]) -> Any:
    """Cuts fp8 blocks that the border between two devices would cross into smaller ones, with repeated scales.

    Args:
        tree: parameters.
        config: the model's config.
        sizes: sizes of the mesh axes by name.

    Returns:
        The parameters. Where no block of at least 16 inputs fits, the weight is dequantised to bfloat16.
    """

    def align(path, leaf):
        if not is_scaled(leaf):
            return leaf
        name = _names(path)
        spec = _part_spec(name, leaf.values, _param_axes(name), config, sizes)
        axis = leaf.axis % leaf.values.ndim
        parts = sizes.get(spec[axis], 1) if axis < len(spec) and spec[axis] else 1
        own = leaf.values.shape[axis] // parts
        if name.endswith("experts/gate_up"):
            # The kernels take gate, up and down of experts in blocks of one size: that of `down`.
            parts = sizes.get("tensor", 1)
            parts = parts if config.moe_intermediate_size % parts == 0 else 1
            own = config.moe_intermediate_size // parts
        if parts == 1 or own % leaf.block == 0:
            return leaf
        block = math.gcd(own, leaf.block)
        return leaf.in_blocks_of(block) if block >= MIN_FP8_BLOCK else leaf.astype(jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(align, tree, is_leaf=is_scaled)


def mesh_of(array: jax.Array) -> Mesh | None:
    """Returns the mesh that an array is laid out over, or None if it is on one device."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    return sharding.mesh if sharding.mesh.size > 1 else None


def shard_state(state: Any, config: ModelConfig, mesh: Mesh) -> Any:
    """Lays a decoding state out over a mesh: rows over `data`, and the heads of the caches over `tensor`.

    Latents are replicated over `tensor`, and the depth policy, which the whole batch shares, everywhere.

    Args:
        state: a `DecodeState`.
        config: the model's config.
        mesh: the mesh.

    Returns:
        The state with its arrays moved.
    """
    sizes = dict(mesh.shape)
    if state.length.shape[0] % sizes.get("data", 1):
        del sizes["data"]
    specs = part_specs(state, config, sizes, is_state=True)
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), state, specs)
