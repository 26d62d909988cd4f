"""Splits parameters and states over a mesh: parameter path -> axis names, and axis name -> mesh axis."""

import itertools
import re
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtpjax.models.attention_kinds import ATTENTION_KINDS

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


def mesh_of(array: jax.Array) -> Mesh | None:
    """Returns the mesh that an array is laid out over, or None if it is on one device."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    return sharding.mesh if sharding.mesh.size > 1 else None


def shard_state(state, mesh: Mesh):
    """Lays a decoding state, or new rows, out over a mesh.

    Rows are split over `data` and the heads of the caches over `tensor`; latents are replicated over `tensor`. The
    depth policy, which the whole batch shares, is replicated.

    Args:
        state: a `DecodeState` or `NewRows`.
        mesh: the mesh.

    Returns:
        The same pytree with its arrays moved.
    """

    def place(path, leaf):
        first, last = (getattr(part, "key", getattr(part, "name", "")) for part in (path[0], path[-1]))
        axes = CACHE_AXES.get(last, () if first in ("policy", "drafting_disabled") else ("batch",))
        return jax.device_put(leaf, NamedSharding(mesh, spec(axes, leaf.shape, mesh.shape)))

    return jax.tree_util.tree_map_with_path(place, state)
