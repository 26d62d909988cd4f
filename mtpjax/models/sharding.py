"""Two tables: parameter path -> names of its axes, and axis name -> mesh axis."""

import re
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The first pattern found in a parameter's path decides; what no pattern knows (norms, routers) is replicated.
PARAMETER_AXES = (
    (r"embedding(_\d+)?$", ("vocab", "embed")),
    (r"(^|/|mtp_)head(_\d+)?$", ("embed", "vocab")),
    (r"project$", ("embed", None)),
    (r"attention/qkv$", ("embed", "heads", None, None)),
    (r"attention/qkv_bias$", ("heads", None, None)),
    (r"attention/(query|query_up)$", (None, "heads")),
    (r"attention/(query_down|latent_down)$", ("embed", None)),
    (r"attention/(key_up|value_up)$", ("heads", None, None)),
    (r"attention/output$", ("heads", "embed")),
    (r"delta/(qkvz|ba)$", ("embed", "heads", None)),
    (r"delta/conv$", ("heads", None, None)),
    (r"delta/(log_rate|rate_bias)$", ("heads",)),
    (r"delta/output$", ("heads", "embed")),
    (r"(dense|shared)/gate_up$", ("embed", None, "ffn")),
    (r"(dense|shared)/down$", ("ffn", "embed")),
    (r"experts/gate_up$", ("expert", "embed", None, "ffn")),
    (r"experts/down$", ("expert", "ffn", "embed")),
)

CACHE_AXES = {
    "key": ("batch", "heads", None, None),
    "value": ("batch", "heads", None, None),
    "latent": ("batch",),
    "index": ("batch",),
    "state": ("batch", "heads", None, None),
    "conv": ("batch", None, "heads", None),
}

MESH_AXES = {
    "batch": "data",
    "vocab": "tensor",
    "heads": "tensor",
    "ffn": "tensor",
    "expert": "expert",
    "embed": "fsdp",
}


def spec(axes: tuple[str | None, ...], shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """Where an array of `shape` with named `axes` lies on a mesh of these axis `sizes`.

    A size that its mesh axis does not divide stays whole.
    """
    names = []
    for axis, size in zip(axes, shape, strict=False):
        name = MESH_AXES.get(axis or "", "")
        names.append(name if name in sizes and size % sizes[name] == 0 else None)
    return PartitionSpec(*names)


def param_spec(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """`spec` of one parameter, `path` like `trunk/layer_3/attention/qkv`; stacked layers have one axis more.

    The values and scales of a `BlockScaled` weight lie as the weight does.
    """
    path = re.sub("/(values|scales)$", "", path)
    axes = next((axes for pattern, axes in PARAMETER_AXES if re.search(pattern, path)), ())
    if path.startswith("trunk/group_"):
        axes = (None, *axes)
    return spec(axes, shape, sizes)


def param_sharding(path: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The sharding of one parameter over `mesh`."""
    return NamedSharding(mesh, param_spec(path, shape, mesh.shape))


def param_shardings(params: dict, mesh: Mesh) -> dict:
    """The sharding of every parameter over `mesh`."""

    def of(path, leaf):
        name = "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        return param_sharding(name, leaf.shape, mesh)

    return jax.tree_util.tree_map_with_path(of, params)


def shard_params(params: dict, mesh: Mesh) -> dict:
    """The parameters laid out over `mesh`; nothing moves that already lies so."""
    return jax.tree.map(jax.device_put, params, param_shardings(params, mesh))


def mesh_of(array: jax.Array) -> Mesh | None:
    """The mesh of several devices that an array lies on, if it does."""
    sharding = array.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None


def shard_state(state, mesh: Mesh):
    """Lays a decoding state (or its new rows) out over a mesh.

    Rows are split over `data`, heads of the caches over `tensor`; latents are the same on all tensor shards. Leaves of
    the depth policy, which the whole batch shares, are on every device.
    """

    def place(path, leaf):
        first, last = (getattr(part, "key", getattr(part, "name", "")) for part in (path[0], path[-1]))
        axes = CACHE_AXES.get(last, () if first in ("policy", "drafting_disabled") else ("batch",))
        return jax.device_put(leaf, NamedSharding(mesh, spec(axes, leaf.shape, mesh.shape)))

    return jax.tree_util.tree_map_with_path(place, state)
