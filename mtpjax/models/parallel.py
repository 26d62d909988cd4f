"""Helpers for a device's shard of a model inside `shard_map`, such as shard sizes and sums over devices.

Outside `shard_map` a model has one shard, and every function here is the identity. Inside, the mesh axes are manual, so
the modules create parameters of the shard's size and sum the shards' results.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from pallas_kernels.partial_sums import PartialSums

EXPERT_AXES = (("data", "expert"), ("data",), ("expert",))  # tried in this order
# Training splits parameters over these axes, as far as they divide the model width; tried in this order.
PARAMETER_SHARDS = (("fsdp", "context"), ("fsdp",), ("context",))
# True if the weights are laid out for decoding; part of JAX's cache key.
decoding_layout = jax.make_user_context(False)


def has_decoding_layout() -> bool:
    """Returns whether the code being traced runs in `run_on_shards`, which shards experts as decoding does."""
    return decoding_layout.value


def num_shards(axis: str) -> int:
    """Returns the number of devices along a manual axis of the mesh; 1 if the axis does not exist or is not manual."""
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.axis_names:
        return 1
    kind = mesh.axis_types[mesh.axis_names.index(axis)]
    return mesh.shape[axis] if kind is AxisType.Manual else 1


def own_size(size: int, axis: str) -> int:
    """Returns the size of this device's shard. A size that the axis does not divide is not split."""
    return size // num_shards(axis) if is_split(size, axis) else size


def is_split(size: int, axis: str) -> bool:
    """Returns whether a size is split over a manual axis."""
    parts = num_shards(axis)
    return parts > 1 and size % parts == 0


def expert_axes(num_experts: int, *, decodes: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the manual axes that split the experts, slowest-varying first, and the subset that also splits the rows.

    Along this subset, each device runs its experts for the rows of all devices. Decoding splits experts over `data` and
    `expert` if these axes divide the number of experts, and rows over `data`. Training splits experts over `expert`,
    and rows over every axis.
    """
    over = axes_that_divide(num_experts, num_shards, EXPERT_AXES if decodes else (("expert",),))
    return over, tuple(axis for axis in over if axis == "data" or not decodes)


def axes_that_divide(
    size: int, parts: Callable[[str], int], candidates: tuple[tuple[str, ...], ...] = EXPERT_AXES
) -> tuple[str, ...]:
    """Returns the first candidate whose axes all have several devices and whose product divides `size`, else ().

    Args:
        parts: returns the number of devices along an axis.
        candidates: tuples of axes to try, in this order.
    """
    for axes in candidates:
        counts = [parts(axis) for axis in axes]
        if min(counts) > 1 and size % math.prod(counts) == 0:
            return axes
    return ()


def add_parts(sums: PartialSums, size: int, axis: str) -> PartialSums:
    """Sums a matmul's partial results over the devices along `axis` if the axis splits its `size` inputs."""
    if not is_split(size, axis):
        return sums
    return PartialSums(jax.lax.psum(sums.total(), axis)[None], sums.dtype)


def over_rows(reduce: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    """Reduces one value per row over the rows of all devices.

    Args:
        reduce: `jnp.any`, `jnp.all` or `jnp.max`.
        rows: `[local B]`.
    """
    own = reduce(rows)
    return own if num_shards("data") == 1 else reduce(jax.lax.all_gather(own, "data"))


def all_rows(rows: jax.Array, axes: tuple[str, ...] = ("data",)) -> jax.Array:
    """Gathers `[local B, ...]` to `[B, ...]` along these mesh axes."""
    # Axes with one device, and calls outside `shard_map`, need no communication.
    axes = tuple(axis for axis in axes if num_shards(axis) > 1)
    return jax.lax.all_gather(rows, axes, tiled=True) if axes else rows


def gather_axis(leaf: jax.Array, axis: int, size: int) -> jax.Array:
    """Joins the shards of an array along `axis`, if `PARAMETER_SHARDS` split it; `size` is its full size.

    The gradient is summed over these devices and scattered back.
    """
    # An array of full size was not split, because the axes do not divide it.
    if leaf.shape[axis] == size:
        return leaf
    # Gather along a new first axis and move it afterwards. If the gathered axis is inside, XLA instead transposes the
    # stack of all layers before the loop, and their gradients after it, which copies them.
    gathered = jax.lax.all_gather(leaf, axes_that_divide(size, num_shards, PARAMETER_SHARDS))
    return jnp.moveaxis(gathered, 0, axis).reshape(*leaf.shape[:axis], size, *leaf.shape[axis + 1 :])


def first_row(own: int) -> jax.Array | int:
    """Returns the index of this device's first row; `own` is the number of its rows."""
    return jax.lax.axis_index("data") * own if num_shards("data") > 1 else 0
