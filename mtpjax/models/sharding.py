"""Splits parameters and states over a mesh by mapping parameter paths to axis names and axis names to mesh axes."""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from mtpjax.models.attention_kinds import ATTENTION_KINDS
from mtpjax.models.config import ModelConfig
from mtpjax.models.parallel import PARAMETER_SHARDS, axes_that_divide, gather_axis
from mtpjax.models.quantized import is_scaled

# (pattern, axis names) pairs. The first pattern that matches a parameter's path applies; parameters that match no
# pattern (norms, routers) are replicated.
PARAMETER_AXES = (
    (r"embedding(_\d+)?$", ("vocab", "embed")),
    (r"(^|/|mtp_)head(_\d+)?$", ("embed", "vocab")),
    (r"project$", ("embed", None)),
    *itertools.chain.from_iterable(kind.param_axes for kind in ATTENTION_KINDS.values()),
    (r"(dense|shared)/gate_up$", ("embed", None, "ffn")),
    (r"(dense|shared)/down$", ("ffn", "embed")),
    (r"experts/gate_up$", ("expert", "embed", None, "ffn")),
    (r"experts/down$", ("expert", "ffn", "embed")),
    (r"experts/gate_up_bias$", ("expert", None, "ffn")),
    (r"experts/down_bias$", ("expert", None)),
    # The other matrices of a separate drafter. They are gathered whole, so the split axis does not matter.
    (r"^drafter/(?!.*(scale|bias)(_\d+)?$)", ("embed",)),
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


def param_spec(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns one parameter's partition spec for training. Axes that their mesh axis does not divide are not split.

    Args:
        path: the parameter's path, such as `trunk/layer_3/attention/qkv`. Values and scales of a `BlockScaled` weight
            are split like the weight. Stacked layers (`trunk/group_...`) have an additional first axis.
    """
    axes = (None,) * path.startswith("trunk/group_") + param_axes(path)

    def split(axis: str | None, size: int) -> tuple[str, ...] | str | None:
        over = axes_that_divide(size, lambda name: sizes.get(name, 1), _mesh_axes(axis)) if axis else ()
        return over if len(over) > 1 else over[0] if over else None

    return PartitionSpec(*(split(axis, size) for axis, size in zip(axes, shape, strict=False)))


def _mesh_axes(axis: str) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes that split an array axis in training, in the order in which they are tried."""
    return PARAMETER_SHARDS if axis == "embed" else ((MESH_AXES[axis],),)


def param_axes(path: str) -> tuple[str | None, ...]:
    """Returns a parameter's axis names, without the axis of stacked layers; () for norms and routers."""
    path = re.sub("/(values|scales)$", "", path)
    return next((axes for pattern, axes in PARAMETER_AXES if re.search(pattern, path)), ())


def param_sharding(path: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Returns the sharding of one parameter over `mesh`; arguments as in `param_spec`."""
    return NamedSharding(mesh, param_spec(path, shape, mesh.shape))


def path_name(path: tuple[Any, ...]) -> str:
    """Returns the name of a leaf, such as `trunk/layer_3/attention/qkv`, from its path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def gather_layers(params: Any, config: ModelConfig) -> Any:
    """Joins the shards of layer parameters along their model-width axis, for training.

    Args:
        params: a tree whose paths end like a layer's parameter paths, without an axis of stacked layers.
    """

    def gather(path, leaf):
        axes = param_axes(path_name(path))
        if "embed" not in axes:
            return leaf
        axis = axes.index("embed")
        if not is_scaled(leaf):
            return gather_axis(leaf, axis, config.hidden_size)
        is_input = leaf.axis % leaf.ndim == axis
        num_scales = -(-config.hidden_size // leaf.block) if is_input else config.hidden_size
        values, scales = gather_axis(leaf.values, axis, config.hidden_size), gather_axis(leaf.scales, axis, num_scales)
        return leaf.replace(values=values, scales=scales)

    return jax.tree_util.tree_map_with_path(gather, params, is_leaf=is_scaled)


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Formats a mesh in the syntax of `--mesh`, such as "data=8,tensor=8", without axes of size 1.

    Returns:
        The text, or "one device" if all sizes are 1.
    """
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one device"


def num_shards(spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    """Returns the number of shards into which a mesh splits an array.

    Args:
        spec: the array's partition spec; an array axis may be split over several mesh axes.
    """
    named = ((names,) if isinstance(names, str) else names for names in spec if names)
    return math.prod(sizes[axis] for axes in named for axis in axes)


def param_shardings(params: dict, mesh: Mesh) -> dict:
    """Returns the sharding of every parameter over `mesh`, in a tree with the structure of `params`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: param_sharding(path_name(path), leaf.shape, mesh), params
    )


def shard_params(params: dict, mesh: Mesh) -> dict:
    """Moves parameters to their shardings over `mesh`. Arrays that already have the right sharding are not copied."""
    return jax.tree.map(jax.device_put, params, param_shardings(params, mesh))


def read_parts(
    shape: tuple[int, ...], sharding: Sharding, read: Callable[[tuple[tuple[int, int], ...]], np.ndarray]
) -> jax.Array:
    """Makes an array from the shards that this process's devices need, reading each shard only once.

    Args:
        read: reads a shard, given the `(begin, end)` of each axis.
    """
    cuts = {
        device: tuple(cut.indices(size)[:2] for cut, size in zip(index or (), shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }
    # The devices of a process usually hold neighbouring shards, which together fill a box. Read the box at once,
    # because files are read in whole rows, even if a shard needs only some columns.
    parts = sorted(set(cuts.values()))
    box = tuple(
        (min(begin), max(end)) for begin, end in (zip(*along, strict=True) for along in zip(*parts, strict=True))
    )
    volume = lambda part: math.prod(end - begin for begin, end in part)
    is_filled = sum(map(volume, parts)) == volume(box)
    whole = read(box) if is_filled else None
    shards = []
    for part in parts:
        if whole is None:
            array = read(part)
        else:
            array = whole[tuple(slice(b - first, e - first) for (b, e), (first, _) in zip(part, box, strict=True))]
        shards += [jax.device_put(array, device) for device, cut in cuts.items() if cut == part]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def mesh_of(array: jax.Array) -> Mesh | None:
    """Returns the mesh of an array, or None if it is on one device."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    return sharding.mesh if sharding.mesh.size > 1 else None


def platform_of(mesh: Mesh | None) -> str:
    """Returns JAX's name for the platform of the mesh or, without a mesh, the default platform: "cpu" or "gpu"."""
    return mesh.devices.flat[0].platform if mesh is not None else jax.default_backend()


def data_size(mesh: Mesh | None) -> int:
    """Returns the number of shards into which rows are split, which is the size of the mesh axis `data`."""
    return 1 if mesh is None else mesh.shape.get("data", 1)
