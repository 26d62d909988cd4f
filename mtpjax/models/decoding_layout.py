"""Lays out weights, caches and rows on a mesh for decoding, and runs each call in a single `shard_map`."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mtpjax.models.attention_kinds import ATTENTION_KINDS
from mtpjax.models.config import ModelConfig
from mtpjax.models.parallel import axes_that_divide, decoding_layout
from mtpjax.models.quantized import is_scaled
from mtpjax.models.sharding import CACHE_AXES, MESH_AXES, mesh_text, param_axes, param_sharding, path_name

MIN_FP8_BLOCK = 16  # smallest block of fp8 weights that the kernels support
AXES = ("data", "expert", "tensor")  # axes that decoding shards over; arrays are replicated along the others


def check_divisible(config: ModelConfig, sizes: Mapping[str, int], num_slots: int | None = None) -> None:
    """Checks that the axes of a mesh divide the model sizes that they split.

    Args:
        num_slots: number of expert slots, copies included; None: no copies.

    Raises:
        ValueError: an axis does not divide its size. The message contains both.
    """
    for problem in find_copies(config, sizes, num_slots):
        raise ValueError(f"{problem}: choose a different mesh, or set allow_copies to replicate it on these devices")


def refuse_uneven_layers(config: ModelConfig, sizes: Mapping[str, int]) -> None:
    """Checks that the heads of all layers can be split in the same way.

    Key/value heads are not copied in models with sliding attention, so `tensor` must divide the number of these heads.

    Raises:
        ValueError: `tensor` does not divide a number of heads. The message contains both.
    """
    tensor = sizes.get("tensor", 1)
    for name in ("num_key_value_heads", "sliding_num_key_value_heads"):
        heads = getattr(config, name)
        if config.has_sliding_layers and heads % tensor:
            raise ValueError(
                f"tensor={tensor} of the mesh does not divide {name} {heads}, and key/value heads of a model with"
                " sliding attention are not copied"
            )


def find_copies(config: ModelConfig, sizes: Mapping[str, int], num_slots: int | None = None) -> list[str]:
    """Lists the model sizes that the mesh axes do not divide, so that devices hold copies along these axes.

    Args:
        num_slots: number of expert slots, copies included; None: no copies.
    """
    kinds = {*config.trunk_kinds, *([config.mtp_kind] if config.num_mtp_modules else [])}
    attentions = {kind.attention for kind in kinds}
    # Group the sizes by the axes that split them: heads and columns over `tensor`, experts over `data` and `expert`.
    over_tensor, over_experts = {"vocab_size": config.vocab_size}, {}
    fitted, records = (
        fit_config(config, sizes),
        (ATTENTION_KINDS[kind] for kind in ATTENTION_KINDS if kind in attentions),
    )
    over_tensor |= {name: getattr(fitted, name) for record in records for name in record.split_sizes}
    if not all(kind.is_moe for kind in kinds):
        over_tensor["intermediate_size"] = config.intermediate_size
    if any(kind.is_moe for kind in kinds):
        over_tensor["moe_intermediate_size"] = config.moe_intermediate_size
        if num_slots is None or num_slots == config.n_routed_experts:
            over_experts["n_routed_experts"] = config.n_routed_experts
        else:
            over_experts["the number of expert slots,"] = num_slots
        if config.shared_width:
            over_tensor["the width of the shared experts,"] = config.shared_width
    # Report each size that the product of its axes does not divide.
    return [
        f"{mesh_text({axis: sizes.get(axis, 1) for axis in axes})} of the mesh does not divide {name} {size}"
        for axes, split in ((("tensor",), over_tensor), (("data", "expert"), over_experts))
        for name, size in split.items()
        if size % math.prod(sizes.get(axis, 1) for axis in axes)
    ]


def fit_config(config: ModelConfig, sizes: Mapping[str, int]) -> ModelConfig:
    """Sets one key/value head per `tensor` device if the config has fewer heads and can copy each equally often."""
    heads, parts = config.num_key_value_heads, sizes.get("tensor", 1)
    has_copies = config.attention == "grouped" and not config.has_sliding_layers and heads < parts
    fits = has_copies and parts % heads == 0 and config.num_attention_heads % parts == 0
    return dataclasses.replace(config, num_key_value_heads=parts) if fits else config


def copy_key_value_heads(params: dict, config: ModelConfig, num_heads: int) -> dict:
    """Copies each key/value head and divides its query heads among the copies. Attention results do not change.

    Args:
        num_heads: new number of key/value heads, a multiple of the old number.

    Returns:
        The parameters of a model with `num_heads` key/value heads.
    """
    group_size = config.num_attention_heads // config.num_key_value_heads
    copies = num_heads // config.num_key_value_heads

    def copy(path, leaf):
        # [..., K, G + 2 (+ G gates), H]; scales of fp8 values have the same axes.
        if not re.search(r"attention/qkv(_bias)?(/values|/scales)?$", path_name(path)):
            return leaf
        queries, key, value, gates = jnp.split(leaf, [group_size, group_size + 1, group_size + 2], axis=-2)
        queries, gates = (
            part.reshape(*part.shape[:-3], num_heads, part.shape[-2] // copies, part.shape[-1])
            for part in (queries, gates)
        )
        key, value = (jnp.repeat(part, copies, axis=-3) for part in (key, value))
        return jnp.concatenate([queries, key, value, gates], axis=-2)

    return jax.tree_util.tree_map_with_path(copy, params)


def run_on_shards(
    function: Callable[..., Any],
    config: ModelConfig,
    params: dict,
    draft_params: Any,
    state: Any,
    *rest: Any,
    has_row_outputs: bool = False,
) -> Any:
    """Calls `function(params, draft_params, state, *rest)` in one `shard_map` over the current mesh.

    Without a mesh, or if already inside a `shard_map`, calls the function directly.

    Every device gets its shard of weights, rows and caches, as `mtpjax.models.parallel` describes. Weights that
    training sharded over `fsdp` are gathered once, before the call.

    Args:
        function: returns the new state.
        draft_params: the drafter's parameters.
        state: a decoding state; its first axes are rows.
        *rest: arrays that every device gets in full.
        has_row_outputs: `function` returns `(state, arrays)`. The arrays have rows as their first axis, and are the
            same on all devices that hold the same rows.

    Returns:
        The new state, sharded like the old one, and with `has_row_outputs` also the arrays for all rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or any(kind is AxisType.Manual for kind in mesh.axis_types):
        return function(params, draft_params, state, *rest)
    sizes = {name: mesh.shape[name] for name in AXES if name in mesh.shape}
    refuse_uneven_layers(config, sizes)
    params, draft_params = (align_blocks(tree, config, sizes) for tree in (params, draft_params))
    specs = [part_specs(tree, config, sizes) for tree in (params, draft_params)]
    specs.append(part_specs(state, config, sizes, is_state=True))
    whole = (PartitionSpec(),) * len(rest)
    rows = PartitionSpec("data" if "data" in sizes else None)
    out_specs = (specs[2], rows) if has_row_outputs else specs[2]

    def on_shard(*arguments: Any) -> Any:
        with decoding_layout(True):
            return function(*arguments)

    in_parts = jax.shard_map(on_shard, in_specs=(*specs, *whole), out_specs=out_specs, check_vma=False)
    return in_parts(params, draft_params, state, *rest)


def part_specs(tree: Any, config: ModelConfig, sizes: Mapping[str, int], *, is_state: bool = False) -> Any:
    """Returns the partition spec of every array in parameters or a state. No head, expert or column is split.

    Args:
        is_state: the tree is a `DecodeState`.

    Returns:
        A tree of `PartitionSpec`s with the same structure. A size that its axis does not divide is not split.
    """

    def of(path, leaf):
        name = path_name(path)
        return _part_spec(name, leaf.shape, _state_axes(name) if is_state else param_axes(name), config, sizes)

    return jax.tree_util.tree_map_with_path(of, tree)


def choose_layout(
    config: ModelConfig, mesh: Mesh, layout: Literal["decoding", "training"], *, allow_copies: bool = False
) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """Returns a function that maps a parameter's path and shape to its sharding over the mesh.

    Args:
        layout: "decoding" (see `part_specs`) or "training" (see `mtpjax.models.sharding.param_spec`).
        allow_copies: replicate arrays along an axis that does not divide their size; "training" always does.

    Raises:
        ValueError: an axis of the mesh does not divide a size of the model.
    """
    if layout == "training":
        return lambda path, shape: param_sharding(path, shape, mesh)
    refuse_uneven_layers(config, mesh.shape)
    if not allow_copies:
        check_divisible(config, mesh.shape)
    return lambda path, shape: NamedSharding(mesh, param_part_spec(path, shape, config, mesh.shape))


def param_part_spec(path: str, shape: tuple[int, ...], config: ModelConfig, sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns the partition spec of one parameter, as `part_specs` does."""
    return _part_spec(path, shape, param_axes(path), config, sizes)


def _state_axes(path: str) -> tuple[str | None, ...]:
    if path.split("/")[0] in ("policy", "drafting_disabled"):
        return ()  # shared by all rows
    return CACHE_AXES.get(path.rsplit("/", 1)[-1], ("batch",))


def _part_spec(path: str, shape, axes: tuple[str | None, ...], config: ModelConfig, sizes) -> PartitionSpec:
    units, names = _units(path, config), []
    for axis, size in zip(axes, shape, strict=False):
        if axis == "expert":
            names.append(axes_that_divide(size, lambda name: sizes.get(name, 1)) or None)
            continue
        name = MESH_AXES.get(axis or "", "")
        parts = sizes.get(name, 1)
        # Split only between whole units, such as heads. Scales of fp8 blocks that cross a shard boundary are not split
        # until `align_blocks` has run.
        is_split = parts > 1 and size % parts == 0 and (axis == "batch" or units.get(axis or "", 1) % parts == 0)
        names.append(name if is_split else None)
    # Use the shortest form, as jit's outputs do: P("data") and P("data", None) are equivalent but compile separately.
    while names and names[-1] is None:
        names.pop()
    return PartitionSpec(*names)


def _units(path: str, config: ModelConfig) -> dict[str, int]:
    """Returns the number of indivisible units along each array axis, such as heads or columns."""
    is_delta = "delta/" in path or path.endswith(("/state", "/conv"))
    of_attention = config.num_key_value_heads if config.attention == "grouped" else config.num_attention_heads
    ffn = config.intermediate_size
    if "experts/" in path:
        ffn = config.shared_width if "/shared/" in path else config.moe_intermediate_size
    return {
        "vocab": config.vocab_size,
        "heads": config.linear_num_key_heads if is_delta else of_attention,
        "ffn": ffn,
    }


def align_blocks(tree: Any, config: ModelConfig, sizes: Mapping[str, int]) -> Any:
    """Splits fp8 blocks that would span two devices into smaller blocks with repeated scales.

    Returns:
        The parameters. A weight in which no block of at least 16 inputs fits is dequantised to bfloat16.
    """

    def align(path, leaf):
        if not is_scaled(leaf):
            return leaf
        name = path_name(path)
        spec = param_part_spec(name, leaf.shape, config, sizes)
        axis = leaf.axis % leaf.values.ndim
        parts = sizes.get(spec[axis], 1) if axis < len(spec) and spec[axis] else 1
        own = leaf.values.shape[axis] // parts
        if name.endswith("experts/gate_up"):
            # The expert kernels need the same block size for gate, up and down, so use the block size of `down`.
            parts = sizes.get("tensor", 1)
            parts = parts if config.moe_intermediate_size % parts == 0 else 1
            own = config.moe_intermediate_size // parts
        if parts == 1 or own % leaf.block == 0:
            return leaf
        block = math.gcd(own, leaf.block)
        return leaf.in_blocks_of(block) if block >= MIN_FP8_BLOCK else leaf.astype(jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(align, tree, is_leaf=is_scaled)


def constrain_state(state: Any, config: ModelConfig, mesh: Mesh) -> Any:
    """Shards a decoding state over a mesh inside a jitted function, so that each device creates only its shard.

    Rows are sharded over `data`, and the heads of the caches over `tensor`. Latents are replicated over `tensor`, and
    the depth policy, which the whole batch shares, over all devices.

    Args:
        state: a `DecodeState`; `data` must divide its number of rows.
    """
    specs = part_specs(state, config, mesh.shape, is_state=True)
    return jax.tree.map(
        lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec)), state, specs
    )
